//! Contents of a checkpoint besides tensors.

use super::engine::Counters;
use super::training::Training;
use crate::amp::ScalerState;
use crate::cpu::HalfKernel;
use crate::data::{Dataset, Facts};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_checkpoint::export::ModelMetadata;
use switchyard_worker_contract::config::{Compression, Features, LossScaling, OuterOptimizer, Rule, SyncPolicy};

/// Identifies a data set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Fingerprint {
    /// Description of a sample, such as `128 tokens`.
    pub sample: String,
    pub train_samples: u64,
    pub validation_samples: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Digest of both parts.
    pub digest: String,
}

/// A field of a [`Fingerprint`] that differs.
pub(super) struct Difference {
    pub field: &'static str,
    pub got: String,
    pub expected: String,
}

impl Fingerprint {
    pub fn of(facts: &Facts) -> Fingerprint {
        let Facts { train_samples, validation_samples, bytes, .. } = *facts;
        let (sample, digest) = (facts.sample.clone(), facts.digest.clone());
        Fingerprint { sample, train_samples, validation_samples, bytes, digest }
    }

    /// The first field that differs from the expected data set.
    pub fn difference(&self, expected: &Fingerprint) -> Option<Difference> {
        let number = |number: u64| number.to_string();
        let fields = [
            ("sample", self.sample.clone(), expected.sample.clone()),
            ("training samples", number(self.train_samples), number(expected.train_samples)),
            ("validation samples", number(self.validation_samples), number(expected.validation_samples)),
            ("bytes", number(self.bytes), number(expected.bytes)),
            ("digest", self.digest.clone(), expected.digest.clone()),
        ];
        let differs = fields.into_iter().find(|(_, got, expected)| got != expected);
        differs.map(|(field, got, expected)| Difference { field, got, expected })
    }
}

/// Contents of a checkpoint besides tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Progress {
    pub step: u64,
    /// Optimizer steps, without skipped ones.
    pub optimizer_steps: u64,
    pub scaler: Option<ScalerState>,
    /// Configuration of the scale when it started; absent in checkpoints of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaling: Option<LossScaling>,
    /// Gradient norm from which the f16 wire scale is derived; absent with other wire formats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wire_norm: Option<f32>,
    /// Samples per step over all ranks.
    pub samples_per_step: u64,
    /// Position of the reader: epoch, and samples consumed in it.
    pub epoch: u64,
    pub position: u64,
    pub seed: u64,
    /// The optimizer's rule, because arrays of the same name have different meanings under
    /// different rules.
    pub rule: Rule,
    /// Decides, with `compression`, which arrays the checkpoint holds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sync: SyncPolicy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<Compression>,
    /// The kernel for bf16 matrix products, because kernels differ in summation order; absent
    /// without bf16.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub half_kernel: Option<HalfKernel>,
    /// The data set; absent in checkpoints of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Fingerprint>,
    /// Metadata of the exported model.
    #[serde(default, skip_serializing_if = "ModelMetadata::is_empty")]
    pub model_metadata: ModelMetadata,
}

/// The class names and the normalisation of features that the model was trained on: lists in JSON.
pub(super) fn model_metadata(dataset: &Dataset) -> ModelMetadata {
    let mut lists = ModelMetadata::new();
    if !dataset.class_names().is_empty() {
        lists.insert("classes".to_owned(), json!(dataset.class_names()).to_string());
    }
    if let Features::Given { mean, deviation } = dataset.features() {
        lists.insert("featureMean".to_owned(), json!(mean).to_string());
        lists.insert("featureDeviation".to_owned(), json!(deviation).to_string());
    }
    lists
}

fn is_default(sync: &SyncPolicy) -> bool {
    *sync == SyncPolicy::default()
}

/// Names the settings that decide which arrays a checkpoint holds.
pub(super) fn exchange(sync: SyncPolicy, compression: Option<Compression>) -> &'static str {
    match (sync, compression) {
        (SyncPolicy::EveryStep, None) => "sync.type EveryStep without communication.compression",
        (SyncPolicy::EveryStep, Some(Compression::TopK(_))) => "communication.compression.type TopK",
        (SyncPolicy::Local(local), _) => match local.outer_optimizer {
            OuterOptimizer::Average => "sync.type Local with outerOptimizer.type Average",
            OuterOptimizer::Nesterov(_) => "sync.type Local with outerOptimizer.type Nesterov",
        },
    }
}

impl Progress {
    /// The progress after `step` steps.
    pub fn new(step: u64, counters: Counters, training: &Training) -> Progress {
        let (epoch, position) = training.order.position(step);
        Progress {
            step,
            optimizer_steps: counters.optimizer_steps,
            scaler: counters.scaler,
            loss_scaling: counters.loss_scaling,
            wire_norm: counters.wire_norm,
            samples_per_step: training.order.samples_per_step(),
            epoch,
            position,
            seed: training.config.seed,
            rule: training.config.optimizer.rule,
            sync: training.config.sync,
            compression: training.config.compression,
            half_kernel: counters.half_kernel,
            data: Some(Fingerprint::of(training.dataset.facts())),
            model_metadata: model_metadata(&training.dataset),
        }
    }

    pub fn counters(&self) -> Counters {
        let Progress { optimizer_steps, scaler, loss_scaling, wire_norm, half_kernel, .. } = *self;
        Counters { optimizer_steps, scaler, loss_scaling, wire_norm, half_kernel }
    }
}
