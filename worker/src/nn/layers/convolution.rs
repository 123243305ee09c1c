//! Image convolution.

use crate::cpu::ConvolutionShape;
use crate::cpu::Cpu;
use crate::nn::{Backward, Flow, Form, Forward, Graph, INPUTS, Initial, Layer, ModelError, Needs, Role, Tensor};

/// A convolution without bias (a batch norm follows); weights are
/// `[outputs, kernel, kernel, channels]`.
#[derive(Debug, Clone, Copy)]
pub struct Convolution {
    /// Output channels.
    pub outputs: usize,
    /// Kernel size in pixels.
    pub kernel: usize,
    /// Pixels between neighbouring windows.
    pub stride: usize,
    /// Zero padding in pixels.
    pub padding: usize,
}

impl Convolution {
    /// Appends the layer as `NAME.weight`. Weights are initially normal with variance 2 / (outputs
    /// x kernel area) (He et al. 2015, fan out).
    ///
    /// # Errors
    /// The input is not an image, or smaller than the window.
    pub fn add(self, graph: &mut Graph, name: &str, x: Tensor) -> Result<Tensor, ModelError> {
        let &[batch, height, width, channels] = graph.shape(x) else {
            return Err(graph.mismatch(name, x, "[batch, height, width, channels]"));
        };
        let Convolution { outputs, kernel, stride, padding } = self;
        if kernel == 0 || stride == 0 || height.min(width) + 2 * padding < kernel {
            return Err(graph.mismatch(
                name,
                x,
                format!("an image of at least {kernel} pixels each way, padding included"),
            ));
        }
        let shape = ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding };
        let deviation = (2.0 / (outputs * kernel * kernel) as f32).sqrt();
        let weight = graph.parameter(
            &format!("{name}.weight"),
            &[outputs, kernel, kernel, channels],
            Role::Matrix,
            Initial::Normal(deviation),
        );
        graph.export_axes(weight, &[0, 3, 1, 2]);
        let output = [batch, shape.output_height(), shape.output_width(), outputs];
        graph.add(name, Window(shape), &[x], &[weight], &[], &output)
    }
}

struct Window(ConvolutionShape);

impl Layer for Window {
    fn kind(&self) -> &'static str {
        "Convolution"
    }

    fn form(&self) -> Form {
        Form::Convolution(self.0)
    }

    fn needs(&self, cpu: &Cpu) -> Needs {
        Needs {
            inputs: [true, false, false],
            flow: [Flow::Accumulate; INPUTS],
            scratch: self.0.scratch_len(cpu),
            backward_scratch: self.0.backward_scratch_len(cpu),
            ..Needs::default()
        }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        cx.kernels.gemm.convolution(&self.0, cx.inputs[0], cx.parameters.compute(0), cx.output.reborrow(), cx.scratch);
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let dy = cx.d_output.shared();
        let (gradient, accumulate) = cx.gradients.of(0);
        cx.kernels.gemm.convolution_weight_gradient(&self.0, dy, cx.inputs[0], gradient, accumulate, cx.scratch);
        if let Some((dx, accumulate)) = cx.d_inputs[0].target() {
            let weight = cx.parameters.compute(0);
            cx.kernels.gemm.convolution_input_gradient(&self.0, dy, weight, dx, accumulate, cx.scratch);
        }
    }
}
