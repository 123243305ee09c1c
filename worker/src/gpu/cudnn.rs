//! What a library computes as a whole, and what it is asked before the first step.

use super::format::{self, element, pitch};
use super::refused::Reason;
use crate::cpu::attention::AttentionShape;
use crate::cpu::{ConvolutionShape, Format};
use crate::nn::{Form, Graph};
use switchyard_cuda::attention;
use switchyard_cuda::convolution::{self, Direction};
use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_cuda::operation::Operation;

/// One direction of a convolution, whatever its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvolutionKind {
    pub shape: ConvolutionShape,
    pub format: Format,
    pub direction: Direction,
    /// To what the result holds.
    pub adds: bool,
}

/// One direction of attention, whatever its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionKind {
    pub shape: AttentionShape,
    pub format: Format,
    pub backward: bool,
}

/// What cuDNN is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CudnnKind {
    Convolution(ConvolutionKind),
    Attention(AttentionKind),
}

impl AttentionKind {
    /// In the words of cuDNN.
    ///
    /// # Errors
    /// Sizes that it cannot have.
    pub(super) fn described(&self) -> Result<attention::Attention, Reason> {
        Ok(attention::Attention { shape: format::attention(&self.shape, self.format)?, backward: self.backward })
    }
}

impl CudnnKind {
    /// In the words of cuDNN. `arithmetic`: of 32-bit numbers. `None` for sizes that it cannot have.
    pub fn described(&self, arithmetic: Arithmetic) -> Option<Operation> {
        match self {
            CudnnKind::Convolution(kind) => Some(Operation::Convolution(kind.described(arithmetic))),
            CudnnKind::Attention(kind) => kind.described().ok().map(Operation::Attention),
        }
    }

    fn in_format(self, format: Format) -> CudnnKind {
        match self {
            CudnnKind::Convolution(kind) => CudnnKind::Convolution(ConvolutionKind { format, ..kind }),
            CudnnKind::Attention(kind) => CudnnKind::Attention(AttentionKind { format, ..kind }),
        }
    }
}

impl ConvolutionKind {
    fn described(&self, arithmetic: Arithmetic) -> convolution::Convolution {
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

/// What cuDNN computes on a device, with the bytes of memory that each needs beside its tensors. Other convolutions are products of patches, other
/// attention is computed by our kernels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudnnKinds(Vec<(CudnnKind, usize)>);

impl CudnnKinds {
    /// There is no cuDNN.
    pub const fn none() -> CudnnKinds {
        CudnnKinds(Vec::new())
    }

    pub fn new(accepted: Vec<(CudnnKind, usize)>) -> CudnnKinds {
        CudnnKinds(accepted)
    }

    /// Those of a graph, as if cuDNN computed all of them without more memory.
    pub fn all(graph: &Graph, deterministic: bool) -> CudnnKinds {
        CudnnKinds(CudnnKinds::of(graph, deterministic).into_iter().map(|kind| (kind, 0)).collect())
    }

    /// The same for tensors in another format.
    pub fn in_format(&self, format: Format) -> CudnnKinds {
        // It has no attention in 32 bits.
        let has = |kind: &CudnnKind| format != Format::F32 || matches!(kind, CudnnKind::Convolution(_));
        let kinds = self.0.iter().filter(|(kind, _)| has(kind));
        CudnnKinds(kinds.map(|(kind, bytes)| (kind.in_format(format), *bytes)).collect())
    }

    /// What cuDNN may be asked for a graph, each kind once. Convolutions that are products of the pixels as they are, are not among it, nor is
    /// attention in 32 bits. `deterministic`: nor is what has other bits in each run.
    pub fn of(graph: &Graph, deterministic: bool) -> Vec<CudnnKind> {
        let format = graph.format();
        let mut kinds = Vec::new();
        for node in &graph.nodes {
            let new: Vec<CudnnKind> = match node.layer.form() {
                Form::Convolution(shape) if !shape.is_product() => {
                    let of = |(direction, adds)| ConvolutionKind { shape, format, direction, adds };
                    WAYS.map(of).map(CudnnKind::Convolution).to_vec()
                }
                Form::Attention(shape) if format != Format::F32 => {
                    let of = |backward| CudnnKind::Attention(AttentionKind { shape, format, backward });
                    [false, true].map(of).to_vec()
                }
                _ => continue,
            };
            let may = |kind: &CudnnKind| {
                let operation = kind.described(Arithmetic::Ieee);
                operation.is_some_and(|operation| !deterministic || operation.is_deterministic())
            };
            let new: Vec<CudnnKind> = new.into_iter().filter(|kind| may(kind) && !kinds.contains(kind)).collect();
            kinds.extend(new);
        }
        kinds
    }

    /// Bytes of workspace of one that cuDNN computes.
    pub(super) fn workspace(&self, kind: &CudnnKind) -> Option<usize> {
        self.0.iter().find(|(known, _)| known == kind).map(|(_, bytes)| *bytes)
    }

    /// Whether cuDNN computes a direction of a convolution, written and added.
    pub(super) fn have(&self, shape: &ConvolutionShape, format: Format, direction: Direction) -> bool {
        let mut ways = WAYS.into_iter().filter(|(of, _)| *of == direction);
        ways.all(|(direction, adds)| {
            let kind = ConvolutionKind { shape: *shape, format, direction, adds };
            self.workspace(&CudnnKind::Convolution(kind)).is_some()
        })
    }
}
