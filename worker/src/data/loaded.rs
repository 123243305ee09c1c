//! Content of array files, before it becomes samples.

use super::error::DataError;
use super::rows::{MAX_CLASSES, Rows};
use std::path::Path;
use switchyard_worker_contract::config::ImageShape;

/// Largest side of an image in pixels.
pub(super) const MAX_SIDE: u32 = 1 << 14;

/// Samples, with or without a separate validation part.
#[derive(Debug, PartialEq)]
pub(super) struct Pair<T> {
    pub train: Rows<T>,
    pub validation: Option<Rows<T>>,
}

/// Content of the files.
#[derive(Debug, PartialEq)]
pub(super) enum Content {
    Images(ImageShape, Pair<u8>),
    Features(Pair<f32>),
}

/// Everything that was read.
#[derive(Debug, PartialEq)]
pub(super) struct Loaded {
    pub content: Content,
    /// The number that the format states; otherwise one more than the largest class.
    pub classes: Option<u32>,
    pub files: u64,
    /// Bytes of the files.
    pub bytes: u64,
    /// Samples skipped because they cannot be read.
    pub bad: u64,
}

/// Checks that a label can be a class.
pub(super) fn label(path: &Path, sample: usize, label: i128, classes: u32) -> Result<u32, DataError> {
    u32::try_from(label).ok().filter(|label| *label < classes).ok_or_else(|| {
        let expected = format!("classes 0 to {}", classes - 1);
        DataError::format(path, format!("label {label} of sample {sample}"), expected)
    })
}

/// A label of a format that does not state the number of classes.
pub(super) fn any_label(path: &Path, sample: usize, number: i128) -> Result<u32, DataError> {
    label(path, sample, number, MAX_CLASSES)
}

/// The shape of an image whose sides are within the limits.
pub(super) fn image_shape(height: usize, width: usize, channels: usize) -> Option<ImageShape> {
    let fits = |side: usize| u32::try_from(side).ok().filter(|side| (1..=MAX_SIDE).contains(side));
    Some(ImageShape { height: fits(height)?, width: fits(width)?, channels: channels as u32 })
}

/// Checks the sizes of the source, and the size that the images are scaled to (0: none).
pub(super) fn check_shape(shape: &ImageShape, size: u32) -> Result<(), DataError> {
    if size > MAX_SIDE {
        return Err(DataError::value("spec.engine.data.images.size", size, format!("at most {MAX_SIDE}")));
    }
    let sides = 1..=MAX_SIDE;
    if !sides.contains(&shape.height) || !sides.contains(&shape.width) || ![1, 3].contains(&shape.channels) {
        let got = format!("{}x{}x{}", shape.height, shape.width, shape.channels);
        let expected = format!("height and width of 1 to {MAX_SIDE}, and 1 or 3 channels");
        return Err(DataError::value("spec.engine.data.image", got, expected));
    }
    Ok(())
}
