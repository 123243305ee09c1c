//! Some of the rows of a tensor, forward and backward.

use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "gather.cu", text: include_str!("gather.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;

/// `count` of `of` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gather {
    rows: Rows,
    count: u32,
    of: u32,
}

impl Gather {
    /// # Errors
    /// A width or pitch that the kernels cannot have, or no rows.
    pub fn new(rows: Rows, count: u32, of: u32) -> Result<Gather, Error> {
        rows.check("gather")?;
        let most = (1 << 31) / rows.width;
        if !(1..=most).contains(&count) || of == 0 {
            let text = format!("{count} of {of} rows of width {}, expected at least one and 2^31 numbers", rows.width);
            return Err(Error::refused("gather", text));
        }
        Ok(Gather { rows, count, of })
    }

    pub fn program(&self) -> Program {
        self.rows.program(&SOURCE)
    }

    fn call<M>(&self, kernel: &'static str, most: u32, memory: [Argument<M>; 3]) -> Call<M> {
        let vectors = self.count * self.rows.vectors();
        let blocks = vectors.div_ceil(THREADS).min(most).max(1);
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

    /// Each row of `y` = the row of `x` with its number, a `u32`; NaN if there is no such row. On at most `most` blocks.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn forward<M: Memory>(&self, most: u32, numbers: M, x: M, y: M) -> Result<Call<M>, Error> {
        self.check("gather", Some(numbers), ("x", x), ("y", y))?;
        Ok(self.call("gather", most, [Argument::Reads(numbers), Argument::Reads(x), Argument::Writes(y)]))
    }

    /// Adds each row of `dy` to the row of `dx` with its number. No number may occur twice. On at most `most` blocks.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn backward<M: Memory>(&self, most: u32, numbers: M, dy: M, dx: M) -> Result<Call<M>, Error> {
        self.check("scatter", Some(numbers), ("dx", dx), ("dy", dy))?;
        Ok(self.call("scatter", most, [Argument::Reads(numbers), Argument::Reads(dy), Argument::Updates(dx)]))
    }

    /// Adds each row of `dy` to the row of `dx` in its place. On at most `most` blocks.
    ///
    /// # Errors
    /// Memory that is too small, or fewer rows of `dx`.
    pub fn add<M: Memory>(&self, most: u32, dy: M, dx: M) -> Result<Call<M>, Error> {
        if self.of < self.count {
            let text = format!("{} rows to add to {}, expected no more", self.count, self.of);
            return Err(Error::refused("scatter", text));
        }
        self.check("scatter", None, ("dx", dx), ("dy", dy))?;
        Ok(self.call("scatter", most, [Argument::Absent, Argument::Reads(dy), Argument::Updates(dx)]))
    }
}
