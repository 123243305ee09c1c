//! Sources of samples, and how they are read.

use serde::{Deserialize, Serialize};

/// Where the samples come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Data {
    /// Format and place.
    pub source: Source,
    /// Share of the samples kept for validation, 0 to 0.5. Not used where the source has a validation part of its own.
    pub validation_fraction: f64,
    /// What is done to images.
    pub images: Images,
}

/// Format and place of the data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Source {
    /// Bytes of text files.
    Text(Files),
    /// A file of little-endian token numbers, or a directory with `train.bin` and optionally `val.bin`; read as it is needed.
    Tokens(Tokens),
    /// Directory of one directory per class, with JPEG and PNG files; or of `train` and `val` with those.
    ImageFolder(Files),
    /// Directory of the binary version of CIFAR-10: `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
    Cifar10(Files),
    /// Directory of MNIST's four IDX files (`train-images-idx3-ubyte` and so on), `.gz` not unpacked.
    Idx(Files),
    /// File with one sample per line, numbers separated by commas, the class last.
    Csv(Csv),
    /// A safetensors file, or a directory with `.npy` files; tensors `images` or `features`, and `labels`; optionally the same with
    /// the prefix `validation_`.
    SafeTensors(Files),
    /// Made up from the seed; shows how fast training is when input costs nothing.
    Synthetic(Synthetic),
}

/// A file or a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Files {
    /// A file, or a directory that is walked.
    pub path: String,
    /// Glob patterns relative to `path`; a file must match one of them. Only for a directory of text or images.
    pub include: Vec<String>,
    /// Glob patterns relative to `path`; a file that matches one of them is left out. Only for a directory of text or images.
    pub exclude: Vec<String>,
}

/// A file of token numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tokens {
    /// A file, or a directory with `train.bin` and optionally `val.bin`.
    pub path: String,
    /// Width of a number.
    pub token_type: TokenType,
}

/// Width of a token number in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenType {
    /// 2 bytes.
    UInt16,
    /// 4 bytes.
    UInt32,
}

/// A file of comma-separated numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Csv {
    /// The file. A first line that is not numeric is a header.
    pub path: String,
    /// Width, height and channels when the numbers are an image (0 to `largest`), row by row; otherwise they are features.
    pub image: Option<ImageShape>,
    /// Value that stands for white in an image, such as 16 or 255; above 0.
    pub largest: f64,
}

/// Size of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageShape {
    /// Rows of pixels.
    pub height: u32,
    /// Pixels of a row.
    pub width: u32,
    /// 1 for grey, 3 for red, green and blue.
    pub channels: u32,
}

/// Samples made up from the seed, of the kind that the model takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Synthetic {
    /// Samples of an epoch (tokens: sequences).
    pub samples: u64,
    /// Images of this size; `None`: 16 features.
    pub image: Option<ImageShape>,
    /// Classes of images and features.
    pub classes: u32,
}

/// What is done to images.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Images {
    /// Height and width that the model sees. Larger or smaller files are scaled so that their shorter side has this size, and cut to the
    /// middle. 0: as the source has them (an image folder must say).
    pub size: u32,
    /// Training only: zero pixels added on each side before a random piece of `size` is cut out.
    pub crop_padding: u32,
    /// Training only: every second image is mirrored, by chance.
    pub flip: bool,
    /// Mean of each channel of x / 255, subtracted on the device; one number for all channels, or one for each.
    pub mean: Vec<f64>,
    /// Standard deviation of each channel of x / 255, divided by on the device.
    pub deviation: Vec<f64>,
}

/// How samples are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Reader {
    /// Threads that read, decode and augment.
    pub workers: u32,
    /// The next micro-batch is made while the current one is in use; otherwise the step waits for each.
    pub double_buffer: bool,
    /// An epoch follows the one before without a gap; otherwise the reader begins an epoch when the training does.
    pub infinite: bool,
    /// What leaves the reader: bytes that the device normalises, or finished floats (4 times the memory traffic).
    pub sample_type: SampleType,
    /// Samples that may be unreadable before the run fails.
    pub max_bad_samples: u64,
}

/// What leaves the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampleType {
    /// Bytes.
    UInt8,
    /// Floats of 32 bits.
    Float32,
}
