//! Softmax cross entropy: loss and gradient in one pass over the logits.

use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "cross_entropy.cu", text: include_str!("cross_entropy.cu"), arithmetic: "--use_fast_math" };
const THREADS: u32 = 512;
/// The target of a row that does not count.
pub const IGNORE: u32 = u32::MAX;
/// What the kernel declares of shared memory: 16 bytes for each warp.
const DECLARED: u32 = THREADS / 32 * 16;

/// Cross entropy of `count` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossEntropy {
    rows: Rows,
    count: u32,
}

/// What the kernel reads and writes.
#[derive(Debug, Clone, Copy)]
pub struct On<M> {
    /// They become their own gradient, and padded columns zero, if there is a `scale`.
    pub logits: M,
    /// The right column of each row as `u32`, or [`IGNORE`].
    pub targets: M,
    /// Nats of each row, 0 for ignored ones.
    pub losses: M,
    /// 1.0 where the first of the largest logits is the target, else 0.0.
    pub correct: M,
    /// One `f32`, the factor of the gradient; `None` in evaluation, which has no gradient.
    pub scale: Option<M>,
}

impl CrossEntropy {
    /// # Errors
    /// A width or pitch that the kernel cannot have.
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

    /// Losses and gradients, on at most `most` blocks that have `shared_bytes` each: what fits in of a row is read from memory once,
    /// the rest twice. `smoothing` is the part of the target that is spread evenly over all columns.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn call<M: Memory>(&self, most: u32, shared_bytes: u32, on: On<M>, smoothing: f32) -> Result<Call<M>, Error> {
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
        // Only the gradient needs a logit for the second time.
        let held = scale.map_or(0, |_| (shared_bytes.saturating_sub(DECLARED) / 16).min(vectors));
        Ok(Call {
            program: self.program(),
            kernel: "cross_entropy",
            blocks: self.count.min(most).max(1),
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
