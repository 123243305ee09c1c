//! Input samples as tensors.

use crate::cpu::ops::{self, PixelTable};
use crate::cpu::values::with_format;
use crate::cpu::{Cpu, Format, bf16, f16};
use crate::data::Kind;
use crate::nn::{Backward, Form, Forward, Graph, Layer, ModelError, Needs, Tensor};

/// Images as `[batch, height, width, channels]` (`flat`: `[batch, height * width * channels]`),
/// normalised according to [`Graph::normalisation`]. Floats that the reader has already normalised
/// are used as they are.
///
/// # Errors
/// The data are not images, or the numbers of means and channels differ.
pub fn pixels(graph: &mut Graph, name: &str, flat: bool) -> Result<Tensor, ModelError> {
    let Kind::Images { height, width, channels, .. } = *graph.kind() else {
        return Err(ModelError::Data { expected: "images", got: graph.kind().words() });
    };
    let (mean, deviation) = graph.normalisation();
    let of = |numbers: &[f64], channel: usize| match numbers {
        [one] => Some(*one),
        all => all.get(channel).copied().filter(|_| all.len() == channels as usize),
    };
    let numbers: Option<Vec<(f32, f32)>> = (0..channels as usize)
        .map(|channel| Some((of(mean, channel)? as f32, of(deviation, channel)? as f32)))
        .collect();
    let Some(numbers) = numbers else {
        return Err(ModelError::Channels { got: mean.len().max(deviation.len()), channels });
    };
    let tables = match graph.format() {
        Format::F32 => Tables::F32(numbers.iter().map(|&(m, d)| ops::pixel_table(m, d)).collect()),
        Format::Bf16 => Tables::Bf16(numbers.iter().map(|&(m, d)| ops::pixel_table(m, d)).collect()),
        Format::F16 => Tables::F16(numbers.iter().map(|&(m, d)| ops::pixel_table(m, d)).collect()),
    };
    let image = [height as usize, width as usize, channels as usize];
    let shape = match flat {
        true => vec![graph.batch(), image.iter().product()],
        false => vec![graph.batch(), image[0], image[1], image[2]],
    };
    let width = if flat { image.iter().product() } else { image[2] };
    let pixels = Pixels { count: graph.batch() * image[0] * image[1], channels: numbers, width };
    graph.add(name, Normalise { pixels, tables }, &[], &[], &[], &shape)
}

/// Features as `[batch, width]`.
///
/// # Errors
/// The data are not features.
pub fn features(graph: &mut Graph, name: &str) -> Result<Tensor, ModelError> {
    let Kind::Features { width, .. } = *graph.kind() else {
        return Err(ModelError::Data { expected: "features", got: graph.kind().words() });
    };
    let features = Features { rows: graph.batch(), width: width as usize };
    graph.add(name, features, &[], &[], &[], &[features.rows, features.width])
}

/// The normalised value of each byte, per channel.
enum Tables {
    F32(Vec<PixelTable<f32>>),
    Bf16(Vec<PixelTable<bf16>>),
    F16(Vec<PixelTable<f16>>),
}

/// Image bytes: `y = (x / 255 - mean) / deviation`. Floats that the reader has already normalised
/// are used as they are.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Pixels {
    /// Pixels of all images in a micro-batch.
    pub count: usize,
    /// Mean and deviation per channel.
    pub channels: Vec<(f32, f32)>,
    /// Elements per output row: the channels of a pixel, or all elements of an image.
    pub width: usize,
}

struct Normalise {
    pixels: Pixels,
    tables: Tables,
}

impl Layer for Normalise {
    fn kind(&self) -> &'static str {
        "Normalise"
    }

    fn form(&self) -> Form {
        Form::Pixels(self.pixels.clone())
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs::default()
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        if cx.batch.pixels.is_empty() {
            return copy(cx);
        }
        let (cpu, pixels) = (&cx.kernels.cpu, &cx.batch.pixels[..]);
        match &self.tables {
            Tables::F32(tables) => ops::normalise(cpu, pixels, tables, cx.output.of()),
            Tables::Bf16(tables) => ops::normalise(cpu, pixels, tables, cx.output.of()),
            Tables::F16(tables) => ops::normalise(cpu, pixels, tables, cx.output.of()),
        }
    }

    fn backward(&mut self, _: &mut Backward<'_>) {}
}

/// Floats from the reader: `[rows, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Features {
    pub rows: usize,
    pub width: usize,
}

impl Layer for Features {
    fn kind(&self) -> &'static str {
        "Features"
    }

    fn form(&self) -> Form {
        Form::Features(*self)
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs::default()
    }

    fn forward(&mut self, cx: &mut Forward<'_>) {
        copy(cx);
    }

    fn backward(&mut self, _: &mut Backward<'_>) {}
}

fn copy(cx: &mut Forward<'_>) {
    with_format!(cx.output.format(), E => {
        ops::convert::<f32, E>(&cx.kernels.cpu, &cx.batch.values, cx.output.of::<E>());
    });
}
