//! Manifests of other operators to TrainJobs of ours. Pure: a document in; a TrainJob and what has no counterpart out.
//!
//! ```text
//! PyTorchJob, PaddleJob, MPIJob, Kubeflow TrainJob ─> reader (takes fields) ─> TrainJob
//!                                                       └─ what nobody took ─> notes, field by field
//! ```
//!
//! **Nothing is dropped silently.** A final walk over the input turns every field that is neither converted nor noted into a [`Note`].

mod advice;
mod kubeflow;
mod mpi;
mod pods;
mod reader;
mod replicas;
#[cfg(test)]
mod tests;

use pods::Draft;
use reader::Reader;
use serde_json::Value;
use switchyard_crds::labels;
use switchyard_fabric::lint::Cursor;

/// A field that the TrainJob lacks or has in another form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// The field in the input, as kubectl writes it.
    pub path: String,
    /// Its value, shortened.
    pub value: String,
    /// What replaces it, or what to do.
    pub what: String,
}

/// A TrainJob, and what it lacks.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    /// The manifest.
    pub job: Value,
    /// In the order of the input.
    pub notes: Vec<Note>,
}

/// Why there is no TrainJob.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// An unknown kind.
    #[error(
        "got {0}; expected a PyTorchJob, PaddleJob or MPIJob of kubeflow.org, or a TrainJob of trainer.kubeflow.org"
    )]
    UnknownKind(String),
    /// A field that everything else depends on.
    #[error("{field}: got {got}; expected {expected}")]
    Unusable {
        /// Path of the field.
        field: String,
        got: String,
        expected: &'static str,
    },
}

/// Converts one document.
///
/// # Errors
/// The document is of another kind, or has no training pods.
pub fn convert(document: &Value) -> Result<Converted, ConvertError> {
    let top = Cursor::new(document);
    let (kind, api) = (top.text("kind").unwrap_or_default(), top.text("apiVersion").unwrap_or_default());
    let mut reader = Reader::new(document);
    reader.take(&top, "kind");
    reader.take(&top, "apiVersion");
    let mut draft = Draft::default();
    match (api.split('/').next().unwrap_or_default(), kind) {
        ("kubeflow.org", "PyTorchJob") => replicas::convert(&replicas::PYTORCH, &top, &mut reader, &mut draft)?,
        ("kubeflow.org", "PaddleJob") => replicas::convert(&replicas::PADDLE, &top, &mut reader, &mut draft)?,
        ("kubeflow.org", "MPIJob") => mpi::convert(&top, &mut reader, &mut draft)?,
        ("trainer.kubeflow.org", "TrainJob") => kubeflow::convert(&top, &mut reader, &mut draft)?,
        (labels::GROUP, "TrainJob") => {
            return Err(ConvertError::UnknownKind("a TrainJob that is Switchyard's already".into()));
        }
        _ if kind.is_empty() => return Err(ConvertError::UnknownKind("a document without a kind".into())),
        _ => return Err(ConvertError::UnknownKind(format!("{kind} of {api}"))),
    }
    let metadata = pods::metadata(&top, &mut reader);
    let job = draft.job(metadata);
    Ok(Converted { job, notes: reader.finish() })
}
