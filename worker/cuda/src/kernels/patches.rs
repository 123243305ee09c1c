//! Windows of images as rows of a matrix, and back: what makes a convolution a product.

use super::windows::Windows;
use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "patches.cu", text: include_str!("patches.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;

/// Of `batch` images, whose pixels are rows of channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patches {
    rows: Rows,
    batch: u32,
    windows: Windows,
}

impl Patches {
    /// # Errors
    /// Channels, windows or numbers that the kernels cannot have.
    pub fn new(rows: Rows, batch: u32, windows: Windows) -> Result<Patches, Error> {
        rows.check("patches")?;
        let area = u64::from(windows.kernel) * u64::from(windows.kernel);
        windows.check("patches", batch, area * u64::from(rows.pitch))?;
        Ok(Patches { rows, batch, windows })
    }

    /// The matrix of the patches: numbers of a row, and from one row to the next.
    pub fn matrix(&self) -> Rows {
        let width = self.windows.kernel * self.windows.kernel * self.rows.width;
        let vector = 16 / self.rows.element.bytes() as u32;
        Rows { element: self.rows.element, width, pitch: width.next_multiple_of(vector) }
    }

    pub fn program(&self) -> Program {
        let mut program = self.rows.program(&SOURCE);
        program.definitions.extend(self.windows.definitions());
        program.definitions.push(format!("-DPATCH_PITCH={}", self.matrix().pitch));
        program
    }

    /// Size of the matrix of the patches.
    pub fn patches_bytes(&self) -> usize {
        self.matrix().bytes(self.batch * self.windows.pixels().1)
    }

    fn sizes<M: Memory>(&self, call: &'static str, image: (&str, M), patches: (&str, M)) -> Result<(), Error> {
        let all = self.rows.bytes(self.batch * self.windows.pixels().0);
        sizes(call, &[(image.0, image.1, all), (patches.0, patches.1, self.patches_bytes())])
    }

    fn call<M>(&self, kernel: &'static str, most: u32, vectors: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        let blocks = (self.batch * vectors).div_ceil(THREADS).min(most).max(1);
        Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments }
    }

    /// `patches` = the windows of `x`, zeros outside of the images. On at most `most` blocks.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn forward<M: Memory>(&self, most: u32, x: M, patches: M) -> Result<Call<M>, Error> {
        self.sizes("patches", ("x", x), ("patches", patches))?;
        let arguments = vec![Argument::Reads(x), Argument::Writes(patches), Argument::Int(self.batch)];
        Ok(self.call("patches", most, self.windows.pixels().1 * self.matrix().vectors(), arguments))
    }

    /// The gradient `dx` of `x`: for each pixel the sum over the patches that have it; `add`: what is in it stays in the sum. On at most
    /// `most` blocks.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn backward<M: Memory>(&self, most: u32, d_patches: M, dx: M, add: bool) -> Result<Call<M>, Error> {
        self.sizes("patches_backward", ("dx", dx), ("d_patches", d_patches))?;
        let arguments = vec![
            Argument::Reads(d_patches),
            if add { Argument::Updates(dx) } else { Argument::Writes(dx) },
            Argument::Int(self.batch),
            Argument::Int(add.into()),
        ];
        Ok(self.call("patches_backward", most, self.windows.pixels().0 * self.rows.vectors(), arguments))
    }
}
