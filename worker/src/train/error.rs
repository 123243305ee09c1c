//! What ends training early.

use crate::comm::{CauseKind, CommError};
use crate::cpu::IsaError;
use crate::data::DataError;
use crate::nn::ModelError;
use switchyard_worker_contract::event::Measured;
use switchyard_worker_contract::exit::Exit;

/// What ends training early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model cannot be built.
    #[error("spec.engine.model: {0}")]
    Model(#[from] ModelError),
    /// The CPU kernels asked for are not there.
    #[error("SWITCHYARD_KERNEL: {0}")]
    Kernel(#[from] IsaError),
    /// The group failed, or could not form.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The plan takes more memory than it may.
    #[error(
        "not placeable: a rank needs {need} MiB of memory ({activations} MiB for activations), and may take {limit} MiB (spec.engine.memory.fraction {fraction} of its share of the node); smallest change that fits: {help}"
    )]
    Memory {
        /// MiB in all.
        need: u64,
        /// MiB that grow with the batch.
        activations: u64,
        /// MiB allowed.
        limit: u64,
        /// Share of what is available.
        fraction: f64,
        /// What would fit.
        help: String,
    },
    /// The checkpoint to go on from cannot be used.
    #[error("spec.checkpoint.path: cannot resume: {0}")]
    Resume(String),
    /// All ranks stopped because one was told to, after saving.
    #[error("stopped by a signal after step {step}{}", if *saved { ", which is saved" } else { "" })]
    Stopped {
        /// Steps done.
        step: u64,
        /// Whether a checkpoint holds them.
        saved: bool,
        /// SIGINT, not SIGTERM, on this rank or an unknown one.
        interrupted: bool,
    },
    /// The links between ranks achieve less than the job needs.
    #[error("{1}")]
    Preflight(Box<Measured>, String),
    /// Too many steps in a row overflowed.
    #[error("{0}; lower optimizer.learningRate, or set precision.computeType: BF16")]
    Overflow(String),
    /// The numbers have left the range of f32.
    #[error(
        "the loss of step {step} is {loss} and the norm of its gradients {norm}: expected a finite number; lower optimizer.learningRate or set optimizer.gradientClipNorm"
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Norm of its gradients.
        norm: f64,
    },
    /// The trained model cannot be written.
    #[error("{cause}")]
    Save {
        /// The file.
        file: String,
        /// What happened, with its name.
        cause: String,
    },
    /// The worker was called wrongly.
    #[error("{0}")]
    Usage(String),
}

impl TrainError {
    /// The exit code that fits, on the rank with this number.
    pub fn exit(&self, rank: u32) -> Exit {
        match self {
            TrainError::Data(_) => Exit::Data,
            TrainError::Model(ModelError::Memory(_)) | TrainError::Memory { .. } => Exit::NotPlaceable,
            TrainError::Resume(_) => Exit::CheckpointRefused,
            TrainError::Preflight(..) => Exit::PreflightRefused,
            TrainError::Stopped { interrupted: true, .. } => Exit::Interrupted,
            TrainError::Stopped { .. } => Exit::Terminated,
            TrainError::Model(_) | TrainError::Kernel(_) | TrainError::Usage(_) => Exit::Usage,
            TrainError::Comm(CommError::Failed(cause)) => match cause.kind {
                CauseKind::Stopped(2) => Exit::Interrupted,
                CauseKind::Stopped(_) => Exit::Terminated,
                CauseKind::Failed if cause.origin_rank == rank => Exit::OwnFailure,
                CauseKind::Failed => Exit::PeerFailure,
            },
            TrainError::Comm(CommError::Missing { .. } | CommError::Unreachable { .. }) => Exit::PeerFailure,
            TrainError::Comm(CommError::Variable { .. } | CommError::KeyFile { .. } | CommError::Transport { .. }) => {
                Exit::Usage
            }
            TrainError::Comm(_) | TrainError::Overflow(_) | TrainError::NotFinite { .. } | TrainError::Save { .. } => {
                Exit::OwnFailure
            }
        }
    }
}
