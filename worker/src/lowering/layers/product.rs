//! GEMMs and their epilogues.

use super::fp8::{self, Phase};
use super::{Lowering, number, rows, size};
use crate::cpu::Format;
use crate::lowering::launch::{Memory, Work};
use crate::lowering::refused::Reason;
use crate::nn::arena::Region;
use crate::nn::layers::{self, Activation};
use crate::nn::plan::{Mode, NodePlan};
use switchyard_cuda::cublaslt::{Epilogue, KEPT_PITCH, Matrix, Product};
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::activation::{self, Function};

/// The bias and activation after a GEMM; `None` if there are none.
pub(super) fn activation(product: &layers::Product, format: Format) -> Result<Option<activation::Activation>, Reason> {
    if !product.bias && product.activation.is_none() {
        return Ok(None);
    }
    let function = match product.activation {
        None => Function::Identity,
        Some(Activation::Relu) => Function::Relu,
        Some(Activation::Gelu) => Function::Gelu,
        Some(Activation::Tanh) => Function::Tanh,
    };
    Ok(Some(activation::Activation::new(function, rows(product.outputs, format)?, size(product.rows)?)?))
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn product(&mut self, product: &layers::Product, regions: &NodePlan) -> Result<(), Reason> {
        let left = self.matrix(&regions.inputs[0], product.rows, product.inputs);
        let weights = self.weight(product.outputs, product.inputs, regions);
        let addend = product.residual.then(|| self.matrix(&regions.inputs[1], product.rows, product.outputs));
        if let Some(epilogue) = self.epilogue(product, regions) {
            let (right, result) = (weights.transposed(), self.matrix(&regions.output, product.rows, product.outputs));
            let fused = Product { epilogue: Some(epilogue), ..self.gemm(left, right, result, addend) };
            self.works.push(Work::Product(fused));
            return Ok(());
        }
        let y = self.arena(&regions.output);
        let is_gelu = product.activation == Some(Activation::Gelu);
        let region = if is_gelu { &regions.kept } else { &regions.output };
        let result = self.matrix(region, product.rows, product.outputs);
        self.with_weights(product, Phase::Forward, [left, weights, result], addend, &regions.scratch)?;
        if let Some(after) = activation(product, self.format)? {
            let bias = product.bias.then(|| self.parameter(Memory::Weights, regions.ordinals[1]));
            // Without a bias, the GEMM result is already the saved tensor.
            let kept = bias.filter(|_| is_gelu).map(|_| result.memory);
            let on = activation::Forward { x: result.memory, bias, kept, y };
            self.works.push(Work::Kernel(after.forward(self.target.blocks, on)?));
        }
        Ok(())
    }

    /// The cuBLASLt epilogue; `None` if our own kernel does the work, or there is none.
    fn epilogue(&self, product: &layers::Product, regions: &NodePlan) -> Option<Epilogue<M>> {
        if !self.target.epilogues || !product.bias || fp8::is_eligible(product, self.target, self.format) {
            return None;
        }
        let (function, kept) = match product.activation {
            None => (Function::Identity, None),
            Some(Activation::Relu) => (Function::Relu, None),
            Some(Activation::Gelu) => (Function::Gelu, Some(self.matrix(&regions.kept, product.rows, product.outputs))),
            Some(Activation::Tanh) => return None,
        };
        let fits = |kept: Matrix<M>| kept.pitch.is_multiple_of(KEPT_PITCH);
        kept.is_none_or(fits).then(|| Epilogue { bias: self.rounded(regions.ordinals[1]), function, kept })
    }

    /// `result` = `left` times the weights, in FP8 if enabled and supported.
    fn with_weights(
        &mut self,
        product: &layers::Product,
        phase: Phase,
        [left, weights, result]: [Matrix<M>; 3],
        addend: Option<Matrix<M>>,
        scratch: &Region,
    ) -> Result<(), Reason> {
        if fp8::is_eligible(product, self.target, self.format) {
            return self.product_in_fp8(phase, [left, weights, result], addend, scratch);
        }
        let right = if phase == Phase::Forward { weights.transposed() } else { weights };
        self.works.push(Work::Product(self.gemm(left, right, result, addend)));
        Ok(())
    }

    pub(super) fn product_backward(&mut self, product: &layers::Product, regions: &NodePlan) -> Result<(), Reason> {
        if let Some(after) = activation(product, self.format)? {
            let blocks = self.target.blocks;
            let dy = self.arena(&regions.d_output);
            let kept = match product.activation {
                None => dy,
                Some(Activation::Gelu) => self.arena(&regions.kept),
                Some(Activation::Relu | Activation::Tanh) => self.arena(&regions.backward_output),
            };
            let partial = product.bias.then(|| self.arena(&regions.backward_scratch));
            self.works.push(Work::Kernel(after.backward(blocks, activation::Backward { kept, dy, partial })?));
            if let Some(partial) = partial {
                let (d_bias, adds) = self.gradient(regions, 1);
                self.works.push(Work::Kernel(after.bias(blocks, partial, d_bias, adds)?));
            }
        }
        let dy = self.matrix(&regions.d_output, product.rows, product.outputs);
        let x = self.matrix(&regions.backward_inputs[0], product.rows, product.inputs);
        let (memory, adds) = self.gradient(regions, 0);
        let right = self.weight(product.outputs, product.inputs, regions);
        let result = Matrix { memory, format: number(Format::F32), ..right };
        let (left, addend) = (dy.transposed(), adds.then_some(result));
        self.works.push(Work::Product(self.gemm(left, x, result, addend)));
        if let Mode::Write | Mode::Add = regions.modes[0] {
            let result = self.matrix(&regions.d_inputs[0], product.rows, product.inputs);
            let addend = (regions.modes[0] == Mode::Add).then_some(result);
            self.with_weights(product, Phase::Backward, [dy, right, result], addend, &regions.backward_scratch)?;
        }
        Ok(())
    }
}
