//! Contents of array files, before they become samples.

use super::error::DataError;
use super::rows::{MAX_CLASSES, Rows};
use std::path::Path;
use switchyard_worker_contract::config::ImageShape;

/// Maximum image height and width in pixels.
pub(super) const MAX_SIDE: u32 = 1 << 14;

/// Samples, with or without a separate validation part.
#[derive(Debug, PartialEq)]
pub(super) struct Pair<T> {
    pub train: Rows<T>,
    pub validation: Option<Rows<T>>,
}

/// Samples by kind.
#[derive(Debug, PartialEq)]
pub(super) enum Content {
    Images(ImageShape, Pair<u8>),
    Features(Pair<f32>),
}

/// The classes of array files.
#[derive(Debug, PartialEq)]
pub(super) enum Classes {
    /// One more than the largest label.
    FromLabels,
    /// As many as the format defines.
    Count(u32),
    /// One for each name.
    Named(Vec<String>),
}

/// The contents of array files.
#[derive(Debug, PartialEq)]
pub(super) struct Loaded {
    pub content: Content,
    pub classes: Classes,
    pub files: u64,
    /// Total file size.
    pub bytes: u64,
    /// Unreadable samples, which are skipped.
    pub bad: u64,
}

/// Checks that a label can be a class.
pub(super) fn label(path: &Path, sample: usize, label: i128, classes: u32) -> Result<u32, DataError> {
    u32::try_from(label).ok().filter(|label| *label < classes).ok_or_else(|| {
        let expected = format!("classes 0 to {}", classes - 1);
        DataError::format(path, format!("label {label} of sample {sample}"), expected)
    })
}

/// Checks a label in a format that does not define the number of classes.
pub(super) fn any_label(path: &Path, sample: usize, number: i128) -> Result<u32, DataError> {
    label(path, sample, number, MAX_CLASSES)
}

/// The shape of an image, if its sides are within the limits.
pub(super) fn image_shape(height: usize, width: usize, channels: usize) -> Option<ImageShape> {
    let fits = |side: usize| u32::try_from(side).ok().filter(|side| (1..=MAX_SIDE).contains(side));
    Some(ImageShape { height: fits(height)?, width: fits(width)?, channels: channels as u32 })
}

/// Checks the shape of the source, and the size that images are scaled to (0: no scaling).
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
