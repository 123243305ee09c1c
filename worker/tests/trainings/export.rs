//! The saved model has the names, shapes and values of the published GPT-2 and BERT, so that other
//! programs can load it as such.
//!
//! GPT-2's blocks compute `x W + b` with `W` as `[inputs, outputs]` (`Conv1D` in Hugging Face's
//! transformers). BERT has separate layers for query, key and value, and a separate bias for its
//! decoder, whose weight is tied to the token embedding and not stored again.

use crate::ranks::{blueprint, free_port, group};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::PathBuf;
use switchyard_worker::model::initialise;
use switchyard_worker::nn::{Layout, ParameterSlot};
use switchyard_worker::train::Trainer;
use switchyard_worker_contract::config::*;

const LAYERS: u32 = 2;
const HIDDEN: usize = 24;
const CONTEXT: usize = 32;

fn config(model: Model) -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    EngineConfig { model, ..crate::plain::gpt(&source, &["**/*.rs"]) }
}

/// A model with its initial weights: the file, our own layout, and our own values.
fn saved(config: &EngineConfig) -> (Vec<u8>, Layout, Vec<f32>) {
    let mut trainer = Trainer::join(blueprint(config, 1).unwrap(), &group(1, 0, free_port())).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    trainer.save(&file).unwrap();
    let layout = trainer.layout().clone();
    let mut own = vec![0.0; layout.len];
    initialise(&layout, config.seed, &mut own);
    (std::fs::read(&file).unwrap(), layout, own)
}

#[derive(Default)]
struct Published(BTreeMap<String, Vec<usize>>);

impl Published {
    fn add(&mut self, name: &str, shape: &[usize]) {
        self.0.insert(name.to_owned(), shape.to_vec());
    }

    /// `nn.Linear`.
    fn linear(&mut self, name: &str, inputs: usize, outputs: usize) {
        self.add(&format!("{name}.weight"), &[outputs, inputs]);
        self.add(&format!("{name}.bias"), &[outputs]);
    }

    fn conv1d(&mut self, name: &str, inputs: usize, outputs: usize) {
        self.add(&format!("{name}.weight"), &[inputs, outputs]);
        self.add(&format!("{name}.bias"), &[outputs]);
    }

    fn norm(&mut self, name: &str) {
        self.add(&format!("{name}.weight"), &[HIDDEN]);
        self.add(&format!("{name}.bias"), &[HIDDEN]);
    }

    fn assert_is(&self, file: &SafeTensors<'_>) {
        let got = file.iter().map(|(name, view)| (name.to_owned(), view.shape().to_vec())).collect();
        assert_eq!(self.0, got);
    }
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let words = file.tensor(name).unwrap().data().as_chunks::<4>().0.iter();
    words.map(|word| f32::from_le_bytes(*word)).collect()
}

fn input(len: usize) -> Vec<f32> {
    (0..len).map(|index| 1.0 + index as f32 / 7.0).collect()
}

/// `W x` with `W` as `[outputs, inputs]`.
fn rows_times(weights: &[f32], x: &[f32]) -> Vec<f32> {
    weights.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

/// `x W` with `W` as `[inputs, outputs]`.
fn times_columns(x: &[f32], weights: &[f32]) -> Vec<f32> {
    let outputs = weights.len() / x.len();
    (0..outputs).map(|output| x.iter().enumerate().map(|(i, x)| weights[i * outputs + output] * x).sum()).collect()
}

fn matrices<'a>(layout: &'a Layout, part: &'a str) -> impl Iterator<Item = &'a ParameterSlot> {
    layout.parameters.iter().filter(move |slot| slot.shape.len() == 2 && slot.name.contains(part))
}

#[test]
fn a_gpt_is_saved_like_the_published_gpt_2() {
    for tied_head in [true, false] {
        let gpt = Gpt {
            layers: LAYERS,
            hidden_size: HIDDEN as u32,
            heads: 3,
            context_length: CONTEXT as u32,
            vocabulary_size: 256,
            tied_head,
        };
        let (bytes, layout, own) = saved(&config(Model::Gpt(gpt)));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut published = Published::default();
        published.add("transformer.wte.weight", &[256, HIDDEN]);
        published.add("transformer.wpe.weight", &[CONTEXT, HIDDEN]);
        for layer in 0..LAYERS {
            let name = |part: &str| format!("transformer.h.{layer}.{part}");
            published.norm(&name("ln_1"));
            published.conv1d(&name("attn.c_attn"), HIDDEN, 3 * HIDDEN);
            published.conv1d(&name("attn.c_proj"), HIDDEN, HIDDEN);
            published.norm(&name("ln_2"));
            published.conv1d(&name("mlp.c_fc"), HIDDEN, 4 * HIDDEN);
            published.conv1d(&name("mlp.c_proj"), 4 * HIDDEN, HIDDEN);
        }
        published.norm("transformer.ln_f");
        if !tied_head {
            published.add("lm_head.weight", &[256, HIDDEN]);
        }
        published.assert_is(&file);
        let blocks: Vec<_> = matrices(&layout, "transformer.h.").collect();
        assert_eq!(blocks.len(), 4 * LAYERS as usize);
        for slot in blocks {
            let x = input(slot.shape[1]);
            let theirs = times_columns(&x, &floats(&file, &slot.name));
            assert_eq!(theirs, rows_times(&own[slot.range()], &x), "{}", slot.name);
        }
    }
}

#[test]
fn a_bert_is_saved_like_the_published_bert() {
    let bert = Bert {
        layers: LAYERS,
        hidden_size: HIDDEN as u32,
        heads: 3,
        context_length: CONTEXT as u32,
        vocabulary_size: 256,
        masked_fraction: 0.15,
        next_sentence: true,
    };
    let rows = bert.embedding_rows() as usize;
    let (bytes, layout, own) = saved(&config(Model::Bert(bert)));
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut published = Published::default();
    published.add("bert.embeddings.word_embeddings.weight", &[rows, HIDDEN]);
    published.add("bert.embeddings.position_embeddings.weight", &[CONTEXT, HIDDEN]);
    published.add("bert.embeddings.token_type_embeddings.weight", &[2, HIDDEN]);
    published.norm("bert.embeddings.LayerNorm");
    for layer in 0..LAYERS {
        let name = |part: &str| format!("bert.encoder.layer.{layer}.{part}");
        for part in ["query", "key", "value"] {
            published.linear(&name(&format!("attention.self.{part}")), HIDDEN, HIDDEN);
        }
        published.linear(&name("attention.output.dense"), HIDDEN, HIDDEN);
        published.norm(&name("attention.output.LayerNorm"));
        published.linear(&name("intermediate.dense"), HIDDEN, 4 * HIDDEN);
        published.linear(&name("output.dense"), 4 * HIDDEN, HIDDEN);
        published.norm(&name("output.LayerNorm"));
    }
    published.linear("bert.pooler.dense", HIDDEN, HIDDEN);
    published.linear("cls.seq_relationship", HIDDEN, 2);
    published.linear("cls.predictions.transform.dense", HIDDEN, HIDDEN);
    published.norm("cls.predictions.transform.LayerNorm");
    published.add("cls.predictions.bias", &[rows]);
    published.assert_is(&file);
    let products: Vec<_> = matrices(&layout, ".qkv.").collect();
    assert_eq!(products.len(), LAYERS as usize);
    for slot in products {
        let x = input(HIDDEN);
        let part = |part: &str| rows_times(&floats(&file, &slot.name.replace("qkv", part)), &x);
        assert_eq!([part("query"), part("key"), part("value")].concat(), rows_times(&own[slot.range()], &x));
    }
}

#[test]
fn the_model_has_its_class_names_and_the_normalisation_of_its_features() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.csv");
    let lines: String =
        (0..40).map(|line| format!("{},{},{}\n", line % 2, 100 + line % 4, ["no", "\"yes\""][line % 2])).collect();
    std::fs::write(&path, lines).unwrap();
    let path = path.to_str().unwrap().to_owned();
    let mut config = config(Model::Mlp(Mlp { hidden_sizes: vec![3], activation: Activation::Relu }));
    config.data.source = Source::Csv(Csv { path, image: None, largest: 1.0, label: None, header: Header::Auto });
    (config.data.validation_fraction, config.data.features) = (0.0, Features::TrainingSplit);
    let (_, header) = SafeTensors::read_metadata(&saved(&config).0).unwrap();
    let metadata = header.metadata().as_ref().unwrap();
    assert_eq!(metadata["classes"], r#"["no","yes"]"#);
    assert_eq!(metadata["featureMean"], "[0.5,101.5]");
    assert_eq!(metadata["featureDeviation"], "[0.5,1.118033988749895]");
}
