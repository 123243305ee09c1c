//! Jobs on a device, and what they told.

use crate::pods::{Job, events};
use std::ffi::OsString;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, GpuCalls, Progress};

/// Makes a job that of another model.
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

pub fn resnet(config: &mut EngineConfig) {
    let image = Some(ImageShape { height: 9, width: 9, channels: 3 });
    config.model = Model::ResNet(ResNet { depth: ResNetDepth::D18, stem: Stem::Small, width: 4 });
    config.data.source = Source::Synthetic(Synthetic { samples: 200, image, classes: 5 });
    config.data.images = Images { mean: vec![0.4], deviation: vec![0.3], ..config.data.images.clone() };
    config.batch_size_per_process = 4;
    // The first steps of Adam have the size of the rate whatever the gradients are, so that roundings show.
    config.optimizer.rule = Rule::Sgd(Momentum { momentum: 0.9, nesterov: false });
    config.optimizer.learning_rate = 0.02;
}

pub fn amp(compute_type: HalfType, loss_scaling: LossScaling) -> Precision {
    Precision::Amp(Amp { compute_type, loss_scaling })
}

/// A run that reports each step.
pub struct Told {
    pub codes: Vec<i32>,
    /// Of rank 0, from the first reported step on.
    pub progress: Vec<Progress>,
    pub validation: Option<f64>,
    /// Of the weights.
    pub digest: Option<String>,
    pub kernel: Option<String>,
    /// Of the last step.
    pub calls: Option<GpuCalls>,
    /// How gradients travel.
    pub transport: Option<Transport>,
    /// What rank 0 wrote to its log.
    pub log: String,
}

impl Told {
    pub fn losses(&self) -> Vec<f64> {
        self.progress.iter().map(|progress| progress.loss).collect()
    }

    /// The first difference beyond `most`, as a share of what is expected.
    pub fn difference(&self, expected: &Told, most: f64) -> Option<String> {
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

/// Changes a small job: its ranks compute on this device, with a report of each step.
pub fn on(device: Device, steps: u64, change: impl FnOnce(&mut EngineConfig)) -> impl FnOnce(&mut EngineConfig) {
    move |config| {
        config.length = Length::Steps(steps);
        change(config);
        config.fetch_every_steps = 1;
        config.cpu_threads = 1;
        config.device = device;
    }
}

/// Runs the pods of a job once. `extra`: more variables.
pub fn run(job: &Job, libraries: &[(&'static str, OsString)], extra: &[(&str, &str)]) -> Told {
    let named = libraries.iter().map(|(name, value)| (*name, value.to_str().unwrap()));
    // Runs of tests leave nothing behind.
    let nothing_kept = [(env::GPU_CACHE, "none")];
    let both: Vec<(&str, &str)> = nothing_kept.into_iter().chain(named).chain(extra.iter().copied()).collect();
    let codes = job.run(&both);
    let all = events(&job.read("out-0"));
    let mut told = Told {
        codes,
        progress: Vec::new(),
        validation: None,
        digest: None,
        kernel: None,
        calls: None,
        transport: None,
        log: job.read("err-0") + &job.read("termination-0"),
    };
    for event in all {
        match event {
            Event::Progress(progress) if progress.rank == 0 => told.progress.push(progress),
            Event::Ready(ready) if ready.rank == 0 => {
                told.kernel = Some(ready.kernel);
                told.transport = Some(ready.transport);
            }
            Event::Finished(finished) if finished.rank == 0 => {
                told.validation = finished.validation_loss;
                told.digest = Some(finished.weights_digest);
                told.calls = finished.gpu_calls;
            }
            _ => {}
        }
    }
    told
}

/// The second attempt of a job.
pub const AGAIN: (&str, &str) = (env::ATTEMPT, "2");
