//! Self-attention.

use super::{Lowering, element, size};
use crate::cpu::Format;
use crate::cpu::attention::AttentionShape;
use crate::gpu::launch::Work;
use crate::gpu::refused::Reason;
use crate::nn::plan::{Mode, NodePlan};
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::attention::{Attention, Backward, Shape};

pub(super) fn kernels_of(shape: &AttentionShape, format: Format) -> Result<Attention, Reason> {
    let AttentionShape { batch, context, heads, head_size, causal } = *shape;
    let [batch, context, heads, head_size] = [size(batch)?, size(context)?, size(heads)?, size(head_size)?];
    Ok(Attention::new(Shape { element: element(format), batch, context, heads, head_size, causal })?)
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn attention(&mut self, shape: &AttentionShape, places: &NodePlan) -> Result<(), Reason> {
        let [qkv, out, saved] = [&places.inputs[0], &places.output, &places.saved].map(|place| self.arena(place));
        let (blocks, shared_bytes) = (self.target.blocks, self.target.shared_bytes);
        let call = kernels_of(shape, self.format)?.forward(blocks, shared_bytes, qkv, out, saved)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn attention_backward(&mut self, shape: &AttentionShape, places: &NodePlan) -> Result<(), Reason> {
        if places.modes[0] != Mode::Write {
            return Ok(());
        }
        let on = Backward {
            qkv: self.arena(&places.backward_inputs[0]),
            out: self.arena(&places.backward_output),
            saved: self.arena(&places.saved),
            d_out: self.arena(&places.d_output),
            means: self.arena(&places.backward_scratch),
            d_qkv: self.arena(&places.d_inputs[0]),
        };
        let calls = kernels_of(shape, self.format)?.backward(self.target.blocks, self.target.shared_bytes, on)?;
        self.works.extend(calls.map(Work::Kernel));
        Ok(())
    }
}
