//! Convolutions that a library computes as a whole, and what it is asked before the first step.

use super::format::{element, pitch};
use crate::cpu::{ConvolutionShape, Format};
use crate::nn::{Form, Graph};
use switchyard_cuda::convolution::{self, Direction};
use switchyard_cuda::cublaslt::Arithmetic;

/// One direction of a convolution, whatever its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvolutionKind {
    pub shape: ConvolutionShape,
    pub format: Format,
    pub direction: Direction,
    /// To what the result holds.
    pub adds: bool,
}

impl ConvolutionKind {
    /// In the words of cuDNN. `arithmetic`: of 32-bit numbers.
    pub fn described(&self, arithmetic: Arithmetic) -> convolution::Convolution {
        let ConvolutionShape { batch, height, width, channels, outputs, kernel, stride, padding } = self.shape;
        convolution::Convolution {
            direction: self.direction,
            element: element(self.format),
            adds: self.adds,
            arithmetic,
            images: batch,
            height,
            width,
            channels,
            pitch: pitch(channels, self.format),
            filters: outputs,
            result_pitch: pitch(outputs, self.format),
            window: kernel,
            stride,
            padding,
        }
    }
}

/// What is computed for a convolution. The gradient of images is written or added; that of filters is written to scratch memory.
const WAYS: [(Direction, bool); 4] =
    [(Direction::Forward, false), (Direction::Filters, false), (Direction::Images, false), (Direction::Images, true)];

/// Those that cuDNN computes on a device, with the bytes of memory that each needs beside its tensors. The others are products of patches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Convolutions(Vec<(ConvolutionKind, usize)>);

impl Convolutions {
    /// All are products of patches.
    pub const fn none() -> Convolutions {
        Convolutions(Vec::new())
    }

    pub fn new(accepted: Vec<(ConvolutionKind, usize)>) -> Convolutions {
        Convolutions(accepted)
    }

    /// Those of a graph, as if cuDNN computed all of them without more memory.
    pub fn all(graph: &Graph) -> Convolutions {
        Convolutions(Convolutions::of(graph).into_iter().map(|kind| (kind, 0)).collect())
    }

    /// The same for tensors in another format.
    pub fn in_format(&self, format: Format) -> Convolutions {
        let of = |(kind, bytes): &(ConvolutionKind, usize)| (ConvolutionKind { format, ..*kind }, *bytes);
        Convolutions(self.0.iter().map(of).collect())
    }

    /// What cuDNN may be asked for a graph, each kind once. Those that are products of the pixels as they are, are not among it.
    pub fn of(graph: &Graph) -> Vec<ConvolutionKind> {
        let mut kinds = Vec::new();
        for node in &graph.nodes {
            let Form::Convolution(shape) = node.layer.form() else { continue };
            let of = |(direction, adds)| ConvolutionKind { shape, format: graph.format(), direction, adds };
            let new = WAYS.map(of).into_iter().filter(|_| !shape.is_product());
            let new: Vec<ConvolutionKind> = new.filter(|kind| !kinds.contains(kind)).collect();
            kinds.extend(new);
        }
        kinds
    }

    /// Bytes of workspace of one that cuDNN computes.
    pub(super) fn workspace(&self, kind: &ConvolutionKind) -> Option<usize> {
        self.0.iter().find(|(known, _)| known == kind).map(|(_, bytes)| *bytes)
    }

    /// Whether cuDNN computes a direction, written and added.
    pub(super) fn have(&self, shape: &ConvolutionShape, format: Format, direction: Direction) -> bool {
        let mut ways = WAYS.into_iter().filter(|(of, _)| *of == direction);
        ways.all(|(direction, adds)| {
            self.workspace(&ConvolutionKind { shape: *shape, format, direction, adds }).is_some()
        })
    }
}
