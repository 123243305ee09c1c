//! Sources of samples, and how they are read.

use serde::{Deserialize, Serialize};

/// Where the samples come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Data {
    /// Format and location.
    pub source: Source,
    /// Share of the samples kept for validation, 0 to 0.5. Not used if the source has its own validation part.
    pub validation_fraction: f64,
    /// How images are sized, augmented and normalised.
    pub images: Images,
}

/// Format and location of the data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Source {
    /// Bytes of text files.
    Text(Files),
    /// A file of little-endian token numbers, or a directory with `train.bin` and optionally `val.bin`; read on demand.
    Tokens(Tokens),
    /// Directory with one directory per class, with JPEG and PNG files; or with `train` and `val`, which contain the
    /// class directories.
    ImageFolder(Files),
    /// Directory of the binary version of CIFAR-10: `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`.
    Cifar10(Files),
    /// Directory of MNIST's four IDX files (`train-images-idx3-ubyte` and so on), not compressed.
    Idx(Files),
    /// File with one sample per line: numbers separated by commas, the class last.
    Csv(Csv),
    /// A safetensors file, or a directory with `.npy` files; tensors `images` or `features`, and `labels`; optionally
    /// the same with the prefix `validation_`.
    SafeTensors(Files),
    /// Generated from the seed; shows how fast training is when input costs nothing.
    Synthetic(Synthetic),
}

/// A file or a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Files {
    /// A file, or a directory that is searched recursively.
    pub path: String,
    /// Glob patterns relative to `path`; a file must match one of them. Only for a directory of text or images.
    pub include: Vec<String>,
    /// Glob patterns relative to `path`; a file that matches one of them is skipped. Only for a directory of text or
    /// images.
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
    /// 2 bytes per token.
    UInt16,
    /// 4 bytes per token.
    UInt32,
}

/// A file of comma-separated numbers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Csv {
    /// The file. A first line that is not numeric is a header.
    pub path: String,
    /// Width, height and channels if the numbers are an image (0 to `largest`), row by row; otherwise they are
    /// features.
    pub image: Option<ImageShape>,
    /// Value of white in an image, such as 16 or 255; above 0.
    pub largest: f64,
}

/// Size of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageShape {
    /// Pixels of a column.
    pub height: u32,
    /// Pixels of a row.
    pub width: u32,
    /// 1 for grey, 3 for red, green and blue.
    pub channels: u32,
}

/// Samples generated from the seed, of the kind that the model takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Synthetic {
    /// Samples of an epoch (for tokens: sequences).
    pub samples: u64,
    /// Size of the images; `None`: samples are 16 features.
    pub image: Option<ImageShape>,
    /// Number of classes of images and features.
    pub classes: u32,
}

/// How images are sized, augmented and normalised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Images {
    /// Height and width that the model sees. Images are scaled so that their shorter side has this size, and cropped to
    /// the middle. 0: as the source has them (an image folder must set a size).
    pub size: u32,
    /// Training only: zero pixels added on each side before a random crop of `size`.
    pub crop_padding: u32,
    /// Training only: a random half of the images is mirrored.
    pub flip: bool,
    /// Mean of each channel of x / 255, subtracted on the device; one number for all channels, or one per channel.
    pub mean: Vec<f64>,
    /// Standard deviation of each channel of x / 255, by which the device divides.
    pub deviation: Vec<f64>,
}

/// How samples are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Reader {
    /// Threads that read, decode and augment.
    pub workers: u32,
    /// The next micro-batch is prepared while the current one is in use; otherwise the step waits for each.
    pub double_buffer: bool,
    /// An epoch follows the previous one without a gap; otherwise the reader starts an epoch when the training does.
    pub infinite: bool,
    /// Output of the reader: bytes that the device normalises, or finished floats (4 times the memory traffic).
    pub sample_type: SampleType,
    /// Samples that may be unreadable before the run fails.
    pub max_bad_samples: u64,
}

/// Output of the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampleType {
    /// Bytes, normalised on the device.
    UInt8,
    /// 32-bit floats, normalised by the reader.
    Float32,
}
