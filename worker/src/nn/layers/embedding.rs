//! Token, position and, for sentence pairs, segment embeddings.

use crate::cpu::Cpu;
use crate::cpu::ops::{self, partials_len};
use crate::cpu::values::with_format;
use crate::nn::{Backward, Form, Forward, Graph, Initial, Layer, ModelError, Needs, Parameter, Role, Tensor};

/// Sum of the learned vectors of each token, its position and its segment.
#[derive(Debug, Clone, Copy)]
pub struct Embedding<'a> {
    pub context: usize,
    pub width: usize,
    /// Name and number of rows of the token table.
    pub tokens: (&'a str, usize),
    /// Name of the position table.
    pub positions: &'a str,
    /// Name and number of rows of the segment table.
    pub segments: Option<(&'a str, usize)>,
    /// Standard deviation of the initial values.
    pub deviation: f32,
}

impl Embedding<'_> {
    /// Appends the layer. Returns the vectors `[batch, context, width]` and the token table, so
    /// that an output layer can share it.
    ///
    /// # Errors
    /// See [`Graph::add`].
    pub fn add(self, graph: &mut Graph, name: &str) -> Result<(Tensor, Parameter), ModelError> {
        let initial = Initial::Normal(self.deviation);
        let mut table = |name: &str, rows: usize| graph.parameter(name, &[rows, self.width], Role::Embedding, initial);
        // In the order in which backward completes them.
        let mut parameters = vec![table(self.positions, self.context)];
        parameters.extend(self.segments.map(|(name, rows)| table(name, rows)));
        let tokens = table(self.tokens.0, self.tokens.1);
        parameters.push(tokens);
        let batch = graph.batch();
        let layer = Tables {
            rows: batch * self.context,
            context: self.context,
            vocabulary: self.tokens.1,
            width: self.width,
            segments: self.segments.map(|(_, rows)| rows),
        };
        let x = graph.add(name, layer, &[], &parameters, &[], &[batch, self.context, self.width])?;
        Ok((x, tokens))
    }
}

/// Sums of table rows: positions, segments if there are any, tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tables {
    /// Tokens per micro-batch.
    pub rows: usize,
    /// Rows of the position table: output row `i` uses row `i % context`.
    pub context: usize,
    /// Rows of the token table.
    pub vocabulary: usize,
    pub width: usize,
    /// Rows of the segment table.
    pub segments: Option<usize>,
}

impl Tables {
    /// Index of the token table among the parameters.
    pub(crate) fn tokens(&self) -> usize {
        1 + usize::from(self.segments.is_some())
    }
}

impl Layer for Tables {
    fn kind(&self) -> &'static str {
        "Embedding"
    }

    fn form(&self) -> Form {
        Form::Embedding(*self)
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs {
            backward_scratch: self.segments.map_or(0, |rows| partials_len(self.rows, rows * self.width)),
            ..Needs::default()
        }
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        let parameters = cx.parameters;
        with_format!(cx.output.format(), E => {
            let segments = self.segments.map(|_| (&cx.batch.segments[..], parameters.compute(1).of::<E>()));
            ops::embed::<E, E>(
                &cx.kernels.cpu,
                &cx.batch.tokens,
                parameters.compute(self.tokens()).of::<E>(),
                parameters.compute(0).of::<E>(),
                segments,
                self.width,
                cx.output.of::<E>(),
            );
        });
    }

    fn backward(&mut self, cx: &mut Backward<'_>) {
        let cpu = &cx.kernels.cpu;
        with_format!(cx.d_output.format(), E => {
            let dx = cx.d_output.shared().of::<E>();
            let (gradient, accumulate) = cx.gradients.of(0);
            ops::position_backward::<E>(cpu, dx, self.width, gradient, accumulate);
            if self.segments.is_some() {
                let (gradient, accumulate) = cx.gradients.of(1);
                let segments = &cx.batch.segments;
                ops::segment_backward::<E>(cpu, segments, dx, self.width, cx.scratch, gradient, accumulate);
            }
            let (gradient, accumulate) = cx.gradients.of(self.tokens());
            if !accumulate {
                gradient.fill(0.0);
            }
            ops::embed_backward::<E>(cpu, &cx.batch.tokens, dx, self.width, gradient);
        });
    }
}
