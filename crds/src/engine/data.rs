//! Sources of samples, and how they are read.

use super::{DECIMAL, SIGNED_DECIMAL, Switch, disabled};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// Format of the training data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum DataFormat {
    /// Text files, read as bytes.
    #[default]
    Text,
    /// A file of little-endian token ids, or a directory with `train.bin` and optionally `val.bin`.
    Tokens,
    /// A directory with one subdirectory of image files per class, or with `train` and `val`
    /// directories of that form: BMP, GIF, JPEG, PGM, PNG, PPM, TIFF and WebP.
    ImageFolder,
    /// A directory with the binary version of CIFAR-10.
    CIFAR10,
    /// A directory with the four uncompressed files of MNIST.
    IDX,
    /// A file with one sample per line: numbers separated by commas, one of them the class.
    CSV,
    /// A safetensors file with `images` or `features`, and `labels`; or a directory of `.npy` files
    /// with these names. Optionally also for validation, with the prefix `validation_`.
    SafeTensors,
    /// Generated from the seed, in the form that the model expects. Shows the training speed
    /// without input cost.
    Synthetic,
}

/// Width of a token id in a file of format `Tokens`. Default `UInt16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum TokenType {
    /// 2 bytes.
    UInt16,
    /// 4 bytes.
    UInt32,
}

/// Where the samples come from.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.path) == (self.format != 'Synthetic')")
    .message("path must be set, and omitted only with format Synthetic, which reads no files").field_path(".path"))]
#[x_kube(validation = Rule::new("self.format in ['Text', 'ImageFolder'] || (!has(self.include) && !has(self.exclude))")
    .message("include and exclude are for the formats Text and ImageFolder").field_path(".format"))]
#[x_kube(validation = Rule::new("self.format == 'Tokens' || !has(self.tokenType)")
    .message("tokenType is for format Tokens").field_path(".tokenType"))]
#[x_kube(validation = Rule::new("self.format != 'ImageFolder' || has(self.imageSize)")
    .message("imageSize must be set with format ImageFolder, whose files may have any size").field_path(".imageSize"))]
#[x_kube(validation = Rule::new("self.format in ['CSV', 'Synthetic'] || !has(self.image)")
    .message("image is for the formats CSV and Synthetic: other formats contain the size of their images").field_path(".image"))]
#[x_kube(validation = Rule::new("!(self.format in ['Text', 'Tokens'] || (self.format in ['CSV', 'Synthetic'] && !has(self.image))) \
    || (!has(self.imageSize) && !has(self.augmentation))")
    .message("imageSize and augmentation are for images: formats ImageFolder, CIFAR10, IDX, SafeTensors, and CSV and Synthetic with image").field_path(".format"))]
#[x_kube(validation = Rule::new("!(self.format in ['Text', 'Tokens'] || (self.format == 'Synthetic' && !has(self.image))) || !has(self.normalisation)")
    .message("normalisation is for images, and for features of the formats CSV and SafeTensors").field_path(".normalisation"))]
#[x_kube(validation = Rule::new("!has(self.normalisation) || !has(self.normalisation.source) || self.format == 'SafeTensors' || (self.format == 'CSV' && !has(self.image))")
    .message("normalisation.source is for features: formats SafeTensors, and CSV without image").field_path(".normalisation.source"))]
#[x_kube(validation = Rule::new("!has(self.normalisation) || !has(self.normalisation.mean) || self.format == 'SafeTensors' || (self.format == 'CSV' && !has(self.image)) \
    || self.normalisation.mean.size() in [1, 3]")
    .message("for images, normalisation must have one number for all channels, or one for each of 3").field_path(".normalisation.mean"))]
#[x_kube(validation = Rule::new("self.format == 'CSV' || (!has(self.labelColumn) && !has(self.header))")
    .message("labelColumn and header are for format CSV").field_path(".format"))]
#[x_kube(validation = Rule::new("self.format == 'Synthetic' || (!has(self.classes) && !has(self.samples))")
    .message("classes and samples are for format Synthetic: other data has its own").field_path(".format"))]
#[x_kube(validation = Rule::new("!has(self.largestValue) || (self.format == 'CSV' && has(self.image) && double(self.largestValue) > 0.0)")
    .message("largestValue must be greater than 0, and is for format CSV with image").field_path(".largestValue"))]
#[x_kube(validation = Rule::new("double(self.validationFraction) <= 0.5")
    .message("validationFraction must be between 0 and 0.5").field_path(".validationFraction"))]
pub struct Data {
    /// Format of the data. Default `Text`: the bytes of text files.
    #[serde(default)]
    pub format: DataFormat,

    /// A file or a directory, depending on the format. `switchyard run` resolves relative paths
    /// against the current directory; in a cluster it is a path in the container. In a directory of
    /// text files, hidden entries and directories marked by a CACHEDIR.TAG (build output) are
    /// skipped. Not with format `Synthetic`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub path: Option<String>,

    /// Glob patterns relative to `path`, such as `**/*.rs`; a file of a directory is read if any of
    /// them matches. Formats `Text` and `ImageFolder`. Default: every file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub include: Vec<String>,

    /// Glob patterns relative to `path`; a file that any of them matches is skipped. Formats `Text`
    /// and `ImageFolder`. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1024)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub exclude: Vec<String>,

    /// Width of a token id in format `Tokens`. Default `UInt16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_type: Option<TokenType>,

    /// Height and width of the images that the model sees, in pixels: files are scaled so that
    /// their shorter side has this size, and center-cropped. Default: the size of the data;
    /// required with format `ImageFolder`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 8, max = 4096))]
    pub image_size: Option<i32>,

    /// Size of an image. Format `CSV`: the numbers of a line are its pixels, row by row; default:
    /// they are features. Format `Synthetic`: samples are images; default: they are 16 features.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageShape>,

    /// Number that represents white in the images of format `CSV`, a decimal string. Default "255".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub largest_value: Option<String>,

    /// Column with the class in format `CSV`: its name in the header, or its position from 1, or
    /// from -1 backwards from the last column. Default: the last or else the first column if the
    /// header calls it `label`, `class`, `target` or `y`, otherwise the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "column")]
    pub label_column: Option<IntOrString>,

    /// Whether the first line of format `CSV` is a header. Default `Auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<Header>,

    /// Number of classes of format `Synthetic`. Default 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 65_536))]
    pub classes: Option<i32>,

    /// Samples per epoch of format `Synthetic`; sequences for language models. Default 10000.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000_i64))]
    pub samples: Option<i64>,

    /// Random augmentation of training images. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub augmentation: Option<Augmentation>,

    /// Mean and deviation for normalising image channels or features. Default: the
    /// statistics of the data set for formats `CIFAR10` and `IDX` (MNIST), of ImageNet for
    /// `ImageFolder`, otherwise mean 0 and deviation 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalisation: Option<Normalisation>,

    /// Fraction of the data reserved for validation, a decimal string between "0" and "0.5"; chosen
    /// by content hash. Not used if the data has its own validation split. Default "0.1".
    #[serde(default = "tenth")]
    #[schemars(length(max = 32), regex(pattern = DECIMAL))]
    pub validation_fraction: String,
}

/// Size of an image.
#[derive(KubeSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.channels == 1 || self.channels == 3")
    .message("channels must be 1 (grey) or 3 (red, green and blue)").field_path(".channels"))]
pub struct ImageShape {
    /// Height in pixels.
    #[schemars(range(min = 1, max = 4096))]
    pub height: i32,

    /// Width in pixels.
    #[schemars(range(min = 1, max = 4096))]
    pub width: i32,

    /// 1 for greyscale, 3 for RGB.
    #[schemars(range(min = 1, max = 3))]
    pub channels: i32,
}

/// Random augmentation of training images.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Augmentation {
    /// Zero padding in pixels on each side before a random crop of the image's size. Default 0: no
    /// random cropping.
    #[serde(default)]
    #[schemars(range(min = 0, max = 512))]
    pub crop_padding: i32,

    /// `Enabled`: a random half of the images is mirrored. Default `Disabled`.
    #[serde(default = "disabled")]
    pub flip: Switch,
}

/// Whether the first line of a file is a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Header {
    /// If no field is a number, a field names the label, or the fields count from 0 as in pandas.
    Auto,
    /// It is.
    Present,
    /// It is a sample.
    Absent,
}

/// Data from which mean and deviation are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NormalisationSource {
    /// All training samples.
    TrainingSplit,
}

/// Normalisation of channels or features: either `source`, or `mean` and `deviation`. Pixel bytes
/// are divided by 255 first.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.source) ? !has(self.mean) && !has(self.deviation) \
    : has(self.mean) && has(self.deviation) && self.mean.size() == self.deviation.size()")
    .message("either source must be set, or mean and deviation with equally many numbers"))]
#[x_kube(validation = Rule::new("!has(self.deviation) || self.deviation.all(number, double(number) > 0.0)")
    .message("every deviation must be greater than 0").field_path(".deviation"))]
pub struct Normalisation {
    /// Computes the mean and standard deviation of each feature from the training samples, and
    /// applies them to validation too. Features that do not vary become 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<NormalisationSource>,

    /// Subtracted from the channels or features: one decimal string for all, or one for each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 4096), inner(length(max = 32), regex(pattern = SIGNED_DECIMAL)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub mean: Vec<String>,

    /// Divisors after the subtraction: one decimal string for all channels or features, or one for
    /// each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 4096), inner(length(max = 32), regex(pattern = DECIMAL)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub deviation: Vec<String>,
}

/// Sample type that the reader produces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SampleType {
    /// Bytes, which the device normalises.
    #[default]
    UInt8,
    /// Normalised floats, with 4 times the memory traffic.
    Float32,
}

/// Whether batches are in memory that a GPU can read directly.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PinnedMemory {
    /// If the process computes on a GPU.
    #[default]
    Auto,
    /// Never.
    Disabled,
}

/// How the samples are read.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reader {
    /// Threads per process that read, decode and augment. Default: as many as keep up with the
    /// training, measured in its first micro-batches, within the CPUs of the process.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub workers: Option<i32>,

    /// `Enabled` (default): the next micro-batch is prepared while the current one is in use.
    /// `Disabled`: the step waits for it.
    #[serde(default)]
    pub double_buffer: Switch,

    /// `Enabled` (default): epochs follow each other without a gap. `Disabled`: the reader drains
    /// between epochs. Both give the same samples.
    #[serde(default)]
    pub infinite: Switch,

    /// Sample type that the reader produces for images. Default `UInt8`: bytes, which the device
    /// normalises.
    #[serde(default)]
    pub sample_type: SampleType,

    /// Whether batches pass through pinned memory. Default `Auto`: if the ranks compute on GPUs,
    /// which read batches from there; `Disabled` is for CPUs only.
    #[serde(default)]
    pub pinned_memory: PinnedMemory,

    /// Unreadable samples tolerated before the run fails; each one is logged. Default 0.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub max_bad_samples: i64,
}

impl Default for Reader {
    fn default() -> Self {
        Reader {
            workers: None,
            double_buffer: Switch::Enabled,
            infinite: Switch::Enabled,
            sample_type: SampleType::UInt8,
            pinned_memory: PinnedMemory::Auto,
            max_bad_samples: 0,
        }
    }
}

fn tenth() -> String {
    "0.1".into()
}

/// Schema of a column's name or position.
fn column(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "nullable": false,
        "minimum": -1_000_000,
        "maximum": 1_000_000,
        "minLength": 1,
        "maxLength": 256,
    })
}
