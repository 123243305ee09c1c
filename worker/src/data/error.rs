//! What can be wrong with the data.

use std::io;
use std::path::{Path, PathBuf};

/// Why there are no samples. Every text names the field or the file, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// There is nothing at the path.
    #[error("spec.engine.data.path: nothing at {}: expected a file or a directory", path.display())]
    Missing {
        /// The path as an absolute one.
        path: PathBuf,
    },
    /// A file that the format consists of is not there.
    #[error("spec.engine.data.path: {} is missing: expected this file", path.display())]
    MissingFile {
        /// The path.
        path: PathBuf,
    },
    /// A device, pipe, socket or link to nothing where a file is expected.
    #[error("{field}: {} is {found}: expected {expected}", path.display())]
    NotAFile {
        /// The field that led there.
        field: &'static str,
        /// The path.
        path: PathBuf,
        /// What it is.
        found: &'static str,
        /// What was expected.
        expected: &'static str,
    },
    /// A file or directory that cannot be read.
    #[error("spec.engine.data.path: cannot read {} ({error}): expected a readable {kind}", path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// `file` or `directory`.
        kind: &'static str,
        /// What the system says.
        error: io::Error,
    },
    /// A glob pattern that is none.
    #[error("{field}: pattern `{pattern}`: {reason}: expected for example `src/**/*.rs`")]
    Pattern {
        /// The field with the position in the list.
        field: String,
        /// The pattern.
        pattern: String,
        /// What is wrong.
        reason: String,
    },
    /// Patterns beside a path to a single file.
    #[error("{field}: got patterns, but the path {} is a file: expected none, or a directory", path.display())]
    PatternsForFile {
        /// The field.
        field: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// No file is left after the patterns.
    #[error(
        "spec.engine.data.include: none of the {seen} files in {} is matched by {include} and not by exclude \
         {exclude}: expected at least one", path.display()
    )]
    NothingMatches {
        /// The directory.
        path: PathBuf,
        /// Files before the patterns.
        seen: u64,
        /// The patterns.
        include: String,
        /// The patterns.
        exclude: String,
    },
    /// Every file is empty.
    #[error("spec.engine.data.path: all {files} files of {} are empty: expected text", path.display())]
    AllEmpty {
        /// The path.
        path: PathBuf,
        /// How many.
        files: u64,
    },
    /// More than is kept in memory.
    #[error("spec.engine.data.path: {} holds {got} bytes: expected at most {limit}", path.display())]
    TooLarge {
        /// The path.
        path: PathBuf,
        /// Bytes found; the search ends when the limit is passed.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// The share for validation is none.
    #[error("spec.engine.data.validationFraction: got {got}: expected 0 to 0.5")]
    Fraction {
        /// The value.
        got: f64,
    },
    /// A size of zero.
    #[error("{field}: got 0: expected at least 1")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A value that cannot be used.
    #[error("{field}: got {got}: expected {expected}")]
    Value {
        /// The field.
        field: &'static str,
        /// The value.
        got: String,
        /// What was expected.
        expected: String,
    },
    /// The data are not what the model learns from.
    #[error("spec.engine.data.format: {format} holds {holds}: the model learns from {wants}: expected {expected}")]
    Mismatch {
        /// The format.
        format: &'static str,
        /// What it holds.
        holds: &'static str,
        /// What the model takes.
        wants: &'static str,
        /// Formats that would do.
        expected: &'static str,
    },
    /// A file that does not hold what its format says.
    #[error("spec.engine.data.path: {}: {found}: expected {expected}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A file that is not what it was when the run started.
    #[error("spec.engine.data.path: {} has changed since the start ({what}): expected it to stay as it is", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// In what.
        what: String,
    },
    /// More samples than allowed cannot be read.
    #[error(
        "spec.engine.reader.maxBadSamples: {count} samples cannot be read, the last of them {last}: expected at most \
         {limit}"
    )]
    BadSamples {
        /// Samples that cannot be read so far.
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
        /// Tokens there are.
        got: u64,
        /// Tokens needed.
        needed: u64,
        /// Windows of one step over all ranks.
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
        /// Samples there are.
        got: u64,
        /// Samples of one step over all ranks.
        needed: u64,
    },
    /// Not enough for a sample of training and one of validation.
    #[error(
        "spec.engine.data.validationFraction: {got} {item} cannot be split so that training and validation get \
         {sample} each: expected more data, or a fraction of 0"
    )]
    NoRoomForValidation {
        /// Tokens or samples there are.
        got: u64,
        /// What they are.
        item: &'static str,
        /// What each side needs.
        sample: String,
    },
    /// A thread of the reader could not be started.
    #[error("cannot start a thread of the reader: {0}")]
    Thread(io::Error),
    /// A thread of the reader ended by itself, which is a bug.
    #[error("a thread of the reader ended unexpectedly ({0}): expected it to run as long as the training")]
    ReaderEnded(String),
}

impl DataError {
    /// A value of a field that cannot be used.
    pub(super) fn value(field: &'static str, got: impl ToString, expected: impl Into<String>) -> DataError {
        DataError::Value { field, got: got.to_string(), expected: expected.into() }
    }

    /// A file that does not hold what its format says.
    pub(super) fn format(path: &Path, found: impl Into<String>, expected: impl Into<String>) -> DataError {
        DataError::Format { path: path.to_owned(), found: found.into(), expected: expected.into() }
    }

    /// A file that cannot be read.
    pub(super) fn unreadable(path: &Path, error: io::Error) -> DataError {
        match error.kind() {
            io::ErrorKind::NotFound => DataError::MissingFile { path: path.to_owned() },
            _ => DataError::Unreadable { path: path.to_owned(), kind: "file", error },
        }
    }
}
