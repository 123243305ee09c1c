//! GEMM descriptions.

use crate::driver::Span;
use crate::error::Error;
use crate::kernels::activation::Function;
use crate::kernels::fp8::{Fp8, MULTIPLE};
use crate::kernels::{Element, Memory};

/// Element type of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    F32,
    Bf16,
    F16,
    Fp8(Fp8),
}

impl Format {
    pub fn bytes(self) -> usize {
        match self {
            Format::F32 => 4,
            Format::Bf16 | Format::F16 => 2,
            Format::Fp8(_) => 1,
        }
    }

    fn is_fp8(self) -> bool {
        matches!(self, Format::Fp8(_))
    }
}

impl From<Element> for Format {
    fn from(element: Element) -> Format {
        match element {
            Element::F32 => Format::F32,
            Element::Bf16 => Format::Bf16,
            Element::F16 => Format::F16,
        }
    }
}

/// How f32 operands are multiplied; accumulation is in f32. 16-bit operands are multiplied exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    Ieee,
    /// Operands are rounded to TF32 for tensor cores.
    Tf32,
}

/// A row-major matrix of `rows` x `columns` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix<M = Span> {
    pub memory: M,
    pub format: Format,
    pub rows: usize,
    pub columns: usize,
    /// Row pitch in elements. The padding is never read.
    pub pitch: usize,
    /// Whether a GEMM reads it transposed.
    pub is_transposed: bool,
}

impl<M> Matrix<M> {
    /// The transposed view of the same elements.
    pub fn transposed(self) -> Matrix<M> {
        Matrix { is_transposed: !self.is_transposed, ..self }
    }
}

impl Matrix {
    /// Rows and columns as a GEMM reads them.
    fn sides(&self) -> (usize, usize) {
        if self.is_transposed { (self.columns, self.rows) } else { (self.rows, self.columns) }
    }

    fn check(&self) -> Result<(), Error> {
        let Matrix { memory, format, rows, columns, pitch, .. } = *self;
        let numbers = rows.checked_sub(1).and_then(|last| last.checked_mul(pitch)?.checked_add(columns));
        let bytes = numbers.and_then(|numbers| numbers.checked_mul(format.bytes()));
        if columns == 0 || pitch < columns || bytes.is_none_or(|bytes| bytes > memory.bytes()) {
            return Err(Error::refused("product", format!("not within its memory, or empty: {self:?}")));
        }
        Ok(())
    }
}

/// GEMM epilogue: `result = function(left right + addend + bias)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epilogue<M = Span> {
    /// One value per column, in the result's format.
    pub bias: M,
    /// Cannot be [`Function::Tanh`].
    pub function: Function,
    /// Receives the input of [`Function::Gelu`]; `None` for other functions. Same size and format
    /// as the result, with a pitch that is a multiple of [`KEPT_PITCH`].
    pub kept: Option<Matrix<M>>,
}

/// Pitch alignment that the library requires of the matrix an epilogue saves.
pub const KEPT_PITCH: usize = 8;

/// GEMM: `result = left right`, or `result = left right + addend`.
///
/// For FP8, only the right operand is transposed, the result is bf16, at most one operand is
/// [`Fp8::E5m2`], and all sizes, pitches and addresses are multiples of [`MULTIPLE`]. If both
/// operands are [`Fp8::E4m3`], as in forward, partial sums are accumulated in reduced precision,
/// which is faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product<M = Span> {
    pub left: Matrix<M>,
    pub right: Matrix<M>,
    /// Not transposed. f32, or the operands' format.
    pub result: Matrix<M>,
    /// Same size and format as the result; can be the result itself.
    pub addend: Option<Matrix<M>>,
    /// Not supported for FP8 operands.
    pub epilogue: Option<Epilogue<M>>,
    pub arithmetic: Arithmetic,
    /// For FP8 operands, left and right: one f32 scale on the device per operand.
    pub scales: Option<[M; 2]>,
}

impl Product {
    /// The key for algorithm selection: everything except the addresses.
    pub fn kind(&self) -> String {
        let matrix = |matrix: &Matrix| {
            let Matrix { memory, format, rows, columns, pitch, is_transposed } = matrix;
            let (flip, alignment) = (if *is_transposed { "T" } else { "" }, memory.alignment());
            format!("{rows} x {columns} / {pitch}{flip} {format:?} at {alignment}")
        };
        let Product { left, right, result, addend, epilogue, arithmetic, .. } = self;
        let epilogue = match epilogue {
            None => String::new(),
            Some(Epilogue { bias, function, kept }) => {
                let kept = kept.as_ref().map(|kept| format!(", keeps {}", matrix(kept))).unwrap_or_default();
                format!(", {function:?} after bias at {}{kept}", bias.alignment())
            }
        };
        let addend = match addend {
            None => String::new(),
            Some(addend) if addend == result => " + itself".to_owned(),
            Some(addend) => format!(" + {}", matrix(addend)),
        };
        let [left, right, result] = [left, right, result].map(matrix);
        format!("{result} = {left} * {right}{addend}, {arithmetic:?}{epilogue}")
    }

    /// The library's C; not read if nothing is added.
    pub(super) fn addend(&self) -> &Matrix {
        self.addend.as_ref().unwrap_or(&self.result)
    }

    /// Rows, columns and depth.
    pub(super) fn shape(&self) -> Result<[usize; 3], Error> {
        let Product { left, right, result, addend, .. } = self;
        [left, right, result].into_iter().chain(addend).try_for_each(Matrix::check)?;
        let ((m, k), (inner, n)) = (left.sides(), right.sides());
        let formats = match (left.format, right.format) {
            (Format::Fp8(_), Format::Fp8(_)) => self.fits_fp8(),
            (left, right) => {
                left == right && [left, Format::F32].contains(&result.format) && !left.is_fp8() && self.scales.is_none()
            }
        };
        let is_alike = |addend: &Matrix| {
            let Matrix { format, rows, columns, is_transposed, .. } = *addend;
            (format, rows, columns, is_transposed) == (result.format, result.rows, result.columns, false)
        };
        let fits = k == inner
            && (m, n) == (result.rows, result.columns)
            && addend.as_ref().is_none_or(is_alike)
            && self.epilogue.as_ref().is_none_or(|epilogue| self.has_room_for(epilogue, is_alike));
        if !fits || result.is_transposed || !formats {
            return Err(Error::refused("product", format!("sides or formats that do not fit: {self:?}")));
        }
        Ok([m, n, k])
    }

    fn has_room_for(&self, Epilogue { bias, function, kept }: &Epilogue, is_alike: impl Fn(&Matrix) -> bool) -> bool {
        let fits = |kept: &Matrix| {
            is_alike(kept)
                && kept.check().is_ok()
                && kept.pitch.is_multiple_of(KEPT_PITCH)
                && *function == Function::Gelu
        };
        bias.bytes() >= self.result.columns * self.result.format.bytes()
            && *function != Function::Tanh
            && kept.is_some() == (*function == Function::Gelu)
            && kept.as_ref().is_none_or(fits)
            && !self.left.format.is_fp8()
    }

    /// Checks the library's requirements for FP8 operands.
    fn fits_fp8(&self) -> bool {
        let Product { left, right, result, addend, .. } = self;
        let multiple = MULTIPLE as usize;
        let is_multiple = |matrix: &Matrix| {
            let numbers = [matrix.rows, matrix.columns, matrix.pitch];
            numbers.iter().all(|number| number.is_multiple_of(multiple))
                && (matrix.memory.alignment() as usize).is_multiple_of(multiple)
        };
        let formats = (left.format, right.format) != (Format::Fp8(Fp8::E5m2), Format::Fp8(Fp8::E5m2));
        let scales = self.scales.is_none_or(|scales| scales.iter().all(|scale| scale.bytes() >= size_of::<f32>()));
        formats
            && scales
            && (left.is_transposed, right.is_transposed) == (false, true)
            && result.format == Format::Bf16
            && [left, right, result].into_iter().chain(addend).all(is_multiple)
    }

    /// Whether partial sums can be accumulated in reduced precision.
    pub(super) fn has_fast_sums(&self) -> bool {
        [self.left.format, self.right.format] == [Format::Fp8(Fp8::E4m3); 2]
    }
}
