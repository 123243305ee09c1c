//! The interface of all sample sources.

use super::batch::Row;
use super::entropy::Entropies;
use super::error::DataError;
use super::task::WindowKind;

/// A sample to load, with its random numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Draw {
    /// Index below the number of samples.
    pub sample: u64,
    /// Token shift of all windows of this epoch, at most the slack.
    pub offset: u64,
    /// Seed for this sample's random numbers in this epoch.
    pub key: u64,
    /// Whether the sample is augmented (images only).
    pub augment: bool,
}

/// Size of one pass over the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct EpochSize {
    /// Samples per epoch.
    pub samples: u64,
    /// Tokens left over by the windows: the first window of an epoch starts at a token in
    /// 0..=`slack`. 0 for other data.
    pub slack: u64,
}

/// Why a sample could not be loaded.
#[derive(Debug)]
pub(super) enum SampleError {
    /// Only this sample is unreadable: the sample and the problem.
    Unreadable(String),
    /// The data as a whole can no longer be read.
    Data(DataError),
}

impl From<DataError> for SampleError {
    fn from(error: DataError) -> Self {
        SampleError::Data(error)
    }
}

/// Buffers that a thread reuses for all samples.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// A file, or a chunk of one.
    pub bytes: Vec<u8>,
    /// A window of tokens.
    pub tokens: Vec<u32>,
    /// An image at the model's input size.
    pub pixels: Vec<u8>,
    /// Rows of an image during scaling.
    pub rows: Vec<f32>,
}

/// A training or validation split.
pub(super) trait Part: std::fmt::Debug + Send + Sync {
    fn epoch_size(&self) -> EpochSize;

    fn write(&self, draw: &Draw, row: &mut Row<'_>, scratch: &mut Scratch) -> Result<(), SampleError>;

    /// Checks that the files are unchanged; called once per micro-batch.
    fn check(&self) -> Result<(), DataError> {
        Ok(())
    }

    /// The window kind of token samples; `None` for other samples.
    fn windows(&self) -> Option<WindowKind> {
        None
    }

    /// See [`super::Dataset::entropies`].
    fn entropies(&self) -> Result<Option<Entropies>, DataError> {
        Ok(None)
    }

    fn memory_bytes(&self) -> u64;
}
