//! Type and size of the model.

use super::{Check, data};
use switchyard_crds as api;
use switchyard_worker_contract::config::{Activation, Bert, Custom, Gpt, Mlp, Model, ResNet, ResNetDepth, Stem};

/// Image size in pixels from which ImageNet's first layers are used. They reduce height and width
/// by a factor of four.
const LARGE_IMAGE: u32 = 96;

/// The block that `type` names. `None`, and a fault, if it is missing.
pub(super) fn model(engine: &api::Engine, check: &mut Check<'_>) -> Option<Model> {
    let model = &engine.model;
    let (field, found) = match model.kind {
        api::ModelType::GPT => ("gpt", model.gpt.as_ref().map(|shape| Model::Gpt(gpt(shape)))),
        api::ModelType::BERT => ("bert", model.bert.as_ref().map(|shape| Model::Bert(bert(shape, check)))),
        api::ModelType::ResNet => {
            ("resnet", model.resnet.as_ref().map(|shape| Model::ResNet(resnet(shape, &engine.data))))
        }
        api::ModelType::MLP => ("mlp", model.mlp.as_ref().map(|shape| Model::Mlp(mlp(shape)))),
        api::ModelType::Custom => ("custom", model.custom.as_ref().map(|custom| Model::Custom(named(custom)))),
    };
    if found.is_none() {
        check.fault(&format!("model.{field}"), "nothing", format!("the block of type {:?}", model.kind));
    }
    found
}

fn gpt(shape: &api::Gpt) -> Gpt {
    Gpt {
        layers: shape.layers.unsigned_abs(),
        hidden_size: shape.hidden_size.unsigned_abs(),
        heads: shape.heads.unsigned_abs(),
        context_length: shape.context_length.unsigned_abs(),
        vocabulary_size: vocabulary_size(shape.vocabulary),
        tied_head: shape.head == api::Head::Tied,
    }
}

fn bert(shape: &api::Bert, check: &mut Check<'_>) -> Bert {
    Bert {
        layers: shape.layers.unsigned_abs(),
        hidden_size: shape.hidden_size.unsigned_abs(),
        heads: shape.heads.unsigned_abs(),
        context_length: shape.context_length.unsigned_abs(),
        vocabulary_size: vocabulary_size(shape.vocabulary),
        masked_fraction: check.decimal("model.bert.maskedFraction", &shape.masked_fraction),
        next_sentence: shape.next_sentence.is_on(),
    }
}

fn vocabulary_size(vocabulary: api::Vocabulary) -> u32 {
    match vocabulary {
        api::Vocabulary::Bytes => 256,
        // 256 bytes, 50,000 merges and the end-of-text token (Radford and others 2019).
        api::Vocabulary::GPT2 => 50_257,
    }
}

fn resnet(shape: &api::ResNet, from: &api::Data) -> ResNet {
    let large = data::known_size(from).is_some_and(|pixels| pixels >= LARGE_IMAGE);
    ResNet {
        depth: if shape.depth == 50 { ResNetDepth::D50 } else { ResNetDepth::D18 },
        stem: match shape.stem {
            Some(api::Stem::ImageNet) => Stem::ImageNet,
            Some(api::Stem::Small) => Stem::Small,
            None if large => Stem::ImageNet,
            None => Stem::Small,
        },
        width: shape.width.unsigned_abs(),
    }
}

fn mlp(shape: &api::Mlp) -> Mlp {
    Mlp {
        hidden_sizes: shape.hidden_sizes.iter().map(|size| size.unsigned_abs()).collect(),
        activation: match shape.activation {
            api::Activation::ReLU => Activation::Relu,
            api::Activation::GELU => Activation::Gelu,
        },
    }
}

fn named(custom: &api::Custom) -> Custom {
    Custom { name: custom.name.clone(), parameters: custom.parameters.clone() }
}
