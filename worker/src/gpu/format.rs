//! How numbers of a format lie in rows.

use crate::cpu::Format;
use switchyard_cuda::cublaslt;
use switchyard_cuda::kernels::Element;

/// Bytes that a thread of a kernel reads at once: rows begin at multiples of them.
pub(super) const VECTOR: usize = 16;

pub(super) fn element(format: Format) -> Element {
    match format {
        Format::F32 => Element::F32,
        Format::Bf16 => Element::Bf16,
        Format::F16 => Element::F16,
    }
}

/// Of a matrix.
pub(super) fn number(format: Format) -> cublaslt::Format {
    element(format).into()
}

/// From one row of a tensor to the next, in numbers.
pub(super) fn pitch(width: usize, format: Format) -> usize {
    width.next_multiple_of(VECTOR / format.size())
}
