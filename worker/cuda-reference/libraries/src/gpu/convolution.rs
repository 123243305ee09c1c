//! Convolutions by definition, with f32 accumulation.

use crate::gpu::Gpu;
use crate::gpu::access::Access;
use crate::gpu::product::tf32;
use crate::gpu::tensor::Tensor;
use crate::numbers::Format;
use crate::shadow::Stamp;
use std::ops::Range;
use switchyard_cuda_reference::Touched;

/// The tensor that is computed from the other two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Forward,
    Images,
    Filters,
}

/// Height and width of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) dilations: [u64; 2],
    pub(crate) strides: [u64; 2],
    /// Zero padding before and after the image.
    pub(crate) before: [u64; 2],
    pub(crate) after: [u64; 2],
}

/// The computation, independent of memory: `result = alpha convolution + beta result`. Axes are
/// images, channels, height and width.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) operation: Operation,
    pub(crate) images: Tensor,
    pub(crate) filters: Tensor,
    pub(crate) results: Tensor,
    pub(crate) window: Window,
    pub(crate) alpha: f32,
    pub(crate) beta: f32,
}

#[derive(Debug, Clone)]
pub(crate) struct Convolution {
    pub(crate) shape: Shape,
    /// Addresses of images, filters and results.
    pub(crate) addresses: [u64; 3],
    /// f32 factors are rounded to TF32.
    pub(crate) is_rounded: bool,
    /// The accumulation order changes from run to run.
    pub(crate) is_unordered: bool,
    pub(crate) workspace: Range<u64>,
}

/// Whether the channels are contiguous, and nothing overlaps.
pub(crate) fn is_nhwc(tensor: &Tensor) -> bool {
    let [_, channels, height, width] = tensor.dimensions;
    let [image, channel, line, pixel] = tensor.strides;
    channel == 1 && pixel >= channels && line >= width * pixel && image >= height * line
}

impl Shape {
    /// Whether the tensor sizes fit one convolution without groups.
    pub(crate) fn fits(&self) -> bool {
        let Shape { images, filters, results, window, .. } = self;
        let side = |at: usize| {
            let long = images.dimensions[2 + at] + window.before[at] + window.after[at];
            let reach = (filters.dimensions[2 + at] - 1) * window.dilations[at] + 1;
            long.checked_sub(reach).map(|rest| rest / window.strides[at] + 1)
        };
        let expected = [Some(images.dimensions[0]), Some(filters.dimensions[0]), side(0), side(1)];
        results.dimensions.map(Some) == expected && images.dimensions[1] == filters.dimensions[1]
    }

    fn tensors(&self) -> [&Tensor; 3] {
        [&self.images, &self.filters, &self.results]
    }

    /// Index of the tensor that is written.
    fn written(&self) -> usize {
        match self.operation {
            Operation::Forward => 2,
            Operation::Images => 0,
            Operation::Filters => 1,
        }
    }

    /// Calls `each` with the offsets of the first channel of an image pixel and of a filter tap,
    /// and the offset of a result element, for every term of the sums. Tensors are contiguous.
    /// `reversed` changes the order.
    fn for_each_term(&self, reversed: bool, mut each: impl FnMut(usize, usize, usize)) {
        let Shape { images, filters, results, window, .. } = self;
        let [count, channels, height, width] = images.dimensions;
        let [outputs, _, rows, columns] = filters.dimensions;
        let [_, _, tall, wide] = results.dimensions;
        let place = |at: usize, result: u64, tap: u64, side: u64| {
            let shifted = result * window.strides[at] + tap * window.dilations[at];
            shifted.checked_sub(window.before[at]).filter(|place| *place < side)
        };
        for n in 0..count {
            let n = if reversed { count - 1 - n } else { n };
            for (p, q) in (0..tall).flat_map(|p| (0..wide).map(move |q| (p, q))) {
                for (r, s) in (0..rows).flat_map(|r| (0..columns).map(move |s| (r, s))) {
                    let (Some(h), Some(w)) = (place(0, p, r, height), place(1, q, s, width)) else { continue };
                    let pixel = ((n * height + h) * width + w) * channels;
                    for k in 0..outputs {
                        let tap = ((k * rows + r) * columns + s) * channels;
                        let result = ((n * tall + p) * wide + q) * outputs + k;
                        each(pixel as usize, tap as usize, result as usize);
                    }
                }
            }
        }
    }
}

impl Convolution {
    pub(crate) fn name(&self) -> String {
        let Shape { operation, images, filters, .. } = &self.shape;
        let what = match operation {
            Operation::Forward => "a convolution",
            Operation::Images => "a gradient of images",
            Operation::Filters => "a gradient of filters",
        };
        format!("{what} of {:?} by {:?}", images.dimensions, filters.dimensions)
    }

    /// All memory that is read or written.
    pub(crate) fn uses(&self) -> Vec<Range<u64>> {
        let tensors = self.shape.tensors().into_iter().zip(self.addresses);
        let tensors = tensors.map(|(tensor, address)| tensor.whole(address));
        tensors.chain((!self.workspace.is_empty()).then(|| self.workspace.clone())).collect()
    }

    /// `is_wrong`: see [`crate::fault`].
    pub(crate) fn run(&self, gpu: &mut Gpu, stamp: &Stamp, is_wrong: bool) -> Vec<Touched> {
        let touched = self.access().touched(gpu, stamp);
        // The previous content of the workspace is lost.
        let workspace = (self.workspace.end - self.workspace.start) as usize;
        gpu.write(self.workspace.start, &vec![0xff; workspace]);
        let Shape { operation, beta, alpha, .. } = self.shape;
        let (tensors, written) = (self.shape.tensors(), self.shape.written());
        let mut numbers: [Vec<f32>; 3] = std::array::from_fn(|at| {
            if at == written {
                return vec![0.0; tensors[at].len()];
            }
            let mut read = tensors[at].read(gpu, self.addresses[at], stamp);
            if self.is_rounded && tensors[at].format == Format::F32 {
                read.iter_mut().for_each(|number| *number = tf32(*number));
            }
            read
        });
        let old = (beta != 0.0).then(|| tensors[written].read(gpu, self.addresses[written], stamp));
        let channels = tensors[0].dimensions[1] as usize;
        let reversed = self.is_unordered && stamp.index % 2 == 1;
        let [images, filters, results] = &mut numbers;
        self.shape.for_each_term(reversed, |pixel, tap, result| {
            let (pixel, tap) = (pixel..pixel + channels, tap..tap + channels);
            match operation {
                Operation::Forward => {
                    let terms = images[pixel].iter().zip(&filters[tap]);
                    terms.for_each(|(x, w)| results[result] += x * w);
                }
                Operation::Images => {
                    images[pixel].iter_mut().zip(&filters[tap]).for_each(|(dx, w)| *dx += results[result] * w);
                }
                Operation::Filters => {
                    filters[tap].iter_mut().zip(&images[pixel]).for_each(|(dw, x)| *dw += results[result] * x);
                }
            }
        });
        let sums = &mut numbers[written];
        sums.iter_mut().for_each(|sum| *sum *= alpha);
        if let Some(old) = &old {
            sums.iter_mut().zip(old).for_each(|(sum, old)| *sum += beta * old);
        }
        if is_wrong {
            sums[0] += 1.0;
        }
        tensors[written].write(gpu, self.addresses[written], sums);
        touched
    }

    fn access(&self) -> Access {
        let mut access = Access { writes: vec![self.workspace.clone()], ..Access::default() };
        for (at, (tensor, address)) in self.shape.tensors().into_iter().zip(self.addresses).enumerate() {
            let ranges = match at == self.shape.written() {
                false => &mut access.reads,
                true if self.shape.beta == 0.0 => &mut access.writes,
                true => &mut access.updates,
            };
            ranges.extend(tensor.ranges(address));
        }
        access
    }
}
