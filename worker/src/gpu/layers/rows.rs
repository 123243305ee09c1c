//! Some of the rows of a tensor.

use super::{Lowering, element, rows, size};
use crate::cpu::Format;
use crate::gpu::launch::{Memory, Work};
use crate::gpu::refused::Reason;
use crate::gpu::target::Computed;
use crate::nn::layers::Rows;
use crate::nn::plan::{Mode, NodePlan};
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::gather::Gather;
use switchyard_cuda::kernels::{self, Element};

pub(super) fn kernels_of(picked: &Rows, format: Format) -> Result<Gather, Reason> {
    Ok(Gather::new(rows(picked.width, format)?, size(picked.count)?, size(picked.of)?)?)
}

impl<M: kernels::Memory> Lowering<'_, M> {
    /// Numbers of the rows.
    fn picked(&self, picked: &Rows, computed: &Computed) -> M {
        let (memory, from) = match picked.fixed.is_empty() {
            true => (Memory::Positions, 0),
            false => (Memory::Constants, computed.constant),
        };
        self.floats(memory, from, picked.count)
    }

    pub(super) fn rows(&mut self, picked: &Rows, computed: &Computed, places: &NodePlan) -> Result<(), Reason> {
        let numbers = self.picked(picked, computed);
        let (x, y) = (self.arena(&places.inputs[0]), self.arena(&places.output));
        let call = kernels_of(picked, self.format)?.forward(self.target.blocks, numbers, x, y)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn rows_backward(
        &mut self,
        picked: &Rows,
        computed: &Computed,
        places: &NodePlan,
    ) -> Result<(), Reason> {
        let (blocks, dx) = (self.target.blocks, self.arena(&places.d_inputs[0]));
        match places.modes[0] {
            Mode::Add => {}
            // The kernel adds: most rows get nothing.
            Mode::Write => {
                let zeros = Elementwise { from: Element::F32, to: element(self.format) };
                let zero = zeros.fill(blocks, size(places.d_inputs[0].len)?, 0.0, dx)?;
                self.works.push(Work::Kernel(zero));
            }
            _ => return Ok(()),
        }
        let (numbers, dy) = (self.picked(picked, computed), self.arena(&places.d_output));
        let call = kernels_of(picked, self.format)?.backward(blocks, numbers, dy, dx)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }
}
