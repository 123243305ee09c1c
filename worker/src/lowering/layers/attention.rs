//! Self-attention: one cuDNN op per direction if supported, otherwise our own kernels. Both use the
//! same saved tensors.

use super::{FLOAT, Lowering};
use crate::cpu::Format;
use crate::cpu::attention::AttentionShape;
use crate::lowering::cudnn;
use crate::lowering::format;
use crate::lowering::launch::Work;
use crate::lowering::refused::Reason;
use crate::lowering::target::Target;
use crate::nn::plan::{Mode, NodePlan};
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::attention::{Attention, Backward};
use switchyard_cuda::operation::Operation;

pub(super) fn kernels_of(shape: &AttentionShape, of: Format) -> Result<Attention, Reason> {
    Ok(Attention::new(format::attention(shape, of)?)?)
}

/// Scratch memory in f32 elements.
pub(super) fn backward_scratch(shape: &AttentionShape, target: &Target, of: Format) -> Result<usize, Reason> {
    let operation = cudnn::attention(shape, of, true)?;
    match target.cudnn.workspace(&Operation::Attention(operation)) {
        None => Ok(kernels_of(shape, of)?.saved_bytes() / FLOAT),
        Some(_) => Ok(operation.scratch_bytes() / FLOAT),
    }
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn attention(&mut self, shape: &AttentionShape, regions: &NodePlan) -> Result<(), Reason> {
        let [qkv, out, saved] = [&regions.inputs[0], &regions.output, &regions.saved].map(|place| self.arena(place));
        if self.fused(shape, false, vec![qkv, out, saved])? {
            return Ok(());
        }
        let (blocks, shared_bytes) = (self.target.blocks, self.target.shared_bytes);
        let call = kernels_of(shape, self.format)?.forward(blocks, shared_bytes, qkv, out, saved)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn attention_backward(&mut self, shape: &AttentionShape, regions: &NodePlan) -> Result<(), Reason> {
        if regions.modes[0] != Mode::Write {
            return Ok(());
        }
        let [qkv, out, saved] =
            [&regions.backward_inputs[0], &regions.backward_output, &regions.saved].map(|place| self.arena(place));
        let [d_out, d_qkv, scratch] =
            [&regions.d_output, &regions.d_inputs[0], &regions.backward_scratch].map(|place| self.arena(place));
        if self.fused(shape, true, vec![qkv, out, saved, d_out, d_qkv, scratch])? {
            return Ok(());
        }
        let on = Backward { qkv, out, saved, d_out, means: scratch, d_qkv };
        let calls = kernels_of(shape, self.format)?.backward(self.target.blocks, self.target.shared_bytes, on)?;
        self.works.extend(calls.map(Work::Kernel));
        Ok(())
    }

    /// Lowers to a cuDNN op if supported; returns whether it is.
    fn fused(&mut self, shape: &AttentionShape, backward: bool, memory: Vec<M>) -> Result<bool, Reason> {
        let operation = Operation::Attention(cudnn::attention(shape, self.format, backward)?);
        let computes = self.target.cudnn.workspace(&operation).is_some();
        if computes {
            self.cudnn(operation, memory);
        }
        Ok(computes)
    }
}
