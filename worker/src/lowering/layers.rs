//! Lowers each form to launches: its memory needs, and its forward and backward ops.

mod attention;
mod convolution;
mod embedding;
mod fp8;
pub(super) mod input;
mod loss;
mod norm;
mod pooling;
mod product;
mod rows;

use super::format::{element, number, pitch, size};
use super::launch::{Memory, Span, Work};
use super::refused::Reason;
use super::target::{Computed, Target};
use crate::cpu::Format;
use crate::nn::arena::Region;
use crate::nn::layers::Activation;
use crate::nn::plan::{Mode, NodePlan, Pass};
use crate::nn::{Flow, Form, INPUTS, Layout, Needs};
use switchyard_cuda::cublaslt::{Matrix, Product};
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda::kernels::gather::Gather;
use switchyard_cuda::kernels::windows::Windows;
use switchyard_cuda::kernels::{self, Rows};

/// Whether a layer adds to the gradient of its input; `None` if the gradient is not needed.
fn adds(mode: Mode) -> Option<bool> {
    match mode {
        Mode::Write => Some(false),
        Mode::Add => Some(true),
        Mode::None | Mode::InPlace | Mode::OverInput => None,
    }
}

/// A form's memory needs on a GPU.
///
/// # Errors
/// No kernel computes the form.
pub(super) fn needs(form: &Form, target: &Target, format: Format) -> Result<Needs, Reason> {
    let missing = |what: &str| Err(Reason::Missing(what.to_owned()));
    let first = [true, false, false];
    match form {
        Form::Features(features) => input::features(features, format).map(|_| Needs::default()),
        // The reader's bytes or floats need no memory of their own.
        Form::Pixels(pixels) => input::pixels(pixels, format, false).map(|_| Needs::default()),
        Form::Embedding(tables) => Ok(Needs {
            backward_scratch: embedding::kernels_of(tables, format)?.partial_bytes() / FLOAT,
            ..Needs::default()
        }),
        Form::Product(product) => {
            let after = product::activation(product, format)?.filter(|_| product.bias);
            let partial = after.map_or(0, |after| after.partial_bytes(target.blocks) / FLOAT);
            let [scratch, backward_scratch] = fp8::scratch(product, target, format)?;
            Ok(Needs {
                inputs: first,
                // GELU's gradient needs its input; for the others the output is enough.
                output: matches!(product.activation, Some(Activation::Relu | Activation::Tanh)),
                kept: if product.activation == Some(Activation::Gelu) {
                    product.rows * pitch(product.outputs, format)
                } else {
                    0
                },
                scratch,
                backward_scratch: backward_scratch.max(partial),
                flow: [Flow::Accumulate, Flow::InPlace, Flow::Write],
                ..Needs::default()
            })
        }
        Form::Attention(shape) => {
            let saved = attention::kernels_of(shape, format)?.saved_bytes() / FLOAT;
            let backward_scratch = attention::backward_scratch(shape, target, format)?;
            Ok(Needs { inputs: first, output: true, saved, backward_scratch, ..Needs::default() })
        }
        Form::Rows(selected) => {
            rows::kernels_of(selected, format)?;
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
        Form::BatchNorm(norm) => {
            let call = norm::batch_norm(norm, format)?;
            let sums = call.partial_bytes(target.blocks);
            Ok(Needs {
                inputs: first,
                output: norm.relu,
                saved: call.saved_bytes() / FLOAT,
                scratch: sums / FLOAT,
                backward_scratch: (sums + call.factors_bytes()) / FLOAT,
                flow: [Flow::Accumulate, Flow::InPlace, Flow::Write],
                always: first,
                ..Needs::default()
            })
        }
        Form::Convolution(shape) => {
            let backward_scratch = convolution::backward_scratch(shape, format);
            Ok(Needs { inputs: first, backward_scratch, flow: [Flow::Accumulate; INPUTS], ..Needs::default() })
        }
        Form::MaxPool(window) => Ok(Needs {
            saved: pooling::max_pool(window, format)?.places_bytes() / FLOAT,
            flow: [Flow::Accumulate; INPUTS],
            ..Needs::default()
        }),
        Form::AveragePool(pool) => {
            pooling::average_pool(pool, format)?;
            Ok(Needs { flow: [Flow::Accumulate; INPUTS], ..Needs::default() })
        }
        // One kernel computes loss and gradient, in backward.
        Form::CrossEntropy(_) => Ok(Needs { flow: [Flow::OverInput; INPUTS], ..Needs::default() }),
        Form::Opaque => missing("CPU code"),
    }
}

/// Whether a linear layer is computed in FP8; `None` for other layers.
pub(super) fn in_fp8(form: &Form, target: &Target, format: Format) -> Option<bool> {
    match form {
        Form::Product(product) => Some(fp8::is_eligible(product, target, format)),
        _ => None,
    }
}

/// Bytes per f32.
const FLOAT: usize = size_of::<f32>();

fn rows(width: usize, format: Format) -> Result<Rows, Reason> {
    Ok(Rows { element: element(format), width: size(width)?, pitch: size(pitch(width, format))? })
}

/// Windows over images of these sizes.
fn windows([height, width]: [usize; 2], kernel: usize, stride: usize, padding: usize) -> Result<Windows, Reason> {
    let [height, width, kernel] = [size(height)?, size(width)?, size(kernel)?];
    Ok(Windows { height, width, kernel, stride: size(stride)?, padding: size(padding)? })
}

/// Row width of each input and of the output, for a form that `needs` accepts.
pub(super) fn widths(form: &Form) -> ([usize; 2], usize) {
    match form {
        Form::Features(features) => ([0, 0], features.width),
        Form::Pixels(pixels) => ([0, 0], pixels.width),
        Form::Embedding(tables) => ([0, 0], tables.width),
        Form::Product(product) => ([product.inputs, product.outputs], product.outputs),
        Form::Attention(shape) => ([3 * shape.hidden(), 0], shape.hidden()),
        Form::Rows(selected) => ([selected.width, 0], selected.width),
        Form::LayerNorm(norm) => ([norm.width, 0], norm.width),
        Form::BatchNorm(norm) => ([norm.channels; 2], norm.channels),
        Form::Convolution(shape) => ([shape.channels, 0], shape.outputs),
        Form::MaxPool(window) => ([window.channels, 0], window.channels),
        Form::AveragePool(pool) => ([pool.channels, 0], pool.channels),
        Form::CrossEntropy(loss) => ([loss.classes, 0], 0),
        Form::Opaque => ([0, 0], 0),
    }
}

/// Lowers layers one after another.
pub(super) struct Lowering<'a, M> {
    pub target: &'a Target,
    pub format: Format,
    pub layout: &'a Layout,
    pub place: &'a dyn Fn(Span) -> M,
    /// Whether to add to the gradients of earlier micro-batches.
    pub adds: bool,
    /// Whether to lower forward only, for evaluation.
    pub evaluates: bool,
    /// Whether the reader delivers normalised f32 images.
    pub is_normalised: bool,
    /// Ops of the current layer.
    pub works: Vec<Work<M>>,
}

impl<M: kernels::Memory> Lowering<'_, M> {
    pub fn forward(&mut self, computed: &Computed, regions: &NodePlan) -> Result<(), Reason> {
        match &computed.form {
            Form::Features(features) => self.features(features, regions)?,
            Form::Pixels(pixels) => self.pixels(pixels, computed, regions)?,
            Form::Embedding(tables) => self.embedding(tables, regions)?,
            Form::Product(product) => self.product(product, regions)?,
            Form::Attention(shape) => self.attention(shape, regions)?,
            Form::Rows(selected) => self.rows(selected, computed, regions)?,
            Form::LayerNorm(norm) => self.layer_norm(norm, regions)?,
            Form::BatchNorm(norm) => self.batch_norm(norm, regions)?,
            Form::Convolution(shape) => self.convolution(shape, regions),
            Form::MaxPool(window) => self.max_pool(window, regions)?,
            Form::AveragePool(pool) => self.average_pool(pool, regions)?,
            // In training, backward computes the loss together with its gradient.
            Form::CrossEntropy(loss) if self.evaluates => self.cross_entropy(loss, computed, regions)?,
            // See `needs`.
            _ => {}
        }
        Ok(())
    }

    pub fn backward(&mut self, computed: &Computed, regions: &NodePlan) -> Result<(), Reason> {
        match &computed.form {
            Form::Embedding(tables) => self.embedding_backward(tables, regions)?,
            Form::Product(product) => self.product_backward(product, regions)?,
            Form::Attention(shape) => self.attention_backward(shape, regions)?,
            Form::Rows(selected) => self.rows_backward(selected, computed, regions)?,
            Form::LayerNorm(norm) => self.layer_norm_backward(norm, regions)?,
            Form::BatchNorm(norm) => self.batch_norm_backward(norm, regions)?,
            Form::Convolution(shape) => self.convolution_backward(shape, regions)?,
            Form::MaxPool(window) => self.max_pool_backward(window, regions)?,
            Form::AveragePool(pool) => self.average_pool_backward(pool, regions)?,
            Form::CrossEntropy(loss) => self.cross_entropy(loss, computed, regions)?,
            _ => {}
        }
        regions.passes.iter().try_for_each(|pass| self.pass(widths(&computed.form).0[pass.input], pass))
    }

    /// `width`: row width of the gradient.
    fn pass(&mut self, width: usize, pass: &Pass<Region>) -> Result<(), Reason> {
        let count = pass.to.len / pitch(width, self.format);
        if !pass.add {
            let [from, to] = [&pass.from, &pass.to].map(|place| self.matrix(place, count, width));
            self.works.push(Work::Copy { from, to });
            return Ok(());
        }
        let (blocks, from, to) = (self.target.blocks, self.arena(&pass.from), self.arena(&pass.to));
        let element = element(self.format);
        // If rows are contiguous, one program serves every width.
        let call = if width == pitch(width, self.format) {
            Elementwise { from: element, to: element }.sum(blocks, size(pass.to.len)?, [to, from], to)?
        } else {
            Gather::new(rows(width, self.format)?, size(count)?, size(count)?)?.add(blocks, from, to)?
        };
        self.works.push(Work::Kernel(call));
        Ok(())
    }

    /// A range of f32 elements.
    fn floats(&self, memory: Memory, from: usize, len: usize) -> M {
        (self.place)(Span { memory, at: FLOAT * from, bytes: FLOAT * len })
    }

    fn arena(&self, region: &Region) -> M {
        (self.place)(Span { memory: Memory::Arena, at: region.offset, bytes: region.bytes() })
    }

    /// A tensor as a matrix.
    fn matrix(&self, region: &Region, rows: usize, columns: usize) -> Matrix<M> {
        let (pitch, format) = (pitch(columns, region.format), region.format);
        let memory = self.arena(&Region { len: rows * pitch, ..*region });
        Matrix { memory, rows, columns, pitch, format: number(format), is_transposed: false }
    }

    /// A GEMM without an epilogue.
    fn gemm(&self, left: Matrix<M>, right: Matrix<M>, result: Matrix<M>, addend: Option<Matrix<M>>) -> Product<M> {
        Product { left, right, result, addend, epilogue: None, arithmetic: self.target.arithmetic, scales: None }
    }

    /// A layer's weight matrix, its first parameter, in the compute format.
    fn weight(&self, rows: usize, columns: usize, regions: &NodePlan) -> Matrix<M> {
        let memory = self.rounded(regions.ordinals[0]);
        Matrix { memory, rows, columns, pitch: columns, format: number(self.format), is_transposed: false }
    }

    /// A parameter or its gradient, in f32.
    fn parameter(&self, memory: Memory, ordinal: usize) -> M {
        let parameter = &self.layout.parameters[ordinal];
        self.floats(memory, parameter.offset, parameter.len)
    }

    /// A parameter in the compute format.
    fn rounded(&self, ordinal: usize) -> M {
        let parameter = &self.layout.parameters[ordinal];
        let memory = if self.format == Format::F32 { Memory::Weights } else { Memory::Half };
        let size = self.format.size();
        (self.place)(Span { memory, at: size * parameter.offset, bytes: size * parameter.len })
    }

    /// The gradient of a layer's parameter, and whether to add to its contents.
    fn gradient(&self, regions: &NodePlan, index: usize) -> (M, bool) {
        let adds = self.adds || regions.written[index];
        (self.parameter(Memory::Gradients, regions.ordinals[index]), adds)
    }
}
