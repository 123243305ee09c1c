//! Translates the `engine` block to the engine's configuration: defaults that depend on other
//! fields, decimals, and checks that CEL cannot express.

mod data;
mod device;
mod model;
mod optimizer;
mod pipeline;
mod precision;
mod sync;
#[cfg(test)]
mod tests;

pub(crate) use pipeline::Traffic;
pub(crate) use sync::dedicated_servers;

use super::Invalid;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use switchyard_crds as api;
use switchyard_worker_contract::config::{
    Checkpoint, Device, EngineConfig, Evaluation, Length, Memory, OnHang, Overlap, Profile, Recomputation, Watchdog,
    WireType,
};

/// Collects faults in the block.
struct Check<'a> {
    faults: &'a mut Vec<Invalid>,
}

impl Check<'_> {
    fn fault(&mut self, field: &str, got: impl Into<String>, expected: impl Into<String>) {
        let field = format!("spec.engine.{field}");
        self.faults.push(Invalid { field, got: got.into(), expected: expected.into() });
    }

    /// Parses a decimal string that the engine's f32 can represent. 0, and a fault, if it is not
    /// one.
    fn decimal(&mut self, field: &str, text: &str) -> f64 {
        let range = f64::from(f32::MIN_POSITIVE)..=f64::from(f32::MAX);
        let value = text.parse::<f64>().ok().filter(|value| *value == 0.0 || range.contains(&value.abs()));
        if value.is_none() {
            self.fault(field, format!("`{text}`"), "a decimal number that is 0, or from 1.2e-38 to 3.4e38");
        }
        value.unwrap_or_default()
    }

    /// Same as [`Self::decimal`], for a field with a default.
    fn decimal_or(&mut self, field: &str, text: Option<&String>, default: f64) -> f64 {
        text.map_or(default, |text| self.decimal(field, text))
    }
}

/// Translates the blocks. Faults are added to `faults`, and then there may be no configuration. The
/// number of threads is left open. Processes and GPUs are per node.
pub(super) fn config(
    engine: &api::Engine,
    checkpoint: Option<&api::Checkpoint>,
    (nodes, processes_per_node, gpus): (u32, u32, u32),
    faults: &mut Vec<Invalid>,
) -> Option<EngineConfig> {
    let check = &mut Check { faults };
    let device = device::device(engine, (processes_per_node, gpus), check);
    let length = match (engine.steps, engine.epochs) {
        (Some(steps), None) => Some(Length::Steps(steps.unsigned_abs())),
        (None, Some(epochs)) => Some(Length::Epochs(epochs.unsigned_abs())),
        _ => {
            check.fault("steps", "both or none of steps and epochs", "exactly one of them");
            None
        }
    };
    let model = model::model(engine, check);
    let data = data::data(&engine.data, check);
    let optimizer = optimizer::optimizer(&engine.optimizer, engine.model.kind, check);
    let overlap = &engine.overlap;
    let label_smoothing = check.decimal("labelSmoothing", &engine.label_smoothing);
    let fraction = check.decimal("memory.fraction", &engine.memory.fraction);
    let precision = precision::precision(&engine.precision, check);
    let sync = sync::sync(&engine.sync, device, check);
    let sharding = sync::sharding(engine.sharding, device, check);
    let parameter_server = sync::parameter_server(&engine.communication, device, check);
    let pipeline = pipeline::pipeline(engine, device, (nodes, processes_per_node), check);
    let algorithm = sync::algorithm(engine.communication.algorithm, device, check);
    let compression = sync::compression(&engine.communication.compression, device, check);
    let schedule = optimizer::schedule(engine.schedule.as_ref(), optimizer.learning_rate, check);
    let config = EngineConfig {
        device,
        model: model?,
        label_smoothing,
        data: data?,
        reader: data::reader(&engine.reader),
        batch_size_per_process: engine.batch_size_per_process.unsigned_abs(),
        batch_merge: engine.batch_merge.unsigned_abs(),
        length: length?,
        seed: engine.seed.unsigned_abs(),
        optimizer,
        schedule,
        precision,
        overlap: Overlap {
            enabled: overlap.mode.is_on(),
            bucket_size_mib: overlap.bucket_size_mib.map(i32::unsigned_abs),
            communicators: communicators(engine, nodes),
            wire_type: match overlap.wire_type {
                api::WireType::FP32 => WireType::Fp32,
                api::WireType::FP16 => WireType::Fp16,
                api::WireType::BF16 => WireType::Bf16,
            },
            sync_all_reduce: overlap.sync_all_reduce.is_on(),
        },
        sync,
        sharding,
        parameter_server,
        pipeline,
        algorithm,
        compression,
        memory: Memory { fraction, release_every_steps: engine.memory.release_every_steps.unsigned_abs() },
        recomputation: recomputation(engine.recomputation, device, check),
        evaluation: Evaluation {
            every_steps: engine.evaluation.every_steps.unsigned_abs(),
            batches: match &engine.evaluation.batches {
                IntOrString::Int(batches) => Some(batches.unsigned_abs()),
                IntOrString::String(_) => None,
            },
        },
        fetch_every_steps: engine.fetch_every_steps.unsigned_abs(),
        cpu_threads: 0,
        devices_per_process: match engine.execution_mode {
            api::ExecutionMode::MultiProcess => 1,
            api::ExecutionMode::SingleProcess => processes_per_node,
        },
        profile: engine.profile.as_ref().map(|profile| Profile {
            from_step: profile.from_step.unsigned_abs(),
            steps: profile.steps.unsigned_abs(),
        }),
        checkpoint: checkpoint.map(|checkpoint| Checkpoint {
            path: checkpoint.path.clone(),
            every_steps: checkpoint.every_steps.unsigned_abs(),
            period_seconds: checkpoint.period_seconds.unsigned_abs(),
            keep: checkpoint.keep.unsigned_abs(),
            on_suspend: checkpoint.on_suspend == api::OnSuspend::Save,
        }),
        bandwidth_check: None,
        watchdog: Watchdog::default(),
        gpu: device::gpu(engine),
    };
    Some(pipeline::ordered(config, (nodes, processes_per_node)))
}

fn recomputation(recomputation: api::Recomputation, device: Device, check: &mut Check<'_>) -> Recomputation {
    match recomputation {
        api::Recomputation::None => Recomputation::None,
        api::Recomputation::Blocks => {
            if device == Device::Cuda {
                check.fault("recomputation", "Blocks on GPUs", "None: only ranks on CPUs recompute blocks yet");
            }
            Recomputation::Blocks
        }
    }
}

/// Concurrent all-reduces between the ranks on this number of hosts. Between hosts a second one
/// uses the network while the first waits; in shared memory there is no wait to fill.
pub fn communicators(engine: &api::Engine, hosts: u32) -> u32 {
    engine.overlap.communicators.map_or(if hosts > 1 { 2 } else { 1 }, i32::unsigned_abs)
}

/// When a rank counts as hung.
pub(super) fn watchdog(policy: &api::FailurePolicy) -> Watchdog {
    Watchdog {
        timeout_seconds: policy.progress_timeout_seconds.map(i32::unsigned_abs),
        on_hang: match policy.on_hang {
            None | Some(api::OnHang::Restart) => OnHang::Restart,
            Some(api::OnHang::Report) => OnHang::Report,
        },
    }
}
