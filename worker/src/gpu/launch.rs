//! What a GPU is told to do, as data.

use super::cudnn::{AttentionKind, ConvolutionKind};
use crate::nn::layers::Target;
use switchyard_cuda::attention;
use switchyard_cuda::convolution::Direction;
use switchyard_cuda::cublaslt::Format;
use switchyard_cuda::kernels::activation::Function;
use switchyard_cuda::kernels::{self, Argument, Call};

/// A memory of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Activations, their gradients and scratch memory, placed by the plan.
    Arena,
    /// 32-bit weights in the order of the layout.
    Weights,
    /// The same in the network's format, in mixed precision.
    Half,
    /// 32-bit gradients in the order of the layout.
    Gradients,
    /// [`crate::data::Batch::values`], 32 bits.
    Values,
    /// [`crate::data::Batch::pixels`], and bytes that do not matter to the end of a word of 32 bits.
    Pixels,
    /// For each row of an embedding which entry of a table it has, `u32`.
    Entries(Table),
    /// The rows in the order of these entries, [`kernels::embedding::order`].
    Order(Table),
    /// [`crate::data::Batch::positions`], `u32`.
    Positions,
    /// Numbers that never change, `u32` or the bits of an `f32`: [`Plan::constants`](super::Plan::constants).
    Constants,
    /// The classes that logits are compared with, `u32`.
    Targets(Target),
    /// Running statistics, `f32` in the order of [`Plan::statistics`](super::Plan::statistics): what evaluation reads.
    Statistics,
    /// Statistics of the last micro-batch in the same order: what training writes.
    BatchStatistics,
    /// For each loss one `f32`: what the gradient of each row is multiplied by.
    Factors,
    /// For each loss one `f32`: the part of a row's nats in the mean loss of the step.
    Shares,
    /// For each row of each loss its nats, `f32`.
    Losses,
    /// For each row of each loss 1.0 if the prediction was right, else 0.0.
    Correct,
    /// An array of the optimizer by its number, 32 bits, in the order of the layout.
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
    /// Two [`kernels::optimizer::Numbers`] of a step: if the step before it was not left out, and if it was.
    Candidates,
    /// Those of both that are true, which the device chooses.
    Numbers,
    /// LAMB and LARS: two sums of squares for each chunk, `f64`.
    Norms,
    /// LAMB and LARS: the factor of each parameter, `f64`.
    Ratios,
    /// What cuDNN needs beside the tensors, one operation after the other.
    Workspace,
}

/// A table of an embedding whose entries a batch chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// By [`crate::data::Batch::tokens`].
    Tokens,
    /// By [`crate::data::Batch::segments`].
    Segments,
}

/// Bytes of a memory.
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

/// `rows` x `columns` numbers as they lie in memory, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix<M> {
    pub memory: M,
    pub rows: usize,
    pub columns: usize,
    /// From one row to the next, in numbers. Nobody reads what is between.
    pub pitch: usize,
    pub format: Format,
    /// A product takes rows for columns.
    pub is_transposed: bool,
}

impl<M> Matrix<M> {
    /// The same numbers with rows for columns.
    pub fn transposed(self) -> Matrix<M> {
        Matrix { is_transposed: !self.is_transposed, ..self }
    }
}

/// What follows a product before its result is written: `result = function(left right + addend + bias)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Epilogue<M> {
    /// In the format of the result.
    pub bias: M,
    pub function: Function,
    /// Gets the argument of [`Function::Gelu`].
    pub kept: Option<Matrix<M>>,
}

/// `result = left right`, or `result = left right + addend`. Sums are in 32 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Product<M> {
    pub left: Matrix<M>,
    pub right: Matrix<M>,
    pub result: Matrix<M>,
    /// As large as the result and in its format; it may be the result itself.
    pub addend: Option<Matrix<M>>,
    pub epilogue: Option<Epilogue<M>>,
    /// Of factors in 8 bits, left and right: one `f32` that all of a factor is multiplied by.
    pub scales: Option<[M; 2]>,
}

/// A convolution of cuDNN. Images and results are in NHWC with the pitch of tensors, filters without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Convolution<M> {
    pub kind: ConvolutionKind,
    pub images: M,
    pub filters: M,
    pub results: M,
    /// If it needs any.
    pub workspace: Option<M>,
}

impl<M: Copy> Convolution<M> {
    /// What is computed, and what it is computed from.
    fn written_and_read(&self) -> (M, [M; 2]) {
        match self.kind.direction {
            Direction::Forward => (self.results, [self.images, self.filters]),
            Direction::Images => (self.images, [self.filters, self.results]),
            Direction::Filters => (self.filters, [self.images, self.results]),
        }
    }
}

/// Attention of cuDNN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attention<M> {
    pub kind: AttentionKind,
    pub on: AttentionPass<M>,
    /// If it needs any.
    pub workspace: Option<M>,
}

/// The memory of a pass of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionPass<M> {
    Forward { qkv: M, out: M, saved: M },
    Backward(attention::Backward<M>),
}

impl<M: Copy> AttentionPass<M> {
    fn reads(&self) -> Vec<M> {
        match self {
            AttentionPass::Forward { qkv, .. } => vec![*qkv],
            AttentionPass::Backward(attention::Backward { qkv, out, saved, d_out, .. }) => {
                vec![*qkv, *out, *saved, *d_out]
            }
        }
    }

    fn writes(&self) -> Vec<M> {
        match self {
            AttentionPass::Forward { out, saved, .. } => vec![*out, *saved],
            AttentionPass::Backward(attention::Backward { d_qkv, scratch, .. }) => vec![*d_qkv, *scratch],
        }
    }
}

/// One operation of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub enum Work<M> {
    Kernel(Call<M>),
    Product(Product<M>),
    Convolution(Convolution<M>),
    Attention(Attention<M>),
    /// Between matrices of the same size.
    Copy {
        from: Matrix<M>,
        to: Matrix<M>,
    },
}

/// An operation and the layer that it is for.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch<M> {
    pub layer: String,
    /// Backward or forward.
    pub backward: bool,
    pub work: Work<M>,
}

impl<M: Copy> Work<M> {
    /// Name of the kernel; `product`, `convolution`, `convolution_images`, `convolution_filters`, `fused_attention`, `fused_attention_backward` or
    /// `copy` where it is none of ours.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Kernel(call) => call.kernel(),
            Work::Product(_) => "product",
            Work::Convolution(convolution) => match convolution.kind.direction {
                Direction::Forward => "convolution",
                Direction::Images => "convolution_images",
                Direction::Filters => "convolution_filters",
            },
            Work::Attention(attention) => match attention.kind.backward {
                false => "fused_attention",
                true => "fused_attention_backward",
            },
            Work::Copy { .. } => "copy",
        }
    }

    /// Memory whose contents matter before the operation.
    pub fn reads(&self) -> Vec<M> {
        match self {
            Work::Kernel(call) => call.arguments().iter().filter_map(|argument| read(*argument)).collect(),
            Work::Product(Product { left, right, addend, epilogue, scales, .. }) => {
                let scales = scales.iter().flatten().copied();
                let more = [addend.map(|addend| addend.memory), epilogue.map(|epilogue| epilogue.bias)];
                [left.memory, right.memory].into_iter().chain(scales).chain(more.into_iter().flatten()).collect()
            }
            Work::Convolution(convolution) => {
                let (written, read) = convolution.written_and_read();
                read.into_iter().chain(convolution.kind.adds.then_some(written)).collect()
            }
            Work::Attention(attention) => attention.on.reads(),
            Work::Copy { from, .. } => vec![from.memory],
        }
    }

    /// Memory that the operation changes.
    pub fn writes(&self) -> Vec<M> {
        match self {
            Work::Kernel(call) => call.arguments().iter().filter_map(|argument| written(*argument)).collect(),
            Work::Product(Product { result, epilogue, .. }) => {
                let kept = epilogue.and_then(|epilogue| epilogue.kept);
                [result.memory].into_iter().chain(kept.map(|kept| kept.memory)).collect()
            }
            Work::Convolution(convolution) => {
                [convolution.written_and_read().0].into_iter().chain(convolution.workspace).collect()
            }
            Work::Attention(Attention { on, workspace, .. }) => on.writes().into_iter().chain(*workspace).collect(),
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
