//! Row selection.

use super::{Lowering, element, rows, size};
use crate::cpu::Format;
use crate::lowering::launch::{Memory, Work};
use crate::lowering::refused::Reason;
use crate::lowering::target::Computed;
use crate::nn::layers::Rows;
use crate::nn::plan::{Mode, NodePlan};
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::gather::Gather;
use switchyard_cuda::kernels::{self, Element};

pub(super) fn kernels_of(selected: &Rows, format: Format) -> Result<Gather, Reason> {
    Ok(Gather::new(rows(selected.width, format)?, size(selected.count)?, size(selected.of)?)?)
}

impl<M: kernels::Memory> Lowering<'_, M> {
    /// The selected row indices.
    fn selected(&self, selected: &Rows, computed: &Computed) -> M {
        let (memory, from) = match selected.fixed.is_empty() {
            true => (Memory::Positions, 0),
            false => (Memory::Constants, computed.constant),
        };
        self.floats(memory, from, selected.count)
    }

    pub(super) fn rows(&mut self, selected: &Rows, computed: &Computed, regions: &NodePlan) -> Result<(), Reason> {
        let numbers = self.selected(selected, computed);
        let (x, y) = (self.arena(&regions.inputs[0]), self.arena(&regions.output));
        let call = kernels_of(selected, self.format)?.forward(self.target.blocks, numbers, x, y)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn rows_backward(
        &mut self,
        selected: &Rows,
        computed: &Computed,
        regions: &NodePlan,
    ) -> Result<(), Reason> {
        let (blocks, dx) = (self.target.blocks, self.arena(&regions.d_inputs[0]));
        match regions.modes[0] {
            Mode::Add => {}
            // The kernel adds, because most rows receive nothing.
            Mode::Write => {
                let zeros = Elementwise { from: Element::F32, to: element(self.format) };
                let zero = zeros.fill(blocks, size(regions.d_inputs[0].len)?, 0.0, dx)?;
                self.works.push(Work::Kernel(zero));
            }
            _ => return Ok(()),
        }
        let (numbers, dy) = (self.selected(selected, computed), self.arena(&regions.d_output));
        let call = kernels_of(selected, self.format)?.backward(blocks, numbers, dy, dx)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }
}
