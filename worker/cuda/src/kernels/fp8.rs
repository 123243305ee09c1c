//! FP8 GEMM operands with per-tensor scales, for tensor cores from compute capability 8.9 on.
//!
//! The scale is computed from the tensor itself ("current scaling"), not from earlier steps
//! ("delayed scaling"). The tensor is read once more, but no value is clipped, the first step is no
//! exception, and checkpoints have nothing to save.

use super::{Argument, Call, Element, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source = Source { name: "fp8.cu", text: include_str!("fp8.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;
/// Rows and columns that a block transposes at once.
const TILE: (u32, u32) = (128, 64);

/// Minimum compute capability with FP8 conversion and tensor cores.
pub const SINCE: (i32, i32) = (8, 9);
/// Required alignment of all sizes of an FP8 GEMM, and of addresses in bytes.
pub const MULTIPLE: u32 = 16;

/// An FP8 format, as specified by the Open Compute Project (OFP8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fp8 {
    /// 4 exponent bits, 3 fraction bits, at most 448: for activations and weights.
    E4m3,
    /// 5 exponent bits, 2 fraction bits, at most 57,344: for gradients.
    E5m2,
}

impl Fp8 {
    fn name(self) -> &'static str {
        match self {
            Fp8::E4m3 => "e4m3",
            Fp8::E5m2 => "e5m2",
        }
    }
}

/// Quantisation of `count` rows of a 16-bit tensor to FP8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantization {
    rows: Rows,
    count: u32,
    to: Fp8,
}

impl Quantization {
    /// # Errors
    /// The elements are not 16-bit, or sizes are not multiples of [`MULTIPLE`].
    pub fn new(rows: Rows, count: u32, to: Fp8) -> Result<Quantization, Error> {
        rows.check("quantize")?;
        let max_rows = (1 << 31) / rows.width;
        let fits = [rows.width, count].iter().all(|side| side.is_multiple_of(MULTIPLE));
        if rows.element == Element::F32 || !fits || !(1..=max_rows).contains(&count) {
            let text = format!(
                "{count} x {} {:?}, expected multiples of {MULTIPLE}, 16 bits and at most 2^31 numbers",
                rows.width, rows.element
            );
            return Err(Error::refused("quantize", text));
        }
        Ok(Quantization { rows, count, to })
    }

    pub fn program(&self) -> Program {
        let mut program = self.rows.program(&SOURCE);
        program.definitions.push(format!("-DTO={}", self.to.name()));
        program
    }

    /// Bytes of the FP8 tensor.
    pub fn bytes(&self) -> usize {
        self.count as usize * self.rows.width as usize
    }

    /// Bytes of the per-block maxima if at most `max_blocks` blocks run.
    pub fn partial_bytes(&self, max_blocks: u32) -> usize {
        4 * self.partials(max_blocks) as usize
    }

    fn partials(&self, max_blocks: u32) -> u32 {
        (self.count * self.rows.vectors()).div_ceil(THREADS).min(max_blocks).max(1)
    }

    /// The largest magnitude of `x` per block, on at most `max_blocks` blocks.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn maxima<M: Memory>(&self, max_blocks: u32, x: M, partial: M) -> Result<Call<M>, Error> {
        sizes(
            "maxima",
            &[("x", x, self.rows.bytes(self.count)), ("partial", partial, self.partial_bytes(max_blocks))],
        )?;
        let arguments = vec![Argument::Reads(x), Argument::Writes(partial), Argument::Int(self.count)];
        let (program, blocks) = (self.program(), self.partials(max_blocks));
        Ok(Call { program, kernel: "maxima", blocks, threads: THREADS, shared_bytes: 0, arguments })
    }

    /// `y` = `x` times its scale in FP8, contiguous, and `inverse` = 1 / scale. `partial`: output
    /// of [`Quantization::maxima`] with the same `max_blocks`.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn quantize<M: Memory>(&self, max_blocks: u32, x: M, partial: M, y: M, inverse: M) -> Result<Call<M>, Error> {
        self.call("quantize", (max_blocks, self.partials(max_blocks)), [x, partial], [y, inverse])
    }

    /// [`Quantization::quantize`] with transposition.
    ///
    /// # Errors
    /// The memory is too small.
    pub fn transposed<M: Memory>(&self, max_blocks: u32, x: M, partial: M, y: M, inverse: M) -> Result<Call<M>, Error> {
        let blocks = self.count.div_ceil(TILE.0) * self.rows.width.div_ceil(TILE.1);
        self.call("quantize_transposed", (max_blocks, blocks), [x, partial], [y, inverse])
    }

    fn call<M: Memory>(
        &self,
        kernel: &'static str,
        (max_blocks, blocks): (u32, u32),
        [x, partial]: [M; 2],
        [y, inverse]: [M; 2],
    ) -> Result<Call<M>, Error> {
        let memory = [
            ("x", x, self.rows.bytes(self.count)),
            ("partial", partial, self.partial_bytes(max_blocks)),
            ("y", y, self.bytes()),
            ("inverse", inverse, 4),
        ];
        sizes(kernel, &memory)?;
        let arguments = vec![
            Argument::Reads(x),
            Argument::Reads(partial),
            Argument::Writes(y),
            Argument::Writes(inverse),
            Argument::Int(self.count),
            Argument::Int(self.partials(max_blocks)),
        ];
        let blocks = blocks.min(max_blocks).max(1);
        Ok(Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments })
    }
}
