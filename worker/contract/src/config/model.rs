//! Model architectures.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The network to train.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Model {
    /// Decoder-only transformer: pre-LN blocks, causal attention, GELU, learned positions.
    Gpt(Gpt),
    /// Encoder with masked-language modelling, post-LN blocks (Devlin et al. 2019).
    Bert(Bert),
    /// Residual convolutional network (He et al. 2016).
    ResNet(ResNet),
    /// Fully connected layers.
    Mlp(Mlp),
    /// A model registered by the worker's program.
    Custom(Custom),
}

/// GPT hyperparameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Gpt {
    /// Transformer blocks.
    pub layers: u32,
    /// Width of the residual stream; a multiple of `heads`.
    pub hidden_size: u32,
    /// Attention heads.
    pub heads: u32,
    /// Tokens per sequence.
    pub context_length: u32,
    /// Vocabulary size; 256 for bytes.
    pub vocabulary_size: u32,
    /// The output layer shares its weights with the token embedding.
    pub tied_head: bool,
}

/// BERT hyperparameters, and how its samples are built.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Bert {
    /// Transformer blocks.
    pub layers: u32,
    /// Width of the residual stream; a multiple of `heads`.
    pub hidden_size: u32,
    /// Attention heads.
    pub heads: u32,
    /// Tokens per sequence, including special tokens.
    pub context_length: u32,
    /// Size of the data's vocabulary; the special tokens follow it.
    pub vocabulary_size: u32,
    /// Fraction of the tokens to predict, above 0 to 0.5.
    pub masked_fraction: f64,
    /// Each sequence consists of two segments, and the model also predicts whether the second
    /// follows the first in the text.
    pub next_sentence: bool,
}

impl Bert {
    /// Offset of this special token after the data's vocabulary: MASK, CLS, SEP, then padding to a
    /// multiple of 8 embedding rows.
    pub const MASK: u32 = 0;
    /// Offset of CLS, see [`Bert::MASK`].
    pub const CLS: u32 = 1;
    /// Offset of SEP, see [`Bert::MASK`].
    pub const SEP: u32 = 2;

    /// Rows of the token embedding: vocabulary plus special tokens, rounded up to a multiple of 8
    /// for tensor cores.
    pub fn embedding_rows(&self) -> u32 {
        (self.vocabulary_size + 3).next_multiple_of(8)
    }

    /// Tokens predicted per sequence. Fixed, so that every step has the same shapes.
    pub fn predictions(&self) -> u32 {
        ((f64::from(self.context_length) * self.masked_fraction).round() as u32).max(1)
    }
}

/// ResNet hyperparameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResNet {
    /// Number of layers.
    pub depth: ResNetDepth,
    /// Layers before the first stage.
    pub stem: Stem,
    /// Channels of the first stage; 64 in the paper. Later stages have 2, 4 and 8 times as many.
    pub width: u32,
}

/// Number of layers of a ResNet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResNetDepth {
    /// Basic blocks, 2 per stage.
    #[serde(rename = "18")]
    D18,
    /// Bottleneck blocks: 3, 4, 6 and 3.
    #[serde(rename = "50")]
    D50,
}

/// Layers of a ResNet before its first stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stem {
    /// 3 x 3 convolution, stride 1, no pooling: for small images.
    Small,
    /// 7 x 7 convolution with stride 2 and 3 x 3 max pooling with stride 2: for images of about 224
    /// pixels.
    ImageNet,
}

/// MLP hyperparameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mlp {
    /// Hidden layer widths. Input and output widths follow from the data.
    pub hidden_sizes: Vec<u32>,
    /// Activation function between the layers.
    pub activation: Activation,
}

/// Activation function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Activation {
    /// max(x, 0)
    Relu,
    /// Gaussian error linear unit, tanh approximation.
    Gelu,
}

/// A model registered by the worker's program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Custom {
    /// Name under which the program registered it.
    pub name: String,
    /// Passed to the program unchanged.
    pub parameters: BTreeMap<String, String>,
}
