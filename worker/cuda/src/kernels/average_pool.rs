//! Mean over the pixels of an image, forward and backward.

use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "average_pool.cu", text: include_str!("average_pool.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;

/// Average pooling of `batch` images, whose pixels are rows of channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AveragePool {
    rows: Rows,
    batch: u32,
    pixels: u32,
}

impl AveragePool {
    /// Pools `pixels` pixels per image.
    ///
    /// # Errors
    /// The kernels do not support the channels or sizes.
    pub fn new(rows: Rows, batch: u32, pixels: u32) -> Result<AveragePool, Error> {
        rows.check("average_pool")?;
        let numbers = u64::from(batch) * u64::from(pixels) * u64::from(rows.pitch);
        if !(1..1 << 31).contains(&numbers) {
            let text = format!(
                "{batch} images of {pixels} pixels with {} channels, expected at least one of each and fewer than 2^31 numbers",
                rows.width
            );
            return Err(Error::refused("average_pool", text));
        }
        Ok(AveragePool { rows, batch, pixels })
    }

    pub fn program(&self) -> Program {
        let mut program = self.rows.program(&SOURCE);
        program.definitions.push(format!("-DPIXELS={}", self.pixels));
        program
    }

    fn sizes<M: Memory>(&self, call: &'static str, image: (&str, M), mean: (&str, M)) -> Result<(), Error> {
        let [all, each] = [self.batch * self.pixels, self.batch].map(|rows| self.rows.bytes(rows));
        sizes(call, &[(image.0, image.1, all), (mean.0, mean.1, each)])
    }

    fn call<M>(&self, kernel: &'static str, max_blocks: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        let vectors = self.batch * self.rows.vectors();
        let blocks = vectors.div_ceil(THREADS).min(max_blocks).max(1);
        Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments }
    }

    /// `y` = the means of `x`. Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(&self, max_blocks: u32, x: M, y: M) -> Result<Call<M>, Error> {
        self.sizes("average_pool", ("x", x), ("y", y))?;
        let arguments = vec![Argument::Reads(x), Argument::Writes(y), Argument::Int(self.batch)];
        Ok(self.call("average_pool", max_blocks, arguments))
    }

    /// The gradient `dx` of `x`; `add`: whether to add to it. Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(&self, max_blocks: u32, dy: M, dx: M, add: bool) -> Result<Call<M>, Error> {
        self.sizes("average_pool_backward", ("dx", dx), ("dy", dy))?;
        let arguments = vec![
            Argument::Reads(dy),
            if add { Argument::Updates(dx) } else { Argument::Writes(dx) },
            Argument::Int(self.batch),
            Argument::Int(add.into()),
        ];
        Ok(self.call("average_pool_backward", max_blocks, arguments))
    }
}
