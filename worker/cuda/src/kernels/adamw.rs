//! AdamW over all parameters at once.

use super::{Argument, Call, Element, Memory, Program, Source, sizes};
use crate::error::Error;
use bytemuck::{Pod, Zeroable};

static SOURCE: Source = Source { name: "adamw.cu", text: include_str!("adamw.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;
/// Moments smaller than this become zero, as in the engine on CPUs.
const TINY: f32 = 1e-30;
/// Chunks begin where every thread reads 16 bytes of `f32` and writes 8 bytes of the copy.
pub const ALIGNMENT: u32 = 8;

/// What changes from step to step, as it lies on the device.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Numbers {
    pub beta1: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    /// Learning rate / (1 - beta1^t).
    pub step_size: f32,
    /// Root of (1 - beta2^t).
    pub root: f32,
    pub epsilon: f32,
    /// 1 - learning rate * weight decay.
    pub keep: f32,
}

impl Numbers {
    /// One parameter's step, operation by operation as in the kernel, which is compared with this. `gradient` is scaled.
    pub fn apply(&self, gradient: f32, decays: bool, [weight, first, second]: [&mut f32; 3]) {
        let flush = |value: f32| if value.abs() < TINY { 0.0 } else { value };
        *first = flush(*first * self.beta1 + gradient * self.one_minus_beta1);
        *second = flush(*second * self.beta2 + gradient * gradient * self.one_minus_beta2);
        let keep = if decays { self.keep } else { 1.0 };
        *weight = *weight * keep - self.step_size * (*first / (second.sqrt() / self.root + self.epsilon));
    }
}

/// What the scaler of mixed precision decides, as it lies on the device.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Scaling {
    pub gradient_scale: f32,
    /// Not 0: nothing changes in this step.
    pub skip: u32,
}

/// Consecutive numbers of one parameter, as they lie on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Chunk {
    begin: u32,
    count: u32,
    decays: u32,
    unused: u32,
}

impl Chunk {
    /// # Errors
    /// It does not begin at a multiple of [`ALIGNMENT`].
    pub fn new(begin: u32, count: u32, decays: bool) -> Result<Chunk, Error> {
        if !begin.is_multiple_of(ALIGNMENT) || begin.checked_add(count).is_none() {
            let text = format!(
                "chunk of {count} numbers from {begin}, expected a multiple of {ALIGNMENT} and an end below 2^32"
            );
            return Err(Error::refused("adamw", text));
        }
        Ok(Chunk { begin, count, decays: decays.into(), unused: 0 })
    }

    /// The number behind the last.
    fn end(&self) -> usize {
        (self.begin + self.count) as usize
    }
}

/// The arrays of a step, all in the same layout.
#[derive(Debug, Clone, Copy)]
pub struct Arrays<M> {
    pub weight: M,
    pub first: M,
    pub second: M,
    pub gradient: M,
    /// The new weights in 16 bits.
    pub copy: M,
}

/// What a step reads besides.
#[derive(Debug, Clone, Copy)]
pub struct Tables<M> {
    /// A copy of the chunks that the call is made with.
    pub chunks: M,
    /// [`Numbers`].
    pub numbers: M,
    /// [`Scaling`].
    pub scaling: M,
}

/// AdamW with copies of the weights of one type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdamW {
    copy: Element,
}

impl AdamW {
    /// # Errors
    /// A copy in 32 bits.
    pub fn new(copy: Element) -> Result<AdamW, Error> {
        if copy == Element::F32 {
            return Err(Error::refused("adamw", "a copy in F32, expected Bf16 or F16"));
        }
        Ok(AdamW { copy })
    }

    pub fn program(&self) -> Program {
        Program { source: &SOURCE, definitions: vec![format!("-DCOPY={}", self.copy.name())] }
    }

    /// One step on at most `blocks` blocks.
    ///
    /// # Errors
    /// Memory that is too small, or no chunks.
    pub fn step<M: Memory>(
        &self,
        blocks: u32,
        chunks: &[Chunk],
        arrays: Arrays<M>,
        tables: Tables<M>,
    ) -> Result<Call<M>, Error> {
        let numbers = chunks.iter().map(Chunk::end).max().unwrap_or(0);
        let count = u32::try_from(chunks.len()).ok().filter(|count| *count > 0);
        let count =
            count.ok_or_else(|| Error::refused("adamw", format!("{} chunks, expected 1 to 2^32", chunks.len())))?;
        let Arrays { weight, first, second, gradient, copy } = arrays;
        let full = 4 * numbers;
        let memory = [
            ("weight", weight, full),
            ("first moment", first, full),
            ("second moment", second, full),
            ("gradient", gradient, full),
            ("copy", copy, self.copy.bytes() * numbers),
            ("chunks", tables.chunks, size_of_val(chunks)),
            ("numbers", tables.numbers, size_of::<Numbers>()),
            ("scaling", tables.scaling, size_of::<Scaling>()),
        ];
        sizes("adamw", &memory)?;
        Ok(Call {
            program: self.program(),
            kernel: "adamw",
            blocks: blocks.clamp(1, count),
            threads: THREADS,
            shared_bytes: 0,
            arguments: vec![
                Argument::Updates(weight),
                Argument::Updates(first),
                Argument::Updates(second),
                Argument::Reads(gradient),
                Argument::Writes(copy),
                Argument::Reads(tables.chunks),
                Argument::Reads(tables.numbers),
                Argument::Reads(tables.scaling),
                Argument::Int(count),
            ],
        })
    }
}
