//! A small network of each kind with weights and a batch, for single-rank tests.
#![allow(dead_code, clippy::unwrap_used)]

use std::sync::Arc;
use switchyard_worker::cpu::{Cpu, Format, HalfKernel, Isa, Pool, Values, bf16, f16};
use switchyard_worker::data::{Batch, Kind, Task};
use switchyard_worker::model::{Registry, initialise};
use switchyard_worker::nn::{GradientSink, Graph, LossSums, Network, Weights};
use switchyard_worker_contract::config::{self, Model};

pub fn gpt(tied_head: bool) -> Model {
    Model::Gpt(config::Gpt { layers: 2, hidden_size: 24, heads: 3, context_length: 11, vocabulary_size: 37, tied_head })
}

pub fn bert(next_sentence: bool) -> Model {
    Model::Bert(config::Bert {
        layers: 2,
        hidden_size: 24,
        heads: 3,
        context_length: 12,
        vocabulary_size: 37,
        masked_fraction: 0.25,
        next_sentence,
    })
}

pub fn resnet(depth: config::ResNetDepth, stem: config::Stem, width: u32) -> Model {
    Model::ResNet(config::ResNet { depth, stem, width })
}

pub fn mlp(activation: config::Activation) -> Model {
    Model::Mlp(config::Mlp { hidden_sizes: vec![20, 13], activation })
}

/// A model, the kind of its samples, and the batch size.
#[derive(Debug, Clone)]
pub struct Case {
    pub name: &'static str,
    pub model: Model,
    pub kind: Kind,
    pub samples: usize,
}

pub fn images(side: u32, channels: u32) -> Kind {
    Kind::Images { height: side, width: side, channels, classes: 5 }
}

/// The kind of a language model's samples.
pub fn kind_of(model: &Model) -> Kind {
    match Task::of(model) {
        Task::NextToken { context, vocabulary } => Kind::Tokens { context, vocabulary },
        Task::Masked(masking) => Kind::Masked(masking),
        Task::Classify => images(8, 3),
    }
}

pub fn cases() -> Vec<Case> {
    use config::{Activation, ResNetDepth, Stem};
    let text = |name, model: Model| Case { name, kind: kind_of(&model), model, samples: 3 };
    let picture = |name, model, kind, samples| Case { name, model, kind, samples };
    vec![
        text("gpt", gpt(true)),
        text("gpt untied", gpt(false)),
        text("bert", bert(false)),
        text("bert next sentence", bert(true)),
        picture("resnet-18", resnet(ResNetDepth::D18, Stem::Small, 4), images(9, 3), 4),
        picture("resnet-50", resnet(ResNetDepth::D50, Stem::ImageNet, 4), images(40, 1), 8),
        picture("mlp", mlp(Activation::Relu), images(4, 3), 6),
        picture("mlp features", mlp(Activation::Gelu), Kind::Features { width: 7, classes: 4 }, 6),
    ]
}

pub fn cpu(threads: usize, isa: Isa) -> Cpu {
    Cpu { pool: Arc::new(Pool::new(threads)), isa, half: HalfKernel::F32 }
}

pub fn batch_of(kind: &Kind, samples: usize) -> Batch {
    let mut batch = Batch::default();
    let pick =
        |count: usize, below: u32| (0..count).map(|i| ((i * i * 5 + 3 * i + 1) as u32) % below).collect::<Vec<_>>();
    match *kind {
        Kind::Tokens { context, vocabulary } => {
            batch.tokens = pick(samples * context as usize, vocabulary);
            batch.targets = (0..samples * context as usize).map(|i| (i * 11 + 3) as u32 % vocabulary).collect();
        }
        Kind::Masked(masking) => {
            let (context, each) = (masking.context as usize, masking.predictions as usize);
            batch.tokens = pick(samples * context, masking.vocabulary);
            batch.segments = (0..samples * context).map(|i| u8::from(i % context > context / 2)).collect();
            batch.positions = (0..samples * each).map(|i| (i / each * context + 1 + 3 * (i % each)) as u32).collect();
            batch.targets = (0..samples * each).map(|i| (i * 7 + 2) as u32 % masking.vocabulary).collect();
            batch.next_sentence = (0..samples).map(|i| (i % 2) as u32).collect();
        }
        Kind::Images { height, width, channels, classes } => {
            let len = samples * (height * width * channels) as usize;
            batch.pixels = (0..len).map(|i| ((i * i * 31 + i * 7) % 251) as u8).collect();
            batch.targets = (0..samples).map(|i| (i * 3 + 1) as u32 % classes).collect();
        }
        Kind::Features { width, classes } => {
            batch.values = (0..samples * width as usize).map(|i| ((i * 37 % 101) as f32 / 50.0).sin()).collect();
            batch.targets = (0..samples).map(|i| (i * 3 + 1) as u32 % classes).collect();
        }
    }
    batch
}

pub enum Half {
    None,
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

pub struct Trial {
    pub network: Network,
    pub weights: Vec<f32>,
    pub half: Half,
    pub statistics: Vec<f32>,
    pub batch: Batch,
}

impl Trial {
    pub fn new(case: &Case, cpu: Cpu, format: Format) -> Trial {
        Trial::new_with(case, cpu, format, (0.45, 0.25))
    }

    pub fn new_with(case: &Case, cpu: Cpu, format: Format, normalisation: (f64, f64)) -> Trial {
        Trial::of(&Registry::new(), case, cpu, format, normalisation)
    }

    pub fn of(registry: &Registry, case: &Case, cpu: Cpu, format: Format, (mean, deviation): (f64, f64)) -> Trial {
        let graph = Graph::new(case.samples, case.kind, format).with_normalisation(&[mean], &[deviation]);
        Trial::build(registry, case, cpu, graph)
    }

    pub fn recomputing(case: &Case, cpu: Cpu, format: Format) -> Trial {
        let graph = Graph::new(case.samples, case.kind, format).with_normalisation(&[0.45], &[0.25]);
        Trial::build(&Registry::new(), case, cpu, graph.with_recomputation())
    }

    fn build(registry: &Registry, case: &Case, cpu: Cpu, mut graph: Graph) -> Trial {
        let format = graph.format();
        registry.model(&case.model).unwrap().build(&mut graph).unwrap();
        let network = Network::new(graph, cpu).unwrap();
        let mut weights = vec![0.0; network.layout().len];
        initialise(network.layout(), 3, &mut weights);
        let half = match format {
            Format::F32 => Half::None,
            Format::Bf16 => Half::Bf16(vec![bf16::ZERO; weights.len()]),
            Format::F16 => Half::F16(vec![f16::ZERO; weights.len()]),
        };
        let statistics = network.initial_statistics();
        let mut trial = Trial { network, weights, half, statistics, batch: batch_of(&case.kind, case.samples) };
        trial.round();
        trial
    }

    /// Larger weights and nonzero biases, so that every path has a measurable gradient.
    pub fn excite(mut self) -> Trial {
        for parameter in &self.network.layout().parameters {
            for (i, w) in self.weights[parameter.range()].iter_mut().enumerate() {
                match (parameter.shape.len(), parameter.initial) {
                    (1, _) => *w += 0.1 * ((i * 7 + parameter.offset) as f32).sin(),
                    (2, switchyard_worker::nn::Initial::Normal(_)) => *w *= 8.0,
                    _ => {}
                }
            }
        }
        self.round();
        self
    }

    /// Call after the weights have changed.
    pub fn round(&mut self) {
        match &mut self.half {
            Half::None => {}
            Half::Bf16(half) => half.iter_mut().zip(&self.weights).for_each(|(h, &w)| *h = bf16::from_f32(w)),
            Half::F16(half) => half.iter_mut().zip(&self.weights).for_each(|(h, &w)| *h = f16::from_f32(w)),
        }
    }

    pub fn parts(&mut self) -> (&mut Network, Weights<'_>, &Batch) {
        let half = match &self.half {
            Half::None => None,
            Half::Bf16(half) => Some(Values::Bf16(half)),
            Half::F16(half) => Some(Values::F16(half)),
        };
        let weights = Weights { master: &self.weights, half, statistics: &self.statistics };
        (&mut self.network, weights, &self.batch)
    }

    pub fn forward(&mut self) -> LossSums {
        let (network, weights, batch) = self.parts();
        network.forward(weights, batch)
    }

    pub fn evaluate(&mut self) -> LossSums {
        let (network, weights, batch) = self.parts();
        network.evaluate(weights, batch)
    }

    pub fn backward(&mut self, scale: f32, sink: &mut dyn GradientSink) {
        let (network, weights, batch) = self.parts();
        network.backward(weights, batch, scale, sink);
    }
}
