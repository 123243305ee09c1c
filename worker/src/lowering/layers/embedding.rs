//! Embeddings, and the gradients of their tables.

use super::{Lowering, rows, size};
use crate::cpu::Format;
use crate::lowering::launch::{Memory, Table, Work};
use crate::lowering::refused::Reason;
use crate::nn::layers::Tables;
use crate::nn::plan::NodePlan;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::embedding::{Backward, Embedding, Lookup};
use switchyard_cuda::kernels::{self, Element};

pub(super) fn kernels_of(tables: &Tables, format: Format) -> Result<Embedding, Reason> {
    Ok(Embedding::new(rows(tables.width, format)?, size(tables.rows)?, size(tables.context)?)?)
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn embedding(&mut self, tables: &Tables, regions: &NodePlan) -> Result<(), Reason> {
        let lookup = |table: Table, index: usize, entries: usize| -> Result<Lookup<M>, Reason> {
            let numbers = self.floats(Memory::Entries(table), 0, tables.rows);
            Ok(Lookup { numbers, table: self.rounded(regions.ordinals[index]), entries: size(entries)? })
        };
        let tokens = lookup(Table::Tokens, tables.tokens(), tables.vocabulary)?;
        let segments = tables.segments.map(|entries| lookup(Table::Segments, 1, entries)).transpose()?;
        let (positions, x) = (self.rounded(regions.ordinals[0]), self.arena(&regions.output));
        let call = kernels_of(tables, self.format)?.forward(self.target.blocks, tokens, positions, segments, x)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    pub(super) fn embedding_backward(&mut self, tables: &Tables, regions: &NodePlan) -> Result<(), Reason> {
        let (gradient, adds) = self.gradient(regions, 0);
        let dx = self.arena(&regions.d_output);
        let call = kernels_of(tables, self.format)?.positions(self.target.blocks, dx, gradient, adds)?;
        self.works.push(Work::Kernel(call));
        if let Some(entries) = tables.segments {
            self.table_backward(tables, regions, (Table::Segments, 1, entries))?;
        }
        self.table_backward(tables, regions, (Table::Tokens, tables.tokens(), tables.vocabulary))
    }

    /// Computes the gradient of a table, given by its parameter index and number of rows. The
    /// kernels add, because most rows of a table are not used by a batch.
    fn table_backward(
        &mut self,
        tables: &Tables,
        regions: &NodePlan,
        (table, index, entries): (Table, usize, usize),
    ) -> Result<(), Reason> {
        let blocks = self.target.blocks;
        let (gradient, adds) = self.gradient(regions, index);
        if !adds {
            let floats = Elementwise { from: Element::F32, to: Element::F32 };
            let zero = floats.fill(blocks, size(entries * tables.width)?, 0.0, gradient)?;
            self.works.push(Work::Kernel(zero));
        }
        let on = Backward {
            numbers: self.floats(Memory::Entries(table), 0, tables.rows),
            order: self.floats(Memory::Order(table), 0, tables.rows),
            dx: self.arena(&regions.d_output),
            partial: self.arena(&regions.backward_scratch),
            gradient,
            entries: size(entries)?,
        };
        let calls = kernels_of(tables, self.format)?.backward(blocks, on)?;
        self.works.extend(calls.map(Work::Kernel));
        Ok(())
    }
}
