//! Convolution as a cuDNN graph.

use crate::cublaslt::Arithmetic;
use crate::cudnn::{BFLOAT16, Cudnn, FLOAT, HALF, Place, TensorLayout, Value};
use crate::error::Error;
use crate::graph::{Builder, Graph};
use crate::kernels::Element;

const CONVOLUTION_DESCRIPTOR: i32 = 1;

const COMP_TYPE: i32 = 100;
const CONV_MODE: i32 = 101;
const DILATIONS: i32 = 102;
const FILTER_STRIDES: i32 = 103;
const POST_PADDINGS: i32 = 104;
const PRE_PADDINGS: i32 = 105;
const SPATIAL_DIMS: i32 = 106;

const CROSS_CORRELATION: i32 = 1;

/// Which of images, filters and results is computed from the other two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    Forward,
    /// The gradient of the images.
    Images,
    /// The gradient of the filters.
    Filters,
}

impl Direction {
    /// Index of the computed tensor among images, filters and results.
    pub fn written(self) -> usize {
        match self {
            Direction::Forward => 2,
            Direction::Images => 0,
            Direction::Filters => 1,
        }
    }

    /// The operation kind, its first attribute (the scaling factor of the result), and the
    /// attributes of images, filters and results.
    fn numbers(self) -> (i32, i32, [i32; 3]) {
        match self {
            Direction::Forward => (10, 700, [704, 703, 705]),
            Direction::Images => (12, 706, [710, 709, 711]),
            Direction::Filters => (11, 712, [716, 715, 717]),
        }
    }
}

/// A convolution of NHWC images with square filters, `[filters][window][window][channels]`,
/// contiguous. Accumulates in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution {
    pub direction: Direction,
    /// Element type of all three tensors.
    pub element: Element,
    /// Whether to add to the result's existing contents.
    pub adds: bool,
    pub arithmetic: Arithmetic,
    pub images: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
    /// Pixel pitch of an image in elements. The padding is neither read nor written.
    pub pitch: usize,
    pub filters: usize,
    /// Pixel pitch of a result.
    pub result_pitch: usize,
    /// Filter height and width.
    pub window: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Convolution {
    /// Height and width of a result; `None` if the filter is larger than the image.
    pub fn result(&self) -> Option<[usize; 2]> {
        let side =
            |side: usize| Some((side + 2 * self.padding).checked_sub(self.window)?.checked_div(self.stride)? + 1);
        Some([side(self.height)?, side(self.width)?])
    }

    /// Images, filters and results.
    pub(crate) fn tensors(&self) -> Result<[TensorLayout; 3], Error> {
        let Convolution { images, height, width, channels, pitch, filters, result_pitch, window, .. } = *self;
        let refused =
            || Error::refused("convolution", format!("a filter larger than the image, or sizes of 0: {self:?}"));
        let [result_height, result_width] = self.result().ok_or_else(refused)?;
        if [images, channels, filters, window].contains(&0) || pitch < channels || result_pitch < filters {
            return Err(refused());
        }
        let data_type = match self.element {
            Element::F32 => FLOAT,
            Element::F16 => HALF,
            Element::Bf16 => BFLOAT16,
        };
        let tensor = |id, dimensions: [usize; 4], pitch: usize| {
            let [_, _, height, width] = dimensions;
            let strides = [height * width * pitch, 1, width * pitch, pitch];
            let [dimensions, strides] = [dimensions, strides].map(|four| four.map(|number| number as i64));
            TensorLayout { id, data_type, dimensions, strides, place: Place::Device }
        };
        Ok([
            tensor(1, [images, channels, height, width], pitch),
            tensor(2, [filters, channels, window, window], channels),
            tensor(3, [images, filters, result_height, result_width], result_pitch),
        ])
    }

    /// Whether f32 operands are multiplied without rounding.
    pub(crate) fn is_exact(&self) -> bool {
        self.element == Element::F32 && self.arithmetic == Arithmetic::Ieee
    }

    /// A single-operation graph.
    pub(crate) fn graph(&self, cudnn: &Cudnn) -> Result<Graph, Error> {
        let mut builder = Builder::new(cudnn);
        let tensors = self.tensors()?;
        let tensors = [builder.tensor(&tensors[0])?, builder.tensor(&tensors[1])?, builder.tensor(&tensors[2])?];
        let both = |number: usize| [number as i64; 2];
        let (once, strides, padding) = (both(1), both(self.stride), both(self.padding));
        let window = [
            (COMP_TYPE, Value::DataType(FLOAT)),
            (CONV_MODE, Value::ConvolutionMode(CROSS_CORRELATION)),
            (SPATIAL_DIMS, Value::Integers(&[2])),
            (DILATIONS, Value::Integers(&once)),
            (FILTER_STRIDES, Value::Integers(&strides)),
            (PRE_PADDINGS, Value::Integers(&padding)),
            (POST_PADDINGS, Value::Integers(&padding)),
        ];
        let window = [builder.part(CONVOLUTION_DESCRIPTOR, "convolution", &window)?];
        let (kind, first, attributes) = self.direction.numbers();
        let mut operation = vec![
            (first, Value::Float(1.0)),
            (first + 1, Value::Float(if self.adds { 1.0 } else { 0.0 })),
            (first + 2, Value::Descriptors(&window)),
        ];
        operation.extend(
            attributes.into_iter().zip(tensors.chunks(1)).map(|(name, tensor)| (name, Value::Descriptors(tensor))),
        );
        builder.operation(kind, "operation", &operation)?;
        builder.graph()
    }
}

#[cfg(test)]
pub(crate) mod tests;
