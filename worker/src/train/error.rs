//! Errors that end training early.

use crate::comm::{CauseKind, CommError};
use crate::cpu::IsaError;
use crate::data::DataError;
use crate::lowering::Refused;
use crate::nn::ModelError;
use switchyard_worker_contract::event::Measured;
use switchyard_worker_contract::exit::Exit;

#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error("spec.engine.model: {0}")]
    Model(#[from] ModelError),
    /// The requested CPU kernels are not available.
    #[error("SWITCHYARD_KERNEL: {0}")]
    Kernel(#[from] IsaError),
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error(
        "not placeable: a rank needs {need} MiB of memory ({activations} MiB for activations), and may take {limit} MiB (spec.engine.memory.fraction {fraction} of its share of the node); smallest change that fits: {help}"
    )]
    Memory {
        /// MiB in total.
        need: u64,
        /// MiB that grow with the batch.
        activations: u64,
        limit: u64,
        /// Share of the memory available to this rank.
        fraction: f64,
        /// The smallest change that would fit.
        help: String,
    },
    /// There is no GPU, or a CUDA library is missing.
    #[error("spec.engine.device: got Cuda; {0}")]
    NoGpu(String),
    /// The network cannot run on a GPU.
    #[error("spec.engine.device: got Cuda; {0}; Cpu computes it")]
    Gpu(#[from] Refused),
    /// A call of a CUDA library failed.
    #[error("the GPU failed: {source}{details}")]
    Cuda {
        source: switchyard_cuda::Error,
        /// Errors that the driver has reported for the GPU, or other processes that use it, if any
        /// are known.
        details: String,
    },
    /// The ranks cannot use NCCL, though all of them have it.
    #[error("NCCL: {0}")]
    Nccl(String),
    #[error(
        "not placeable: a rank needs {need} MiB of the memory of its GPU ({activations} MiB for activations, {state} MiB for weights, gradients and optimizer, {communication} MiB for NCCL), and may take {limit} MiB (spec.engine.memory.fraction {fraction} of what is free); smallest change that fits: {help}{others}"
    )]
    GpuMemory {
        /// MiB in total.
        need: u64,
        /// MiB that grow with the batch.
        activations: u64,
        /// MiB that do not.
        state: u64,
        /// MiB of NCCL's buffers.
        communication: u64,
        limit: u64,
        fraction: f64,
        /// The smallest change that would fit.
        help: String,
        /// Processes that use its memory, if any are known.
        others: String,
    },
    /// The checkpoint to resume from cannot be used.
    #[error("spec.checkpoint.path: cannot resume: {0}")]
    Resume(String),
    /// The checkpoint to resume from cannot be read now, although it can be good.
    #[error(
        "spec.checkpoint.path: cannot read the checkpoint to resume from: {0}; it is kept, and the next attempt reads it again"
    )]
    Storage(String),
    /// The directory of checkpoints cannot be used by this run.
    #[error("spec.checkpoint.path: {0}")]
    Directory(String),
    /// The file system of the checkpoints fails, or is full, which can change.
    #[error("spec.checkpoint.path: {0}")]
    DirectoryIo(String),
    /// The ranks hold different weights, moments or statistics.
    #[error(
        "after step {step} the ranks are no longer equal: {text}; memory, a GPU or a link has altered numbers, so no checkpoint is written; a restart resumes from the last one that all ranks agreed on"
    )]
    Replicas {
        step: u64,
        /// The digests of the ranks.
        text: String,
    },
    /// A rank received a stop request, and all ranks stopped after saving.
    #[error("stopped by a signal after step {step}{}", if *saved { ", which is saved" } else { "" })]
    Stopped {
        step: u64,
        /// Whether a checkpoint holds these steps.
        saved: bool,
        /// SIGINT rather than SIGTERM, on this rank or on an unknown one.
        interrupted: bool,
    },
    /// The links between ranks are slower than the job needs.
    #[error("{1}")]
    Preflight(Box<Measured>, String),
    #[error("{0}; lower optimizer.learningRate, or set precision.computeType: BF16")]
    Overflow(String),
    #[error(
        "the loss of step {step} is {loss} and the norm of its gradients {norm}: expected a finite number; lower optimizer.learningRate or set optimizer.gradientClipNorm"
    )]
    NotFinite { step: u64, loss: f64, norm: f64 },
    #[error("{cause}")]
    Save {
        file: String,
        /// The reason, including the file name.
        cause: String,
    },
    #[error("{0}")]
    Usage(String),
}

impl From<switchyard_cuda::Error> for TrainError {
    fn from(source: switchyard_cuda::Error) -> TrainError {
        TrainError::Cuda { source, details: String::new() }
    }
}

impl TrainError {
    /// The exit code for this error on the given rank.
    pub fn exit(&self, rank: u32) -> Exit {
        match self {
            TrainError::Data(error) if error.is_io() => Exit::OwnFailure,
            TrainError::Data(_) => Exit::Data,
            TrainError::Model(ModelError::Memory(_)) | TrainError::Memory { .. } | TrainError::GpuMemory { .. } => {
                Exit::NotPlaceable
            }
            TrainError::Resume(_) | TrainError::Directory(_) => Exit::CheckpointRefused,
            TrainError::Preflight(..) => Exit::PreflightRefused,
            TrainError::Stopped { interrupted: true, .. } => Exit::Interrupted,
            TrainError::Stopped { .. } => Exit::Terminated,
            TrainError::Model(_)
            | TrainError::Kernel(_)
            | TrainError::Usage(_)
            | TrainError::NoGpu(_)
            | TrainError::Gpu(_) => Exit::Usage,
            TrainError::Comm(CommError::Failed(cause)) => match cause.kind {
                CauseKind::Stopped(2) => Exit::Interrupted,
                CauseKind::Stopped(_) => Exit::Terminated,
                _ if cause.origin_rank != rank => Exit::PeerFailure,
                CauseKind::Failed => Exit::OwnFailure,
                CauseKind::Hung => Exit::Hung,
            },
            TrainError::Comm(CommError::Missing { .. } | CommError::Unreachable { .. }) => Exit::PeerFailure,
            TrainError::Comm(
                CommError::Variable { .. }
                | CommError::KeyFile { .. }
                | CommError::Group { .. }
                | CommError::Transport { .. },
            ) => Exit::Usage,
            TrainError::Overflow(_) | TrainError::NotFinite { .. } => Exit::Diverged,
            TrainError::Comm(_)
            | TrainError::Storage(_)
            | TrainError::DirectoryIo(_)
            | TrainError::Replicas { .. }
            | TrainError::Save { .. }
            | TrainError::Cuda { .. }
            | TrainError::Nccl(_) => Exit::OwnFailure,
        }
    }
}
