//! Networks.

use super::{Switch, disabled};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Kind of network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum ModelType {
    /// Decoder-only transformer.
    GPT,
    /// Encoder with masked-language modelling.
    BERT,
    /// Residual convolutional network.
    ResNet,
    /// Fully connected layers.
    MLP,
    /// A network that the worker program registers.
    Custom,
}

/// The network: `type` and the block of that name. The number of classes and the sample size follow
/// from the data.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(self.type == 'GPT') == has(self.gpt) && (self.type == 'BERT') == has(self.bert) \
    && (self.type == 'ResNet') == has(self.resnet) && (self.type == 'MLP') == has(self.mlp) && (self.type == 'Custom') == has(self.custom)")
    .message("the block named by type must be set, and no other: type GPT needs gpt, BERT bert, ResNet resnet, MLP mlp, Custom custom"))]
pub struct Model {
    /// Kind of network.
    #[serde(rename = "type")]
    pub kind: ModelType,

    /// Shape of a GPT: pre-LN blocks, causal attention, GELU, learned positions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpt: Option<Gpt>,

    /// Shape of a BERT (post-LN blocks, GELU, learned positions), and how its samples are
    /// generated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bert: Option<Bert>,

    /// Shape of a ResNet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resnet: Option<ResNet>,

    /// Shape of a multi-layer perceptron. Images are flattened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlp: Option<Mlp>,

    /// A network of the worker program, by its registered name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<Custom>,
}

/// Vocabulary of a language model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Vocabulary {
    /// The 256 byte values.
    #[default]
    Bytes,
    /// The 50,257 tokens of GPT-2.
    GPT2,
}

/// Output layer of a language model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Head {
    /// Shares its weights with the token embedding.
    #[default]
    Tied,
    /// Has its own weights.
    Untied,
}

/// Shape of a GPT.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.hiddenSize % self.heads == 0")
    .message("heads must divide hiddenSize").field_path(".heads"))]
pub struct Gpt {
    /// Transformer blocks.
    #[schemars(range(min = 1, max = 256))]
    pub layers: i32,

    /// Width of the residual stream; a multiple of `heads`.
    #[schemars(range(min = 1, max = 32768))]
    pub hidden_size: i32,

    /// Attention heads.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: i32,

    /// Tokens per sequence.
    #[schemars(range(min = 1, max = 131_072))]
    pub context_length: i32,

    /// Vocabulary. Default `Bytes`. `GPT2` needs data with GPT-2 tokens.
    #[serde(default)]
    pub vocabulary: Vocabulary,

    /// Output layer. Default `Tied`.
    #[serde(default)]
    pub head: Head,
}

/// Shape of a BERT, and how its samples are generated.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.hiddenSize % self.heads == 0")
    .message("heads of a BERT must divide hiddenSize").field_path(".heads"))]
#[x_kube(validation = Rule::new("double(self.maskedFraction) > 0.0 && double(self.maskedFraction) <= 0.5")
    .message("maskedFraction must be greater than 0 and at most 0.5").field_path(".maskedFraction"))]
pub struct Bert {
    /// Transformer blocks.
    #[schemars(range(min = 1, max = 256))]
    pub layers: i32,

    /// Width of the residual stream; a multiple of `heads`.
    #[schemars(range(min = 1, max = 32768))]
    pub hidden_size: i32,

    /// Attention heads.
    #[schemars(range(min = 1, max = 1024))]
    pub heads: i32,

    /// Tokens per sequence, including special tokens.
    #[schemars(range(min = 8, max = 131_072))]
    pub context_length: i32,

    /// Fraction of the tokens that are predicted, a decimal string above "0" and at most "0.5".
    /// Default "0.15".
    #[serde(default = "masked_fraction")]
    #[schemars(length(max = 32), regex(pattern = super::DECIMAL))]
    pub masked_fraction: String,

    /// `Enabled`: a sequence is two segments, and the model also predicts whether the second
    /// follows the first in the text. Default `Disabled`.
    #[serde(default = "disabled")]
    pub next_sentence: Switch,

    /// Vocabulary. Default `Bytes`. `GPT2` needs data with GPT-2 tokens.
    #[serde(default)]
    pub vocabulary: Vocabulary,
}

/// First layers of a ResNet. Default: `ImageNet` if `data` specifies images of 96 pixels or more,
/// otherwise `Small`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Stem {
    /// 3 x 3 convolution: for small images.
    Small,
    /// 7 x 7 convolution with stride 2 and 3 x 3 max pooling with stride 2: for images of about 224
    /// pixels.
    ImageNet,
}

/// Shape of a ResNet.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.depth == 18 || self.depth == 50")
    .message("depth must be 18 or 50").field_path(".depth"))]
pub struct ResNet {
    /// Number of layers, 18 (basic blocks) or 50 (bottleneck blocks).
    #[schemars(range(min = 18, max = 50))]
    pub depth: i32,

    /// First layers. Default: `ImageNet` if `data` specifies images of 96 pixels or more, otherwise
    /// `Small`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stem: Option<Stem>,

    /// Channels of the first stage; the others have 2, 4 and 8 times as many. Default 64.
    #[serde(default = "sixty_four")]
    #[schemars(range(min = 8, max = 1024))]
    pub width: i32,
}

/// Activation function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(clippy::upper_case_acronyms)]
pub enum Activation {
    /// max(x, 0)
    #[default]
    ReLU,
    /// Gaussian error linear unit.
    GELU,
}

/// Shape of a multi-layer perceptron.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mlp {
    /// Widths of the hidden layers, from input to output.
    #[schemars(length(min = 1, max = 32), inner(range(min = 1, max = 65536)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub hidden_sizes: Vec<i32>,

    /// Activation between the layers. Default `ReLU`.
    #[serde(default)]
    pub activation: Activation,
}

/// A network that the worker program registers.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Custom {
    /// Name under which the program registered it.
    #[schemars(length(min = 1, max = 64), regex(pattern = r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"))]
    pub name: String,

    /// Passed to the network unchanged. Default: none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64, "additionalProperties" = {"type": "string", "maxLength": 1024}))]
    pub parameters: BTreeMap<String, String>,
}

fn masked_fraction() -> String {
    "0.15".into()
}
fn sixty_four() -> i32 {
    64
}
