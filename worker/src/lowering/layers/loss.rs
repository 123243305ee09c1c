//! Softmax cross entropy.

use super::{Lowering, rows, size};
use crate::lowering::launch::{Memory, Work};
use crate::lowering::refused::Reason;
use crate::lowering::target::{Computed, Target};
use crate::nn::layers::Loss;
use crate::nn::plan::NodePlan;
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::cross_entropy::{CrossEntropy, On};

impl<M: kernels::Memory> Lowering<'_, M> {
    /// Losses and correct predictions; in training also the gradient, which overwrites the logits.
    pub(super) fn cross_entropy(&mut self, loss: &Loss, computed: &Computed, regions: &NodePlan) -> Result<(), Reason> {
        let call = CrossEntropy::new(rows(loss.classes, self.format)?, size(loss.rows)?)?;
        let on = On {
            logits: self.arena(&regions.inputs[0]),
            targets: self.floats(Memory::Targets(loss.options.target), 0, loss.rows),
            losses: self.floats(Memory::Losses, computed.row, loss.rows),
            correct: self.floats(Memory::Correct, computed.row, loss.rows),
            scale: (!self.evaluates).then(|| self.floats(Memory::Factors, computed.loss, 1)),
        };
        let Target { blocks, shared_bytes, .. } = *self.target;
        // Evaluation uses unsmoothed targets, as on CPUs.
        let smoothing = if self.evaluates { 0.0 } else { loss.smoothing };
        self.works.push(Work::Kernel(call.call(blocks, shared_bytes, on, smoothing)?));
        Ok(())
    }
}
