//! Row gather and scatter-add.

use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "gather.cu", text: include_str!("gather.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;

/// Selects `count` of `of` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gather {
    rows: Rows,
    count: u32,
    of: u32,
}

impl Gather {
    /// # Errors
    /// The kernels do not support the width or pitch, or there are no rows.
    pub fn new(rows: Rows, count: u32, of: u32) -> Result<Gather, Error> {
        rows.check("gather")?;
        let max_rows = (1 << 31) / rows.width;
        if !(1..=max_rows).contains(&count) || of == 0 {
            let text = format!("{count} of {of} rows of width {}, expected at least one and 2^31 numbers", rows.width);
            return Err(Error::refused("gather", text));
        }
        Ok(Gather { rows, count, of })
    }

    pub fn program(&self) -> Program {
        self.rows.program(&SOURCE)
    }

    fn call<M>(&self, kernel: &'static str, max_blocks: u32, memory: [Argument<M>; 3]) -> Call<M> {
        let vectors = self.count * self.rows.vectors();
        let blocks = vectors.div_ceil(THREADS).min(max_blocks).max(1);
        let mut arguments = Vec::from(memory);
        arguments.extend([Argument::Int(self.of), Argument::Int(self.count)]);
        Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments }
    }

    fn check<M: Memory>(
        &self,
        call: &'static str,
        numbers: Option<M>,
        all: (&str, M),
        some: (&str, M),
    ) -> Result<(), Error> {
        let mut memory = vec![(all.0, all.1, self.rows.bytes(self.of)), (some.0, some.1, self.rows.bytes(self.count))];
        memory.extend(numbers.map(|numbers| ("numbers", numbers, 4 * self.count as usize)));
        sizes(call, &memory)
    }

    /// Each row of `y` = the row of `x` with its index, a `u32`; NaN if the row does not exist.
    /// Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(&self, max_blocks: u32, numbers: M, x: M, y: M) -> Result<Call<M>, Error> {
        self.check("gather", Some(numbers), ("x", x), ("y", y))?;
        Ok(self.call("gather", max_blocks, [Argument::Reads(numbers), Argument::Reads(x), Argument::Writes(y)]))
    }

    /// Adds each row of `dy` to the row of `dx` with its index. Indices must be unique. Runs on at
    /// most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(&self, max_blocks: u32, numbers: M, dy: M, dx: M) -> Result<Call<M>, Error> {
        self.check("scatter", Some(numbers), ("dx", dx), ("dy", dy))?;
        Ok(self.call("scatter", max_blocks, [Argument::Reads(numbers), Argument::Reads(dy), Argument::Updates(dx)]))
    }

    /// Adds each row of `dy` to the row of `dx` with the same index. Runs on at most `max_blocks`
    /// blocks.
    ///
    /// # Errors
    /// The memory is too small, or `dx` has fewer rows.
    pub fn add<M: Memory>(&self, max_blocks: u32, dy: M, dx: M) -> Result<Call<M>, Error> {
        if self.of < self.count {
            let text = format!("{} rows to add to {}, expected no more", self.count, self.of);
            return Err(Error::refused("scatter", text));
        }
        self.check("scatter", None, ("dx", dx), ("dy", dy))?;
        Ok(self.call("scatter", max_blocks, [Argument::Absent, Argument::Reads(dy), Argument::Updates(dx)]))
    }
}
