//! What every source of samples does.

use super::batch::Row;
use super::dataset::Entropies;
use super::error::DataError;
use super::windows::Shape;

/// Which sample, and what chance does to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Draw {
    /// Below the number of samples.
    pub sample: u64,
    /// Tokens by which all windows of this epoch are moved, at most the slack.
    pub offset: u64,
    /// The random numbers of this sample in this epoch.
    pub key: u64,
    /// Whether the sample is changed by chance (images only).
    pub augment: bool,
}

/// How many samples a pass takes from the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spread {
    /// Samples of an epoch.
    pub samples: u64,
    /// Tokens that no window needs: an epoch's first window starts at any of 0 to `slack`. 0 for what is not a text.
    pub slack: u64,
}

/// Why there is no sample.
#[derive(Debug)]
pub(super) enum Fault {
    /// Only this one cannot be read: which it is and what is wrong with it.
    Bad(String),
    /// Nothing more can be read.
    Data(DataError),
}

impl From<DataError> for Fault {
    fn from(error: DataError) -> Self {
        Fault::Data(error)
    }
}

/// Memory that a thread keeps from one sample to the next.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// A file, or a piece of one.
    pub bytes: Vec<u8>,
    /// A window of tokens.
    pub tokens: Vec<u32>,
    /// An image of the size that the model sees.
    pub pixels: Vec<u8>,
    /// Rows of an image that is being scaled.
    pub rows: Vec<f32>,
}

/// The samples for training, or those for validation.
pub(super) trait Part: std::fmt::Debug + Send + Sync {
    /// How many samples there are.
    fn spread(&self) -> Spread;

    /// Writes a sample.
    fn write(&self, draw: &Draw, row: &mut Row<'_>, scratch: &mut Scratch) -> Result<(), Fault>;

    /// Whether the files are what they were; asked once for each micro-batch.
    fn check(&self) -> Result<(), DataError> {
        Ok(())
    }

    /// The windows of tokens that samples are made of; `None` where they are made of something else.
    fn windows(&self) -> Option<Shape> {
        None
    }

    /// See [`super::Dataset::entropies`].
    fn entropies(&self) -> Result<Option<Entropies>, DataError> {
        Ok(None)
    }

    /// Bytes of memory it takes.
    fn memory_bytes(&self) -> u64;
}
