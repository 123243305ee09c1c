//! NHWC convolution as GEMM (implicit im2col): the packers gather the windows, so no patch buffer
//! is needed.
//!
//! ```text
//! y  [pixels of y] x [outputs]  =  windows of x  *  weights^T
//! dx [pixels of x] x [channels] =  windows of dy *  weights, taps from the last to the first
//! dw [outputs] x [taps x channels] = dy^T * windows of x
//! ```
//!
//! With stride s, the pixels of dx fall into s x s classes by their position modulo s. All pixels
//! of a class use the same taps (every s-th one), and each class is a separate GEMM, so no zeros
//! are multiplied.
//!
//! 3 x 3 convolutions with stride 1 use Winograd filtering where it is faster (`gemm::winograd`).
#![allow(unsafe_code)]

use super::Cpu;
use super::gemm::operand::{Operand, Patches, Taps};
use super::gemm::winograd::Filter;
use super::gemm::{Epilogue, Gemm, Lines, Matrix, Size, Target, View};
use super::values::{Values, ValuesMut};

/// Shape of a convolution. Images are `[batch][height][width][channels]`, weights
/// `[outputs][kernel][kernel][channels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvolutionShape {
    pub batch: usize,
    /// Input height in pixels.
    pub height: usize,
    /// Input width in pixels.
    pub width: usize,
    /// Input channels.
    pub channels: usize,
    /// Output channels.
    pub outputs: usize,
    /// Kernel size in each direction.
    pub kernel: usize,
    /// Input pixels between neighbouring output pixels.
    pub stride: usize,
    /// Zero padding on each side of the input.
    pub padding: usize,
}

impl ConvolutionShape {
    /// Output height; 0 if the kernel is larger than the padded input.
    pub fn output_height(&self) -> usize {
        self.output_side(self.height)
    }

    /// Output width; 0 if the kernel is larger than the padded input.
    pub fn output_width(&self) -> usize {
        self.output_side(self.width)
    }

    fn output_side(&self, side: usize) -> usize {
        (side + 2 * self.padding).checked_sub(self.kernel).map_or(0, |rest| rest / self.stride + 1)
    }

    /// Elements of the input.
    pub fn input_len(&self) -> usize {
        self.batch * self.height * self.width * self.channels
    }

    /// Elements of the output.
    pub fn output_len(&self) -> usize {
        self.output_pixels() * self.outputs
    }

    /// Elements of the weights.
    pub fn weights_len(&self) -> usize {
        self.outputs * self.window_len()
    }

    fn output_pixels(&self) -> usize {
        self.batch * self.output_height() * self.output_width()
    }

    /// Weights per output channel.
    pub(crate) fn window_len(&self) -> usize {
        self.kernel * self.kernel * self.channels
    }

    /// Whether the convolution is a plain GEMM of the pixels and the weights.
    pub(crate) fn is_product(&self) -> bool {
        self.kernel == 1 && self.stride == 1 && self.padding == 0
    }

    /// The Winograd filter for the forward pass, if it is faster.
    fn filter(&self) -> Option<Filter> {
        let ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding } = *self;
        let filter = Filter { batch, height, width, channels, outputs, padding };
        (kernel == 3 && stride == 1 && filter.is_faster()).then_some(filter)
    }

    /// The Winograd filter for the input gradient, if it is faster.
    fn input_gradient_filter(&self) -> Option<Filter> {
        let Filter { batch, channels, outputs, padding, .. } = self.filter()?;
        let (height, width) = (self.output_height(), self.output_width());
        let filter = Filter { batch, height, width, channels: outputs, outputs: channels, padding: 2 - padding };
        filter.is_faster().then_some(filter)
    }

    /// Scratch floats for [`Gemm::convolution`].
    pub fn scratch_len(&self, cpu: &Cpu) -> usize {
        self.filter().map_or(0, |filter| filter.scratch_len(cpu))
    }

    /// Scratch floats for the gradients; they are computed one at a time.
    pub fn backward_scratch_len(&self, cpu: &Cpu) -> usize {
        let weights = self.filter().map_or(0, |filter| filter.gradient_scratch_len(cpu));
        self.input_gradient_filter().map_or(0, |filter| filter.scratch_len(cpu)).max(weights)
    }

    fn check(&self, x: usize, w: usize, y: usize) {
        assert!(self.stride > 0 && self.kernel > 0, "stride {} and kernel {} of at least 1", self.stride, self.kernel);
        assert_eq!(x, self.input_len(), "size of the input");
        assert_eq!(w, self.weights_len(), "size of the weights");
        assert_eq!(y, self.output_len(), "size of the output");
    }

    fn patches(&self, x: Values<'_>) -> Operand {
        let before = -(self.padding as isize);
        Operand::Patches(Patches {
            start: x.pointer(),
            height: self.height,
            width: self.width,
            channels: self.channels,
            rows: self.output_height(),
            columns: self.output_width(),
            stride: self.stride,
            top: before,
            left: before,
            taps_x: self.kernel,
        })
    }
}

/// In one direction: the pixels of dx at `phase` modulo the stride, and the taps they use.
#[derive(Clone, Copy)]
struct Class {
    phase: usize,
    pixels: usize,
    first_tap: usize,
    taps: usize,
    /// Pixel of dy that the last tap of the first pixel of the class reads.
    start: isize,
}

impl Class {
    fn new(shape: &ConvolutionShape, side: usize, phase: usize) -> Class {
        let stride = shape.stride;
        // Input pixel i and output pixel o meet at tap i + padding - stride * o.
        let first_tap = (phase + shape.padding) % stride;
        let taps = shape.kernel.saturating_sub(first_tap).div_ceil(stride);
        let start = ((phase + shape.padding - first_tap) / stride) as isize - (taps as isize - 1);
        Class { phase, pixels: side.saturating_sub(phase).div_ceil(stride), first_tap, taps, start }
    }
}

impl Gemm {
    /// `y` = convolution of `x` with the weights `w`, in any format. `scratch` has
    /// [`ConvolutionShape::scratch_len`] floats.
    ///
    /// # Panics
    /// If a length does not match the shape, or its stride or kernel is 0.
    pub fn convolution<'a, 'y>(
        &mut self,
        shape: &ConvolutionShape,
        x: impl Into<Values<'a>>,
        w: impl Into<Values<'a>>,
        y: impl Into<ValuesMut<'y>>,
        scratch: &mut [f32],
    ) {
        let (x, w, mut y) = (x.into(), w.into(), y.into());
        shape.check(x.len(), w.len(), y.len());
        if let Some(filter) = shape.filter().filter(|_| self.filters(x.format())) {
            let (x, weights, y) = (x.pointer(), (w.pointer(), false), (y.pointer(), false));
            // SAFETY: the sizes were checked.
            return unsafe { self.filter(&filter, x, weights, y, scratch) };
        }
        if shape.is_product() {
            let weights = Matrix::new(w, shape.outputs, shape.channels).t();
            return self.multiply(
                Matrix::new(x, shape.output_pixels(), shape.channels),
                weights,
                y,
                Epilogue::Overwrite,
            );
        }
        let size = Size { m: shape.output_pixels(), n: shape.outputs, k: shape.window_len() };
        let weights = View { start: w.pointer(), down: 1, right: size.k }.as_b();
        let target = Target { c: y.pointer(), lines: Lines::Even(size.n), bias: std::ptr::null(), addend: None };
        // SAFETY: the sizes were checked.
        unsafe { self.product(&shape.patches(x), &weights, size, &target) };
    }

    /// `dx` = (or +=, if `accumulate`) gradient of the input from `dy`, the gradient of the output.
    /// `scratch` has [`ConvolutionShape::backward_scratch_len`] floats.
    ///
    /// # Panics
    /// See [`Gemm::convolution`].
    pub fn convolution_input_gradient<'a, 'x>(
        &mut self,
        shape: &ConvolutionShape,
        dy: impl Into<Values<'a>>,
        w: impl Into<Values<'a>>,
        dx: impl Into<ValuesMut<'x>>,
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        let (dy, w, mut dx) = (dy.into(), w.into(), dx.into());
        shape.check(dx.len(), w.len(), dy.len());
        if let Some(filter) = shape.input_gradient_filter().filter(|_| self.filters(dy.format())) {
            let (dy, weights, dx) = (dy.pointer(), (w.pointer(), true), (dx.pointer(), accumulate));
            // SAFETY: the sizes were checked.
            return unsafe { self.filter(&filter, dy, weights, dx, scratch) };
        }
        let ConvolutionShape { batch, height, width, channels, outputs, stride, .. } = *shape;
        for phase_y in 0..stride {
            for phase_x in 0..stride {
                let (y, x) = (Class::new(shape, height, phase_y), Class::new(shape, width, phase_x));
                let windows = Operand::Patches(Patches {
                    start: dy.pointer(),
                    height: shape.output_height(),
                    width: shape.output_width(),
                    channels: outputs,
                    rows: y.pixels,
                    columns: x.pixels,
                    stride: 1,
                    top: y.start,
                    left: x.start,
                    taps_x: x.taps,
                });
                let taps = Operand::Taps(Taps {
                    start: w.pointer(),
                    outputs,
                    channels,
                    kernel_x: shape.kernel,
                    each: shape.window_len(),
                    first_y: y.first_tap,
                    first_x: x.first_tap,
                    stride,
                    taps_y: y.taps,
                    taps_x: x.taps,
                });
                let lines = if stride == 1 {
                    Lines::Even(channels)
                } else {
                    let (step, line, image) = (stride * channels, stride * width * channels, height * width * channels);
                    Lines::Grid { rows: y.pixels, columns: x.pixels, step, line, image }
                };
                let c = dx.pointer().at((y.phase * width + x.phase) * channels);
                let target = Target { c, lines, bias: std::ptr::null(), addend: accumulate.then_some(c) };
                let size = Size { m: batch * y.pixels * x.pixels, n: channels, k: y.taps * x.taps * outputs };
                // SAFETY: the sizes were checked; the pixels of each class are inside the images.
                unsafe { self.product(&windows, &taps, size, &target) };
            }
        }
    }

    /// `dw` = (or +=, if `accumulate`) gradient of the weights from `dy`, the gradient of the
    /// output. `scratch` has [`ConvolutionShape::backward_scratch_len`] floats.
    ///
    /// # Panics
    /// See [`Gemm::convolution`].
    pub fn convolution_weight_gradient<'a>(
        &mut self,
        shape: &ConvolutionShape,
        dy: impl Into<Values<'a>>,
        x: impl Into<Values<'a>>,
        dw: &mut [f32],
        accumulate: bool,
        scratch: &mut [f32],
    ) {
        let (dy, x) = (dy.into(), x.into());
        shape.check(x.len(), dw.len(), dy.len());
        if let Some(filter) = shape.filter().filter(|_| self.filters(x.format())) {
            // SAFETY: the sizes were checked.
            return unsafe { self.filter_gradient(&filter, dy.pointer(), x.pointer(), dw, accumulate, scratch) };
        }
        let pixels = shape.output_pixels();
        if shape.is_product() {
            let epilogue = if accumulate { Epilogue::Accumulate } else { Epilogue::Overwrite };
            let dy = Matrix::new(dy, pixels, shape.outputs).t();
            return self.multiply(dy, Matrix::new(x, pixels, shape.channels), dw, epilogue);
        }
        let size = Size { m: shape.outputs, n: shape.window_len(), k: pixels };
        let dy = View { start: dy.pointer(), down: 1, right: shape.outputs }.as_a();
        let c = ValuesMut::from(dw).pointer();
        let lines = Lines::Even(size.n);
        let target = Target { c, lines, bias: std::ptr::null(), addend: accumulate.then_some(c) };
        // SAFETY: the sizes were checked.
        unsafe { self.product(&dy, &shape.patches(x), size, &target) };
    }
}
