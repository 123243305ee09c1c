//! Layers as data: the description of an operation that non-CPU devices read instead of code.

use super::layers::{
    Activation, AveragePool, ChannelNorm, Features, Loss, Pixels, Product, RowNorm, Rows, Tables, Target,
};
use crate::cpu::ConvolutionShape;
use crate::cpu::attention::AttentionShape;
use crate::cpu::ops::Window;
use std::fmt;

/// A layer's operation. Every device that supports a form computes the same as the CPU layer, up to
/// rounding.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Form {
    /// Arbitrary code, which runs on CPUs only.
    #[default]
    Opaque,
    Pixels(Pixels),
    Features(Features),
    Embedding(Tables),
    Product(Product),
    LayerNorm(RowNorm),
    BatchNorm(ChannelNorm),
    Attention(AttentionShape),
    Convolution(ConvolutionShape),
    MaxPool(Window),
    AveragePool(AveragePool),
    Rows(Rows),
    CrossEntropy(Loss),
}

/// Element counts of a form's tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths {
    /// Input tensors, in the layer's order.
    pub inputs: Vec<usize>,
    /// Parameters, in the layer's order.
    pub parameters: Vec<usize>,
    /// 0 for a loss.
    pub output: usize,
}

impl Form {
    /// The lengths implied by the form; `None` for [`Form::Opaque`].
    pub fn lengths(&self) -> Option<Lengths> {
        let lengths = |inputs: &[usize], parameters: &[usize], output: usize| {
            Some(Lengths { inputs: inputs.to_vec(), parameters: parameters.to_vec(), output })
        };
        // The residual has the length of the output.
        let and = |input: usize, output: usize, residual: bool| {
            let mut inputs = vec![input];
            inputs.extend(residual.then_some(output));
            inputs
        };
        match self {
            Form::Opaque => None,
            Form::Pixels(pixels) => lengths(&[], &[], pixels.count * pixels.channels.len()),
            Form::Features(features) => lengths(&[], &[], features.rows * features.width),
            Form::Embedding(tables) => {
                let mut rows = vec![tables.context];
                rows.extend(tables.segments);
                rows.push(tables.vocabulary);
                let parameters: Vec<usize> = rows.iter().map(|rows| rows * tables.width).collect();
                lengths(&[], &parameters, tables.rows * tables.width)
            }
            Form::Product(product) => {
                let mut parameters = vec![product.outputs * product.inputs];
                parameters.extend(product.bias.then_some(product.outputs));
                let output = product.rows * product.outputs;
                lengths(&and(product.rows * product.inputs, output, product.residual), &parameters, output)
            }
            Form::LayerNorm(norm) => {
                let len = norm.rows * norm.width;
                lengths(&[len], &[norm.width; 2], len)
            }
            Form::BatchNorm(norm) => {
                let len = norm.rows * norm.channels;
                lengths(&and(len, len, norm.residual), &[norm.channels; 2], len)
            }
            Form::Attention(shape) => {
                let len = shape.batch * shape.context * shape.hidden();
                lengths(&[3 * len], &[], len)
            }
            Form::Convolution(shape) => {
                let input = shape.batch * shape.height * shape.width * shape.channels;
                let weights = shape.outputs * shape.kernel * shape.kernel * shape.channels;
                let output = shape.batch * shape.output_height() * shape.output_width() * shape.outputs;
                lengths(&[input], &[weights], output)
            }
            Form::MaxPool(window) => {
                let (rows, columns) = window.output();
                let each = window.batch * window.channels;
                lengths(&[each * window.height * window.width], &[], each * rows * columns)
            }
            Form::AveragePool(pool) => {
                let output = pool.batch * pool.channels;
                lengths(&[output * pool.pixels], &[], output)
            }
            Form::Rows(rows) => lengths(&[rows.of * rows.width], &[], rows.count * rows.width),
            Form::CrossEntropy(loss) => lengths(&[loss.rows * loss.classes], &[], 0),
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let with = |is: bool, word: &'static str| if is { word } else { "" };
        match self {
            Form::Opaque => write!(f, "CPU code"),
            Form::Pixels(Pixels { count, channels, .. }) => {
                write!(f, "pixels {count} x {}, (x / 255 - mean) / deviation:", channels.len())?;
                channels.iter().try_for_each(|(mean, deviation)| write!(f, " {mean} {deviation}"))
            }
            Form::Features(Features { rows, width }) => write!(f, "features {rows} x {width}"),
            Form::Embedding(Tables { rows, context, vocabulary, width, segments }) => {
                write!(f, "embedding {rows} x {width}, {vocabulary} tokens, {context} positions")?;
                segments.iter().try_for_each(|segments| write!(f, ", {segments} segments"))
            }
            Form::Product(Product { rows, inputs, outputs, bias, activation, residual }) => {
                let activation = match activation {
                    None => "",
                    Some(Activation::Relu) => ", ReLU",
                    Some(Activation::Gelu) => ", GELU",
                    Some(Activation::Tanh) => ", tanh",
                };
                let (bias, residual) = (with(*bias, ", bias"), with(*residual, ", residual"));
                write!(f, "product {rows} x {inputs} -> {rows} x {outputs}{bias}{activation}{residual}")
            }
            Form::LayerNorm(RowNorm { rows, width }) => write!(f, "layer norm {rows} x {width}"),
            Form::BatchNorm(ChannelNorm { rows, channels, residual, relu }) => {
                let (residual, relu) = (with(*residual, ", residual"), with(*relu, ", ReLU"));
                write!(f, "batch norm {rows} x {channels}{residual}{relu}")
            }
            Form::Attention(AttentionShape { batch, context, heads, head_size, causal }) => {
                let causal = with(*causal, ", causal");
                write!(f, "attention {batch} x {context} x {}, {heads} heads{causal}", heads * head_size)
            }
            Form::Convolution(shape) => {
                let ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding } = shape;
                let (rows, columns) = (shape.output_height(), shape.output_width());
                write!(f, "convolution {batch} x {height} x {width} x {channels}")?;
                write!(f, " -> {batch} x {rows} x {columns} x {outputs}")?;
                write!(f, ", kernel {kernel}, stride {stride}, padding {padding}")
            }
            Form::MaxPool(window) => {
                let Window { batch, height, width, channels, kernel, stride, padding } = window;
                let (rows, columns) = window.output();
                write!(f, "max pool {batch} x {height} x {width} x {channels}")?;
                write!(f, " -> {batch} x {rows} x {columns} x {channels}")?;
                write!(f, ", kernel {kernel}, stride {stride}, padding {padding}")
            }
            Form::AveragePool(AveragePool { batch, pixels, channels }) => {
                write!(f, "average pool {batch} x {pixels} x {channels} -> {batch} x {channels}")
            }
            Form::Rows(Rows { count, of, width, fixed }) => {
                let which = if fixed.is_empty() { "named by each batch" } else { "the same in each batch" };
                write!(f, "rows {of} x {width} -> {count} x {width}, {which}")
            }
            Form::CrossEntropy(Loss { rows, classes, smoothing, options }) => {
                write!(f, "cross entropy {rows} x {classes}{}", with(options.count, ", counts"))?;
                write!(f, "{}", with(options.target == Target::NextSentence, ", next sentence"))?;
                if *smoothing > 0.0 { write!(f, ", smoothing {smoothing}") } else { Ok(()) }
            }
        }
    }
}
