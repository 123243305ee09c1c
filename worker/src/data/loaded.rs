//! What a file of arrays holds, before it becomes samples.

use super::error::DataError;
use super::rows::{MAX_CLASSES, Rows};
use std::path::Path;
use switchyard_worker_contract::config::ImageShape;

/// Most pixels of a side of an image.
pub(super) const MAX_SIDE: u32 = 1 << 14;

/// Samples with a part of their own for validation, or without.
#[derive(Debug, PartialEq)]
pub(super) struct Pair<T> {
    pub train: Rows<T>,
    pub validation: Option<Rows<T>>,
}

/// What the files hold.
#[derive(Debug, PartialEq)]
pub(super) enum Content {
    Images(ImageShape, Pair<u8>),
    Features(Pair<f32>),
}

/// All that was read.
#[derive(Debug, PartialEq)]
pub(super) struct Loaded {
    pub content: Content,
    /// Where the format says it; else one more than the largest class.
    pub classes: Option<u32>,
    pub files: u64,
    /// Of the files.
    pub bytes: u64,
    /// Samples left out because they cannot be read.
    pub bad: u64,
}

/// A label that can be a class.
pub(super) fn label(path: &Path, sample: usize, label: i128, classes: u32) -> Result<u32, DataError> {
    u32::try_from(label).ok().filter(|label| *label < classes).ok_or_else(|| {
        let expected = format!("classes 0 to {}", classes - 1);
        DataError::format(path, format!("label {label} of sample {sample}"), expected)
    })
}

/// A label of a format that does not say how many classes there are.
pub(super) fn any_label(path: &Path, sample: usize, number: i128) -> Result<u32, DataError> {
    label(path, sample, number, MAX_CLASSES)
}

/// The shape of images whose sides a model can have.
pub(super) fn image_shape(height: usize, width: usize, channels: usize) -> Option<ImageShape> {
    let fits = |side: usize| u32::try_from(side).ok().filter(|side| (1..=MAX_SIDE).contains(side));
    Some(ImageShape { height: fits(height)?, width: fits(width)?, channels: channels as u32 })
}
