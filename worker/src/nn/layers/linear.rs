//! Fully connected layer: `y = activation(x W^T + bias) + residual`.

use crate::cpu::ops::{self, partials_len};
use crate::cpu::values::with_format;
use crate::cpu::{Cpu, Epilogue, Matrix, Values};
use crate::nn::{Backward, Flow, Form, Forward, Graph, Initial, Layer, ModelError, Needs, Parameter, Role, Tensor};

/// Activation function after a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// Gaussian error linear unit, tanh approximation.
    Gelu,
    /// Hyperbolic tangent.
    Tanh,
}

/// A fully connected layer; weights are `[outputs, inputs]`.
#[derive(Debug, Clone)]
pub struct Linear {
    outputs: usize,
    bias: bool,
    activation: Option<Activation>,
    residual: Option<Tensor>,
    initial: Initial,
    initial_bias: Initial,
    shared: Option<Parameter>,
    exported_as: Vec<String>,
    exported_transposed: bool,
}

impl Linear {
    /// With bias and without activation. Weights are initially normal with deviation 0.02, biases
    /// 0.
    pub fn new(outputs: usize) -> Linear {
        Linear {
            outputs,
            bias: true,
            activation: None,
            residual: None,
            initial: Initial::Normal(0.02),
            initial_bias: Initial::Constant(0.0),
            shared: None,
            exported_as: Vec::new(),
            exported_transposed: false,
        }
    }

    pub fn without_bias(self) -> Linear {
        Linear { bias: false, ..self }
    }

    pub fn activation(self, activation: Activation) -> Linear {
        Linear { activation: Some(activation), ..self }
    }

    /// Adds a tensor of the output's shape; cannot be combined with an activation.
    pub fn residual(self, residual: Tensor) -> Linear {
        Linear { residual: Some(residual), ..self }
    }

    /// Sets the initial values of the weights.
    pub fn initial(self, initial: Initial) -> Linear {
        Linear { initial, ..self }
    }

    /// Sets the initial values of the biases.
    pub fn initial_bias(self, initial_bias: Initial) -> Linear {
        Linear { initial_bias, ..self }
    }

    /// Shares another layer's weights, `[outputs, inputs]`.
    pub fn shared(self, weight: Parameter) -> Linear {
        Linear { shared: Some(weight), ..self }
    }

    /// Sets the layer's name in other frameworks, or several names for equal parts of its outputs.
    pub fn exported_as(self, names: impl Into<Vec<String>>) -> Linear {
        Linear { exported_as: names.into(), ..self }
    }

    /// Exports the weights transposed, as `[inputs, outputs]`.
    pub fn exported_transposed(self) -> Linear {
        Linear { exported_transposed: true, ..self }
    }

    /// Appends the layer as `NAME.weight` and `NAME.bias`. The last axis of `x` becomes `outputs`.
    ///
    /// # Errors
    /// The residual has a different shape, or is combined with an activation.
    pub fn add(self, graph: &mut Graph, name: &str, x: Tensor) -> Result<Tensor, ModelError> {
        let inputs = graph.width(x);
        let mut shape = graph.shape(x).to_vec();
        if let Some(last) = shape.last_mut() {
            *last = self.outputs;
        }
        if let Some(residual) = self.residual
            && (graph.shape(residual) != shape || self.activation.is_some())
        {
            return Err(graph.mismatch(name, residual, format!("{shape:?}, and no activation")));
        }
        let exported = |part: &str| self.exported_as.iter().map(|name| format!("{name}.{part}")).collect();
        let weight = match self.shared {
            Some(weight) => weight,
            None => {
                let shape = [self.outputs, inputs];
                let weight = graph.parameter(&format!("{name}.weight"), &shape, Role::Matrix, self.initial);
                graph.export_names(weight, exported("weight"));
                if self.exported_transposed {
                    graph.export_axes(weight, &[1, 0]);
                }
                weight
            }
        };
        let mut parameters = vec![weight];
        if self.bias {
            let bias = graph.parameter(&format!("{name}.bias"), &[self.outputs], Role::Vector, self.initial_bias);
            graph.export_names(bias, exported("bias"));
            parameters.push(bias);
        }
        let mut tensors = vec![x];
        tensors.extend(self.residual);
        let layer = Product {
            rows: graph.len(x) / inputs,
            inputs,
            outputs: self.outputs,
            bias: self.bias,
            activation: self.activation,
            residual: self.residual.is_some(),
        };
        graph.add(name, layer, &tensors, &parameters, &[], &shape)
    }
}

fn sum(accumulate: bool) -> Epilogue<'static> {
    if accumulate { Epilogue::Accumulate } else { Epilogue::Overwrite }
}

/// `y[rows, outputs] = activation(x[rows, inputs] W^T + bias) + residual`, with weights
/// `W[outputs, inputs]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Product {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    /// Whether there is a bias, the second parameter.
    pub bias: bool,
    pub activation: Option<Activation>,
    /// Whether there is a residual, the second input; not combined with an activation.
    pub residual: bool,
}

impl Layer for Product {
    fn kind(&self) -> &'static str {
        "Linear"
    }

    fn form(&self) -> Form {
        Form::Product(*self)
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs {
            inputs: [true, false, false],
            // GELU's gradient needs its input; for the others the output is enough.
            output: matches!(self.activation, Some(Activation::Relu | Activation::Tanh)),
            kept: if self.activation == Some(Activation::Gelu) { self.rows * self.outputs } else { 0 },
            backward_scratch: partials_len(self.rows, self.outputs) + self.outputs,
            flow: [Flow::Accumulate, Flow::InPlace, Flow::Write],
            ..Needs::default()
        }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let x = Matrix::new(cx.inputs[0], self.rows, self.inputs);
        let weight = Matrix::new(cx.parameters.compute(0), self.outputs, self.inputs);
        let epilogue = match (self.bias, self.residual) {
            (false, false) => Epilogue::Overwrite,
            (true, false) => Epilogue::Bias(cx.parameters.master(1)),
            (false, true) => Epilogue::Matrix(cx.inputs[1]),
            (true, true) => Epilogue::BiasAndMatrix(cx.parameters.master(1), cx.inputs[1]),
        };
        let gelu = self.activation == Some(Activation::Gelu);
        let target = if gelu { cx.kept.reborrow() } else { cx.output.reborrow() };
        cx.kernels.gemm.multiply(x, weight.t(), target, epilogue);
        let cpu = &cx.kernels.cpu;
        with_format!(cx.output.format(), E => match self.activation {
            Some(Activation::Gelu) => ops::gelu::<E>(cpu, cx.kept.shared().of::<E>(), cx.output.of::<E>()),
            Some(Activation::Relu) => ops::relu::<E>(cpu, cx.output.of::<E>()),
            Some(Activation::Tanh) => ops::tanh::<E>(cpu, cx.output.of::<E>()),
            None => {}
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let (rows, outputs) = (self.rows, self.outputs);
        let (partials, spare) = cx.scratch.split_at_mut(partials_len(rows, outputs));
        // Without a bias this gradient is discarded: the activation kernels compute both in one
        // pass.
        let (d_bias, accumulate) = if self.bias { cx.gradients.of(1) } else { (spare, false) };
        let cpu = &cx.kernels.cpu;
        with_format!(cx.d_output.format(), E => {
            let output = cx.output;
            let kept = cx.kept.shared();
            let dy = cx.d_output.of::<E>();
            match self.activation {
                Some(Activation::Gelu) => {
                    ops::gelu_backward::<E>(cpu, kept.of::<E>(), dy, partials, d_bias, accumulate);
                }
                Some(Activation::Relu) => {
                    ops::relu_backward::<E>(cpu, output.of::<E>(), dy, partials, d_bias, accumulate);
                }
                Some(Activation::Tanh) => {
                    ops::tanh_backward::<E>(cpu, output.of::<E>(), dy, partials, d_bias, accumulate);
                }
                None if self.bias => ops::column_sums::<E>(cpu, dy, partials, d_bias, accumulate),
                None => {}
            }
        });
        let dy: Values<'_> = cx.d_output.shared();
        let dy = Matrix::new(dy, rows, outputs);
        let x = Matrix::new(cx.inputs[0], rows, self.inputs);
        let (d_weight, accumulate) = cx.gradients.of(0);
        cx.kernels.gemm.multiply(dy.t(), x, d_weight, sum(accumulate));
        if let Some((dx, accumulate)) = cx.d_inputs[0].target() {
            let weight = Matrix::new(cx.parameters.compute(0), outputs, self.inputs);
            cx.kernels.gemm.multiply(dy, weight, dx, sum(accumulate));
        }
    }
}
