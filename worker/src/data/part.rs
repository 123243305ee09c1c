//! What every source of samples provides.

use super::batch::Row;
use super::entropy::Entropies;
use super::error::DataError;
use super::task::WindowKind;

/// Which sample, and its random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Draw {
    /// Index below the number of samples.
    pub sample: u64,
    /// Tokens by which all windows of this epoch are shifted, at most the slack.
    pub offset: u64,
    /// Seed for the random numbers of this sample in this epoch.
    pub key: u64,
    /// Whether the sample is augmented (images only).
    pub augment: bool,
}

/// How many samples a pass over the data takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spread {
    /// Samples of an epoch.
    pub samples: u64,
    /// Tokens that no window needs: the first window of an epoch starts at any of 0 to `slack`. 0 for data that are not
    /// text.
    pub slack: u64,
}

/// Why there is no sample.
#[derive(Debug)]
pub(super) enum SampleError {
    /// Only this sample cannot be read: which one it is, and what is wrong with it.
    Bad(String),
    /// The data can no longer be read.
    Data(DataError),
}

impl From<DataError> for SampleError {
    fn from(error: DataError) -> Self {
        SampleError::Data(error)
    }
}

/// Memory that a thread keeps from one sample to the next.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// A file, or a piece of one.
    pub bytes: Vec<u8>,
    /// A window of tokens.
    pub tokens: Vec<u32>,
    /// An image of the size that the model takes.
    pub pixels: Vec<u8>,
    /// Rows of an image that is being scaled.
    pub rows: Vec<f32>,
}

/// The samples for training, or those for validation.
pub(super) trait Part: std::fmt::Debug + Send + Sync {
    fn spread(&self) -> Spread;

    fn write(&self, draw: &Draw, row: &mut Row<'_>, scratch: &mut Scratch) -> Result<(), SampleError>;

    /// Checks that the files have not changed; called once per micro-batch.
    fn check(&self) -> Result<(), DataError> {
        Ok(())
    }

    /// The token windows that the samples consist of; `None` for other samples.
    fn windows(&self) -> Option<WindowKind> {
        None
    }

    /// See [`super::Dataset::entropies`].
    fn entropies(&self) -> Result<Option<Entropies>, DataError> {
        Ok(None)
    }

    fn memory_bytes(&self) -> u64;
}
