//! Mean loss, gradient norm, and the loss scale that depends on both.

use super::optimizer::{Numbers, Scaling};
use super::{Argument, Call, Memory, Program, Source, sizes};
use crate::error::Error;
use bytemuck::{Pod, Zeroable};

pub(super) static SOURCE: Source =
    Source { name: "gradients.cu", text: include_str!("gradients.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;
/// Elements that a block processes at once.
const AT_ONCE: u32 = THREADS * 4 * 4;
const MAX_BLOCKS: u32 = 1024;

/// Training constants, in device layout.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Rules {
    /// Maximum norm for clipping; infinity disables clipping.
    pub most: f64,
    pub growth: f32,
    pub backoff: f32,
    /// Consecutive good steps after which the scale grows.
    pub growth_interval: u64,
    /// 0 for a static scale.
    pub is_dynamic: u32,
    pub unused: u32,
}

/// Loss scale and its counters, in device layout.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Scaler {
    /// Norm of the last step, unscaled; not finite if the gradients were not.
    pub norm: f64,
    /// Good steps since the last overflow or growth.
    pub good_steps: u64,
    pub skipped_steps: u64,
    pub skipped_in_a_row: u64,
    pub scale: f32,
    pub unused: u32,
}

/// Memory of [`scaler`].
#[derive(Debug, Clone, Copy)]
pub struct On<M> {
    /// Output of [`sum_of_squares`].
    pub partial: M,
    /// One `f32`; if not finite, the step is skipped.
    pub loss: M,
    /// [`Rules`].
    pub rules: M,
    /// [`Scaler`].
    pub state: M,
    /// [`Scaling`], which the optimizer reads.
    pub scaling: M,
    /// Two [`Numbers`]: for the case that the previous step was applied, and for the case that it
    /// was skipped.
    pub candidates: M,
    /// The candidate that the optimizer reads.
    pub numbers: M,
}

/// The program with all kernels.
pub fn program() -> Program {
    Program { source: &SOURCE, definitions: Vec::new() }
}

/// Depends only on the number of gradients, so every device adds in the same order.
fn blocks(count: u32) -> u32 {
    count.div_ceil(AT_ONCE).clamp(1, MAX_BLOCKS)
}

/// Bytes of the partial sums over `count` gradients.
pub fn partial_bytes(count: u32) -> usize {
    8 * blocks(count) as usize
}

/// The sum of squares of `count` gradients, as partial sums.
///
/// # Errors
/// The memory is too small.
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

/// `factor` times the sum of the losses of `count` rows; `add`: whether to add to `mean`. Both are
/// one `f32`.
///
/// # Errors
/// The memory is too small.
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

/// Computes the norm, clipping and next scale from the partial sums over `count` gradients, and
/// selects the optimizer's parameters.
///
/// # Errors
/// The memory is too small.
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
