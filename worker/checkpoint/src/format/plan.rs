//! Which rank writes what: a pure function of the tensors and the number of ranks.

use super::header::{self, ShardLabel, TensorEntry};
use super::{CHUNK, Fault, HEADER_LIMIT, WORLD_LIMIT};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;

/// Longest name of a tensor in bytes.
const NAME_LIMIT: usize = 1024;
/// Most dimensions of a tensor.
const RANK_LIMIT: usize = 8;
/// Most numbers in a checkpoint: 1 PiB. Sums of offsets in bytes stay far from overflow.
const NUMBERS_LIMIT: usize = 1 << 48;

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Trained parameters.
    Weight,
    /// Measured during training and used by the model, such as the running mean of a batch normalisation.
    Statistic,
    /// Used only by the optimizer, such as moments.
    Optimizer,
}

/// A tensor of the state: 32-bit floats, row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Unique among all tensors.
    pub name: String,
    /// Empty for a single number.
    pub shape: Vec<usize>,
    pub role: Role,
    /// Axis order for other programs: axis `i` of the exported tensor is axis `export_axes[i]` of this one. `None`:
    /// unchanged.
    pub export_axes: Option<Vec<usize>>,
    /// Names for other programs, which have equal parts of the first exported axis as tensors of their own. Empty: the
    /// whole tensor under its own name.
    pub export_names: Vec<String>,
}

impl TensorSpec {
    pub fn numbers(&self) -> usize {
        self.shape.iter().product()
    }

    /// The tensors that other programs get: their names, and the shape of each.
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
        if !numbers.is_some_and(|numbers| (1..=NUMBERS_LIMIT).contains(&numbers)) {
            let got = format!("{:?}", self.shape);
            return Err(Fault::new(what(" shape"), got, format!("1 to {NUMBERS_LIMIT} numbers")));
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

/// A part of a tensor that is in one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub tensor: usize,
    /// Range of its numbers in row-major order.
    pub range: Range<usize>,
}

/// Tensors, divided over the shards of a checkpoint. Always valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    tensors: Vec<TensorSpec>,
    /// Pieces of each shard, in the order of the tensors.
    shards: Vec<Vec<Piece>>,
}

impl Plan {
    /// Divides tensors over `world` ranks, in order and equally to within one number. So a tensor may be cut, and a
    /// shard has at most one piece of each.
    ///
    /// # Errors
    /// A tensor without a name or numbers, two of the same name, too many ranks.
    pub fn new(tensors: Vec<TensorSpec>, world: usize) -> Result<Plan, Fault> {
        check_world(world)?;
        let total = check_tensors(&tensors)?;
        let mut shards = vec![Vec::new(); world];
        // Shard r ends at number total x (r + 1) / world; the product needs more than 64 bits.
        let end_of = |shard: usize| (total as u128 * (shard as u128 + 1) / world as u128) as usize;
        let mut shard = 0;
        let mut start = 0;
        for (tensor, spec) in tensors.iter().enumerate() {
            let end = start + spec.numbers();
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

    /// A division from a manifest: the pieces of each tensor, with their shards.
    ///
    /// # Errors
    /// See [`Plan::new`]; also pieces that overlap, are missing, or are out of order.
    pub(super) fn from_pieces(
        tensors: Vec<TensorSpec>,
        world: usize,
        pieces: Vec<Vec<(usize, Range<usize>)>>,
    ) -> Result<Plan, Fault> {
        check_world(world)?;
        check_tensors(&tensors)?;
        let mut shards: Vec<Vec<Piece>> = vec![Vec::new(); world];
        let mut last_shard = 0;
        for (tensor, (spec, pieces)) in tensors.iter().zip(pieces).enumerate() {
            let fault = |got: String, expected: String| {
                Err(Fault::new(format!("tensor `{}` pieces", spec.name), got, expected))
            };
            let mut at = 0;
            for (shard, range) in pieces {
                if range.start != at || range.end <= at || range.end > spec.numbers() {
                    let expected = format!("numbers from {at} on, at most {}", spec.numbers());
                    return fault(format!("{range:?}"), expected);
                }
                // Two pieces of a tensor in one shard would have the same name there.
                let first = if at == 0 { last_shard } else { last_shard + 1 };
                if !(first..world).contains(&shard) {
                    return fault(format!("shard {shard}"), format!("one from {first} to {}", world - 1));
                }
                (at, last_shard) = (range.end, shard);
                shards[shard].push(Piece { tensor, range });
            }
            if at != spec.numbers() {
                return fault(format!("{at} numbers"), format!("all {}", spec.numbers()));
            }
        }
        Ok(Plan { tensors, shards })
    }

    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Number of shards: the ranks of the run that writes.
    pub fn world(&self) -> usize {
        self.shards.len()
    }

    /// Pieces of a shard, in the order of its bytes.
    ///
    /// # Panics
    /// `shard` is not below [`Plan::world`].
    pub fn pieces(&self, shard: usize) -> &[Piece] {
        &self.shards[shard]
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.numbers() as u64 * 4).sum()
    }

    /// The header of a shard, preceded by its length: the bytes before the first tensor.
    pub(crate) fn header(&self, label: &ShardLabel) -> Vec<u8> {
        header::encode(label, self.entries(label.rank))
    }

    /// What a shard's header says of each piece. Its shape is that of the tensor if the piece is the whole tensor.
    pub(crate) fn entries(&self, shard: usize) -> impl Iterator<Item = TensorEntry<'_>> {
        let mut at = 0;
        self.shards[shard].iter().map(move |piece| {
            let spec = &self.tensors[piece.tensor];
            let numbers = piece.range.len();
            let shape = if numbers == spec.numbers() { spec.shape.clone() } else { vec![numbers] };
            let bytes = at..at + numbers as u64 * 4;
            at = bytes.end;
            TensorEntry { name: spec.name.as_str(), shape, bytes }
        })
    }

    /// Length of a shard in bytes, including its header.
    ///
    /// # Errors
    /// The header is longer than readers accept.
    pub(crate) fn shard_length(&self, label: &ShardLabel) -> Result<u64, Fault> {
        let header = self.header(label).len() as u64;
        if header > HEADER_LIMIT {
            let what = format!("header of shard {}", label.rank);
            return Err(Fault::new(what, format!("{header} bytes"), format!("at most {HEADER_LIMIT}")));
        }
        Ok(header + self.shards[label.rank].iter().map(|piece| piece.range.len() as u64 * 4).sum::<u64>())
    }
}

/// Number of digests of a shard.
pub(crate) fn chunks(length: u64) -> usize {
    length.div_ceil(CHUNK as u64) as usize
}

fn check_world(world: usize) -> Result<(), Fault> {
    if !(1..=WORLD_LIMIT).contains(&world) {
        return Err(Fault::new("world", world, format!("1 to {WORLD_LIMIT} ranks")));
    }
    Ok(())
}

/// Number of all numbers, if the tensors are valid.
fn check_name(name: &str, what: &str) -> Result<(), Fault> {
    let is_name =
        !name.is_empty() && name.len() <= NAME_LIMIT && !name.contains(char::is_control) && name != header::METADATA;
    if !is_name {
        let expected = format!("1 to {NAME_LIMIT} bytes without control characters, not {}", header::METADATA);
        return Err(Fault::new(what, format!("{name:?}"), expected));
    }
    Ok(())
}

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
        total += tensor.numbers();
        if total > NUMBERS_LIMIT {
            return Err(Fault::new("tensors", "more", format!("at most {NUMBERS_LIMIT} numbers")));
        }
    }
    if tensors.is_empty() {
        return Err(Fault::new("tensors", "none", "at least one"));
    }
    Ok(total)
}
