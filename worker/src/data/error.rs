//! What can be wrong with the data.

use std::io;
use std::path::PathBuf;

/// Why there are no samples. Every text names the field or the file, what was found and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// There is nothing at the path.
    #[error("spec.engine.data.path: nothing at {}: expected a file or a directory", path.display())]
    Missing {
        /// The path as an absolute one.
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
    #[error("spec.engine.data.path: {} holds {got} bytes of text: expected at most {limit}", path.display())]
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
    /// Not enough text for one step.
    #[error(
        "spec.engine.data.path: {got} tokens for training: one step needs {needed} ({windows} windows of \
         {context_length} tokens): expected more text, or a smaller batch, fewer processes or a shorter context"
    )]
    TooShort {
        /// Tokens there are.
        got: u64,
        /// Tokens needed.
        needed: u64,
        /// Windows of one step over all ranks.
        windows: u64,
        /// Tokens per window.
        context_length: u64,
    },
    /// Not enough text for a window of training and one of validation.
    #[error(
        "spec.engine.data.validationFraction: {got} tokens cannot be split so that training and validation get a \
         window of {context_length} tokens each: expected more text, or a fraction of 0"
    )]
    NoRoomForValidation {
        /// Tokens there are.
        got: u64,
        /// Tokens per window.
        context_length: u64,
    },
    /// The reader's thread could not be started.
    #[error("cannot start the reader's thread: {0}")]
    Thread(io::Error),
    /// The reader's thread ended by itself, which is a bug.
    #[error("the reader's thread ended unexpectedly: expected it to run as long as the training")]
    ReaderEnded,
}
