//! What ends training early.

use crate::comm::{CauseKind, CommError};
use crate::cpu::IsaError;
use crate::data::DataError;
use crate::model::ModelError;
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
    /// The numbers have left the range of f32.
    #[error(
        "the loss of step {step} is {loss}: expected a finite number; lower optimizer.learningRate or set optimizer.gradientClipNorm"
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// Its loss.
        loss: f64,
    },
    /// The trained model cannot be written.
    #[error("cannot write {file}: {source}")]
    Save {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
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
            TrainError::Model(ModelError::Memory(_)) => Exit::NotPlaceable,
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
            TrainError::Comm(_) | TrainError::NotFinite { .. } | TrainError::Save { .. } => Exit::OwnFailure,
        }
    }
}
