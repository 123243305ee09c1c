//! Max pooling, forward and backward.

use super::windows::Windows;
use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "max_pool.cu", text: include_str!("max_pool.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;
/// The index within a window is one byte.
const LARGEST: u32 = 16;

/// Max pooling of `batch` images, whose pixels are rows of channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MaxPool {
    rows: Rows,
    batch: u32,
    windows: Windows,
}

impl MaxPool {
    /// # Errors
    /// The kernels do not support the channels, windows or sizes.
    pub fn new(rows: Rows, batch: u32, windows: Windows) -> Result<MaxPool, Error> {
        rows.check("max_pool")?;
        windows.check("max_pool", batch, rows.pitch.into())?;
        if windows.kernel > LARGEST {
            let text = format!("windows of {} pixels, expected at most {LARGEST}", windows.kernel);
            return Err(Error::refused("max_pool", text));
        }
        Ok(MaxPool { rows, batch, windows })
    }

    pub fn program(&self) -> Program {
        let mut program = self.rows.program(&SOURCE);
        program.definitions.extend(self.windows.definitions());
        program
    }

    /// Bytes of the maxima's indices within their windows.
    pub fn places_bytes(&self) -> usize {
        let vector = 16 / self.rows.element.bytes();
        self.batch as usize * self.windows.pixels().1 as usize * self.rows.vectors() as usize * vector
    }

    fn sizes<M: Memory>(
        &self,
        call: &'static str,
        image: (&str, M),
        result: (&str, M),
        places: Option<M>,
    ) -> Result<(), Error> {
        let (pixels, results) = self.windows.pixels();
        let bytes = |each: u32| self.rows.bytes(self.batch * each);
        let mut memory = vec![(image.0, image.1, bytes(pixels)), (result.0, result.1, bytes(results))];
        memory.extend(places.map(|places| ("places", places, self.places_bytes())));
        sizes(call, &memory)
    }

    fn call<M>(&self, kernel: &'static str, max_blocks: u32, pixels: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        let blocks = (self.batch * pixels * self.rows.vectors()).div_ceil(THREADS).min(max_blocks).max(1);
        Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments }
    }

    /// `y` = the maximum of each window of `x`; `places`: its index in the window, for backward.
    /// Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(&self, max_blocks: u32, x: M, y: M, places: Option<M>) -> Result<Call<M>, Error> {
        self.sizes("max_pool", ("x", x), ("y", y), places)?;
        let places = places.map_or(Argument::Absent, Argument::Writes);
        let arguments = vec![Argument::Reads(x), Argument::Writes(y), places, Argument::Int(self.batch)];
        Ok(self.call("max_pool", max_blocks, self.windows.pixels().1, arguments))
    }

    /// The gradient `dx` of `x`; `add`: whether to add to it. Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(&self, max_blocks: u32, dy: M, places: M, dx: M, add: bool) -> Result<Call<M>, Error> {
        self.sizes("max_pool_backward", ("dx", dx), ("dy", dy), Some(places))?;
        let arguments = vec![
            Argument::Reads(dy),
            Argument::Reads(places),
            if add { Argument::Updates(dx) } else { Argument::Writes(dx) },
            Argument::Int(self.batch),
            Argument::Int(add.into()),
        ];
        Ok(self.call("max_pool_backward", max_blocks, self.windows.pixels().0, arguments))
    }
}
