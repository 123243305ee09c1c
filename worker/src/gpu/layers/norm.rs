//! Normalisation.

use super::{Lowering, rows, size};
use crate::cpu::Format;
use crate::gpu::launch::{Memory, Work};
use crate::gpu::refused::Reason;
use crate::nn::layers::RowNorm;
use crate::nn::plan::{Mode, NodePlan};
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::layer_norm::{self, LayerNorm};

pub(super) fn layer_norm(norm: &RowNorm, format: Format) -> Result<LayerNorm, Reason> {
    Ok(LayerNorm::new(rows(norm.width, format)?, size(norm.rows)?)?)
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn layer_norm(&mut self, norm: &RowNorm, places: &NodePlan) -> Result<(), Reason> {
        let parameters = [0, 1].map(|index| self.parameter(Memory::Weights, places.ordinals[index]));
        let [x, y, saved] = [&places.inputs[0], &places.output, &places.saved].map(|place| self.arena(place));
        let call = layer_norm(norm, self.format)?.forward(self.target.blocks, x, parameters, y, saved)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn layer_norm_backward(&mut self, norm: &RowNorm, places: &NodePlan) -> Result<(), Reason> {
        let blocks = self.target.blocks;
        let call = layer_norm(norm, self.format)?;
        let [dy, x, saved, dx, partial] = [
            &places.d_output,
            &places.backward_inputs[0],
            &places.saved,
            &places.d_inputs[0],
            &places.backward_scratch,
        ]
        .map(|place| self.arena(place));
        let gamma = self.parameter(Memory::Weights, places.ordinals[0]);
        let on = layer_norm::Backward { dy, x, gamma, saved, dx, partial };
        self.works.push(Work::Kernel(call.backward(blocks, on, places.modes[0] == Mode::Add)?));
        let ((d_gamma, adds), (d_beta, _)) = (self.gradient(places, 0), self.gradient(places, 1));
        self.works.push(Work::Kernel(call.parameters(blocks, partial, [d_gamma, d_beta], adds)?));
        Ok(())
    }
}
