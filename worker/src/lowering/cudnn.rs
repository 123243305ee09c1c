//! cuDNN operations of a network, which are planned before the first step.

use super::format::{self, VECTOR, element, pitch};
use super::refused::Reason;
use crate::cpu::attention::AttentionShape;
use crate::cpu::{ConvolutionShape, Format};
use crate::nn::{Form, Graph};
use switchyard_cuda::attention::Attention;
use switchyard_cuda::convolution::{Convolution, Direction};
use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_cuda::operation::Operation;

/// One direction of a convolution. `adds`: whether the result is added to the existing contents.
/// `arithmetic` applies to f32.
pub(super) fn convolution(
    shape: &ConvolutionShape,
    (format, arithmetic): (Format, Arithmetic),
    (direction, adds): (Direction, bool),
) -> Convolution {
    let ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding } = *shape;
    Convolution {
        direction,
        element: element(format),
        adds,
        arithmetic,
        images: batch,
        height,
        width,
        channels,
        pitch: pitch(channels, format),
        filters: outputs,
        result_pitch: pitch(outputs, format),
        window: kernel,
        stride,
        padding,
    }
}

/// # Errors
/// The sizes exceed cuDNN's limits.
pub(super) fn attention(shape: &AttentionShape, format: Format, backward: bool) -> Result<Attention, Reason> {
    Ok(Attention { shape: format::attention(shape, format)?, backward })
}

/// The operations of a convolution. The image gradient is written or added; the filter gradient is
/// written to scratch memory.
const DIRECTIONS: [(Direction, bool); 4] =
    [(Direction::Forward, false), (Direction::Filters, false), (Direction::Images, false), (Direction::Images, true)];

/// The operations that a device's cuDNN computes, with their workspace in bytes. Our own kernels
/// compute other attention; convolutions need cuDNN.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudnnKinds(Vec<(Operation, usize)>);

impl CudnnKinds {
    /// Without cuDNN.
    pub const fn none() -> CudnnKinds {
        CudnnKinds(Vec::new())
    }

    pub fn new(accepted: Vec<(Operation, usize)>) -> CudnnKinds {
        CudnnKinds(accepted)
    }

    /// All operations of a graph, as if cuDNN supported them. Convolutions then need no workspace.
    pub fn all(graph: &Graph) -> CudnnKinds {
        let workspace = |operation: &Operation| match operation {
            Operation::Attention(attention) => attention.workspace_bytes(),
            Operation::Convolution(_) => 0,
        };
        let operations = CudnnKinds::of(graph, Arithmetic::Ieee).into_iter();
        CudnnKinds(operations.map(|operation| (operation, workspace(&operation))).collect())
    }

    /// The same convolutions in f32. cuDNN has no f32 attention.
    pub fn in_f32(&self) -> CudnnKinds {
        let wide = |(operation, bytes): &(Operation, usize)| match operation {
            Operation::Convolution(of) => {
                let element = element(Format::F32);
                let [pitch, result_pitch] =
                    [of.channels, of.filters].map(|width| width.next_multiple_of(VECTOR / element.bytes()));
                Some((Operation::Convolution(Convolution { element, pitch, result_pitch, ..*of }), *bytes))
            }
            Operation::Attention(_) => None,
        };
        CudnnKinds(self.0.iter().filter_map(wide).collect())
    }

    /// The cuDNN operations of a graph, each once. Excludes convolutions that are plain GEMMs of
    /// the pixels, f32 attention, and sizes beyond cuDNN's limits. `arithmetic` applies to f32.
    pub fn of(graph: &Graph, arithmetic: Arithmetic) -> Vec<Operation> {
        let format = graph.format();
        let mut operations = Vec::new();
        for node in &graph.nodes {
            let new: Vec<Operation> = match node.layer.form() {
                Form::Convolution(shape) if !shape.is_product() => {
                    let of = |direction| Operation::Convolution(convolution(&shape, (format, arithmetic), direction));
                    DIRECTIONS.map(of).to_vec()
                }
                Form::Attention(shape) if format != Format::F32 => {
                    let of = |backward| attention(&shape, format, backward).ok().map(Operation::Attention);
                    [false, true].into_iter().filter_map(of).collect()
                }
                _ => continue,
            };
            let new: Vec<Operation> = new.into_iter().filter(|new| !operations.contains(new)).collect();
            operations.extend(new);
        }
        operations
    }

    /// Workspace bytes of a supported operation.
    pub(super) fn workspace(&self, operation: &Operation) -> Option<usize> {
        self.0.iter().find(|(known, _)| known == operation).map(|(_, bytes)| *bytes)
    }
}
