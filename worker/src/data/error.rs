//! What can be wrong with the data.

use std::io;
use std::path::{Path, PathBuf};

/// Why there are no samples. Every text names the field or the file, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// There is nothing at the path.
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
        /// The field that leads to the file.
        field: &'static str,
        path: PathBuf,
        /// The kind of file found.
        found: &'static str,
        expected: &'static str,
    },
    /// A file or directory that cannot be read.
    #[error("spec.engine.data.path: cannot read {} ({error}): expected a readable {kind}", path.display())]
    Unreadable {
        path: PathBuf,
        /// `file` or `directory`.
        kind: &'static str,
        error: io::Error,
    },
    /// An invalid glob pattern.
    #[error("{field}: pattern `{pattern}`: {reason}: expected for example `src/**/*.rs`")]
    Pattern {
        /// The field with the index in the list.
        field: String,
        pattern: String,
        reason: String,
    },
    /// Patterns for a path that is a single file.
    #[error("{field}: got patterns, but the path {} is a file: expected none, or a directory", path.display())]
    PatternsForFile { field: &'static str, path: PathBuf },
    /// The patterns leave no file.
    #[error(
        "spec.engine.data.include: none of the {seen} files in {} is matched by {include} and not by exclude \
         {exclude}: expected at least one", path.display()
    )]
    NothingMatches {
        path: PathBuf,
        /// Files before the patterns were applied.
        seen: u64,
        include: String,
        exclude: String,
    },
    /// Every file is empty.
    #[error("spec.engine.data.path: all {files} files of {} are empty: expected text", path.display())]
    AllEmpty { path: PathBuf, files: u64 },
    /// More data than is kept in memory.
    #[error("spec.engine.data.path: {} holds {got} bytes: expected at most {limit}", path.display())]
    TooLarge {
        path: PathBuf,
        /// Bytes found; the search stops once the limit is exceeded.
        got: u64,
        limit: u64,
    },
    /// The share for validation is out of range.
    #[error("spec.engine.data.validationFraction: got {got}: expected 0 to 0.5")]
    Fraction { got: f64 },
    /// A size of zero.
    #[error("{field}: got 0: expected at least 1")]
    Zero { field: &'static str },
    /// A value that cannot be used.
    #[error("{field}: got {got}: expected {expected}")]
    Value { field: &'static str, got: String, expected: String },
    /// The data are not what the model learns from.
    #[error("spec.engine.data.format: {format} holds {holds}: the model learns from {wants}: expected {expected}")]
    Mismatch {
        format: &'static str,
        holds: &'static str,
        wants: &'static str,
        /// Formats that the model can use.
        expected: &'static str,
    },
    /// A file whose content does not match its format.
    #[error("spec.engine.data.path: {}: {found}: expected {expected}", path.display())]
    Format { path: PathBuf, found: String, expected: String },
    /// A file that has changed since the run started.
    #[error("spec.engine.data.path: {} has changed since the start ({what}): expected it to stay as it is", path.display())]
    Changed { path: PathBuf, what: String },
    /// More samples than allowed cannot be read.
    #[error(
        "spec.engine.reader.maxBadSamples: {count} samples cannot be read, the last of them {last}: expected at most \
         {limit}"
    )]
    BadSamples {
        /// Unreadable samples so far.
        count: u64,
        /// How many are allowed.
        limit: u64,
        /// The last one and what is wrong with it.
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
        /// Windows of one step on all ranks.
        windows: u64,
        /// Tokens from one window to the next.
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
        /// Samples of one step on all ranks.
        needed: u64,
    },
    /// Not enough for one training and one validation sample.
    #[error(
        "spec.engine.data.validationFraction: {got} {item} cannot be split so that training and validation get \
         {sample} each: expected more data, or a fraction of 0"
    )]
    NoRoomForValidation {
        /// Tokens or samples available.
        got: u64,
        /// What is counted: tokens or samples.
        item: &'static str,
        /// What each side needs.
        sample: String,
    },
    /// A thread of the reader could not be started.
    #[error("cannot start a thread of the reader: {0}")]
    Thread(io::Error),
    /// A thread of the reader ended on its own, which is a bug.
    #[error("a thread of the reader ended unexpectedly ({0}): expected it to run as long as the training")]
    ReaderEnded(String),
}

impl DataError {
    /// A value of a field that cannot be used.
    pub(super) fn value(field: &'static str, got: impl ToString, expected: impl Into<String>) -> DataError {
        DataError::Value { field, got: got.to_string(), expected: expected.into() }
    }

    /// A file whose content does not match its format.
    pub(super) fn format(path: &Path, found: impl Into<String>, expected: impl Into<String>) -> DataError {
        DataError::Format { path: path.to_owned(), found: found.into(), expected: expected.into() }
    }

    pub(super) fn unreadable(path: &Path, error: io::Error) -> DataError {
        match error.kind() {
            io::ErrorKind::NotFound => DataError::MissingFile { path: path.to_owned() },
            _ => DataError::Unreadable { path: path.to_owned(), kind: "file", error },
        }
    }
}
