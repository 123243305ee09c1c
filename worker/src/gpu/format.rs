//! How numbers of a format lie in rows.

use super::refused::Reason;
use crate::cpu::Format;
use crate::cpu::attention::AttentionShape;
use switchyard_cuda::cublaslt;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::attention::Shape;

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

/// Sizes of kernels have 32 bits.
pub(super) fn size(number: usize) -> Result<u32, Reason> {
    u32::try_from(number).map_err(|_| Reason::Missing(format!("a size of {number}")))
}

/// In the words of kernels.
pub(super) fn attention(shape: &AttentionShape, format: Format) -> Result<Shape, Reason> {
    let AttentionShape { batch, context, heads, head_size, causal } = *shape;
    let [batch, context, heads, head_size] = [size(batch)?, size(context)?, size(heads)?, size(head_size)?];
    Ok(Shape { element: element(format), batch, context, heads, head_size, causal })
}
