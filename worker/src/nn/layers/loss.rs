//! Softmax cross entropy.

use crate::cpu::Cpu;
use crate::cpu::ops::{self, Targets};
use crate::cpu::values::with_format;
use crate::data::Batch;
use crate::nn::{Backward, Flow, Form, Forward, Graph, INPUTS, InputGradient, Layer, ModelError, Needs, Tensor};

/// Source of the targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// [`Batch::targets`]: a token or a class per row.
    Classes,
    /// [`Batch::next_sentence`]: whether the second segment follows the first.
    NextSentence,
}

impl Target {
    /// The targets in a batch.
    pub fn of(self, batch: &Batch) -> &[u32] {
        match self {
            Target::Classes => &batch.targets,
            Target::NextSentence => &batch.next_sentence,
        }
    }
}

/// Adds the mean cross entropy over the rows of the logits to the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CrossEntropy {
    /// The targets of the logits.
    pub target: Target,
    /// Whether to count correct predictions; set for one loss of a model.
    pub count: bool,
}

impl CrossEntropy {
    /// Appends the layer. The logits must have no other reader, because their memory is reused for
    /// the gradient.
    ///
    /// # Errors
    /// See [`Graph::add_loss`].
    pub fn add(self, graph: &mut Graph, name: &str, logits: Tensor) -> Result<(), ModelError> {
        let columns = graph.width(logits);
        let rows = graph.len(logits) / columns;
        let layer = Loss { rows, classes: columns, smoothing: graph.label_smoothing(), options: self };
        graph.add_loss(name, layer, &[logits])
    }
}

/// Mean cross entropy of logits `[rows, classes]`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Loss {
    pub rows: usize,
    pub classes: usize,
    /// Label smoothing: share of a target's probability that training spreads over all classes.
    pub smoothing: f32,
    pub options: CrossEntropy,
}

impl Loss {
    fn targets<'a>(&self, batch: &'a Batch, training: bool) -> Targets<'a> {
        let classes = self.options.target.of(batch);
        assert_eq!(classes.len(), self.rows, "targets of a micro-batch");
        // Smoothing helps only training. Evaluation uses unsmoothed targets, so that losses are
        // comparable between runs.
        Targets { classes, smoothing: if training { self.smoothing } else { 0.0 } }
    }
}

impl Layer for Loss {
    fn kind(&self) -> &'static str {
        "CrossEntropy"
    }

    fn form(&self) -> Form {
        Form::CrossEntropy(*self)
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs { saved: 2 * self.rows, scratch: 2 * self.rows, flow: [Flow::OverInput; INPUTS], ..Needs::default() }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let targets = self.targets(cx.batch, cx.training());
        let (losses, correct) = cx.scratch.split_at_mut(self.rows);
        let logits = cx.inputs[0];
        with_format!(logits.format(), E => {
            ops::cross_entropy::<E>(&cx.kernels.cpu, logits.of::<E>(), targets, cx.saved, losses, correct);
        });
        let counted = targets.counted();
        let sum: f64 = losses.iter().map(|&loss| f64::from(loss)).sum();
        cx.loss_sums.loss += sum / counted.max(1) as f64;
        if self.options.count {
            cx.loss_sums.correct += correct.iter().filter(|&&correct| correct > 0.0).count() as u64;
            cx.loss_sums.predicted += counted as u64;
        }
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let targets = self.targets(cx.batch, true);
        let each = (f64::from(cx.scale) / targets.counted().max(1) as f64) as f32;
        let InputGradient::OverInput(logits) = &mut cx.d_inputs[0] else { return };
        with_format!(logits.format(), E => {
            ops::cross_entropy_backward::<E>(&cx.kernels.cpu, logits.of::<E>(), targets, cx.saved, each);
        });
    }
}
