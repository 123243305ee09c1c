//! Convolution: one cuDNN op per supported direction. Other directions, and all of them without
//! cuDNN, use im2col + GEMM: patches are the windows of the images as rows of a matrix.
//!
//! ```text
//! y = patches(x) weights^T    d_weights = dy^T patches(x)    dx = col2im(dy weights)
//! ```
//!
//! Patches are many times as large as the images, so they are built for a few images at a time, and
//! rebuilt in backward.
//!
//! cuDNN does not accumulate 16-bit operands into f32 gradients, so it writes weight gradients in
//! the network's format to scratch memory, and a kernel converts them.

use super::{FLOAT, Lowering, VECTOR, adds, element, number, rows, size, windows};
use crate::cpu::{ConvolutionShape, Format};
use crate::gpu::cudnn::{ConvolutionKind, CudnnKind};
use crate::gpu::launch::{Convolution, Matrix, Memory, Product, Span, Work};
use crate::gpu::refused::Reason;
use crate::gpu::target::Target;
use crate::nn::arena::Region;
use crate::nn::plan::NodePlan;
use switchyard_cuda::convolution::Direction;
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::patches::Patches;

/// Patch vectors per launch thread that are built at a time: enough to fill a device, and few
/// enough for the GEMM to find them in the cache (35 MB of 50 MB on an H200 with 4 blocks per
/// multiprocessor).
const VECTORS: usize = 16;
/// Threads per block.
const THREADS: usize = 256;

fn patches(shape: &ConvolutionShape, images: usize, format: Format) -> Result<Patches, Reason> {
    let ConvolutionShape { height, width, channels, kernel, stride, padding, .. } = *shape;
    let windows = windows([height, width], kernel, stride, padding)?;
    Ok(Patches::new(rows(channels, format)?, size(images)?, windows)?)
}

/// Number of images whose patches are built at a time, at least one. `None` if the pixels
/// themselves are the rows of the GEMM.
fn images_at_once(shape: &ConvolutionShape, target: &Target, format: Format) -> Result<Option<usize>, Reason> {
    if shape.is_product() {
        return Ok(None);
    }
    let each = patches(shape, 1, format)?.patches_bytes();
    let most = VECTORS * THREADS * VECTOR * target.blocks as usize;
    Ok(Some((most / each).clamp(1, shape.batch)))
}

/// Scratch memory in f32 elements, forward and backward: the patches built at a time, or a weight
/// gradient.
pub(super) fn scratch(shape: &ConvolutionShape, target: &Target, format: Format) -> Result<[usize; 2], Reason> {
    let Some(images) = images_at_once(shape, target, format)? else { return Ok([0; 2]) };
    let patches = patches(shape, images, format)?.patches_bytes() / FLOAT;
    let weights = (shape.weights_len() * format.size()).div_ceil(FLOAT);
    let of = |direction, with_cudnn| if target.cudnn.supports(shape, format, direction) { with_cudnn } else { patches };
    Ok([of(Direction::Forward, 0), of(Direction::Filters, weights).max(of(Direction::Images, 0))])
}

/// A range of consecutive images.
#[derive(Clone, Copy)]
struct Images {
    first: usize,
    count: usize,
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn convolution(&mut self, shape: &ConvolutionShape, regions: &NodePlan) -> Result<(), Reason> {
        if self.uses_cudnn(shape, Direction::Forward) {
            let (images, results) = (self.arena(&regions.inputs[0]), self.arena(&regions.output));
            self.cudnn_convolution(
                shape,
                (Direction::Forward, false),
                [images, self.rounded(regions.ordinals[0]), results],
            );
            return Ok(());
        }
        let right = self.filters(shape, regions).transposed();
        for images in self.image_chunks(shape)? {
            let left = self.factor(shape, images, &regions.inputs[0], &regions.scratch)?;
            let result = self.results(shape, images, &regions.output);
            self.works.push(Work::Product(Product { left, right, result, addend: None, epilogue: None, scales: None }));
        }
        Ok(())
    }

    pub(super) fn convolution_backward(&mut self, shape: &ConvolutionShape, regions: &NodePlan) -> Result<(), Reason> {
        let (filters, images) = (self.uses_cudnn(shape, Direction::Filters), self.uses_cudnn(shape, Direction::Images));
        if filters {
            self.filter_gradient(shape, regions)?;
        }
        let adds = adds(regions.modes[0]);
        if let Some(adds) = adds.filter(|_| images) {
            let [dx, dy] = [&regions.d_inputs[0], &regions.d_output].map(|place| self.arena(place));
            self.cudnn_convolution(shape, (Direction::Images, adds), [dx, self.rounded(regions.ordinals[0]), dy]);
        }
        self.backward_by_patches(shape, regions, [!filters, !images])
    }

    /// Whether cuDNN supports a direction.
    fn uses_cudnn(&self, shape: &ConvolutionShape, direction: Direction) -> bool {
        self.target.cudnn.supports(shape, self.format, direction)
    }

    /// A cuDNN convolution of images, filters and results.
    fn cudnn_convolution(&mut self, shape: &ConvolutionShape, (direction, adds): (Direction, bool), tensors: [M; 3]) {
        let kind = ConvolutionKind { shape: *shape, format: self.format, direction, adds };
        let workspace = self.workspace(&CudnnKind::Convolution(kind));
        let [images, filters, results] = tensors;
        self.works.push(Work::Convolution(Convolution { kind, images, filters, results, workspace }));
    }

    /// The workspace of a cuDNN operation, if it needs one.
    pub(super) fn workspace(&self, kind: &CudnnKind) -> Option<M> {
        let bytes = self.target.cudnn.workspace(kind).filter(|bytes| *bytes > 0);
        bytes.map(|bytes| (self.place)(Span { memory: Memory::Workspace, at: 0, bytes }))
    }

    fn filter_gradient(&mut self, shape: &ConvolutionShape, regions: &NodePlan) -> Result<(), Reason> {
        let len = shape.weights_len();
        let written = self.arena(&Region { len, format: self.format, ..regions.backward_scratch });
        let [x, dy] = [&regions.backward_inputs[0], &regions.d_output].map(|place| self.arena(place));
        self.cudnn_convolution(shape, (Direction::Filters, false), [x, written, dy]);
        let (gradient, adds) = self.gradient(regions, 0);
        let conversion = Elementwise { from: element(self.format), to: element(Format::F32) };
        let call = conversion.convert(self.target.blocks, size(len)?, written, 1.0, gradient, adds)?;
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    /// The gradients of the weights and of the input, each if requested, by im2col + GEMM.
    fn backward_by_patches(
        &mut self,
        shape: &ConvolutionShape,
        regions: &NodePlan,
        [of_weights, of_input]: [bool; 2],
    ) -> Result<(), Reason> {
        let (filters, scratch) = (self.filters(shape, regions), &regions.backward_scratch);
        let (memory, adds_weights) = self.gradient(regions, 0);
        let d_weights = Matrix { memory, format: number(Format::F32), ..filters };
        let adds = adds(regions.modes[0]).filter(|_| of_input);
        let image_chunks = if of_weights || adds.is_some() { self.image_chunks(shape)? } else { Vec::new() };
        for images in image_chunks {
            let right = match of_weights {
                true => self.factor(shape, images, &regions.backward_inputs[0], scratch)?,
                false => self.patches_of(shape, images, scratch)?,
            };
            let dy = self.results(shape, images, &regions.d_output);
            if of_weights {
                let addend = (adds_weights || images.first > 0).then_some(d_weights);
                let sum =
                    Product { left: dy.transposed(), right, result: d_weights, addend, epilogue: None, scales: None };
                self.works.push(Work::Product(sum));
            }
            let Some(adds) = adds else { continue };
            let to = &regions.d_inputs[0];
            if shape.is_product() {
                let result = self.pixels_of(shape, images, to);
                let addend = adds.then_some(result);
                self.works.push(Work::Product(Product {
                    left: dy,
                    right: filters,
                    result,
                    addend,
                    epilogue: None,
                    scales: None,
                }));
                continue;
            }
            // Overwrite the patches, which are no longer needed.
            let d_patches = right;
            self.works.push(Work::Product(Product {
                left: dy,
                right: filters,
                result: d_patches,
                addend: None,
                epilogue: None,
                scales: None,
            }));
            let dx = self.pixels_of(shape, images, to).memory;
            let gather = patches(shape, images.count, self.format)?;
            self.works.push(Work::Kernel(gather.backward(self.target.blocks, d_patches.memory, dx, adds)?));
        }
        Ok(())
    }

    /// All images, in chunks whose patches are built at a time.
    fn image_chunks(&self, shape: &ConvolutionShape) -> Result<Vec<Images>, Reason> {
        let most = images_at_once(shape, self.target, self.format)?.unwrap_or(shape.batch);
        let lot = |first: usize| Images { first, count: most.min(shape.batch - first) };
        Ok((0..shape.batch).step_by(most).map(lot).collect())
    }

    fn filters(&self, shape: &ConvolutionShape, regions: &NodePlan) -> Matrix<M> {
        self.weight(shape.outputs, shape.kernel * shape.kernel * shape.channels, regions)
    }

    /// The GEMM operand for some images of `x`: their patches, which this builds, or the pixels
    /// themselves.
    fn factor(
        &mut self,
        shape: &ConvolutionShape,
        images: Images,
        x: &Region,
        scratch: &Region,
    ) -> Result<Matrix<M>, Reason> {
        let pixels = self.pixels_of(shape, images, x);
        if shape.is_product() {
            return Ok(pixels);
        }
        let matrix = self.patches_of(shape, images, scratch)?;
        let patches = patches(shape, images.count, self.format)?;
        self.works.push(Work::Kernel(patches.forward(self.target.blocks, pixels.memory, matrix.memory)?));
        Ok(matrix)
    }

    /// The scratch memory for the patches of some images.
    fn patches_of(&self, shape: &ConvolutionShape, images: Images, scratch: &Region) -> Result<Matrix<M>, Reason> {
        let patches = patches(shape, images.count, self.format)?;
        let memory = self.arena(&Region { len: patches.patches_bytes() / FLOAT, ..*scratch });
        let rows = images.count * shape.output_height() * shape.output_width();
        let (columns, pitch) = (patches.matrix().width as usize, patches.matrix().pitch as usize);
        Ok(Matrix { memory, rows, columns, pitch, format: number(self.format), is_transposed: false })
    }

    fn pixels_of(&self, shape: &ConvolutionShape, images: Images, region: &Region) -> Matrix<M> {
        let each = shape.height * shape.width;
        self.rows_from(region, images.first * each, images.count * each, shape.channels)
    }

    fn results(&self, shape: &ConvolutionShape, images: Images, region: &Region) -> Matrix<M> {
        let each = shape.output_height() * shape.output_width();
        self.rows_from(region, images.first * each, images.count * each, shape.outputs)
    }
}
