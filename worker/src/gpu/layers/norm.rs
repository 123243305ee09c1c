//! Normalisation.

use super::{FLOAT, Lowering, rows, size};
use crate::cpu::Format;
use crate::gpu::launch::{Memory, Work};
use crate::gpu::refused::Reason;
use crate::nn::arena::Region;
use crate::nn::layers::{ChannelNorm, RowNorm};
use crate::nn::plan::{Mode, NodePlan};
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::batch_norm::{self, BatchNorm};
use switchyard_cuda::kernels::layer_norm::{self, LayerNorm};

pub(super) fn layer_norm(norm: &RowNorm, format: Format) -> Result<LayerNorm, Reason> {
    Ok(LayerNorm::new(rows(norm.width, format)?, size(norm.rows)?)?)
}

pub(super) fn batch_norm(norm: &ChannelNorm, format: Format) -> Result<BatchNorm, Reason> {
    Ok(BatchNorm::new(rows(norm.channels, format)?, size(norm.rows)?)?)
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

    pub(super) fn batch_norm(&mut self, norm: &ChannelNorm, places: &NodePlan) -> Result<(), Reason> {
        let (blocks, call) = (self.target.blocks, batch_norm(norm, self.format)?);
        let [x, saved, y] = [&places.inputs[0], &places.saved, &places.output].map(|place| self.arena(place));
        let memory = if self.evaluates { Memory::Statistics } else { Memory::BatchStatistics };
        let statistics = self.floats(memory, places.statistics.start, places.statistics.len());
        if self.evaluates {
            self.works.push(Work::Kernel(call.running(statistics, saved)?));
        } else {
            let calls = call.statistics(blocks, x, self.arena(&places.scratch), saved, statistics)?;
            self.works.extend(calls.map(Work::Kernel));
        }
        let [gamma, beta] = [0, 1].map(|index| self.parameter(Memory::Weights, places.ordinals[index]));
        let residual = norm.residual.then(|| self.arena(&places.inputs[1]));
        let on = batch_norm::Forward { x, residual, gamma, beta, saved, y };
        self.works.push(Work::Kernel(call.forward(blocks, on, norm.relu)?));
        Ok(())
    }

    pub(super) fn batch_norm_backward(&mut self, norm: &ChannelNorm, places: &NodePlan) -> Result<(), Reason> {
        let (blocks, call) = (self.target.blocks, batch_norm(norm, self.format)?);
        let scratch = places.backward_scratch;
        let part = |at: usize, bytes: usize| {
            self.arena(&Region { offset: scratch.offset + at, len: bytes / FLOAT, ..scratch })
        };
        let sums = call.partial_bytes(blocks);
        let ((d_gamma, adds), (d_beta, _)) = (self.gradient(places, 0), self.gradient(places, 1));
        let on = batch_norm::Backward {
            x: self.arena(&places.backward_inputs[0]),
            y: norm.relu.then(|| self.arena(&places.backward_output)),
            dy: self.arena(&places.d_output),
            gamma: self.parameter(Memory::Weights, places.ordinals[0]),
            saved: self.arena(&places.saved),
            partial: part(0, sums),
            factors: part(sums, call.factors_bytes()),
            d_gamma,
            d_beta,
            dx: self.arena(&places.d_inputs[0]),
        };
        let calls = call.backward(blocks, on, adds, places.modes[0] == Mode::Add)?;
        self.works.extend(calls.map(Work::Kernel));
        Ok(())
    }
}
