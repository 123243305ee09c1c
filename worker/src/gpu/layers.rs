//! How a GPU computes each form: what it needs, and its launches forward and backward.

mod attention;
mod embedding;
mod loss;
mod norm;
mod product;
mod rows;

use super::launch::{Matrix, Memory, Span, Work};
use super::plan::{Computed, Target};
use super::refused::Reason;
use crate::cpu::Format;
use crate::nn::arena::Region;
use crate::nn::layers::Activation;
use crate::nn::plan::NodePlan;
use crate::nn::{Flow, Form, INPUTS, Layout, Needs};
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::{self, Element, Rows};

/// What a form needs on a GPU.
///
/// # Errors
/// No kernel computes it.
pub(super) fn needs(form: &Form, target: Target, format: Format) -> Result<Needs, Reason> {
    let missing = |what: &str| Err(Reason::Missing(what.to_owned()));
    let first = [true, false, false];
    match form {
        Form::Features(_) if format == Format::F32 => Ok(Needs::default()),
        Form::Features(_) => missing("features in 16 bits"),
        Form::Embedding(tables) => Ok(Needs {
            backward_scratch: embedding::kernels_of(tables, format)?.partial_bytes() / FLOAT,
            ..Needs::default()
        }),
        Form::Product(product) => {
            let after = product::activation(product, format)?.filter(|_| product.bias);
            Ok(Needs {
                inputs: first,
                // GELU needs its argument; for the others the output is enough.
                output: matches!(product.activation, Some(Activation::Relu | Activation::Tanh)),
                kept: if product.activation == Some(Activation::Gelu) {
                    product.rows * pitch(product.outputs, format)
                } else {
                    0
                },
                backward_scratch: after.map_or(0, |after| after.partial_bytes(target.blocks) / FLOAT),
                flow: [Flow::Accumulate, Flow::InPlace, Flow::Write],
                ..Needs::default()
            })
        }
        Form::Attention(shape) => {
            let saved = attention::kernels_of(shape, format)?.saved_bytes() / FLOAT;
            Ok(Needs { inputs: first, output: true, saved, backward_scratch: saved, ..Needs::default() })
        }
        Form::Rows(picked) => {
            rows::kernels_of(picked, format)?;
            Ok(Needs { flow: [Flow::Accumulate; INPUTS], ..Needs::default() })
        }
        Form::LayerNorm(norm) => Ok(Needs {
            inputs: first,
            saved: 2 * norm.rows,
            backward_scratch: norm::layer_norm(norm, format)?.partial_bytes(target.blocks) / FLOAT,
            flow: [Flow::Accumulate; INPUTS],
            always: [true, false, false],
            ..Needs::default()
        }),
        // Loss and gradient come from one kernel, in backward.
        Form::CrossEntropy(_) => Ok(Needs { flow: [Flow::OverInput; INPUTS], ..Needs::default() }),
        other => missing(&other.to_string()),
    }
}

/// Bytes that a thread of a kernel reads at once: rows begin at multiples of them.
pub(super) const VECTOR: usize = 16;

/// Bytes of a number in 32 bits.
const FLOAT: usize = size_of::<f32>();

fn element(format: Format) -> Element {
    match format {
        Format::F32 => Element::F32,
        Format::Bf16 => Element::Bf16,
        Format::F16 => Element::F16,
    }
}

/// Sizes of kernels have 32 bits.
fn size(number: usize) -> Result<u32, Reason> {
    u32::try_from(number).map_err(|_| Reason::Missing(format!("a size of {number}")))
}

/// From one row of a tensor to the next, in numbers.
fn pitch(width: usize, format: Format) -> usize {
    width.next_multiple_of(VECTOR / format.size())
}

fn rows(width: usize, format: Format) -> Result<Rows, Reason> {
    Ok(Rows { element: element(format), width: size(width)?, pitch: size(pitch(width, format))? })
}

/// Numbers of a row of each input, and of the output, of a form that `needs` does not refuse.
pub(super) fn widths(form: &Form) -> ([usize; 2], usize) {
    match form {
        Form::Features(features) => ([0, 0], features.width),
        Form::Embedding(tables) => ([0, 0], tables.width),
        Form::Product(product) => ([product.inputs, product.outputs], product.outputs),
        Form::Attention(shape) => ([3 * shape.hidden(), 0], shape.hidden()),
        Form::Rows(picked) => ([picked.width, 0], picked.width),
        Form::LayerNorm(norm) => ([norm.width, 0], norm.width),
        Form::CrossEntropy(loss) => ([loss.classes, 0], 0),
        _ => ([0, 0], 0),
    }
}

/// Makes the launches of one layer after another.
pub(super) struct Lowering<'a, M> {
    pub target: Target,
    pub format: Format,
    pub layout: &'a Layout,
    pub place: &'a dyn Fn(Span) -> M,
    /// To the gradients of earlier micro-batches.
    pub adds: bool,
    /// Forward alone, of a network that is not trained.
    pub evaluates: bool,
    /// Those of the current layer.
    pub works: Vec<Work<M>>,
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub fn forward(&mut self, computed: &Computed, places: &NodePlan) -> Result<(), Reason> {
        match &computed.form {
            Form::Features(features) => {
                let (rows, columns) = (features.rows, features.width);
                let memory = self.floats(Memory::Values, 0, rows * columns);
                let from = Matrix { memory, rows, columns, pitch: columns, format: self.format, is_transposed: false };
                let to = self.matrix(&places.output, rows, columns);
                self.works.push(Work::Copy { from, to });
            }
            Form::Embedding(tables) => self.embedding(tables, places)?,
            Form::Product(product) => self.product(product, places)?,
            Form::Attention(shape) => self.attention(shape, places)?,
            Form::Rows(picked) => self.rows(picked, computed, places)?,
            Form::LayerNorm(norm) => self.layer_norm(norm, places)?,
            // In training it is computed in backward, together with its gradient.
            Form::CrossEntropy(loss) if self.evaluates => self.cross_entropy(loss, computed, places)?,
            // See `needs`.
            _ => {}
        }
        Ok(())
    }

    pub fn backward(&mut self, computed: &Computed, places: &NodePlan) -> Result<(), Reason> {
        match &computed.form {
            Form::Embedding(tables) => self.embedding_backward(tables, places)?,
            Form::Product(product) => self.product_backward(product, places)?,
            Form::Attention(shape) => self.attention_backward(shape, places)?,
            Form::Rows(picked) => self.rows_backward(picked, computed, places)?,
            Form::LayerNorm(norm) => self.layer_norm_backward(norm, places)?,
            Form::CrossEntropy(loss) => self.cross_entropy(loss, computed, places)?,
            _ => {}
        }
        for pass in &places.passes {
            let width = widths(&computed.form).0[pass.input];
            let pitch = pitch(width, self.format);
            if !pass.add {
                let [from, to] = [&pass.from, &pass.to].map(|place| self.matrix(place, place.len / pitch, width));
                self.works.push(Work::Copy { from, to });
                continue;
            }
            if width != pitch {
                return Err(Reason::Missing(format!("a sum of gradients with rows of {width} numbers")));
            }
            let (from, to) = (self.arena(&pass.from), self.arena(&pass.to));
            let both = Elementwise { from: element(self.format), to: element(self.format) };
            let sum = both.sum(self.target.blocks, size(pass.to.len)?, [to, from], to)?;
            self.works.push(Work::Kernel(sum));
        }
        Ok(())
    }

    /// Of numbers of 32 bits.
    fn floats(&self, memory: Memory, from: usize, len: usize) -> M {
        (self.place)(Span { memory, at: FLOAT * from, bytes: FLOAT * len })
    }

    fn arena(&self, place: &Region) -> M {
        (self.place)(Span { memory: Memory::Arena, at: place.offset, bytes: place.bytes() })
    }

    /// A tensor.
    fn matrix(&self, place: &Region, rows: usize, columns: usize) -> Matrix<M> {
        let pitch = pitch(columns, place.format);
        Matrix { memory: self.arena(place), rows, columns, pitch, format: place.format, is_transposed: false }
    }

    /// A parameter or its gradient, in 32 bits.
    fn parameter(&self, memory: Memory, ordinal: usize) -> M {
        let parameter = &self.layout.parameters[ordinal];
        self.floats(memory, parameter.offset, parameter.len)
    }

    /// A parameter in the format that is computed with.
    fn rounded(&self, ordinal: usize) -> M {
        let parameter = &self.layout.parameters[ordinal];
        let memory = if self.format == Format::F32 { Memory::Weights } else { Memory::Half };
        let size = self.format.size();
        (self.place)(Span { memory, at: size * parameter.offset, bytes: size * parameter.len })
    }

    /// The gradient of a layer's parameter, and whether to add to what it holds.
    fn gradient(&self, places: &NodePlan, index: usize) -> (M, bool) {
        let adds = self.adds || places.written[index];
        (self.parameter(Memory::Gradients, places.ordinals[index]), adds)
    }
}
