//! The mean loss, the norm of all gradients, and the loss scale that follows from both.

use super::optimizer::{Numbers, Scaling};
use super::{Argument, Call, Memory, Program, Source, sizes};
use crate::error::Error;
use bytemuck::{Pod, Zeroable};

pub(super) static SOURCE: Source =
    Source { name: "gradients.cu", text: include_str!("gradients.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;
/// Numbers that a block takes at a time.
const AT_ONCE: u32 = THREADS * 4 * 4;
const MOST_BLOCKS: u32 = 1024;

/// What is known when training starts, as it lies on the device.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Rules {
    /// The norm to which gradients are clipped; infinity if they are not.
    pub most: f64,
    pub growth: f32,
    pub backoff: f32,
    /// Good steps in a row after which the scale grows.
    pub growth_interval: u64,
    /// 0: the scale never changes.
    pub is_dynamic: u32,
    pub unused: u32,
}

/// The loss scale and its counters, as they lie on the device.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Scaler {
    /// Of the last step, without the scale; not finite if gradients were not.
    pub norm: f64,
    /// Since the last overflow or growth.
    pub good_steps: u64,
    pub skipped_steps: u64,
    pub skipped_in_a_row: u64,
    pub scale: f32,
    pub unused: u32,
}

/// What ends a step.
#[derive(Debug, Clone, Copy)]
pub struct On<M> {
    /// Sums of [`sum_of_squares`].
    pub partial: M,
    /// One `f32`; if it is not finite, the step is left out.
    pub loss: M,
    /// [`Rules`].
    pub rules: M,
    /// [`Scaler`].
    pub state: M,
    /// [`Scaling`], which the optimizer reads.
    pub scaling: M,
    /// Two [`Numbers`]: if the step before was not left out, and if it was.
    pub candidates: M,
    /// Those of both that the optimizer reads.
    pub numbers: M,
}

/// The program with all kernels.
pub fn program() -> Program {
    Program { source: &SOURCE, definitions: Vec::new() }
}

/// Depends on nothing but the number of gradients, so every device adds in the same order.
fn blocks(count: u32) -> u32 {
    count.div_ceil(AT_ONCE).clamp(1, MOST_BLOCKS)
}

/// Size of the sums over `count` gradients.
pub fn partial_bytes(count: u32) -> usize {
    8 * blocks(count) as usize
}

/// The sum of squares of `count` gradients, in parts.
///
/// # Errors
/// Memory that is too small.
pub fn sum_of_squares<M: Memory>(count: u32, gradient: M, partial: M) -> Result<Call<M>, Error> {
    let memory = [("gradient", gradient, 4 * count as usize), ("partial", partial, partial_bytes(count))];
    sizes("sum_of_squares", &memory)?;
    Ok(Call {
        program: program(),
        kernel: "sum_of_squares",
        blocks: blocks(count),
        threads: THREADS,
        shared_bytes: 0,
        arguments: vec![Argument::Reads(gradient), Argument::Writes(partial), Argument::Int(count)],
    })
}

/// `factor` times the sum of the losses of `count` rows; `add`: what is in `mean` stays in the sum. Both are one `f32`.
///
/// # Errors
/// Memory that is too small.
pub fn mean_loss<M: Memory>(count: u32, losses: M, factor: M, mean: M, add: bool) -> Result<Call<M>, Error> {
    sizes("mean_loss", &[("losses", losses, 4 * count as usize), ("factor", factor, 4), ("mean", mean, 4)])?;
    let arguments = vec![
        Argument::Reads(losses),
        Argument::Reads(factor),
        if add { Argument::Updates(mean) } else { Argument::Writes(mean) },
        Argument::Int(count),
        Argument::Int(add.into()),
    ];
    Ok(Call { program: program(), kernel: "mean_loss", blocks: 1, threads: THREADS, shared_bytes: 0, arguments })
}

/// Norm, clipping and the scale of the next step, from the sums over `count` gradients; and what the optimizer is told.
///
/// # Errors
/// Memory that is too small.
pub fn scaler<M: Memory>(count: u32, on: On<M>) -> Result<Call<M>, Error> {
    let On { partial, loss, rules, state, scaling, candidates, numbers } = on;
    let memory = [
        ("partial", partial, partial_bytes(count)),
        ("loss", loss, 4),
        ("rules", rules, size_of::<Rules>()),
        ("state", state, size_of::<Scaler>()),
        ("scaling", scaling, size_of::<Scaling>()),
        ("candidates", candidates, 2 * size_of::<Numbers>()),
        ("numbers", numbers, size_of::<Numbers>()),
    ];
    sizes("scaler", &memory)?;
    Ok(Call {
        program: program(),
        kernel: "scaler",
        blocks: 1,
        threads: THREADS,
        shared_bytes: 0,
        arguments: vec![
            Argument::Reads(partial),
            Argument::Reads(loss),
            Argument::Reads(rules),
            Argument::Updates(state),
            Argument::Writes(scaling),
            Argument::Reads(candidates),
            Argument::Writes(numbers),
            Argument::Int(size_of::<Numbers>() as u32 / 4),
            Argument::Int(blocks(count)),
        ],
    })
}
