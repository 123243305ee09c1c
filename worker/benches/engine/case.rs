//! Benchmark cases.

use serde_json::{Value, json};
use switchyard_worker::data::{Batch, Kind, Task};
use switchyard_worker_contract::config::{
    self, Activation, Adam, Bert, DecayExclusions, Gpt, Mlp, Model, Momentum, ResNet, ResNetDepth, Rule, Stem,
};

/// The compared steps cycle through this many batches.
pub const BATCHES: usize = 4;

/// A model with its batch shape and optimizer.
pub struct Case {
    pub name: &'static str,
    pub model: Model,
    pub kind: Kind,
    pub samples: usize,
    pub optimizer: config::Optimizer,
}

impl Case {
    pub const NAMES: [&str; 4] = ["gpt", "bert", "resnet18", "mlp"];

    /// One of [`Case::NAMES`].
    pub fn named(name: &str) -> Case {
        match name {
            "gpt" => text("gpt", gpt()),
            "bert" => text("bert", bert()),
            "resnet18" => Case {
                name: "resnet18",
                model: Model::ResNet(ResNet { depth: ResNetDepth::D18, stem: Stem::Small, width: 64 }),
                kind: Kind::Images { height: 32, width: 32, channels: 3, classes: 10 },
                samples: 16,
                // At a rate of 0.01, PyTorch's losses in two memory formats differ from each other
                // by 1e-2 after 20 steps; at this rate, by 2e-4.
                optimizer: sgd(5e-4),
            },
            _ => Case {
                name: "mlp",
                model: Model::Mlp(Mlp { hidden_sizes: vec![1024, 1024], activation: Activation::Relu }),
                kind: Kind::Features { width: 784, classes: 10 },
                samples: 128,
                optimizer: sgd(0.01),
            },
        }
    }

    /// The model as `torch_engine.py` expects it.
    pub fn peer_model(&self) -> Value {
        match (&self.model, self.kind) {
            (Model::Gpt(gpt), _) => json!({
                "kind": "gpt", "layers": gpt.layers, "hidden": gpt.hidden_size, "heads": gpt.heads,
                "context": gpt.context_length, "vocabulary": gpt.vocabulary_size,
            }),
            (Model::Bert(bert), _) => json!({
                "kind": "bert", "layers": bert.layers, "hidden": bert.hidden_size, "heads": bert.heads,
                "context": bert.context_length, "rows": bert.embedding_rows(),
            }),
            (Model::ResNet(resnet), Kind::Images { channels, classes, .. }) => json!({
                "kind": "resnet", "depth": if resnet.depth == ResNetDepth::D50 { 50 } else { 18 },
                "width": resnet.width, "small": resnet.stem == Stem::Small, "channels": channels, "classes": classes,
            }),
            (Model::Mlp(mlp), Kind::Features { width, classes }) => {
                let sizes = [width].into_iter().chain(mlp.hidden_sizes.iter().copied()).chain([classes]);
                json!({"kind": "mlp", "sizes": sizes.collect::<Vec<_>>()})
            }
            _ => unreachable!("invariant: the cases above"),
        }
    }

    /// Batch `index`: noise, equal on both sides.
    pub fn batch(&self, index: usize) -> Batch {
        let mut noise = Noise(index as u64 + 1);
        let mut below = |count: usize, most: u32| (0..count).map(|_| noise.next() % most).collect::<Vec<u32>>();
        let samples = self.samples;
        let mut batch = Batch::default();
        match self.kind {
            Kind::Tokens { context, vocabulary } => {
                batch.tokens = below(samples * context as usize, vocabulary);
                batch.targets = below(samples * context as usize, vocabulary);
            }
            Kind::Masked(masking) => {
                let (context, each) = (masking.context as usize, masking.predictions as usize);
                batch.tokens = below(samples * context, masking.vocabulary);
                batch.segments = vec![0; samples * context];
                batch.positions = (0..samples * each).map(|i| (i / each * context + 1 + i % each * 6) as u32).collect();
                batch.targets = below(samples * each, masking.vocabulary);
            }
            Kind::Images { height, width, channels, classes } => {
                let len = samples * (height * width * channels) as usize;
                batch.pixels = below(len, 256).into_iter().map(|pixel| pixel as u8).collect();
                batch.targets = below(samples, classes);
            }
            Kind::Features { width, classes } => {
                let values = below(samples * width as usize, 2001);
                batch.values = values.into_iter().map(|value| value as f32 / 1000.0 - 1.0).collect();
                batch.targets = below(samples, classes);
            }
        }
        batch
    }
}

fn gpt() -> Model {
    Model::Gpt(Gpt {
        layers: 4,
        hidden_size: 256,
        heads: 4,
        context_length: 128,
        vocabulary_size: 1024,
        tied_head: true,
    })
}

fn bert() -> Model {
    Model::Bert(Bert {
        layers: 4,
        hidden_size: 256,
        heads: 4,
        context_length: 128,
        vocabulary_size: 1024,
        masked_fraction: 0.15,
        next_sentence: false,
    })
}

fn text(name: &'static str, model: Model) -> Case {
    let kind = match Task::of(&model) {
        Task::NextToken { context, vocabulary } => Kind::Tokens { context, vocabulary },
        Task::Masked(masking) => Kind::Masked(masking),
        Task::Classify => unreachable!("invariant: a language model"),
    };
    let rule = Rule::AdamW(Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
    Case { name, model, kind, samples: 8, optimizer: optimizer(rule, 3e-4, 0.1) }
}

fn sgd(learning_rate: f64) -> config::Optimizer {
    optimizer(Rule::Sgd(Momentum { momentum: 0.9, nesterov: false }), learning_rate, 5e-4)
}

fn optimizer(rule: Rule, learning_rate: f64, weight_decay: f64) -> config::Optimizer {
    let decay_exclusions = DecayExclusions::Vectors;
    config::Optimizer { rule, learning_rate, weight_decay, gradient_clip_norm: None, decay_exclusions }
}

/// The upper half of a linear congruential generator (Knuth's MMIX).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
}
