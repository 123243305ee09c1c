//! FP8 GEMMs: forward and the input gradient. The weight gradient stays in 16 bits, because tensor
//! cores require both of its FP8 operands transposed, which costs more than FP8 gains.
//!
//! Each GEMM quantises its operands anew, in scratch memory: weights are small compared to a batch
//! of activations, and no FP8 tensor has to be saved.

use super::{FLOAT, Lowering, element, rows, size};
use crate::cpu::Format;
use crate::lowering::launch::{Memory, Span, Work};
use crate::lowering::refused::Reason;
use crate::lowering::target::Target;
use crate::nn::arena::Region;
use crate::nn::layers;
use switchyard_cuda::cublaslt::{self, Matrix, Product};
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::Rows;
use switchyard_cuda::kernels::fp8::{Fp8, MULTIPLE, Quantization};

/// Alignment in scratch memory in bytes.
const PLACE: usize = MULTIPLE as usize;

/// Whether a GEMM is computed in FP8.
pub(super) fn is_eligible(product: &layers::Product, target: &Target, format: Format) -> bool {
    let layers::Product { rows, inputs, outputs, .. } = *product;
    target.fp8 && format == Format::Bf16 && [rows, inputs, outputs].iter().all(|side| side.is_multiple_of(PLACE))
}

/// Scratch memory of forward and backward in f32 elements; 0 for a GEMM not computed in FP8.
pub(super) fn scratch(product: &layers::Product, target: &Target, format: Format) -> Result<[usize; 2], Reason> {
    if !is_eligible(product, target, format) {
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

/// Bytes of an operand's consecutive scratch parts: its FP8 values, partial maxima, and scale.
fn parts(quantization: &Quantization, blocks: u32) -> [usize; 3] {
    [quantization.bytes(), quantization.partial_bytes(blocks), FLOAT]
}

/// The GEMM to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Activations times weights.
    Forward,
    /// Gradients times transposed weights.
    Backward,
}

impl<M: kernels::Memory> Lowering<'_, M> {
    /// `result` = `left` times the weights of a layer, in FP8.
    pub(super) fn product_in_fp8(
        &mut self,
        phase: Phase,
        [left, weights, result]: [Matrix<M>; 3],
        addend: Option<Matrix<M>>,
        scratch: &Region,
    ) -> Result<(), Reason> {
        let (to, is_flipped) = match phase {
            Phase::Forward => (Fp8::E4m3, false),
            Phase::Backward => (Fp8::E5m2, true),
        };
        let mut at = scratch.offset;
        let (left, of_left) = self.quantized(left, to, false, &mut at)?;
        let (right, of_right) = self.quantized(weights, Fp8::E4m3, is_flipped, &mut at)?;
        let scales = Some([of_left, of_right]);
        let product = Product { scales, ..self.gemm(left, right.transposed(), result, addend) };
        self.works.push(Work::Product(product));
        Ok(())
    }

    /// Quantises a matrix into the arena from `at` on; returns it and its scale.
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
