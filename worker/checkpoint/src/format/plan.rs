//! Assigns tensors to shards: a pure function of the tensors and the world size.

use super::header::{self, ShardLabel, TensorEntry};
use super::{CHUNK, Fault, HEADER_LIMIT, WORLD_LIMIT};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;

/// Longest tensor name in bytes.
const NAME_LIMIT: usize = 1024;
/// Most dimensions of a tensor.
const RANK_LIMIT: usize = 8;
/// Most elements in a checkpoint: 1 PiB. Keeps sums of byte offsets far from overflow.
const ELEMENTS_LIMIT: usize = 1 << 48;

/// Purpose of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Trained parameters.
    Weight,
    /// Measured during training and used by the model, for example a batch norm's running mean.
    Statistic,
    /// Used only by the optimizer, for example moments.
    Optimizer,
}

/// A tensor of the training state: f32, row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Unique among all tensors.
    pub name: String,
    /// Empty for a scalar.
    pub shape: Vec<usize>,
    pub role: Role,
    /// Axis order of the exported tensor: its axis `i` is axis `export_axes[i]` of this one.
    /// `None`: unchanged.
    pub export_axes: Option<Vec<usize>>,
    /// Names of the exported tensors if this one is split into equal parts along its first exported
    /// axis. Empty: exported whole under its own name.
    pub export_names: Vec<String>,
}

impl TensorSpec {
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Names of the exported tensors, and their common shape.
    pub(crate) fn exported(&self) -> (&[String], Vec<usize>) {
        let names = match &self.export_names[..] {
            [] => std::slice::from_ref(&self.name),
            names => names,
        };
        let mut shape = match &self.export_axes {
            None => self.shape.clone(),
            Some(axes) => axes.iter().map(|axis| self.shape[*axis]).collect(),
        };
        shape.first_mut().into_iter().for_each(|first| *first /= names.len());
        (names, shape)
    }

    fn check(&self) -> Result<(), Fault> {
        let what = |part: &str| format!("tensor `{}`{part}", self.name);
        check_name(&self.name, "name of a tensor")?;
        self.export_names.iter().try_for_each(|name| check_name(name, &what(" exportNames")))?;
        if self.shape.len() > RANK_LIMIT {
            let expected = format!("at most {RANK_LIMIT} dimensions");
            return Err(Fault::new(what(" shape"), self.shape.len(), expected));
        }
        let numbers = self.shape.iter().try_fold(1, |product: usize, axis| product.checked_mul(*axis));
        if !numbers.is_some_and(|numbers| (1..=ELEMENTS_LIMIT).contains(&numbers)) {
            let got = format!("{:?}", self.shape);
            return Err(Fault::new(what(" shape"), got, format!("1 to {ELEMENTS_LIMIT} numbers")));
        }
        if let Some(axes) = &self.export_axes {
            let mut sorted = axes.clone();
            sorted.sort_unstable();
            if !sorted.into_iter().eq(0..self.shape.len()) {
                let expected = format!("each of the {} axes once", self.shape.len());
                return Err(Fault::new(what(" exportAxes"), format!("{axes:?}"), expected));
            }
        }
        let first = self.export_axes.as_ref().and_then(|axes| axes.first().copied()).unwrap_or(0);
        let divided = self.shape.get(first).copied().unwrap_or(1);
        let parts = self.export_names.len();
        if parts > 0 && !divided.is_multiple_of(parts) {
            return Err(Fault::new(what(" exportNames"), parts, format!("a number that divides {divided}")));
        }
        Ok(())
    }
}

/// A slice of a tensor in one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub tensor: usize,
    /// Range of its elements in row-major order.
    pub range: Range<usize>,
}

/// Tensors divided into the shards of a checkpoint. Always valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    tensors: Vec<TensorSpec>,
    /// Pieces of each shard, in tensor order.
    shards: Vec<Vec<Piece>>,
}

impl Plan {
    /// Divides tensors over `world` ranks, in order, into shards whose sizes differ by at most one
    /// element. A tensor may be split, but a shard has at most one piece of each.
    ///
    /// # Errors
    /// A tensor without a name or elements, duplicate names, too many ranks.
    pub fn new(tensors: Vec<TensorSpec>, world: usize) -> Result<Plan, Fault> {
        check_world(world)?;
        let total = check_tensors(&tensors)?;
        let mut shards = vec![Vec::new(); world];
        // Shard r ends at element total x (r + 1) / world; the product needs more than 64 bits.
        let end_of = |shard: usize| (total as u128 * (shard as u128 + 1) / world as u128) as usize;
        let mut shard = 0;
        let mut start = 0;
        for (tensor, spec) in tensors.iter().enumerate() {
            let end = start + spec.element_count();
            let mut at = start;
            while at < end {
                while end_of(shard) <= at {
                    shard += 1;
                }
                let until = end.min(end_of(shard));
                shards[shard].push(Piece { tensor, range: at - start..until - start });
                at = until;
            }
            start = end;
        }
        Ok(Plan { tensors, shards })
    }

    /// Like [`Plan::new`], and adds `private[r]`, tensors that only rank r has, to shard r. The
    /// world size is the length of `private`.
    ///
    /// # Errors
    /// See [`Plan::new`].
    pub fn with_private(tensors: Vec<TensorSpec>, private: Vec<Vec<TensorSpec>>) -> Result<Plan, Fault> {
        let mut plan = Plan::new(tensors, private.len())?;
        for (shard, own) in private.into_iter().enumerate() {
            for spec in own {
                spec.check()?;
                plan.shards[shard].push(Piece { tensor: plan.tensors.len(), range: 0..spec.element_count() });
                plan.tensors.push(spec);
            }
        }
        check_tensors(&plan.tensors)?;
        Ok(plan)
    }

    /// Rebuilds the division stored in a manifest from the pieces of each tensor and their shards.
    ///
    /// # Errors
    /// As [`Plan::new`]; also pieces that overlap, are missing, or are out of order.
    pub(super) fn from_pieces(
        tensors: Vec<TensorSpec>,
        world: usize,
        pieces: Vec<Vec<(usize, Range<usize>)>>,
    ) -> Result<Plan, Fault> {
        check_world(world)?;
        check_tensors(&tensors)?;
        let mut shards: Vec<Vec<Piece>> = vec![Vec::new(); world];
        for (tensor, (spec, pieces)) in tensors.iter().zip(pieces).enumerate() {
            let fault = |got: String, expected: String| {
                Err(Fault::new(format!("tensor `{}` pieces", spec.name), got, expected))
            };
            let (mut at, mut first) = (0, 0);
            for (shard, range) in pieces {
                if range.start != at || range.end <= at || range.end > spec.element_count() {
                    let expected = format!("numbers from {at} on, at most {}", spec.element_count());
                    return fault(format!("{range:?}"), expected);
                }
                // Two pieces of a tensor in one shard would have the same name.
                if !(first..world).contains(&shard) {
                    return fault(format!("shard {shard}"), format!("one from {first} to {}", world - 1));
                }
                (at, first) = (range.end, shard + 1);
                shards[shard].push(Piece { tensor, range });
            }
            if at != spec.element_count() {
                return fault(format!("{at} numbers"), format!("all {}", spec.element_count()));
            }
        }
        Ok(Plan { tensors, shards })
    }

    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Number of shards: the world size of the run that writes.
    pub fn world(&self) -> usize {
        self.shards.len()
    }

    /// Pieces of a shard, in file order.
    ///
    /// # Panics
    /// `shard` is not below [`Plan::world`].
    pub fn pieces(&self, shard: usize) -> &[Piece] {
        &self.shards[shard]
    }

    /// Total bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.element_count() as u64 * 4).sum()
    }

    /// The header of a shard, preceded by its length: all bytes before the first tensor.
    pub(crate) fn header(&self, label: &ShardLabel) -> Vec<u8> {
        header::encode(label, self.entries(label.rank))
    }

    /// Header entries of a shard's pieces. An unsplit tensor keeps its shape.
    pub(crate) fn entries(&self, shard: usize) -> impl Iterator<Item = TensorEntry<'_>> {
        let mut at = 0;
        self.shards[shard].iter().map(move |piece| {
            let spec = &self.tensors[piece.tensor];
            let numbers = piece.range.len();
            let shape = if numbers == spec.element_count() { spec.shape.clone() } else { vec![numbers] };
            let bytes = at..at + numbers as u64 * 4;
            at = bytes.end;
            TensorEntry { name: spec.name.as_str(), shape, bytes }
        })
    }

    /// File length of a shard in bytes, including its header.
    ///
    /// # Errors
    /// The header exceeds the limit of readers.
    pub(crate) fn shard_length(&self, label: &ShardLabel) -> Result<u64, Fault> {
        let header = self.header(label).len() as u64;
        if header > HEADER_LIMIT {
            let what = format!("header of shard {}", label.rank);
            return Err(Fault::new(what, format!("{header} bytes"), format!("at most {HEADER_LIMIT}")));
        }
        Ok(header + self.shards[label.rank].iter().map(|piece| piece.range.len() as u64 * 4).sum::<u64>())
    }
}

/// Number of digests for a shard.
pub(crate) fn chunks(length: u64) -> usize {
    length.div_ceil(CHUNK as u64) as usize
}

fn check_world(world: usize) -> Result<(), Fault> {
    if !(1..=WORLD_LIMIT).contains(&world) {
        return Err(Fault::new("world", world, format!("1 to {WORLD_LIMIT} ranks")));
    }
    Ok(())
}

fn check_name(name: &str, what: &str) -> Result<(), Fault> {
    let is_name =
        !name.is_empty() && name.len() <= NAME_LIMIT && !name.contains(char::is_control) && name != header::METADATA;
    if !is_name {
        let expected = format!("1 to {NAME_LIMIT} bytes without control characters, not {}", header::METADATA);
        return Err(Fault::new(what, format!("{name:?}"), expected));
    }
    Ok(())
}

/// Validates the tensors and returns their total number of elements.
fn check_tensors(tensors: &[TensorSpec]) -> Result<usize, Fault> {
    let mut names = BTreeSet::new();
    let mut exported = BTreeSet::new();
    let mut total = 0_usize;
    for tensor in tensors {
        tensor.check()?;
        if !names.insert(tensor.name.as_str()) {
            return Err(Fault::new("name of a tensor", format!("`{}` twice", tensor.name), "a unique name"));
        }
        let mut others = tensor.exported().0.iter().filter(|_| tensor.role != Role::Optimizer);
        if let Some(name) = others.find(|name| !exported.insert(name.as_str())) {
            let what = format!("tensor `{}` exportNames", tensor.name);
            return Err(Fault::new(what, format!("`{name}` twice"), "a unique name"));
        }
        total += tensor.element_count();
        if total > ELEMENTS_LIMIT {
            return Err(Fault::new("tensors", "more", format!("at most {ELEMENTS_LIMIT} numbers")));
        }
    }
    if tensors.is_empty() {
        return Err(Fault::new("tensors", "none", "at least one"));
    }
    Ok(total)
}
