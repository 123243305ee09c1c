//! Data sources and how samples are read from them.

use serde::{Deserialize, Serialize};

/// Where the samples come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Data {
    /// Format and location.
    pub source: Source,
    /// Fraction of the samples held out for validation, 0 to 0.5. Ignored if the source has its own
    /// validation split.
    pub validation_fraction: f64,
    /// How images are sized, augmented and normalised.
    pub images: Images,
    /// How features are normalised.
    #[serde(default, skip_serializing_if = "is_default")]
    pub features: Features,
}

/// Format and location of the data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Source {
    /// Raw bytes of text files.
    Text(Files),
    /// A file of little-endian token IDs, or a directory with `train.bin` and optionally `val.bin`;
    /// read on demand.
    Tokens(Tokens),
    /// A directory with one subdirectory of image files per class, optionally below `train` and
    /// `val`.
    ImageFolder(Files),
    /// Directory of the CIFAR-10 binary version: `data_batch_1.bin` to `data_batch_5.bin` and
    /// `test_batch.bin`.
    Cifar10(Files),
    /// Directory of MNIST's four uncompressed IDX files (`train-images-idx3-ubyte` and so on).
    Idx(Files),
    /// File with one sample per line: comma-separated numbers, one of them the class.
    Csv(Csv),
    /// A safetensors file, or a directory with `.npy` files; tensors `images` or `features`, and
    /// `labels`; optionally the same with the prefix `validation_`.
    SafeTensors(Files),
    /// Generated from the seed; measures training speed when input costs nothing.
    Synthetic(Synthetic),
}

/// A file or a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Files {
    /// A file, or a directory that is searched recursively.
    pub path: String,
    /// Glob patterns relative to `path`; a file must match one of them. Text and image directories
    /// only.
    pub include: Vec<String>,
    /// Glob patterns relative to `path`; a file that matches one of them is skipped. Text and image
    /// directories only.
    pub exclude: Vec<String>,
}

/// A file of token IDs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tokens {
    /// A file, or a directory with `train.bin` and optionally `val.bin`.
    pub path: String,
    /// Width of a token ID.
    pub token_type: TokenType,
}

/// Width of a token ID in a file.
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
    /// The file.
    pub path: String,
    /// The column with the class. `None`: the only column with a usual name for labels, otherwise
    /// the last column.
    #[serde(default, skip_serializing_if = "is_default")]
    pub label: Option<Column>,
    /// Whether the first line is a header.
    #[serde(default, skip_serializing_if = "is_default")]
    pub header: Header,
    /// Height, width and channels if each line is an image (row-major, 0 to `largest`); `None` if
    /// the numbers are features.
    pub image: Option<ImageShape>,
    /// Value of white in an image, for example 16 or 255; above 0.
    pub largest: f64,
}

/// A column of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Column {
    /// The name in the header.
    Name(String),
    /// From 1, or from -1 backwards from the last column.
    Position(i32),
}

/// Whether a file starts with a header.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Header {
    /// If the first line looks like one.
    #[default]
    Auto,
    /// Always.
    Present,
    /// Never.
    Absent,
}

/// How features are normalised: `(x - mean) / deviation`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Features {
    /// Not at all.
    #[default]
    Raw,
    /// By the mean and standard deviation of each feature in the training split.
    TrainingSplit,
    /// By the given numbers; one for all features, or one per feature.
    Given {
        /// Subtracted.
        mean: Vec<f64>,
        /// Divisors.
        deviation: Vec<f64>,
    },
}

/// Size of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageShape {
    /// Height in pixels.
    pub height: u32,
    /// Width in pixels.
    pub width: u32,
    /// 1 for grey, 3 for red, green and blue.
    pub channels: u32,
}

/// Samples generated from the seed, in the form that the model expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Synthetic {
    /// Samples per epoch (sequences for token models).
    pub samples: u64,
    /// Image size; `None` generates vectors of 16 features.
    pub image: Option<ImageShape>,
    /// Number of classes for images and features.
    pub classes: u32,
}

/// How images are sized, augmented and normalised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Images {
    /// Height and width of the model input. Images are scaled so that their shorter side has this
    /// size, then centre-cropped. 0 keeps the source's size (image folders must set one).
    pub size: u32,
    /// Training only: zero padding on each side before a random crop to `size`.
    pub crop_padding: u32,
    /// Training only: mirror each image with probability 1/2.
    pub flip: bool,
    /// Mean of each channel of x / 255, subtracted on the device; one value for all channels, or
    /// one per channel.
    pub mean: Vec<f64>,
    /// Standard deviation of each channel of x / 255, by which the device divides.
    pub deviation: Vec<f64>,
}

/// How samples are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Reader {
    /// Threads that read, decode and augment. `None`: as many as keep up with the training, within
    /// the CPUs of the rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers: Option<u32>,
    /// Prepare the next micro-batch while the current one is in use; otherwise each step waits for
    /// its input.
    pub double_buffer: bool,
    /// Start the next epoch without a gap; otherwise the reader starts an epoch when training does.
    pub infinite: bool,
    /// Output format: bytes that the device normalises, or finished floats (4 times the memory
    /// traffic).
    pub sample_type: SampleType,
    /// Unreadable samples tolerated before the run fails.
    pub max_bad_samples: u64,
}

/// Sample format produced by the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampleType {
    /// Bytes, normalised on the device.
    UInt8,
    /// 32-bit floats, normalised by the reader.
    Float32,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
