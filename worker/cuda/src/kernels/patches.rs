//! im2col and col2im, which turn a convolution into a GEMM.

use super::windows::Windows;
use super::{Argument, Call, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source =
    Source { name: "patches.cu", text: include_str!("patches.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;

/// Patches of `batch` images, whose pixels are rows of channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patches {
    rows: Rows,
    batch: u32,
    windows: Windows,
}

impl Patches {
    /// # Errors
    /// The kernels do not support the channels, windows or sizes.
    pub fn new(rows: Rows, batch: u32, windows: Windows) -> Result<Patches, Error> {
        rows.check("patches")?;
        let area = u64::from(windows.kernel) * u64::from(windows.kernel);
        windows.check("patches", batch, area * u64::from(rows.pitch))?;
        Ok(Patches { rows, batch, windows })
    }

    /// Width and pitch of the patch matrix.
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

    /// Bytes of the patch matrix.
    pub fn patches_bytes(&self) -> usize {
        self.matrix().bytes(self.batch * self.windows.pixels().1)
    }

    fn sizes<M: Memory>(&self, call: &'static str, image: (&str, M), patches: (&str, M)) -> Result<(), Error> {
        let all = self.rows.bytes(self.batch * self.windows.pixels().0);
        sizes(call, &[(image.0, image.1, all), (patches.0, patches.1, self.patches_bytes())])
    }

    fn call<M>(&self, kernel: &'static str, max_blocks: u32, vectors: u32, arguments: Vec<Argument<M>>) -> Call<M> {
        let blocks = (self.batch * vectors).div_ceil(THREADS).min(max_blocks).max(1);
        Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments }
    }

    /// `patches` = the windows of `x`, with zeros outside the images. Runs on at most `max_blocks`
    /// blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn forward<M: Memory>(&self, max_blocks: u32, x: M, patches: M) -> Result<Call<M>, Error> {
        self.sizes("patches", ("x", x), ("patches", patches))?;
        let arguments = vec![Argument::Reads(x), Argument::Writes(patches), Argument::Int(self.batch)];
        Ok(self.call("patches", max_blocks, self.windows.pixels().1 * self.matrix().vectors(), arguments))
    }

    /// The gradient `dx` of `x`: for each pixel, the sum over the patches that contain it; `add`:
    /// whether to add to it. Runs on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn backward<M: Memory>(&self, max_blocks: u32, d_patches: M, dx: M, add: bool) -> Result<Call<M>, Error> {
        self.sizes("patches_backward", ("dx", dx), ("d_patches", d_patches))?;
        let arguments = vec![
            Argument::Reads(d_patches),
            if add { Argument::Updates(dx) } else { Argument::Writes(dx) },
            Argument::Int(self.batch),
            Argument::Int(add.into()),
        ];
        Ok(self.call("patches_backward", max_blocks, self.windows.pixels().0 * self.rows.vectors(), arguments))
    }
}
