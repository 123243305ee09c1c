//! Image pooling.

use super::{Lowering, adds, rows, size, windows};
use crate::cpu::Format;
use crate::cpu::ops::Window;
use crate::lowering::launch::Work;
use crate::lowering::refused::Reason;
use crate::nn::layers;
use crate::nn::plan::NodePlan;
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::average_pool::AveragePool;
use switchyard_cuda::kernels::max_pool::MaxPool;

pub(super) fn max_pool(window: &Window, format: Format) -> Result<MaxPool, Reason> {
    let Window { batch, height, width, channels, kernel, stride, padding } = *window;
    let windows = windows([height, width], kernel, stride, padding)?;
    Ok(MaxPool::new(rows(channels, format)?, size(batch)?, windows)?)
}

pub(super) fn average_pool(pool: &layers::AveragePool, format: Format) -> Result<AveragePool, Reason> {
    Ok(AveragePool::new(rows(pool.channels, format)?, size(pool.batch)?, size(pool.pixels)?)?)
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn max_pool(&mut self, window: &Window, regions: &NodePlan) -> Result<(), Reason> {
        let [x, y] = [&regions.inputs[0], &regions.output].map(|place| self.arena(place));
        let found = (!self.evaluates).then(|| self.arena(&regions.saved));
        let call = max_pool(window, self.format)?.forward(self.target.blocks, x, y, found)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn max_pool_backward(&mut self, window: &Window, regions: &NodePlan) -> Result<(), Reason> {
        let Some(adds) = adds(regions.modes[0]) else { return Ok(()) };
        let [dy, found, dx] = [&regions.d_output, &regions.saved, &regions.d_inputs[0]].map(|place| self.arena(place));
        let call = max_pool(window, self.format)?.backward(self.target.blocks, dy, found, dx, adds)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn average_pool(&mut self, pool: &layers::AveragePool, regions: &NodePlan) -> Result<(), Reason> {
        let [x, y] = [&regions.inputs[0], &regions.output].map(|place| self.arena(place));
        let call = average_pool(pool, self.format)?.forward(self.target.blocks, x, y)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn average_pool_backward(
        &mut self,
        pool: &layers::AveragePool,
        regions: &NodePlan,
    ) -> Result<(), Reason> {
        let Some(adds) = adds(regions.modes[0]) else { return Ok(()) };
        let [dy, dx] = [&regions.d_output, &regions.d_inputs[0]].map(|place| self.arena(place));
        let call = average_pool(pool, self.format)?.backward(self.target.blocks, dy, dx, adds)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }
}
