//! Normalisation over the width of each row, or over the rows of a batch.

use crate::cpu::Cpu;
use crate::cpu::ops::{self, batch_norm_partials_len, partials_len};
use crate::cpu::values::with_format;
use crate::nn::{
    Backward, Flow, Form, Forward, Graph, INPUTS, Initial, Layer, ModelError, Needs, Parameter, Role, Statistics,
    Tensor,
};

/// `NAME.weight` and `NAME.bias`, with one value per channel.
fn scale_and_shift(graph: &mut Graph, name: &str, channels: usize, scale: f32) -> [Parameter; 2] {
    let mut vector = |part: &str, value: f32| {
        graph.parameter(&format!("{name}.{part}"), &[channels], Role::Vector, Initial::Constant(value))
    };
    [vector("weight", scale), vector("bias", 0.0)]
}

/// Layer normalisation over the last axis (Ba, Kiros and Hinton 2016), epsilon 1e-5.
#[derive(Debug, Clone, Copy, Default)]
pub struct LayerNorm;

impl LayerNorm {
    /// Appends the layer as `NAME.weight` and `NAME.bias`.
    ///
    /// # Errors
    /// See [`Graph::add`].
    pub fn add(self, graph: &mut Graph, name: &str, x: Tensor) -> Result<Tensor, ModelError> {
        let width = graph.width(x);
        let parameters = scale_and_shift(graph, name, width, 1.0);
        let layer = RowNorm { rows: graph.len(x) / width, width };
        let shape = graph.shape(x).to_vec();
        graph.add(name, layer, &[x], &parameters, &[], &shape)
    }
}

/// Layer normalisation of `[rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowNorm {
    pub rows: usize,
    pub width: usize,
}

impl Layer for RowNorm {
    fn kind(&self) -> &'static str {
        "LayerNorm"
    }

    fn form(&self) -> Form {
        Form::LayerNorm(*self)
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs {
            inputs: [true, false, false],
            saved: 2 * self.rows,
            backward_scratch: partials_len(self.rows, 2 * self.width),
            flow: [Flow::Accumulate; INPUTS],
            always: [true, false, false],
            ..Needs::default()
        }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let (gamma, beta) = (cx.parameters.master(0), cx.parameters.master(1));
        with_format!(cx.output.format(), E => {
            ops::layer_norm::<E>(
                &cx.kernels.cpu, cx.inputs[0].of::<E>(), gamma, beta, cx.output.of::<E>(), cx.saved,
            );
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let gamma = cx.parameters.master(0);
        let (gradients, accumulate) = cx.gradients.pair(0);
        let (mut dx, add) = cx.d_inputs[0].target().expect("invariant: the plan has memory for it, see `needs`");
        with_format!(cx.d_output.format(), E => {
            ops::layer_norm_backward::<E>(
                &cx.kernels.cpu,
                cx.d_output.of::<E>(),
                cx.inputs[0].of::<E>(),
                gamma,
                cx.saved,
                dx.of::<E>(),
                add,
                cx.scratch,
                gradients,
                accumulate,
            );
        });
    }
}

/// Batch normalisation over channels, the last axis (Ioffe and Szegedy 2015), epsilon 1e-5, with an
/// optional residual and ReLU: `y = relu(normalised x + residual)`.
#[derive(Debug, Clone, Copy)]
pub struct BatchNorm {
    residual: Option<Tensor>,
    relu: bool,
    initial: f32,
}

impl Default for BatchNorm {
    fn default() -> Self {
        BatchNorm { residual: None, relu: false, initial: 1.0 }
    }
}

impl BatchNorm {
    /// Adds a tensor of the same shape.
    pub fn residual(self, residual: Tensor) -> BatchNorm {
        BatchNorm { residual: Some(residual), ..self }
    }

    /// Applies ReLU.
    pub fn relu(self) -> BatchNorm {
        BatchNorm { relu: true, ..self }
    }

    /// Sets the initial scale of all channels; with 0, a residual block starts as the identity
    /// (Goyal et al. 2017, section 5.1).
    pub fn initial(self, initial: f32) -> BatchNorm {
        BatchNorm { initial, ..self }
    }

    /// Appends the layer as `NAME.weight`, `NAME.bias` and the statistics `NAME.running_mean`,
    /// `NAME.running_var`.
    ///
    /// # Errors
    /// There is only one row and therefore no variance, or the residual has a different shape.
    pub fn add(self, graph: &mut Graph, name: &str, x: Tensor) -> Result<Tensor, ModelError> {
        let channels = graph.width(x);
        let rows = graph.len(x) / channels;
        let shape = graph.shape(x).to_vec();
        if rows < 2 {
            return Err(graph.mismatch(name, x, "at least 2 values per channel: a larger batch or image"));
        }
        if let Some(residual) = self.residual.filter(|&residual| graph.shape(residual) != shape) {
            return Err(graph.mismatch(name, residual, format!("{shape:?}")));
        }
        let parameters = scale_and_shift(graph, name, channels, self.initial);
        let mean = graph.statistic(&format!("{name}.running_mean"), channels, 0.0);
        let variance = graph.statistic(&format!("{name}.running_var"), channels, 1.0);
        let mut inputs = vec![x];
        inputs.extend(self.residual);
        let layer = ChannelNorm { rows, channels, residual: self.residual.is_some(), relu: self.relu };
        graph.add(name, layer, &inputs, &parameters, &[mean, variance], &shape)
    }
}

/// Batch normalisation of `[rows, channels]`: `y = relu(normalised x + residual)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChannelNorm {
    /// Pixels of all images in a micro-batch.
    pub rows: usize,
    pub channels: usize,
    /// Whether there is a residual, the second input.
    pub residual: bool,
    pub relu: bool,
}

impl Layer for ChannelNorm {
    fn kind(&self) -> &'static str {
        "BatchNorm"
    }

    fn form(&self) -> Form {
        Form::BatchNorm(*self)
    }

    fn needs(&self, _: &Cpu) -> Needs {
        let scratch = batch_norm_partials_len(self.rows, self.channels);
        Needs {
            inputs: [true, false, false],
            output: self.relu,
            saved: 2 * self.channels,
            scratch,
            backward_scratch: scratch,
            flow: [Flow::Accumulate, Flow::InPlace, Flow::Write],
            always: [true, false, false],
            ..Needs::default()
        }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let (gamma, beta) = (cx.parameters.master(0), cx.parameters.master(1));
        let cpu = &cx.kernels.cpu;
        with_format!(cx.output.format(), E => {
            let residual = self.residual.then(|| cx.inputs[1].of::<E>());
            let layer = ops::BatchNorm { gamma, beta, residual, relu: self.relu };
            let (x, y) = (cx.inputs[0].of::<E>(), cx.output.of::<E>());
            match &mut cx.statistics {
                Statistics::Batch(statistics) => {
                    ops::batch_norm(cpu, layer, x, y, cx.saved, statistics, cx.scratch);
                }
                Statistics::Running(running) => ops::batch_norm_evaluate(cpu, layer, running, x, y, cx.saved),
            }
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let gamma = cx.parameters.master(0);
        let (gradients, accumulate) = cx.gradients.pair(0);
        let (mut dx, add) = cx.d_inputs[0].target().expect("invariant: the plan has memory for it, see `needs`");
        with_format!(cx.d_output.format(), E => {
            ops::batch_norm_backward::<E>(
                &cx.kernels.cpu,
                cx.d_output.of::<E>(),
                self.relu.then(|| cx.output.of::<E>()),
                cx.inputs[0].of::<E>(),
                gamma,
                cx.saved,
                dx.of::<E>(),
                add,
                cx.scratch,
                gradients,
                accumulate,
            );
        });
    }
}
