//! Learning tasks and sample kinds.

use switchyard_worker_contract::config::{Bert, Model};
use switchyard_worker_contract::event::Item;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// The next token after each token of a window.
    NextToken {
        context: u32,
        /// Exclusive upper bound of tokens.
        vocabulary: u32,
    },
    /// Masked tokens.
    Masked(Masking),
    /// One class per sample.
    Classify,
}

/// Parameters of masked-language-modelling samples (Devlin et al. 2019, section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Masking {
    /// Tokens per sequence, including special tokens.
    pub context: u32,
    /// Predicted tokens per sequence.
    pub predictions: u32,
    /// Exclusive upper bound of data tokens.
    pub vocabulary: u32,
    /// Whether a sequence has two segments, with next-sentence prediction.
    pub next_sentence: bool,
    /// Replaces a masked token.
    pub mask: u32,
    /// First token of a sequence.
    pub cls: u32,
    /// Last token of a segment.
    pub sep: u32,
}

impl Masking {
    /// Data tokens per sequence: all but CLS and one SEP per segment.
    pub fn window(&self) -> u32 {
        self.context.saturating_sub(if self.next_sentence { 3 } else { 2 })
    }

    /// Data tokens in the first segment.
    pub fn first_segment(&self) -> u32 {
        if self.next_sentence { self.window().div_ceil(2) } else { self.window() }
    }
}

impl Task {
    /// The task of a model configuration.
    pub fn of(model: &Model) -> Task {
        match model {
            Model::Gpt(gpt) => Task::NextToken { context: gpt.context_length, vocabulary: gpt.vocabulary_size },
            Model::Bert(bert) => Task::Masked(Masking {
                context: bert.context_length,
                predictions: bert.predictions(),
                vocabulary: bert.vocabulary_size,
                next_sentence: bert.next_sentence,
                mask: bert.vocabulary_size + Bert::MASK,
                cls: bert.vocabulary_size + Bert::CLS,
                sep: bert.vocabulary_size + Bert::SEP,
            }),
            Model::ResNet(_) | Model::Mlp(_) | Model::Custom(_) => Task::Classify,
        }
    }

    /// The data that the task needs, for messages.
    pub(super) fn wants(&self) -> &'static str {
        match self {
            Task::NextToken { .. } | Task::Masked(_) => "tokens",
            Task::Classify => "images or features with classes",
        }
    }

    /// The formats with suitable data.
    pub(super) fn formats(&self) -> &'static str {
        match self {
            Task::NextToken { .. } | Task::Masked(_) => "Text, Tokens or Synthetic",
            Task::Classify => "ImageFolder, CIFAR10, IDX, CSV, SafeTensors or Synthetic",
        }
    }
}

/// Sample kind; it determines the model's input and output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A window of tokens and the next token of each.
    Tokens {
        context: u32,
        /// Exclusive upper bound of tokens.
        vocabulary: u32,
    },
    /// A sequence with masked tokens.
    Masked(Masking),
    /// An image and its class.
    Images {
        height: u32,
        width: u32,
        /// 1 or 3 bytes per pixel.
        channels: u32,
        /// Exclusive upper bound of classes.
        classes: u32,
    },
    /// A feature vector and its class.
    Features {
        width: u32,
        /// Exclusive upper bound of classes.
        classes: u32,
    },
}

impl Kind {
    /// The unit of throughput.
    pub fn item(&self) -> Item {
        match self {
            Kind::Tokens { .. } | Kind::Masked(_) => Item::Tokens,
            Kind::Images { .. } => Item::Images,
            Kind::Features { .. } => Item::Samples,
        }
    }

    /// [`Item`]s per sample.
    pub fn items_per_sample(&self) -> u64 {
        match self {
            Kind::Tokens { context, .. } | Kind::Masked(Masking { context, .. }) => (*context).into(),
            Kind::Images { .. } | Kind::Features { .. } => 1,
        }
    }

    /// Description of a sample, for example `128 tokens` or `32x32x3 pixels in 10 classes`.
    pub fn words(&self) -> String {
        match self {
            Kind::Tokens { context, .. } => format!("{context} tokens"),
            Kind::Masked(Masking { context, predictions, .. }) => {
                format!("{context} tokens, {predictions} of them masked")
            }
            Kind::Images { height, width, channels, classes } => {
                format!("{height}x{width}x{channels} pixels in {classes} classes")
            }
            Kind::Features { width, classes } => format!("{width} numbers in {classes} classes"),
        }
    }
}

/// How a window is used.
#[derive(Debug, Clone, Copy)]
pub(super) enum WindowKind {
    /// Tokens and the next token of each.
    NextToken { context: u32, vocabulary: u32 },
    /// A sequence with masked tokens.
    Masked(Masking),
}

impl WindowKind {
    /// Tokens between the starts of neighbouring windows.
    pub(super) fn stride(&self) -> u64 {
        match self {
            WindowKind::NextToken { context, .. } => (*context).into(),
            WindowKind::Masked(masking) => masking.window().into(),
        }
    }

    /// Tokens that `windows` windows need, including the target after the last window.
    pub(super) fn needed(&self, windows: u64) -> u64 {
        let last = u64::from(matches!(self, WindowKind::NextToken { .. }));
        windows.saturating_mul(self.stride()).saturating_add(last)
    }
}
