//! Factors of products in 8 bits, with a scale for each tensor: what tensor cores multiply from compute capability 8.9 on.
//!
//! The scale follows from the tensor itself ("current scaling"), not from those of earlier steps ("delayed scaling"): the tensor is read once
//! more, but no number is cut off, the first step is as good as any other, and a checkpoint has nothing to keep.

use super::{Argument, Call, Element, Memory, Program, Rows, Source, sizes};
use crate::error::Error;

pub(super) static SOURCE: Source = Source { name: "fp8.cu", text: include_str!("fp8.cu"), arithmetic: "--fmad=false" };
const THREADS: u32 = 256;
/// Rows and columns of what a block transposes at once.
const TILE: (u32, u32) = (128, 64);

/// The least compute capability of devices that convert to 8 bits and multiply them.
pub const SINCE: (i32, i32) = (8, 9);
/// Of what all sides of a product of such numbers are multiples, and addresses in bytes.
pub const MULTIPLE: u32 = 16;

/// A format of 8 bits, as the Open Compute Project specifies it (OFP8).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fp8 {
    /// 4 bits of exponent, 3 of fraction, at most 448: for activations and weights.
    E4m3,
    /// 5 bits of exponent, 2 of fraction, at most 57,344: for gradients.
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

/// `count` rows of a tensor in 16 bits, to be rounded to 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantization {
    rows: Rows,
    count: u32,
    to: Fp8,
}

impl Quantization {
    /// # Errors
    /// Numbers that do not have 16 bits, or sides that are no multiples of [`MULTIPLE`].
    pub fn new(rows: Rows, count: u32, to: Fp8) -> Result<Quantization, Error> {
        rows.check("quantize")?;
        let most = (1 << 31) / rows.width;
        let fits = [rows.width, count].iter().all(|side| side.is_multiple_of(MULTIPLE));
        if rows.element == Element::F32 || !fits || !(1..=most).contains(&count) {
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

    /// Bytes in 8 bits.
    pub fn bytes(&self) -> usize {
        self.count as usize * self.rows.width as usize
    }

    /// Bytes of the maxima of as many blocks as there are, if at most `most` run.
    pub fn partial_bytes(&self, most: u32) -> usize {
        4 * self.partials(most) as usize
    }

    fn partials(&self, most: u32) -> u32 {
        (self.count * self.rows.vectors()).div_ceil(THREADS).min(most).max(1)
    }

    /// The largest magnitudes of `x`, one for each of at most `most` blocks.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn maxima<M: Memory>(&self, most: u32, x: M, partial: M) -> Result<Call<M>, Error> {
        sizes("maxima", &[("x", x, self.rows.bytes(self.count)), ("partial", partial, self.partial_bytes(most))])?;
        let arguments = vec![Argument::Reads(x), Argument::Writes(partial), Argument::Int(self.count)];
        let (program, blocks) = (self.program(), self.partials(most));
        Ok(Call { program, kernel: "maxima", blocks, threads: THREADS, shared_bytes: 0, arguments })
    }

    /// `y` = `x` times its scale in 8 bits, row by row without gaps, and `inverse` = one by the scale. `partial`: of [`Quantization::maxima`] with the
    /// same `most`.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn quantize<M: Memory>(&self, most: u32, x: M, partial: M, y: M, inverse: M) -> Result<Call<M>, Error> {
        self.call("quantize", (most, self.partials(most)), [x, partial], [y, inverse])
    }

    /// The same with rows for columns.
    ///
    /// # Errors
    /// Memory that is too small.
    pub fn transposed<M: Memory>(&self, most: u32, x: M, partial: M, y: M, inverse: M) -> Result<Call<M>, Error> {
        let blocks = self.count.div_ceil(TILE.0) * self.rows.width.div_ceil(TILE.1);
        self.call("quantize_transposed", (most, blocks), [x, partial], [y, inverse])
    }

    fn call<M: Memory>(
        &self,
        kernel: &'static str,
        (most, blocks): (u32, u32),
        [x, partial]: [M; 2],
        [y, inverse]: [M; 2],
    ) -> Result<Call<M>, Error> {
        let memory = [
            ("x", x, self.rows.bytes(self.count)),
            ("partial", partial, self.partial_bytes(most)),
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
            Argument::Int(self.partials(most)),
        ];
        let blocks = blocks.min(most).max(1);
        Ok(Call { program: self.program(), kernel, blocks, threads: THREADS, shared_bytes: 0, arguments })
    }
}
