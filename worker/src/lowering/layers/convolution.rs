//! Convolution: one cuDNN op per direction, or plain GEMMs if the pixels themselves are the rows of
//! the images' matrix.
//!
//! cuDNN does not accumulate 16-bit operands into f32 gradients, so it writes weight gradients in
//! the network's format to scratch memory, and a kernel converts them.

use super::{FLOAT, Lowering, adds, element, number, size};
use crate::cpu::{ConvolutionShape, Format};
use crate::lowering::cudnn;
use crate::lowering::launch::{Cudnn, Memory, Span, Work};
use crate::lowering::refused::Reason;
use crate::nn::arena::Region;
use crate::nn::plan::NodePlan;
use switchyard_cuda::convolution::Direction;
use switchyard_cuda::cublaslt::Matrix;
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::operation::Operation;

/// Scratch memory of backward in f32 elements: a weight gradient in the network's format.
pub(super) fn backward_scratch(shape: &ConvolutionShape, format: Format) -> usize {
    if shape.is_product() { 0 } else { (shape.weights_len() * format.size()).div_ceil(FLOAT) }
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn convolution(&mut self, shape: &ConvolutionShape, regions: &NodePlan) {
        if shape.is_product() {
            let [left, result] = self.pixel_rows(shape, [&regions.inputs[0], &regions.output]);
            let product = self.gemm(left, self.filters(shape, regions).transposed(), result, None);
            self.works.push(Work::Product(product));
        } else {
            let [images, results] = [&regions.inputs[0], &regions.output].map(|place| self.arena(place));
            let filters = self.rounded(regions.ordinals[0]);
            self.cudnn_convolution(shape, (Direction::Forward, false), [images, filters, results]);
        }
    }

    pub(super) fn convolution_backward(&mut self, shape: &ConvolutionShape, regions: &NodePlan) -> Result<(), Reason> {
        let (gradient, adds_weights) = self.gradient(regions, 0);
        let adds = adds(regions.modes[0]);
        let (x, dy) = (&regions.backward_inputs[0], &regions.d_output);
        if shape.is_product() {
            let filters = self.filters(shape, regions);
            let [pixels, d_results] = self.pixel_rows(shape, [x, dy]);
            let d_filters = Matrix { memory: gradient, format: number(Format::F32), ..filters };
            let addend = adds_weights.then_some(d_filters);
            self.works.push(Work::Product(self.gemm(d_results.transposed(), pixels, d_filters, addend)));
            if let Some(adds) = adds {
                let [d_pixels, _] = self.pixel_rows(shape, [&regions.d_inputs[0], dy]);
                let product = self.gemm(d_results, filters, d_pixels, adds.then_some(d_pixels));
                self.works.push(Work::Product(product));
            }
            return Ok(());
        }
        let len = shape.weights_len();
        let written = self.arena(&Region { len, format: self.format, ..regions.backward_scratch });
        let [x, dy] = [x, dy].map(|place| self.arena(place));
        self.cudnn_convolution(shape, (Direction::Filters, false), [x, written, dy]);
        let conversion = Elementwise { from: element(self.format), to: element(Format::F32) };
        let call = conversion.convert(self.target.blocks, size(len)?, written, 1.0, gradient, adds_weights)?;
        self.works.push(Work::Kernel(call));
        if let Some(adds) = adds {
            let (dx, filters) = (self.arena(&regions.d_inputs[0]), self.rounded(regions.ordinals[0]));
            self.cudnn_convolution(shape, (Direction::Images, adds), [dx, filters, dy]);
        }
        Ok(())
    }

    /// A cuDNN convolution of images, filters and results.
    fn cudnn_convolution(&mut self, shape: &ConvolutionShape, (direction, adds): (Direction, bool), tensors: [M; 3]) {
        let operation = cudnn::convolution(shape, (self.format, self.target.arithmetic), (direction, adds));
        self.cudnn(Operation::Convolution(operation), tensors.to_vec());
    }

    /// A cuDNN operation, with its workspace if it needs one.
    pub(super) fn cudnn(&mut self, operation: Operation, memory: Vec<M>) {
        let bytes = self.target.cudnn.workspace(&operation).filter(|bytes| *bytes > 0);
        let workspace = bytes.map(|bytes| (self.place)(Span { memory: Memory::Workspace, at: 0, bytes }));
        self.works.push(Work::Cudnn(Cudnn { operation, memory, workspace }));
    }

    fn filters(&self, shape: &ConvolutionShape, regions: &NodePlan) -> Matrix<M> {
        self.weight(shape.outputs, shape.channels, regions)
    }

    /// Images and results as matrices with one row per pixel.
    fn pixel_rows(&self, shape: &ConvolutionShape, [images, results]: [&Region; 2]) -> [Matrix<M>; 2] {
        let rows = shape.batch * shape.height * shape.width;
        [self.matrix(images, rows, shape.channels), self.matrix(results, rows, shape.outputs)]
    }
}
