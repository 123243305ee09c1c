//! Data errors.

use std::io;
use std::path::{Path, PathBuf};
use switchyard_checkpoint::disk::is_final;

/// A data error. Every message names the field or the file, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The path does not exist.
    #[error("spec.engine.data.path: nothing at {}: expected a file or a directory", path.display())]
    Missing {
        /// The absolute path.
        path: PathBuf,
    },
    /// A file that the format requires does not exist.
    #[error("spec.engine.data.path: {} is missing: expected this file", path.display())]
    MissingFile { path: PathBuf },
    /// A device, pipe, socket or dangling link where a file is expected.
    #[error("{field}: {} is {found}: expected {expected}", path.display())]
    NotAFile {
        /// The field that refers to the file.
        field: &'static str,
        path: PathBuf,
        /// The kind of file found.
        found: &'static str,
        expected: &'static str,
    },
    /// A file or directory cannot be read.
    #[error("spec.engine.data.path: cannot read {} ({error}): expected a readable {kind}", path.display())]
    Unreadable {
        path: PathBuf,
        /// `file` or `directory`.
        kind: &'static str,
        error: io::Error,
    },
    /// The file system failed. The data can be good, so another attempt can succeed.
    #[error("spec.engine.data.path: cannot read {} now ({error}): expected a file system that answers", path.display())]
    Io { path: PathBuf, error: io::Error },
    /// An invalid glob pattern.
    #[error("{field}: pattern `{pattern}`: {reason}: expected for example `src/**/*.rs`")]
    Pattern {
        /// The field, including the list index.
        field: String,
        pattern: String,
        reason: String,
    },
    /// Patterns given, but the path is a single file.
    #[error("{field}: got patterns, but the path {} is a file: expected none, or a directory", path.display())]
    PatternsForFile { field: &'static str, path: PathBuf },
    /// The patterns select no file.
    #[error(
        "spec.engine.data.include: none of the {seen} files in {} is matched by {include} and not by exclude \
         {exclude}: expected at least one", path.display()
    )]
    NothingMatches {
        path: PathBuf,
        /// Files before applying the patterns.
        seen: u64,
        include: String,
        exclude: String,
    },
    /// Every file is empty.
    #[error("spec.engine.data.path: all {files} files of {} are empty: expected text", path.display())]
    AllEmpty { path: PathBuf, files: u64 },
    /// More data than the in-memory limit.
    #[error("spec.engine.data.path: {} holds {got} bytes: expected at most {limit}", path.display())]
    TooLarge {
        path: PathBuf,
        /// Bytes found; the scan stops once the limit is exceeded.
        got: u64,
        limit: u64,
    },
    /// The validation fraction is out of range.
    #[error("spec.engine.data.validationFraction: got {got}: expected 0 to 0.5")]
    Fraction { got: f64 },
    /// A size is zero.
    #[error("{field}: got 0: expected at least 1")]
    Zero { field: &'static str },
    /// An invalid value.
    #[error("{field}: got {got}: expected {expected}")]
    Value { field: &'static str, got: String, expected: String },
    /// The data do not suit the model.
    #[error("spec.engine.data.format: {format} holds {holds}: the model learns from {wants}: expected {expected}")]
    Mismatch {
        format: &'static str,
        holds: &'static str,
        wants: &'static str,
        /// Formats suitable for the model.
        expected: &'static str,
    },
    /// The content of a file does not match its format.
    #[error("spec.engine.data.path: {}: {found}: expected {expected}", path.display())]
    Format { path: PathBuf, found: String, expected: String },
    /// A file has changed since the run started.
    #[error("spec.engine.data.path: {} has changed since the start ({what}): expected it to stay as it is", path.display())]
    Changed { path: PathBuf, what: String },
    /// Ranks read other files than rank 0.
    #[error("spec.engine.data.path: {ranks} read other contents than rank 0: expected the same files on all nodes")]
    Differs {
        /// `rank 3`, or `ranks 3-5`.
        ranks: String,
    },
    /// More unreadable samples than allowed.
    #[error(
        "spec.engine.reader.maxBadSamples: {count} samples cannot be read, the last of them {last}: expected at most \
         {limit}"
    )]
    BadSamples {
        /// Unreadable samples so far.
        count: u64,
        /// Allowed number.
        limit: u64,
        /// The last unreadable sample and the problem.
        last: String,
    },
    /// Not enough text for one step.
    #[error(
        "spec.engine.data.path: {got} tokens for training: one step needs {needed} ({windows} windows of {stride} \
         tokens): expected more text, or a smaller batch, fewer processes or a shorter context"
    )]
    TooShort {
        /// Tokens available.
        got: u64,
        /// Tokens needed.
        needed: u64,
        /// Windows per step over all ranks.
        windows: u64,
        /// Tokens between the starts of neighbouring windows.
        stride: u64,
    },
    /// Not enough samples for one step.
    #[error(
        "spec.engine.data.path: {got} samples for training: one step needs {needed}: expected more samples, a smaller \
         batch or fewer processes"
    )]
    TooFew {
        /// Samples available.
        got: u64,
        /// Samples per step over all ranks.
        needed: u64,
    },
    /// Not enough data for at least one training and one validation sample.
    #[error(
        "spec.engine.data.validationFraction: {got} {item} cannot be split so that training and validation get \
         {sample} each: expected more data, or a fraction of 0"
    )]
    NoRoomForValidation {
        /// Tokens or samples available.
        got: u64,
        /// The unit counted: tokens or samples.
        item: &'static str,
        /// What each split needs.
        sample: String,
    },
    /// A reader thread could not be started.
    #[error("cannot start a thread of the reader: {0}")]
    Thread(io::Error),
    /// A reader thread ended unexpectedly, which is a bug.
    #[error("a thread of the reader ended unexpectedly ({0}): expected it to run as long as the training")]
    ReaderEnded(String),
}

impl DataError {
    /// An invalid value of a field.
    pub(super) fn value(field: &'static str, got: impl ToString, expected: impl Into<String>) -> DataError {
        DataError::Value { field, got: got.to_string(), expected: expected.into() }
    }

    /// The content of a file does not match its format.
    pub(super) fn format(path: &Path, found: impl Into<String>, expected: impl Into<String>) -> DataError {
        DataError::Format { path: path.to_owned(), found: found.into(), expected: expected.into() }
    }

    pub(super) fn unreadable(path: &Path, error: io::Error) -> DataError {
        match error.kind() {
            io::ErrorKind::NotFound => DataError::MissingFile { path: path.to_owned() },
            // At the start of a run, permissions are more likely wrong than late.
            kind if is_final(&error) || kind == io::ErrorKind::PermissionDenied => {
                DataError::Unreadable { path: path.to_owned(), kind: "file", error }
            }
            _ => DataError::Io { path: path.to_owned(), error },
        }
    }

    /// A file that could be read when the run started: only the file system can be the cause.
    pub(super) fn unreadable_now(path: &Path, error: io::Error) -> DataError {
        DataError::Io { path: path.to_owned(), error }
    }

    /// Whether the file system failed, rather than the data.
    pub fn is_io(&self) -> bool {
        matches!(self, DataError::Io { .. })
    }
}
