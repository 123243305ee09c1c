//! GPU operations as data.

use crate::nn::layers::Target;
use switchyard_cuda::convolution::Direction;
use switchyard_cuda::cublaslt::{Matrix, Product};
use switchyard_cuda::kernels::{self, Argument, Call};
use switchyard_cuda::operation::Operation;

/// A device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Activations, their gradients and scratch memory, laid out by the plan.
    Arena,
    /// f32 weights in layout order.
    Weights,
    /// The weights in the network's format, for mixed precision.
    Half,
    /// f32 gradients in layout order.
    Gradients,
    /// [`crate::data::Batch::values`], f32.
    Values,
    /// [`crate::data::Batch::pixels`], padded to a multiple of 32 bits.
    Pixels,
    /// The table row of each row of an embedding, `u32`.
    Entries(Table),
    /// The embedding's rows sorted by table row, [`kernels::embedding::order`].
    Order(Table),
    /// [`crate::data::Batch::positions`], `u32`.
    Positions,
    /// Constants, `u32` or the bits of an `f32`: [`Plan::constants`](super::Plan::constants).
    Constants,
    /// The target classes of logits, `u32`.
    Targets(Target),
    /// Running statistics, `f32` in the order of [`Plan::statistics`](super::Plan::statistics),
    /// read by evaluation.
    Statistics,
    /// Statistics of the last micro-batch in the same order, written by training.
    BatchStatistics,
    /// One `f32` per loss: the factor of each row's gradient.
    Factors,
    /// One `f32` per loss: the share of a row's nats in the step's mean loss.
    Shares,
    /// The loss of each row of each loss in nats, `f32`.
    Losses,
    /// For each row of each loss, 1.0 for a correct prediction, otherwise 0.0.
    Correct,
    /// An optimizer state array by index, f32, in layout order.
    Moments(usize),
    /// The mean loss of a step over all ranks, one `f32`.
    Loss,
    /// Sums of squares of gradients, `f64`.
    Squares,
    /// [`kernels::gradients::Rules`].
    Rules,
    /// [`kernels::gradients::Scaler`].
    Scaler,
    /// [`kernels::optimizer::Scaling`].
    Scaling,
    /// [`kernels::optimizer::Chunk`]s of the layout.
    Chunks,
    /// Two [`kernels::optimizer::Numbers`] of a step: for the case that the previous step is
    /// applied, and for the case that it is skipped.
    Candidates,
    /// The [`kernels::optimizer::Numbers`] that the device selects from the candidates.
    Numbers,
    /// LAMB and LARS: two sums of squares per chunk, `f64`.
    Norms,
    /// LAMB and LARS: the ratio of each parameter, `f64`.
    Ratios,
    /// cuDNN workspaces, shared by operations in sequence.
    Workspace,
}

/// An embedding table that is indexed by a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// Indexed by [`crate::data::Batch::tokens`].
    Tokens,
    /// Indexed by [`crate::data::Batch::segments`].
    Segments,
}

/// A byte range of a memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub memory: Memory,
    /// First byte.
    pub at: usize,
    pub bytes: usize,
}

impl kernels::Memory for Span {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

/// A cuDNN operation. Images and results of convolutions are NHWC with the pitch of tensors,
/// filters are contiguous.
#[derive(Debug, Clone, PartialEq)]
pub struct Cudnn<M> {
    pub operation: Operation,
    /// As [`Operation::arguments`] describes it.
    pub memory: Vec<M>,
    /// `None` if no workspace is needed.
    pub workspace: Option<M>,
}

/// A GPU operation.
#[derive(Debug, Clone, PartialEq)]
pub enum Work<M> {
    Kernel(Call<M>),
    Product(Product<M>),
    Cudnn(Cudnn<M>),
    /// Copies between matrices of equal size.
    Copy {
        from: Matrix<M>,
        to: Matrix<M>,
    },
}

/// An operation and its layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch<M> {
    pub layer: String,
    /// Whether it belongs to the backward pass.
    pub backward: bool,
    pub work: Work<M>,
}

impl<M: Copy> Work<M> {
    /// Kernel name; for other operations `product`, `convolution`, `convolution_images`,
    /// `convolution_filters`, `fused_attention`, `fused_attention_backward` or `copy`.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Kernel(call) => call.kernel(),
            Work::Product(_) => "product",
            Work::Cudnn(cudnn) => match cudnn.operation {
                Operation::Convolution(convolution) => match convolution.direction {
                    Direction::Forward => "convolution",
                    Direction::Images => "convolution_images",
                    Direction::Filters => "convolution_filters",
                },
                Operation::Attention(attention) if attention.backward => "fused_attention_backward",
                Operation::Attention(_) => "fused_attention",
            },
            Work::Copy { .. } => "copy",
        }
    }

    /// Memory that the operation reads.
    pub fn reads(&self) -> Vec<M> {
        match self {
            Work::Kernel(call) => call.arguments().iter().filter_map(|argument| read(*argument)).collect(),
            Work::Product(Product { left, right, addend, epilogue, scales, .. }) => {
                let scales = scales.iter().flatten().copied();
                let more = [addend.map(|addend| addend.memory), epilogue.map(|epilogue| epilogue.bias)];
                [left.memory, right.memory].into_iter().chain(scales).chain(more.into_iter().flatten()).collect()
            }
            Work::Cudnn(Cudnn { operation, memory, .. }) => {
                operation.arguments(memory).into_iter().filter_map(read).collect()
            }
            Work::Copy { from, .. } => vec![from.memory],
        }
    }

    /// Memory that the operation modifies.
    pub fn writes(&self) -> Vec<M> {
        match self {
            Work::Kernel(call) => call.arguments().iter().filter_map(|argument| written(*argument)).collect(),
            Work::Product(Product { result, epilogue, .. }) => {
                let kept = epilogue.and_then(|epilogue| epilogue.kept);
                [result.memory].into_iter().chain(kept.map(|kept| kept.memory)).collect()
            }
            Work::Cudnn(Cudnn { operation, memory, workspace }) => {
                operation.arguments(memory).into_iter().filter_map(written).chain(*workspace).collect()
            }
            Work::Copy { to, .. } => vec![to.memory],
        }
    }
}

fn read<M>(argument: Argument<M>) -> Option<M> {
    match argument {
        Argument::Reads(memory) | Argument::Updates(memory) => Some(memory),
        Argument::Writes(_) | Argument::Absent | Argument::Int(_) | Argument::Float(_) => None,
    }
}

fn written<M>(argument: Argument<M>) -> Option<M> {
    match argument {
        Argument::Writes(memory) | Argument::Updates(memory) => Some(memory),
        Argument::Reads(_) | Argument::Absent | Argument::Int(_) | Argument::Float(_) => None,
    }
}
