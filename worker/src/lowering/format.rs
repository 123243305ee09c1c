//! Row layout by format.

use super::refused::Reason;
use crate::cpu::Format;
use crate::cpu::attention::AttentionShape;
use switchyard_cuda::cublaslt;
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::attention::Shape;

/// Bytes per vectorised read of a kernel thread; rows are aligned to them.
pub(super) const VECTOR: usize = 16;

pub(super) fn element(format: Format) -> Element {
    match format {
        Format::F32 => Element::F32,
        Format::Bf16 => Element::Bf16,
        Format::F16 => Element::F16,
    }
}

/// The matrix element format.
pub(super) fn number(format: Format) -> cublaslt::Format {
    element(format).into()
}

/// Row pitch of a tensor in elements.
pub(super) fn pitch(width: usize, format: Format) -> usize {
    width.next_multiple_of(VECTOR / format.size())
}

/// Converts a size for kernels, which use 32-bit sizes.
pub(super) fn size(number: usize) -> Result<u32, Reason> {
    u32::try_from(number).map_err(|_| Reason::Missing(format!("a size of {number}")))
}

/// Converts to the kernels' shape.
pub(super) fn attention(shape: &AttentionShape, format: Format) -> Result<Shape, Reason> {
    let AttentionShape { batch, context, heads, head_size, causal } = *shape;
    let [batch, context, heads, head_size] = [size(batch)?, size(context)?, size(heads)?, size(head_size)?];
    Ok(Shape { element: element(format), batch, context, heads, head_size, causal })
}
