//! cuDNN operations, which are queried before the first step.

use super::format::{self, element, pitch};
use super::refused::Reason;
use crate::cpu::attention::AttentionShape;
use crate::cpu::{ConvolutionShape, Format};
use crate::nn::{Form, Graph};
use switchyard_cuda::attention;
use switchyard_cuda::convolution::{self, Direction};
use switchyard_cuda::cublaslt::Arithmetic;
use switchyard_cuda::operation::Operation;

/// One direction of a convolution, independent of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvolutionKind {
    pub shape: ConvolutionShape,
    pub format: Format,
    pub direction: Direction,
    /// Whether the result is added to the existing contents.
    pub adds: bool,
}

/// One direction of attention, independent of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionKind {
    pub shape: AttentionShape,
    pub format: Format,
    pub backward: bool,
}

/// A cuDNN operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CudnnKind {
    Convolution(ConvolutionKind),
    Attention(AttentionKind),
}

impl AttentionKind {
    /// Converts to the cuDNN description.
    ///
    /// # Errors
    /// The sizes exceed cuDNN's limits.
    pub(super) fn described(&self) -> Result<attention::Attention, Reason> {
        Ok(attention::Attention { shape: format::attention(&self.shape, self.format)?, backward: self.backward })
    }
}

impl CudnnKind {
    /// Converts to a cuDNN description. `arithmetic` applies to f32. `None` if the sizes exceed
    /// cuDNN's limits.
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

/// The operations of a convolution. The image gradient is written or added; the filter gradient is
/// written to scratch memory.
const DIRECTIONS: [(Direction, bool); 4] =
    [(Direction::Forward, false), (Direction::Filters, false), (Direction::Images, false), (Direction::Images, true)];

/// The cuDNN operations that a device supports, with their workspace in bytes. Our own kernels
/// compute other attention; convolutions need cuDNN.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CudnnKinds(Vec<(CudnnKind, usize)>);

impl CudnnKinds {
    /// Without cuDNN.
    pub const fn none() -> CudnnKinds {
        CudnnKinds(Vec::new())
    }

    pub fn new(accepted: Vec<(CudnnKind, usize)>) -> CudnnKinds {
        CudnnKinds(accepted)
    }

    /// All operations of a graph, as if cuDNN supported them. Convolutions then need no workspace.
    pub fn all(graph: &Graph) -> CudnnKinds {
        let workspace = |kind: &CudnnKind| match kind.described(Arithmetic::Ieee) {
            Some(Operation::Attention(attention)) => attention.workspace_bytes(),
            Some(Operation::Convolution(_)) | None => 0,
        };
        CudnnKinds(CudnnKinds::of(graph).into_iter().map(|kind| (kind, workspace(&kind))).collect())
    }

    /// The same operations for tensors in another format.
    pub fn in_format(&self, format: Format) -> CudnnKinds {
        // cuDNN has no f32 attention.
        let has = |kind: &CudnnKind| format != Format::F32 || matches!(kind, CudnnKind::Convolution(_));
        let kinds = self.0.iter().filter(|(kind, _)| has(kind));
        CudnnKinds(kinds.map(|(kind, bytes)| (kind.in_format(format), *bytes)).collect())
    }

    /// The cuDNN operations of a graph, each kind once. Excludes convolutions that are plain GEMMs
    /// of the pixels, and f32 attention.
    pub fn of(graph: &Graph) -> Vec<CudnnKind> {
        let format = graph.format();
        let mut kinds = Vec::new();
        for node in &graph.nodes {
            let new: Vec<CudnnKind> = match node.layer.form() {
                Form::Convolution(shape) if !shape.is_product() => {
                    let of = |(direction, adds)| ConvolutionKind { shape, format, direction, adds };
                    DIRECTIONS.map(of).map(CudnnKind::Convolution).to_vec()
                }
                Form::Attention(shape) if format != Format::F32 => {
                    let of = |backward| CudnnKind::Attention(AttentionKind { shape, format, backward });
                    [false, true].map(of).to_vec()
                }
                _ => continue,
            };
            let is_new = |kind: &CudnnKind| kind.described(Arithmetic::Ieee).is_some() && !kinds.contains(kind);
            let new: Vec<CudnnKind> = new.into_iter().filter(is_new).collect();
            kinds.extend(new);
        }
        kinds
    }

    /// Workspace bytes of a supported operation.
    pub(super) fn workspace(&self, kind: &CudnnKind) -> Option<usize> {
        self.0.iter().find(|(known, _)| known == kind).map(|(_, bytes)| *bytes)
    }
}
