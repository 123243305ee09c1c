//! Runs jobs on a device and collects their reports.

use crate::pods::{Job, events};
use std::ffi::OsString;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, GpuCalls, Link, Progress};

/// Turns a job into one of another model.
pub type Change = fn(&mut EngineConfig);

/// Small networks of every kind.
pub fn gpt(config: &mut EngineConfig) {
    config.model = Model::Gpt(Gpt {
        layers: 1,
        hidden_size: 16,
        heads: 2,
        context_length: 8,
        vocabulary_size: 256,
        tied_head: true,
    });
}

pub fn bert(config: &mut EngineConfig) {
    config.model = Model::Bert(Bert {
        layers: 1,
        hidden_size: 16,
        heads: 2,
        context_length: 12,
        vocabulary_size: 256,
        masked_fraction: 0.25,
        next_sentence: true,
    });
    config.data.validation_fraction = 0.3;
}

pub fn mlp(config: &mut EngineConfig) {
    config.model = Model::Mlp(Mlp { hidden_sizes: vec![24, 13], activation: Activation::Gelu });
    config.data.source = Source::Synthetic(Synthetic { samples: 200, image: None, classes: 5 });
    config.batch_size_per_process = 6;
}

pub fn relu(config: &mut EngineConfig) {
    mlp(config);
    config.model = Model::Mlp(Mlp { hidden_sizes: vec![24, 13], activation: Activation::Relu });
}

pub fn resnet(config: &mut EngineConfig) {
    let image = Some(ImageShape { height: 9, width: 9, channels: 3 });
    config.model = Model::ResNet(ResNet { depth: ResNetDepth::D18, stem: Stem::Small, width: 4 });
    config.data.source = Source::Synthetic(Synthetic { samples: 200, image, classes: 5 });
    config.data.images = Images { mean: vec![0.4], deviation: vec![0.3], ..config.data.images.clone() };
    config.batch_size_per_process = 4;
    // Adam's first steps have the size of the learning rate whatever the gradients are, which would
    // amplify rounding errors.
    config.optimizer.rule = Rule::Sgd(Momentum { momentum: 0.9, nesterov: false });
    config.optimizer.learning_rate = 0.02;
}

pub fn amp(compute_type: HalfType, loss_scaling: LossScaling) -> Precision {
    Precision::Amp(Amp { compute_type, loss_scaling })
}

/// Results of a run that reports each step.
pub struct RunOutput {
    pub codes: Vec<i32>,
    /// Reports of rank 0, from the first reported step on.
    pub progress: Vec<Progress>,
    pub validation: Option<f64>,
    /// Digest of the weights.
    pub digest: Option<String>,
    pub kernel: Option<String>,
    /// Driver calls of the last step.
    pub calls: Option<GpuCalls>,
    /// Transport of gradients.
    pub transport: Option<Transport>,
    /// Links of rank 0.
    pub links: Vec<Link>,
    /// Log of rank 0.
    pub log: String,
}

impl RunOutput {
    pub fn losses(&self) -> Vec<f64> {
        self.progress.iter().map(|progress| progress.loss).collect()
    }

    /// The first relative difference above `most`.
    pub fn difference(&self, expected: &RunOutput, most: f64) -> Option<String> {
        let (got, wanted) = (self.losses(), expected.losses());
        if got.len() != wanted.len() || got.is_empty() || self.codes != expected.codes {
            return Some(format!("{:?} {got:?}, expected {:?} {wanted:?}; {}", self.codes, expected.codes, self.log));
        }
        let near = |a: f64, b: f64| (a - b).abs() <= most * b.abs();
        let at = got.iter().zip(&wanted).position(|(a, b)| !near(*a, *b));
        if let Some(step) = at {
            return Some(format!("report {step}: loss {}, expected {}", got[step], wanted[step]));
        }
        let (got, wanted) = (self.validation, expected.validation);
        match (got, wanted) {
            (Some(got), Some(wanted)) if near(got, wanted) => None,
            (None, None) => None,
            _ => Some(format!("validation {got:?}, expected {wanted:?}")),
        }
    }
}

/// Changes a small job: its ranks compute on this device and report each step.
pub fn on(device: Device, steps: u64, change: impl FnOnce(&mut EngineConfig)) -> impl FnOnce(&mut EngineConfig) {
    move |config| {
        config.length = Length::Steps(steps);
        change(config);
        config.fetch_every_steps = 1;
        config.cpu_threads = 1;
        config.device = device;
    }
}

/// Runs the pods of a job once, with additional variables `extra`.
pub fn run(job: &Job, libraries: &[(&'static str, OsString)], extra: &[(&str, &str)]) -> RunOutput {
    let named = libraries.iter().map(|(name, value)| (*name, value.to_str().unwrap()));
    // Test runs leave nothing behind.
    let no_cache = [(env::GPU_CACHE, "none")];
    let both: Vec<(&str, &str)> = no_cache.into_iter().chain(named).chain(extra.iter().copied()).collect();
    let codes = job.run(&both);
    let all = events(&job.read("out-0"));
    let mut output = RunOutput {
        codes,
        progress: Vec::new(),
        validation: None,
        digest: None,
        kernel: None,
        calls: None,
        transport: None,
        links: Vec::new(),
        log: job.read("err-0") + &job.read("termination-0"),
    };
    for event in all {
        match event {
            Event::Progress(progress) if progress.rank == 0 => output.progress.push(progress),
            Event::Ready(ready) if ready.rank == 0 => {
                output.kernel = Some(ready.kernel);
                output.transport = Some(ready.transport);
                output.links = ready.links;
            }
            Event::Finished(finished) if finished.rank == 0 => {
                output.validation = finished.validation_loss;
                output.digest = Some(finished.weights_digest);
                output.calls = finished.gpu_calls;
            }
            _ => {}
        }
    }
    output
}

/// Environment of a job's second attempt.
pub const SECOND_ATTEMPT: (&str, &str) = (env::ATTEMPT, "2");
