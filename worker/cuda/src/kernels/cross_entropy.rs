//! Softmax cross entropy: loss and gradient in one pass over the logits.

use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "cross_entropy.cu", text: include_str!("cross_entropy.cu"), arithmetic: "--use_fast_math" };
const THREADS: u32 = 512;
/// Target of a row that is excluded.
pub const IGNORE: u32 = u32::MAX;
/// Shared memory that the kernel declares statically: 16 bytes per warp.
const DECLARED: u32 = THREADS / 32 * 16;

/// Cross entropy of `count` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossEntropy {
    rows: Rows,
    count: u32,
}

/// Memory of the kernel.
#[derive(Debug, Clone, Copy)]
pub struct On<M> {
    /// Replaced by their gradient, with padded columns set to zero, if there is a `scale`.
    pub logits: M,
    /// The target column of each row as `u32`, or [`IGNORE`].
    pub targets: M,
    /// Loss of each row in nats, 0 for ignored ones.
    pub losses: M,
    /// 1.0 where the first of the largest logits is the target, otherwise 0.0.
    pub correct: M,
    /// One `f32`, the gradient factor; `None` in evaluation, which has no gradient.
    pub scale: Option<M>,
}

impl CrossEntropy {
    /// # Errors
    /// The kernel does not support the width or pitch.
    pub fn new(rows: Rows, count: u32) -> Result<CrossEntropy, Error> {
        rows.check("cross_entropy")?;
        if count == 0 {
            return Err(Error::refused("cross_entropy", "0 rows, expected at least one"));
        }
        Ok(CrossEntropy { rows, count })
    }

    pub fn program(&self) -> Program {
        self.rows.program(&SOURCE)
    }

    /// Losses and gradients, on at most `max_blocks` blocks with `shared_bytes` each: the part of a
    /// row that fits there is read once, the rest twice. `smoothing` is the label smoothing.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn call<M: Memory>(
        &self,
        max_blocks: u32,
        shared_bytes: u32,
        on: On<M>,
        smoothing: f32,
    ) -> Result<Call<M>, Error> {
        let On { logits, targets, losses, correct, scale } = on;
        let each = 4 * self.count as usize;
        let mut memory = vec![
            ("logits", logits, self.rows.bytes(self.count)),
            ("targets", targets, each),
            ("losses", losses, each),
            ("correct", correct, each),
        ];
        memory.extend(scale.map(|scale| ("scale", scale, 4)));
        sizes("cross_entropy", &memory)?;
        let vectors = self.rows.vectors();
        // Only the gradient reads logits a second time.
        let held = scale.map_or(0, |_| (shared_bytes.saturating_sub(DECLARED) / 16).min(vectors));
        Ok(Call {
            program: self.program(),
            kernel: "cross_entropy",
            blocks: self.count.min(max_blocks).max(1),
            threads: THREADS,
            shared_bytes: 16 * held,
            arguments: vec![
                if scale.is_some() { Argument::Updates(logits) } else { Argument::Reads(logits) },
                Argument::Reads(targets),
                Argument::Writes(losses),
                Argument::Writes(correct),
                scale.map_or(Argument::Absent, Argument::Reads),
                Argument::Float(smoothing),
                Argument::Int(self.count),
                Argument::Int(held),
            ],
        })
    }
}
