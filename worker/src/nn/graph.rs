//! A network before memory planning: layers, tensors and parameters.

use super::error::ModelError;
use super::layer::{INPUTS, Layer};
use super::layout::{Initial, Role};
use crate::cpu::Format;
use crate::data::Kind;
use std::ops::Range;

/// A tensor of a [`Graph`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tensor(pub(super) usize);

/// A parameter of a [`Graph`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter(pub(super) usize);

/// Running values of a layer that gradients do not update, such as a batch norm's mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statistic(pub(super) usize);

pub(crate) struct TensorInfo {
    pub shape: Vec<usize>,
    /// The node that computes it.
    pub producer: usize,
    /// Whether it depends on a parameter.
    pub differentiable: bool,
}

impl TensorInfo {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The length with each row padded to a multiple of `multiple` elements.
    pub fn pitched_len(&self, multiple: usize) -> usize {
        let (width, rows) = self.shape.split_last().unwrap_or((&1, &[]));
        rows.iter().product::<usize>() * width.next_multiple_of(multiple)
    }
}

pub(crate) struct ParameterInfo {
    pub name: String,
    pub shape: Vec<usize>,
    pub role: Role,
    pub initial: Initial,
    pub export_axes: Option<Vec<usize>>,
    pub export_names: Vec<String>,
    pub used: bool,
}

pub(crate) struct StatisticInfo {
    pub name: String,
    pub len: usize,
    pub initial: f32,
}

pub(crate) struct Node {
    pub name: String,
    pub layer: Box<dyn Layer>,
    pub inputs: Vec<usize>,
    /// `None` for a loss.
    pub output: Option<usize>,
    pub parameters: Vec<usize>,
    pub statistics: Vec<usize>,
}

/// A network under construction: layers in forward order.
pub struct Graph {
    batch: usize,
    format: Format,
    kind: Kind,
    normalisation: (Vec<f64>, Vec<f64>),
    label_smoothing: f32,
    pub(super) recomputes: bool,
    /// Nodes of each block, in order.
    pub(super) blocks: Vec<Range<usize>>,
    pub(crate) tensors: Vec<TensorInfo>,
    pub(crate) parameters: Vec<ParameterInfo>,
    pub(crate) statistics: Vec<StatisticInfo>,
    pub(crate) nodes: Vec<Node>,
}

impl Graph {
    /// An empty network for micro-batches of `batch` samples of this kind, with tensors in
    /// `format`.
    pub fn new(batch: usize, kind: Kind, format: Format) -> Graph {
        Graph {
            batch,
            format,
            kind,
            normalisation: (vec![0.0], vec![1.0]),
            label_smoothing: 0.0,
            recomputes: false,
            blocks: Vec::new(),
            tensors: Vec::new(),
            parameters: Vec::new(),
            statistics: Vec::new(),
            nodes: Vec::new(),
        }
    }

    /// Sets the label smoothing: the share of a target's probability that losses spread over all
    /// classes.
    pub fn with_label_smoothing(self, label_smoothing: f32) -> Graph {
        Graph { label_smoothing, ..self }
    }

    /// Normalises images to `(x / 255 - mean) / deviation`, with one value for all channels or one
    /// per channel.
    pub fn with_normalisation(self, mean: &[f64], deviation: &[f64]) -> Graph {
        Graph { normalisation: (mean.to_vec(), deviation.to_vec()), ..self }
    }

    /// Recomputes blocks: their values are dropped in the forward pass, except those that other
    /// layers read, and computed again before the backward pass.
    pub fn with_recomputation(self) -> Graph {
        Graph { recomputes: true, ..self }
    }

    /// Groups the layers that `build` adds into a block. A block within another is part of it.
    pub fn block<T>(&mut self, build: impl FnOnce(&mut Graph) -> T) -> T {
        let first = self.nodes.len();
        let built = build(self);
        self.blocks.retain(|block| block.end <= first);
        self.blocks.push(first..self.nodes.len());
        built
    }

    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns whether blocks were recomputed.
    pub(super) fn stop_recomputing(&mut self) -> bool {
        std::mem::take(&mut self.recomputes) && !self.blocks.is_empty()
    }

    pub(super) fn recomputed_blocks(&self) -> &[Range<usize>] {
        if self.recomputes { &self.blocks } else { &[] }
    }

    /// Image mean and deviation.
    pub fn normalisation(&self) -> (&[f64], &[f64]) {
        (&self.normalisation.0, &self.normalisation.1)
    }

    /// Samples per micro-batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Sample kind.
    pub fn kind(&self) -> &Kind {
        &self.kind
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Share of a target's probability that losses spread over all classes.
    pub fn label_smoothing(&self) -> f32 {
        self.label_smoothing
    }

    pub fn shape(&self, tensor: Tensor) -> &[usize] {
        &self.tensors[tensor.0].shape
    }

    /// Elements of a tensor.
    pub fn len(&self, tensor: Tensor) -> usize {
        self.tensors[tensor.0].len()
    }

    /// Size of the last axis.
    pub fn width(&self, tensor: Tensor) -> usize {
        self.shape(tensor).last().copied().unwrap_or(1)
    }

    /// Adds a trainable tensor. Checkpoints use its name; prefer the names of the corresponding
    /// PyTorch model, so that other programs can read them.
    pub fn parameter(&mut self, name: &str, shape: &[usize], role: Role, initial: Initial) -> Parameter {
        self.parameters.push(ParameterInfo {
            name: name.to_owned(),
            shape: shape.to_vec(),
            role,
            initial,
            export_axes: None,
            export_names: Vec::new(),
            used: false,
        });
        Parameter(self.parameters.len() - 1)
    }

    /// Sets the axis order that other frameworks use for a parameter.
    pub fn export_axes(&mut self, parameter: Parameter, axes: &[usize]) {
        self.parameters[parameter.0].export_axes = Some(axes.to_vec());
    }

    /// Sets a parameter's name in other frameworks, or several names for equal parts of its first
    /// axis.
    pub fn export_names(&mut self, parameter: Parameter, names: Vec<String>) {
        self.parameters[parameter.0].export_names = names;
    }

    /// Adds running values. Each step moves them by a tenth towards the mean, over all ranks and
    /// micro-batches, of the values that forward writes.
    pub fn statistic(&mut self, name: &str, len: usize, initial: f32) -> Statistic {
        self.statistics.push(StatisticInfo { name: name.to_owned(), len, initial });
        Statistic(self.statistics.len() - 1)
    }

    /// Appends a layer and returns its output.
    ///
    /// # Errors
    /// The layer has more than [`INPUTS`] inputs, or the output is empty or too large.
    pub fn add(
        &mut self,
        name: &str,
        layer: impl Layer + 'static,
        inputs: &[Tensor],
        parameters: &[Parameter],
        statistics: &[Statistic],
        output: &[usize],
    ) -> Result<Tensor, ModelError> {
        let len = output.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        match len {
            None => return Err(ModelError::TooLarge),
            Some(0) => return Err(ModelError::Empty { layer: name.to_owned() }),
            Some(_) => {}
        }
        let tensor = self.tensors.len();
        let node = self.push(name, Box::new(layer), inputs, parameters, statistics, Some(tensor))?;
        let differentiable = !parameters.is_empty() || inputs.iter().any(|input| self.tensors[input.0].differentiable);
        self.tensors.push(TensorInfo { shape: output.to_vec(), producer: node, differentiable });
        Ok(Tensor(tensor))
    }

    /// Appends a layer that adds to the loss and has no output.
    ///
    /// # Errors
    /// See [`Graph::add`].
    pub fn add_loss(&mut self, name: &str, layer: impl Layer + 'static, inputs: &[Tensor]) -> Result<(), ModelError> {
        self.push(name, Box::new(layer), inputs, &[], &[], None)?;
        Ok(())
    }

    fn push(
        &mut self,
        name: &str,
        layer: Box<dyn Layer>,
        inputs: &[Tensor],
        parameters: &[Parameter],
        statistics: &[Statistic],
        output: Option<usize>,
    ) -> Result<usize, ModelError> {
        if inputs.len() > INPUTS {
            return Err(ModelError::Inputs { layer: name.to_owned(), got: inputs.len() });
        }
        for parameter in parameters {
            self.parameters[parameter.0].used = true;
        }
        self.nodes.push(Node {
            name: name.to_owned(),
            layer,
            inputs: inputs.iter().map(|tensor| tensor.0).collect(),
            output,
            parameters: parameters.iter().map(|parameter| parameter.0).collect(),
            statistics: statistics.iter().map(|statistic| statistic.0).collect(),
        });
        Ok(self.nodes.len() - 1)
    }

    /// The error for a layer whose input has the wrong shape.
    pub fn mismatch(&self, layer: &str, tensor: Tensor, expected: impl Into<String>) -> ModelError {
        ModelError::Shape { layer: layer.to_owned(), got: self.shape(tensor).to_vec(), expected: expected.into() }
    }
}
