//! Image pooling.

use crate::cpu::Cpu;
use crate::cpu::ops::{self, Window};
use crate::cpu::values::with_format;
use crate::nn::{Backward, Form, Forward, Graph, Layer, ModelError, Needs, Tensor};

/// The maximum of each window of `kernel` x `kernel` pixels, per channel.
///
/// # Errors
/// The input is not an image, or smaller than the window.
pub fn max_pool(
    graph: &mut Graph,
    name: &str,
    x: Tensor,
    kernel: usize,
    stride: usize,
    padding: usize,
) -> Result<Tensor, ModelError> {
    let &[batch, height, width, channels] = graph.shape(x) else {
        return Err(graph.mismatch(name, x, "[batch, height, width, channels]"));
    };
    if kernel == 0 || kernel > 16 || stride == 0 || 2 * padding > kernel || height.min(width) + 2 * padding < kernel {
        return Err(graph.mismatch(
            name,
            x,
            format!("an image of at least {kernel} pixels each way, padding included"),
        ));
    }
    let window = Window { batch, height, width, channels, kernel, stride, padding };
    let (rows, columns) = window.output();
    graph.add(name, MaxPool(window), &[x], &[], &[], &[batch, rows, columns, channels])
}

struct MaxPool(Window);

impl MaxPool {
    fn outputs(&self) -> usize {
        let (rows, columns) = self.0.output();
        self.0.batch * rows * columns * self.0.channels
    }
}

impl Layer for MaxPool {
    fn kind(&self) -> &'static str {
        "MaxPool"
    }

    fn form(&self) -> Form {
        Form::MaxPool(self.0)
    }

    fn needs(&self, _: &Cpu) -> Needs {
        // One byte per output: its index in the window.
        Needs { saved: self.outputs().div_ceil(4), ..Needs::default() }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let indices = &mut bytemuck::cast_slice_mut(cx.saved)[..self.outputs()];
        with_format!(cx.output.format(), E => {
            ops::max_pool::<E>(&cx.kernels.cpu, &self.0, cx.inputs[0].of::<E>(), cx.output.of::<E>(), indices);
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let indices = &bytemuck::cast_slice(cx.saved)[..self.outputs()];
        let Some((mut dx, _)) = cx.d_inputs[0].target() else { return };
        with_format!(dx.format(), E => {
            ops::max_pool_backward::<E>(&cx.kernels.cpu, &self.0, cx.d_output.of::<E>(), indices, dx.of::<E>());
        });
    }
}

/// Mean over all pixels: `[batch, height, width, channels]` to `[batch, channels]`.
///
/// # Errors
/// The input is not an image.
pub fn average_pool(graph: &mut Graph, name: &str, x: Tensor) -> Result<Tensor, ModelError> {
    let &[batch, height, width, channels] = graph.shape(x) else {
        return Err(graph.mismatch(name, x, "[batch, height, width, channels]"));
    };
    graph.add(name, AveragePool { batch, pixels: height * width, channels }, &[x], &[], &[], &[batch, channels])
}

/// Mean over pixels: `[batch, pixels, channels]` to `[batch, channels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct AveragePool {
    pub batch: usize,
    /// Pixels per image.
    pub pixels: usize,
    pub channels: usize,
}

impl Layer for AveragePool {
    fn kind(&self) -> &'static str {
        "AveragePool"
    }

    fn form(&self) -> Form {
        Form::AveragePool(*self)
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs::default()
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        with_format!(cx.output.format(), E => {
            ops::average_pool::<E>(&cx.kernels.cpu, cx.inputs[0].of::<E>(), self.channels, cx.output.of::<E>());
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let Some((mut dx, _)) = cx.d_inputs[0].target() else { return };
        with_format!(dx.format(), E => {
            ops::average_pool_backward::<E>(&cx.kernels.cpu, cx.d_output.of::<E>(), self.channels, dx.of::<E>());
        });
    }
}
