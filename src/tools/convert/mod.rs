//! Converts manifests of other operators to our TrainJobs. Pure: takes a document, returns a
//! TrainJob and notes about fields without a counterpart.
//!
//! ```text
//! PyTorchJob, TFJob, PaddleJob, MPIJob, Kubeflow TrainJob ─> reader (takes fields) ─> TrainJob
//!                                                       └─ remaining fields ─> one note each
//! ```
//!
//! **Nothing is dropped silently.** A final walk over the input turns every field that is neither
//! converted nor noted into a [`Note`].

mod advice;
mod kubeflow;
mod mpi;
mod paddle;
mod pods;
mod reader;
mod replicas;
mod roles;
mod tensorflow;
#[cfg(test)]
mod tests;

use pods::Draft;
use reader::Reader;
use serde_json::Value;
use switchyard_crds::labels;
use switchyard_fabric::lint::Cursor;

/// A field that the TrainJob lacks or represents differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Path of the field in the input, in kubectl's notation.
    pub path: String,
    /// Its value, shortened.
    pub value: String,
    /// Its replacement, or what to do.
    pub what: String,
}

/// A TrainJob with notes about its differences.
#[derive(Debug, Clone, PartialEq)]
pub struct Converted {
    /// The manifest.
    pub job: Value,
    /// In input order.
    pub notes: Vec<Note>,
}

/// Why a document cannot be converted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// An unknown kind.
    #[error(
        "got {0}; expected a PyTorchJob, TFJob, PaddleJob or MPIJob of kubeflow.org, a PaddleJob of batch.paddlepaddle.org, or a TrainJob of trainer.kubeflow.org"
    )]
    UnknownKind(String),
    /// A required field is missing or unusable.
    #[error("{field}: got {got}; expected {expected}")]
    Unusable {
        /// Path of the field.
        field: String,
        got: String,
        expected: &'static str,
    },
}

/// Converts one document. `others` are the documents of the same file, among which a Kubeflow
/// TrainJob can have its runtime.
///
/// # Errors
/// The document has another kind, or no training pods.
pub fn convert(document: &Value, others: &[Value]) -> Result<Converted, ConvertError> {
    let top = Cursor::new(document);
    let (kind, api) = (top.text("kind").unwrap_or_default(), top.text("apiVersion").unwrap_or_default());
    let mut reader = Reader::new(document);
    reader.take(&top, "kind");
    reader.take(&top, "apiVersion");
    let mut draft = Draft::default();
    match (api.split('/').next().unwrap_or_default(), kind) {
        ("kubeflow.org", "PyTorchJob") => replicas::convert(&replicas::PYTORCH, &top, &mut reader, &mut draft)?,
        ("kubeflow.org", "PaddleJob") => replicas::convert(&replicas::PADDLE, &top, &mut reader, &mut draft)?,
        ("batch.paddlepaddle.org", "PaddleJob") => paddle::convert(&top, &mut reader, &mut draft)?,
        ("kubeflow.org", "TFJob") => tensorflow::convert(&top, &mut reader, &mut draft)?,
        ("kubeflow.org", "MPIJob") => mpi::convert(&top, &mut reader, &mut draft)?,
        ("trainer.kubeflow.org", "TrainJob") => kubeflow::convert(&top, others, &mut reader, &mut draft)?,
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
