//! Convolution as products of patches: the windows of the images as rows of a matrix.
//!
//! ```text
//! y = patches(x) weights^T     d_weights = dy^T patches(x)     dx = the sum of what d_patches = dy weights say of each pixel
//! ```
//!
//! Patches are many times as large as the images, so they are made of some images at a time, and again in backward.

use super::{FLOAT, Lowering, VECTOR, adds, rows, size, windows};
use crate::cpu::{ConvolutionShape, Format};
use crate::gpu::launch::{Matrix, Product, Work};
use crate::gpu::refused::Reason;
use crate::gpu::target::Target;
use crate::nn::arena::Region;
use crate::nn::plan::NodePlan;
use switchyard_cuda::kernels;
use switchyard_cuda::kernels::patches::Patches;

/// Vectors of the patches that are made at a time, for each thread of a launch: enough to fill a device, and few enough that a product finds
/// them in its cache (35 MB of 50 MB on an H200 with 4 blocks for each multiprocessor).
const VECTORS: usize = 16;
/// Threads of a block.
const THREADS: usize = 256;

fn patches(shape: &ConvolutionShape, images: usize, format: Format) -> Result<Patches, Reason> {
    let ConvolutionShape { height, width, channels, kernel, stride, padding, .. } = *shape;
    let windows = windows([height, width], kernel, stride, padding)?;
    Ok(Patches::new(rows(channels, format)?, size(images)?, windows)?)
}

/// Images whose patches are made at a time; at least one. `None` if pixels are the rows of the product as they are.
fn images_at_once(shape: &ConvolutionShape, target: Target, format: Format) -> Result<Option<usize>, Reason> {
    if shape.is_product() {
        return Ok(None);
    }
    let each = patches(shape, 1, format)?.patches_bytes();
    let most = VECTORS * THREADS * VECTOR * target.blocks as usize;
    Ok(Some((most / each).clamp(1, shape.batch)))
}

/// Numbers of 32 bits of the patches that are made at a time.
pub(super) fn scratch(shape: &ConvolutionShape, target: Target, format: Format) -> Result<usize, Reason> {
    match images_at_once(shape, target, format)? {
        Some(images) => Ok(patches(shape, images, format)?.patches_bytes() / FLOAT),
        None => Ok(0),
    }
}

/// Some images, one after the other.
#[derive(Clone, Copy)]
struct Images {
    first: usize,
    count: usize,
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub(super) fn convolution(&mut self, shape: &ConvolutionShape, places: &NodePlan) -> Result<(), Reason> {
        let right = self.filters(shape, places).transposed();
        for images in self.lots(shape)? {
            let left = self.factor(shape, images, &places.inputs[0], &places.scratch)?;
            let result = self.results(shape, images, &places.output);
            self.works.push(Work::Product(Product { left, right, result, adds: false }));
        }
        Ok(())
    }

    pub(super) fn convolution_backward(&mut self, shape: &ConvolutionShape, places: &NodePlan) -> Result<(), Reason> {
        let (filters, scratch) = (self.filters(shape, places), &places.backward_scratch);
        let (memory, adds_weights) = self.gradient(places, 0);
        let d_weights = Matrix { memory, format: Format::F32, ..filters };
        for images in self.lots(shape)? {
            let right = self.factor(shape, images, &places.backward_inputs[0], scratch)?;
            let dy = self.results(shape, images, &places.d_output);
            let adds_sum = adds_weights || images.first > 0;
            let sum = Product { left: dy.transposed(), right, result: d_weights, adds: adds_sum };
            self.works.push(Work::Product(sum));
            let Some(adds) = adds(places.modes[0]) else { continue };
            let to = &places.d_inputs[0];
            if shape.is_product() {
                let result = self.pixels_of(shape, images, to);
                self.works.push(Work::Product(Product { left: dy, right: filters, result, adds }));
                continue;
            }
            // In the place of the patches, which are no longer needed.
            let d_patches = right;
            self.works.push(Work::Product(Product { left: dy, right: filters, result: d_patches, adds: false }));
            let dx = self.pixels_of(shape, images, to).memory;
            let gather = patches(shape, images.count, self.format)?;
            self.works.push(Work::Kernel(gather.backward(self.target.blocks, d_patches.memory, dx, adds)?));
        }
        Ok(())
    }

    /// All images, in lots whose patches are made at a time.
    fn lots(&self, shape: &ConvolutionShape) -> Result<Vec<Images>, Reason> {
        let most = images_at_once(shape, self.target, self.format)?.unwrap_or(shape.batch);
        let lot = |first: usize| Images { first, count: most.min(shape.batch - first) };
        Ok((0..shape.batch).step_by(most).map(lot).collect())
    }

    fn filters(&self, shape: &ConvolutionShape, places: &NodePlan) -> Matrix<M> {
        self.weight(shape.outputs, shape.kernel * shape.kernel * shape.channels, places)
    }

    /// What is multiplied with the weights, of some images of `x`: their patches, which this makes, or the pixels themselves.
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
        let patches = patches(shape, images.count, self.format)?;
        let memory = self.arena(&Region { len: patches.patches_bytes() / FLOAT, ..*scratch });
        self.works.push(Work::Kernel(patches.forward(self.target.blocks, pixels.memory, memory)?));
        let rows = images.count * shape.output_height() * shape.output_width();
        let (columns, pitch) = (patches.matrix().width as usize, patches.matrix().pitch as usize);
        Ok(Matrix { memory, rows, columns, pitch, format: self.format, is_transposed: false })
    }

    fn pixels_of(&self, shape: &ConvolutionShape, images: Images, place: &Region) -> Matrix<M> {
        let each = shape.height * shape.width;
        self.rows_from(place, images.first * each, images.count * each, shape.channels)
    }

    fn results(&self, shape: &ConvolutionShape, images: Images, place: &Region) -> Matrix<M> {
        let each = shape.output_height() * shape.output_width();
        self.rows_from(place, images.first * each, images.count * each, shape.outputs)
    }
}
