//! Normalisation.

use super::{FLOAT, Lowering, rows, size};
use crate::cpu::Format;
use crate::lowering::launch::{Memory, Work};
use crate::lowering::refused::Reason;
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
    pub(super) fn layer_norm(&mut self, norm: &RowNorm, regions: &NodePlan) -> Result<(), Reason> {
        let parameters = [0, 1].map(|index| self.parameter(Memory::Weights, regions.ordinals[index]));
        let [x, y, saved] = [&regions.inputs[0], &regions.output, &regions.saved].map(|place| self.arena(place));
        let call = layer_norm(norm, self.format)?.forward(self.target.blocks, x, parameters, y, saved)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn layer_norm_backward(&mut self, norm: &RowNorm, regions: &NodePlan) -> Result<(), Reason> {
        let blocks = self.target.blocks;
        let call = layer_norm(norm, self.format)?;
        let [dy, x, saved, dx, partial] = [
            &regions.d_output,
            &regions.backward_inputs[0],
            &regions.saved,
            &regions.d_inputs[0],
            &regions.backward_scratch,
        ]
        .map(|place| self.arena(place));
        let gamma = self.parameter(Memory::Weights, regions.ordinals[0]);
        let on = layer_norm::Backward { dy, x, gamma, saved, dx, partial };
        self.works.push(Work::Kernel(call.backward(blocks, on, regions.modes[0] == Mode::Add)?));
        let ((d_gamma, adds), (d_beta, _)) = (self.gradient(regions, 0), self.gradient(regions, 1));
        self.works.push(Work::Kernel(call.parameters(blocks, partial, [d_gamma, d_beta], adds)?));
        Ok(())
    }

    pub(super) fn batch_norm(&mut self, norm: &ChannelNorm, regions: &NodePlan) -> Result<(), Reason> {
        let (blocks, call) = (self.target.blocks, batch_norm(norm, self.format)?);
        let [x, saved, y] = [&regions.inputs[0], &regions.saved, &regions.output].map(|place| self.arena(place));
        let memory = if self.evaluates { Memory::Statistics } else { Memory::BatchStatistics };
        let statistics = self.floats(memory, regions.statistics.start, regions.statistics.len());
        if self.evaluates {
            self.works.push(Work::Kernel(call.running(statistics, saved)?));
        } else {
            let calls = call.statistics(blocks, x, self.arena(&regions.scratch), saved, statistics)?;
            self.works.extend(calls.map(Work::Kernel));
        }
        let [gamma, beta] = [0, 1].map(|index| self.parameter(Memory::Weights, regions.ordinals[index]));
        let residual = norm.residual.then(|| self.arena(&regions.inputs[1]));
        let on = batch_norm::Forward { x, residual, gamma, beta, saved, y };
        self.works.push(Work::Kernel(call.forward(blocks, on, norm.relu)?));
        Ok(())
    }

    pub(super) fn batch_norm_backward(&mut self, norm: &ChannelNorm, regions: &NodePlan) -> Result<(), Reason> {
        let (blocks, call) = (self.target.blocks, batch_norm(norm, self.format)?);
        let scratch = regions.backward_scratch;
        let part = |at: usize, bytes: usize| {
            self.arena(&Region { offset: scratch.offset + at, len: bytes / FLOAT, ..scratch })
        };
        let sums = call.partial_bytes(blocks);
        let ((d_gamma, adds), (d_beta, _)) = (self.gradient(regions, 0), self.gradient(regions, 1));
        let on = batch_norm::Backward {
            x: self.arena(&regions.backward_inputs[0]),
            y: norm.relu.then(|| self.arena(&regions.backward_output)),
            dy: self.arena(&regions.d_output),
            gamma: self.parameter(Memory::Weights, regions.ordinals[0]),
            saved: self.arena(&regions.saved),
            partial: part(0, sums),
            factors: part(sums, call.factors_bytes()),
            d_gamma,
            d_beta,
            dx: self.arena(&regions.d_inputs[0]),
        };
        let calls = call.backward(blocks, on, adds, regions.modes[0] == Mode::Add)?;
        self.works.extend(calls.map(Work::Kernel));
        Ok(())
    }
}
