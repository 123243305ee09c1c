//! Token, position and segment embeddings, forward and backward.

use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "embedding.cu", text: include_str!("embedding.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;
const WARPS: u32 = THREADS / LANES;
const LANES: u32 = 32;

/// Embedding of `count` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Embedding {
    rows: Rows,
    count: u32,
    /// Number of positions; the position of a row is its index modulo this.
    context: u32,
}

/// A table, and the table row of each row of the batch.
#[derive(Debug, Clone, Copy)]
pub struct Lookup<M> {
    /// One `u32` per row of the batch. An id of `entries` or more yields a row of NaN.
    pub numbers: M,
    /// Contiguous rows.
    pub table: M,
    pub entries: u32,
}

/// Memory of a table's backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Backward<M> {
    /// As in [`Lookup`]. Ids of `entries` or more are ignored.
    pub numbers: M,
    /// [`order`] of these ids.
    pub order: M,
    pub dx: M,
    /// [`Embedding::partial_bytes`].
    pub partial: M,
    /// The `f32` gradient of the table, which is added to.
    pub gradient: M,
    pub entries: u32,
}

/// Sorts the rows of a batch by id, stably. Ids of `entries` or more come last. `starts` is scratch
/// memory, reused between calls.
pub fn order(
    numbers: impl ExactSizeIterator<Item = u32> + Clone,
    entries: u32,
    starts: &mut Vec<u32>,
    order: &mut [u32],
) {
    let slot = |number: u32| number.min(entries) as usize;
    starts.clear();
    starts.resize(entries as usize + 2, 0);
    for number in numbers.clone() {
        starts[slot(number) + 1] += 1;
    }
    for slot in 1..starts.len() {
        starts[slot] += starts[slot - 1];
    }
    for (row, number) in (0..).zip(numbers) {
        let next = &mut starts[slot(number)];
        order[*next as usize] = row;
        *next += 1;
    }
}

impl Embedding {
    /// # Errors
    /// The kernels do not support the width or pitch, or there are no rows.
    pub fn new(rows: Rows, count: u32, context: u32) -> Result<Embedding, Error> {
        rows.check("embedding")?;
        let vector = 16 / rows.element.bytes() as u32;
        let max_rows = (1 << 31) / rows.width;
        if !rows.width.is_multiple_of(vector) || !(1..=max_rows).contains(&count) || !(1..=max_rows).contains(&context)
        {
            let text = format!(
                "{count} rows of width {}, {context} positions, expected a multiple of {vector} and at most 2^31 numbers",
                rows.width
            );
            return Err(Error::refused("embedding", text));
        }
        Ok(Embedding { rows, count, context })
    }

    pub fn program(&self) -> Program {
        self.rows.program(&SOURCE)
    }

    /// Bytes of the partial sums of runs that a table's backward pass keeps between its calls.
    pub fn partial_bytes(&self) -> usize {
        2 * self.count.div_ceil(LANES) as usize * self.gradient_bytes(1)
    }

    fn table_bytes(&self, entries: u32) -> usize {
        entries as usize * self.rows.width as usize * self.rows.element.bytes()
    }

    fn gradient_bytes(&self, entries: u32) -> usize {
        entries as usize * self.rows.width as usize * 4
    }

    fn number_bytes(&self) -> usize {
        4 * self.count as usize
    }

    fn call<M>(&self, kernel: &'static str, blocks: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments }
    }

    /// Each row of `x` = its token embedding + its position embedding + its segment embedding. Runs
    /// on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(
        &self,
        max_blocks: u32,
        tokens: Lookup<M>,
        positions: M,
        segments: Option<Lookup<M>>,
        x: M,
    ) -> Result<Call<M>, Error> {
        let mut memory = vec![
            ("tokens", tokens.numbers, self.number_bytes()),
            ("token table", tokens.table, self.table_bytes(tokens.entries)),
            ("positions", positions, self.table_bytes(self.context)),
            ("x", x, self.rows.bytes(self.count)),
        ];
        memory.extend(segments.map(|on| ("segments", on.numbers, self.number_bytes())));
        memory.extend(segments.map(|on| ("segment table", on.table, self.table_bytes(on.entries))));
        sizes("embedding", &memory)?;
        let vectors = self.count * (self.rows.width * self.rows.element.bytes() as u32 / 16);
        let arguments = vec![
            Argument::Reads(tokens.numbers),
            Argument::Reads(tokens.table),
            Argument::Int(tokens.entries),
            Argument::Reads(positions),
            Argument::Int(self.context),
            segments.map_or(Argument::Absent, |on| Argument::Reads(on.numbers)),
            segments.map_or(Argument::Absent, |on| Argument::Reads(on.table)),
            Argument::Int(segments.map_or(0, |on| on.entries)),
            Argument::Writes(x),
            Argument::Int(self.count),
        ];
        Ok(self.call("embedding", vectors.div_ceil(THREADS).min(max_blocks).max(1), arguments))
    }

    /// Adds each row of `dx` to its row of the table gradient, in two calls on at most `max_blocks`
    /// blocks. The result does not depend on the number of blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(&self, max_blocks: u32, on: Backward<M>) -> Result<[Call<M>; 2], Error> {
        let Backward { numbers, order, dx, partial, gradient, entries } = on;
        let memory = [
            ("numbers", numbers, self.number_bytes()),
            ("order", order, self.number_bytes()),
            ("dx", dx, self.rows.bytes(self.count)),
            ("partial", partial, self.partial_bytes()),
            ("gradient", gradient, self.gradient_bytes(entries)),
        ];
        sizes("embedding_gradient", &memory)?;
        let items = self.count.div_ceil(LANES) * (self.rows.width / 4).div_ceil(LANES);
        let rows = vec![
            Argument::Reads(numbers),
            Argument::Reads(order),
            Argument::Reads(dx),
            Argument::Writes(partial),
            Argument::Updates(gradient),
            Argument::Int(entries),
            Argument::Int(self.count),
        ];
        let runs = vec![
            Argument::Reads(numbers),
            Argument::Reads(order),
            Argument::Reads(partial),
            Argument::Updates(gradient),
            Argument::Int(entries),
            Argument::Int(self.count),
        ];
        Ok([
            self.call("embedding_gradient", items.div_ceil(WARPS).min(max_blocks).max(1), rows),
            self.call("embedding_runs", items.min(max_blocks).max(1), runs),
        ])
    }

    /// The `f32` position gradient: the sum over all sequences; `add`: whether to add to it. Runs
    /// on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn positions<M: Memory>(&self, max_blocks: u32, dx: M, gradient: M, add: bool) -> Result<Call<M>, Error> {
        let memory =
            [("dx", dx, self.rows.bytes(self.count)), ("gradient", gradient, self.gradient_bytes(self.context))];
        sizes("embedding_positions", &memory)?;
        let blocks = (self.context * (self.rows.width / 4)).div_ceil(THREADS).min(max_blocks).max(1);
        let arguments = vec![
            Argument::Reads(dx),
            if add { Argument::Updates(gradient) } else { Argument::Writes(gradient) },
            Argument::Int(self.context),
            Argument::Int(self.count),
            Argument::Int(add.into()),
        ];
        Ok(self.call("embedding_positions", blocks, arguments))
    }
}
