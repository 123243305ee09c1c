//! Products whose factors are rounded to 8 bits: forward, and the gradient of the input. The gradient of the weights stays in 16 bits, since tensor
//! cores want both of its factors transposed, which costs more than it brings.
//!
//! Each product makes the factors anew, in scratch memory: weights are small beside a batch of activations, and nothing in 8 bits has to be kept.

use super::{FLOAT, Lowering, element, rows, size};
use crate::cpu::Format;
use crate::gpu::launch::{Matrix, Memory, Product, Span, Work};
use crate::gpu::refused::Reason;
use crate::gpu::target::Target;
use crate::nn::arena::Region;
use crate::nn::layers;
use switchyard_cuda::cublaslt;
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::Rows;
use switchyard_cuda::kernels::fp8::{Fp8, MULTIPLE, Quantization};

/// Of which every place in scratch memory is a multiple, bytes.
const PLACE: usize = MULTIPLE as usize;

/// Whether a product is computed so.
pub(super) fn takes(product: &layers::Product, target: &Target, format: Format) -> bool {
    let layers::Product { rows, inputs, outputs, .. } = *product;
    target.fp8 && format == Format::Bf16 && [rows, inputs, outputs].iter().all(|side| side.is_multiple_of(PLACE))
}

/// Scratch memory of forward and backward in numbers of 32 bits; nothing for a product that is not computed so.
pub(super) fn scratch(product: &layers::Product, target: &Target, format: Format) -> Result<[usize; 2], Reason> {
    if !takes(product, target, format) {
        return Ok([0; 2]);
    }
    let layers::Product { rows: batch, inputs, outputs, .. } = *product;
    let bytes = |count: usize, width: usize| -> Result<usize, Reason> {
        let quantization = Quantization::new(rows(width, format)?, size(count)?, Fp8::E4m3)?;
        Ok(parts(&quantization, target.blocks).iter().map(|bytes| bytes.next_multiple_of(PLACE)).sum())
    };
    let weights = bytes(outputs, inputs)?;
    Ok([(bytes(batch, inputs)? + weights) / FLOAT, (bytes(batch, outputs)? + weights) / FLOAT])
}

/// Bytes of what a factor has in scratch memory, one after the other: its numbers in 8 bits, maxima, what they have to be multiplied by.
fn parts(quantization: &Quantization, blocks: u32) -> [usize; 3] {
    [quantization.bytes(), quantization.partial_bytes(blocks), FLOAT]
}

/// Which way a product goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Activations with weights.
    Forward,
    /// Gradients with weights whose rows are taken for columns.
    Backward,
}

impl<M: kernels::Memory> Lowering<'_, M> {
    /// `result` = `left` and the weights of a layer multiplied in 8 bits.
    pub(super) fn product_in_fp8(
        &mut self,
        way: Way,
        [left, weights, result]: [Matrix<M>; 3],
        addend: Option<Matrix<M>>,
        scratch: &Region,
    ) -> Result<(), Reason> {
        let (to, is_flipped) = match way {
            Way::Forward => (Fp8::E4m3, false),
            Way::Backward => (Fp8::E5m2, true),
        };
        let mut at = scratch.offset;
        let (left, of_left) = self.quantized(left, to, false, &mut at)?;
        let (right, of_right) = self.quantized(weights, Fp8::E4m3, is_flipped, &mut at)?;
        let scales = Some([of_left, of_right]);
        self.works.push(Work::Product(Product {
            left,
            right: right.transposed(),
            result,
            addend,
            epilogue: None,
            scales,
        }));
        Ok(())
    }

    /// A matrix in 8 bits from `at` on in the arena, and what it has to be multiplied by.
    fn quantized(
        &mut self,
        matrix: Matrix<M>,
        to: Fp8,
        is_flipped: bool,
        at: &mut usize,
    ) -> Result<(Matrix<M>, M), Reason> {
        let Matrix { memory: x, rows, columns, pitch, .. } = matrix;
        let of_rows = Rows { element: element(self.format), width: size(columns)?, pitch: size(pitch)? };
        let (quantization, blocks) = (Quantization::new(of_rows, size(rows)?, to)?, self.target.blocks);
        let [y, partial, inverse] = parts(&quantization, blocks).map(|bytes| {
            let span = Span { memory: Memory::Arena, at: *at, bytes };
            *at += bytes.next_multiple_of(PLACE);
            (self.place)(span)
        });
        self.works.push(Work::Kernel(quantization.maxima(blocks, x, partial)?));
        let (call, [rows, columns]) = match is_flipped {
            false => (quantization.quantize(blocks, x, partial, y, inverse)?, [rows, columns]),
            true => (quantization.transposed(blocks, x, partial, y, inverse)?, [columns, rows]),
        };
        self.works.push(Work::Kernel(call));
        let format = cublaslt::Format::Fp8(to);
        Ok((Matrix { memory: y, rows, columns, pitch: columns, format, is_transposed: false }, inverse))
    }
}
