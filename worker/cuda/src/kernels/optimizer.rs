//! The engine's optimizers, each as a single launch over all parameters.

use super::{Argument, Call, Element, Memory, Program, Source, sizes};
use crate::error::Error;
use bytemuck::{Pod, Zeroable};

pub(super) static SOURCE: Source =
    Source { name: "optimizer.cu", text: include_str!("optimizer.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;
/// Smaller state is flushed to zero, as in the CPU engine.
const TINY: f32 = 1e-30;
/// Chunks are aligned so that every thread reads 16 bytes of `f32` and writes 8 bytes of the copy.
pub const ALIGNMENT: u32 = 8;

/// A rule of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// With momentum if there is memory for it.
    Sgd,
    /// Adam with [`Numbers::decay`], AdamW with [`Numbers::keep`].
    Adam,
    Lamb,
    /// With momentum if there is memory for it.
    Lars,
}

/// Per-step values, in device layout. Each rule reads the fields documented for it and ignores the
/// rest.
#[derive(Debug, Clone, Copy, PartialEq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Numbers {
    /// LAMB and LARS.
    pub learning_rate: f64,
    /// LARS.
    pub weight_decay: f64,
    /// LARS: the trust coefficient.
    pub trust: f64,
    /// Adam and LAMB, as are the fields up to `epsilon`.
    pub beta1: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    /// Learning rate / (1 - beta1^t); LAMB: 1 / (1 - beta1^t).
    pub step_size: f32,
    /// sqrt(1 - beta2^t).
    pub root: f32,
    pub epsilon: f32,
    /// AdamW: 1 - learning rate * weight decay; Adam: 1.
    pub keep: f32,
    /// SGD, Adam, LAMB: the weight decay; AdamW: 0.
    pub decay: f32,
    /// SGD, LARS.
    pub momentum: f32,
    /// SGD: the learning rate; LARS: 1.
    pub rate: f32,
    /// SGD: nonzero for Nesterov momentum; LARS: 0.
    pub nesterov: u32,
}

impl Numbers {
    /// Updates a single element with the same operations as the kernels, which are tested against
    /// this. `scale` unscales the gradient, `ratio` is the parameter's ratio for LAMB and LARS. The
    /// state is the first and second moment or, for SGD and LARS, the momentum.
    pub fn apply(
        &self,
        rule: Rule,
        (gradient, scale): (f32, f32),
        (decays, ratio): (bool, f64),
        weight: &mut f32,
        state: [Option<&mut f32>; 2],
    ) {
        let flush = |value: f32| if value.abs() < TINY { 0.0 } else { value };
        let decay = if decays { self.decay } else { 0.0 };
        match (rule, state) {
            (Rule::Adam | Rule::Lamb, [Some(first), Some(second)]) => {
                let scaled = gradient * scale;
                let gradient = if rule == Rule::Adam { scaled + *weight * decay } else { scaled };
                *first = flush(*first * self.beta1 + gradient * self.one_minus_beta1);
                *second = flush(*second * self.beta2 + gradient * gradient * self.one_minus_beta2);
                let quotient = *first / (second.sqrt() / self.root + self.epsilon);
                if rule == Rule::Adam {
                    let keep = if decays { self.keep } else { 1.0 };
                    *weight = *weight * keep - self.step_size * quotient;
                } else {
                    let rate = (self.learning_rate * ratio) as f32;
                    *weight -= rate * (self.step_size * quotient + *weight * decay);
                }
            }
            (_, [momentum, _]) => {
                let rate = self.learning_rate * ratio;
                let (scale, decay) = match rule {
                    Rule::Lars if decays => ((f64::from(scale) * rate) as f32, (self.weight_decay * rate) as f32),
                    Rule::Lars => ((f64::from(scale) * rate) as f32, 0.0),
                    _ => (scale, decay),
                };
                let gradient = gradient * scale + *weight * decay;
                let step = match momentum {
                    Some(momentum) => {
                        *momentum = flush(*momentum * self.momentum + gradient);
                        if self.nesterov != 0 { gradient + *momentum * self.momentum } else { *momentum }
                    }
                    None => gradient,
                };
                *weight -= self.rate * step;
            }
        }
    }
}

/// The decision of the mixed-precision scaler, in device layout.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Scaling {
    pub gradient_scale: f32,
    /// Nonzero to skip this step.
    pub skip: u32,
}

/// Consecutive elements of one parameter, in device layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Chunk {
    begin: u32,
    count: u32,
    decays: u32,
    parameter: u32,
}

impl Chunk {
    /// `count` elements from `begin` on, of the parameter with this ordinal. The chunks of a
    /// parameter are consecutive.
    ///
    /// # Errors
    /// `begin` is not a multiple of [`ALIGNMENT`].
    pub fn new(begin: u32, count: u32, decays: bool, parameter: u32) -> Result<Chunk, Error> {
        if !begin.is_multiple_of(ALIGNMENT) || begin.checked_add(count).is_none() {
            let text = format!(
                "chunk of {count} numbers from {begin}, expected a multiple of {ALIGNMENT} and an end below 2^32"
            );
            return Err(Error::refused("optimizer", text));
        }
        Ok(Chunk { begin, count, decays: decays.into(), parameter })
    }

    /// The index after the last element.
    fn end(&self) -> usize {
        (self.begin + self.count) as usize
    }
}

/// The arrays of a step, all in the same layout.
#[derive(Debug, Clone, Copy)]
pub struct Arrays<M> {
    pub weight: M,
    /// First moment, or momentum.
    pub first: Option<M>,
    pub second: Option<M>,
    pub gradient: M,
    /// The new weights, rounded to 16 bits.
    pub copy: Option<M>,
}

/// The other inputs of a step.
#[derive(Debug, Clone, Copy)]
pub struct Tables<M> {
    /// A device copy of the chunks that the call is made with.
    pub chunks: M,
    /// [`Numbers`].
    pub numbers: M,
    /// [`Scaling`].
    pub scaling: M,
    /// LAMB and LARS: two `f64` per chunk.
    pub squares: Option<M>,
    /// LAMB and LARS: one `f64` per parameter.
    pub ratios: Option<M>,
}

/// A rule, and the element type of the weight copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Optimizer {
    pub rule: Rule,
    /// `F32` for no copies.
    pub copy: Element,
}

impl Optimizer {
    pub fn program(&self) -> Program {
        let rule = match self.rule {
            Rule::Sgd => "SGD",
            Rule::Adam => "ADAM",
            Rule::Lamb => "LAMB",
            Rule::Lars => "LARS",
        };
        Program { source: &SOURCE, definitions: vec![format!("-DRULE={rule}"), format!("-DCOPY={}", self.copy.name())] }
    }

    /// Whether parameters have individual ratios, which a step computes first.
    fn is_layer_wise(&self) -> bool {
        matches!(self.rule, Rule::Lamb | Rule::Lars)
    }

    fn call<M>(&self, kernel: &'static str, blocks: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments }
    }

    fn check<M: Memory>(&self, chunks: &[Chunk], on: &Arrays<M>, tables: &Tables<M>) -> Result<u32, Error> {
        let refused = |text: String| Error::refused("optimizer", text);
        let numbers = chunks.iter().map(Chunk::end).max().unwrap_or(0);
        let parameters = chunks.iter().map(|chunk| chunk.parameter as usize + 1).max().unwrap_or(0);
        let count = u32::try_from(chunks.len()).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(|| refused(format!("{} chunks, expected 1 to 2^32", chunks.len())))?;
        let has_moments = matches!(self.rule, Rule::Adam | Rule::Lamb);
        let optional = [
            ("first moment", on.first, 4 * numbers, (on.first.is_some() || has_moments)),
            ("second moment", on.second, 4 * numbers, has_moments),
            ("copy", on.copy, self.copy.bytes() * numbers, self.copy != Element::F32),
            ("squares", tables.squares, 16 * chunks.len(), self.is_layer_wise()),
            ("ratios", tables.ratios, 8 * parameters, self.is_layer_wise()),
        ];
        let mut memory = vec![
            ("weight", on.weight, 4 * numbers),
            ("gradient", on.gradient, 4 * numbers),
            ("chunks", tables.chunks, size_of_val(chunks)),
            ("numbers", tables.numbers, size_of::<Numbers>()),
            ("scaling", tables.scaling, size_of::<Scaling>()),
        ];
        for (name, given, needed, expected) in optional {
            if given.is_some() != expected {
                let found = if expected { "missing" } else { "given" };
                return Err(refused(format!("{name} is {found} for {:?} with copies in {:?}", self.rule, self.copy)));
            }
            memory.extend(given.map(|given| (name, given, needed)));
        }
        sizes("optimizer", &memory)?;
        Ok(count)
    }

    /// The calls of one step in order, on at most `blocks` blocks: one, or three for LAMB and LARS.
    ///
    /// # Errors
    /// Memory is too small, missing, or not used by the rule; or there are no chunks.
    pub fn step<M: Memory>(
        &self,
        blocks: u32,
        chunks: &[Chunk],
        arrays: Arrays<M>,
        tables: Tables<M>,
    ) -> Result<Vec<Call<M>>, Error> {
        let count = self.check(chunks, &arrays, &tables)?;
        let Arrays { weight, first, second, gradient, copy } = arrays;
        let blocks = blocks.clamp(1, count);
        let reads = |memory: Option<M>| memory.map_or(Argument::Absent, Argument::Reads);
        let updates = |memory: Option<M>| memory.map_or(Argument::Absent, Argument::Updates);
        let writes = |memory: Option<M>| memory.map_or(Argument::Absent, Argument::Writes);
        let is_lamb = self.rule == Rule::Lamb;
        // LAMB updates its moments while summing the norms.
        let before = [first, second].map(|state| if is_lamb { updates(state) } else { Argument::Absent });
        let state = [first, second].map(|state| if is_lamb { reads(state) } else { updates(state) });
        let mut calls = Vec::new();
        if self.is_layer_wise() {
            let norms = vec![
                Argument::Reads(weight),
                before[0],
                before[1],
                Argument::Reads(gradient),
                Argument::Reads(tables.chunks),
                Argument::Reads(tables.numbers),
                Argument::Reads(tables.scaling),
                writes(tables.squares),
                Argument::Int(count),
            ];
            let ratios = vec![
                Argument::Reads(tables.chunks),
                reads(tables.squares),
                Argument::Reads(tables.numbers),
                Argument::Reads(tables.scaling),
                writes(tables.ratios),
                Argument::Int(count),
            ];
            calls.push(self.call("optimizer_norms", blocks, norms));
            calls.push(self.call("optimizer_ratios", count.div_ceil(THREADS), ratios));
        }
        let step = vec![
            Argument::Updates(weight),
            state[0],
            state[1],
            if is_lamb { Argument::Absent } else { Argument::Reads(gradient) },
            writes(copy),
            Argument::Reads(tables.chunks),
            Argument::Reads(tables.numbers),
            Argument::Reads(tables.scaling),
            reads(tables.ratios),
            Argument::Int(count),
        ];
        calls.push(self.call("optimizer_step", blocks, step));
        Ok(calls)
    }
}
