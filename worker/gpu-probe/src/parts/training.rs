//! Trains small models on the CPU and on the GPU, and compares gradients and losses.

use super::{Probe, gather};
use crate::cpu_losses::CpuLosses;
use crate::jobs::{DYNAMIC, half, job, synthetic, text};
use crate::numbers::short;
use crate::outcome::Outcome;
use crate::worker::{CompletedRun, Worker, check_paths};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_cuda::kernels::fp8;
use switchyard_worker_contract::config::*;

/// Numeric mode of a run, with its tolerances: losses relative to their value, gradients relative
/// to their tensor's largest.
#[derive(Clone, Copy)]
struct NumericMode {
    name: &'static str,
    precision: fn() -> Precision,
    /// On the GPU.
    matmul: Matmul,
    /// Precision with a fixed loss scale, for the gradients of one step.
    steady: fn() -> Precision,
    losses: f64,
    gradients: f64,
    /// Gradients below this fraction of the model's largest are compared relative to it: a value
    /// that is small because large terms cancel carries their rounding errors.
    small: f64,
}

const F32: NumericMode = NumericMode {
    name: "f32",
    precision: || Precision::Fp32,
    matmul: Matmul::Ieee,
    steady: || Precision::Fp32,
    losses: 1e-3,
    gradients: 1e-2,
    small: 1e-3,
};
const BF16: NumericMode =
    NumericMode { name: "bf16", precision: bf16, steady: bf16, losses: 2e-2, gradients: 1e-1, small: 1e-2, ..F32 };
/// FP8 rounding errors average 3 % per factor, and a gradient passes through several of them.
const FP8: NumericMode = NumericMode { name: "fp8", matmul: Matmul::Fp8, losses: 5e-2, gradients: 5e-1, ..BF16 };
const FP16: NumericMode = NumericMode {
    name: "fp16",
    precision: || half(HalfType::Fp16, DYNAMIC),
    steady: || half(HalfType::Fp16, LossScaling::Static { scale: 128.0 }),
    ..BF16
};

fn bf16() -> Precision {
    half(HalfType::Bf16, LossScaling::Static { scale: 1.0 })
}

/// A job, and the modes in which it trains on both devices.
struct Comparison {
    name: &'static str,
    modes: &'static [NumericMode],
    config: EngineConfig,
}

pub(super) fn mlp(probe: &Probe) -> Result<Value, Outcome> {
    compare(probe, &small_mlp(probe))
}

pub(super) fn gpt(probe: &Probe) -> Result<Value, Outcome> {
    compare(probe, &small_gpt(probe)?)
}

pub(super) fn bert(probe: &Probe) -> Result<Value, Outcome> {
    compare(probe, &small_bert(probe)?)
}

pub(super) fn resnet(probe: &Probe) -> Result<Value, Outcome> {
    compare(probe, &small_resnet(probe))
}

/// Trains on the CPU what the parts compare with, and returns the losses.
pub(crate) fn record_cpu_losses(probe: &Probe) -> Result<CpuLosses, Outcome> {
    let worker = probe.worker()?;
    let mut recorded = CpuLosses::default();
    for Comparison { name, modes, config } in
        [small_mlp(probe), small_gpt(probe)?, small_bert(probe)?, small_resnet(probe)]
    {
        for numbers in modes {
            recorded.record(&worker, name, &long(probe, numbers, &config))?;
        }
    }
    recorded.record(&worker, "resume-cpu", &resumed(probe)?)?;
    Ok(recorded)
}

fn small_mlp(probe: &Probe) -> Comparison {
    let (hidden_sizes, batch) = if probe.rehearse { (vec![24, 13], 6) } else { (vec![256, 130], 64) };
    let model = Model::Mlp(Mlp { hidden_sizes, activation: Activation::Gelu });
    Comparison { name: "mlp", modes: &[F32], config: job(model, synthetic(500, None), batch) }
}

fn small_gpt(probe: &Probe) -> Result<Comparison, Outcome> {
    let ([layers, hidden_size, heads, context_length], batch) =
        if probe.rehearse { ([1, 16, 2, 8], 2) } else { ([2, 128, 4, 96], 8) };
    let gpt = Gpt { layers, hidden_size, heads, context_length, vocabulary_size: 256, tied_head: true };
    Ok(Comparison { name: "gpt", modes: &[F32, BF16, FP16, FP8], config: job(Model::Gpt(gpt), text()?, batch) })
}

fn small_bert(probe: &Probe) -> Result<Comparison, Outcome> {
    let ([layers, hidden_size, heads, context_length], batch) =
        if probe.rehearse { ([1, 16, 2, 12], 2) } else { ([2, 128, 4, 96], 8) };
    let vocabulary_size = 256;
    let masked_fraction = 0.25;
    let next_sentence = true;
    let bert = Bert { layers, hidden_size, heads, context_length, vocabulary_size, masked_fraction, next_sentence };
    Ok(Comparison { name: "bert", modes: &[F32, BF16, FP16], config: job(Model::Bert(bert), text()?, batch) })
}

fn small_resnet(probe: &Probe) -> Comparison {
    let (width, side, batch) = if probe.rehearse { (4, 8, 2) } else { (16, 32, 16) };
    let model = ResNet { depth: ResNetDepth::D18, stem: Stem::Small, width };
    let modes: &[NumericMode] = if probe.rehearse { &[F32] } else { &[F32, BF16, FP16] };
    let config = job(Model::ResNet(model), synthetic(400, Some(side)), batch);
    let rule = Rule::Sgd(Momentum { momentum: 0.9, nesterov: false });
    // Larger rates make batch norms amplify rounding differences from step to step.
    let optimizer = Optimizer { rule, learning_rate: 5e-4, ..config.optimizer };
    Comparison { name: "resnet", modes, config: EngineConfig { optimizer, ..config } }
}

/// Compares the gradients of a step and the losses of many, in each numeric mode that the device
/// supports.
fn compare(probe: &Probe, Comparison { name, modes, config }: &Comparison) -> Result<Value, Outcome> {
    let (_, device) = probe.require_device()?;
    let (worker, recorded) = (probe.worker()?, probe.cpu_losses()?);
    let mut rows = Vec::new();
    let has_fp8 = device.capability >= fp8::SINCE;
    for numbers in modes.iter().filter(|numbers| has_fp8 || numbers.matmul != Matmul::Fp8) {
        let row = |check: &str| json!({"check": check, "numbers": numbers.name});
        rows.push((row("gradients"), gradients(&worker, name, numbers, config)));
        rows.push((row("losses"), losses(&worker, &recorded, name, numbers, &long(probe, numbers, config))));
    }
    gather(json!({"device": device.name, "model": name}), "checks", rows)
}

/// One step without momentum and with a learning rate of one: the weights change by exactly their
/// gradients.
fn gradients(worker: &Worker, name: &str, numbers: &NumericMode, config: &EngineConfig) -> Result<Value, Outcome> {
    let after = |device: Device, learning_rate: f64| {
        let mut config = EngineConfig { device, precision: (numbers.steady)(), ..config.clone() };
        config.gpu.matmul = numbers.matmul;
        config.optimizer = Optimizer {
            rule: Rule::Sgd(Momentum { momentum: 0.0, nesterov: false }),
            learning_rate,
            weight_decay: 0.0,
            gradient_clip_norm: None,
            ..config.optimizer
        };
        weights(&worker.train(&format!("{name}-gradients"), &config, 1)?)
    };
    // A near-zero learning rate leaves the weights unchanged.
    let [start, cpu] = [after(Device::Cpu, 1e-30)?, after(Device::Cpu, 1.0)?];
    let gpu = after(Device::Cuda, 1.0)?;
    let (tensor, difference) = worst([&start, &cpu, &gpu], numbers.small);
    let (tensors, limit) = (start.len(), numbers.gradients);
    check_limit("gradients", difference, limit, || format!("of `{tensor}`"))?;
    Ok(json!({"tensors": tensors, "largestDifference": short(difference), "of": tensor, "limit": limit}))
}

/// Weights by name.
type Tensors = BTreeMap<String, Vec<f32>>;

fn weights(ran: &CompletedRun) -> Result<Tensors, Outcome> {
    let failed = |text: String| Outcome::failed("weights of the worker", text);
    let file = ran.finished.model_file.as_deref().ok_or_else(|| failed("no file".into()))?;
    let bytes = std::fs::read(file).map_err(|error| failed(format!("{file}: {error}")))?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| failed(format!("{file}: {error}")))?;
    let numbers = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().copied().map(f32::from_le_bytes).collect();
    Ok(tensors.iter().map(|(name, view)| (name.to_owned(), numbers(view.data()))).collect())
}

/// The tensor whose GPU gradients differ most from the CPU's.
fn worst([start, cpu, gpu]: [&Tensors; 3], small: f64) -> (String, f64) {
    let largest = |a: &[f32], b: &[f32]| {
        let apart = a.iter().zip(b).map(|(a, b)| f64::from(a - b).abs());
        let apart = apart.map(|apart| if apart.is_nan() { f64::INFINITY } else { apart });
        // A missing or differently sized tensor counts as infinitely different.
        if a.len() == b.len() { apart.fold(0.0, f64::max) } else { f64::INFINITY }
    };
    let of = |tensors: &'_ Tensors, name: &str| tensors.get(name).cloned().unwrap_or_default();
    let changes: Vec<f64> = start.iter().map(|(name, start)| largest(start, &of(cpu, name))).collect();
    let floor = changes.iter().copied().fold(f64::MIN_POSITIVE, f64::max) * small;
    let shares = start.keys().zip(&changes).map(|(name, change)| {
        let apart = largest(&of(cpu, name), &of(gpu, name));
        (name.clone(), apart / change.max(floor))
    });
    shares.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or_default()
}

/// The run whose losses are compared.
fn long(probe: &Probe, numbers: &NumericMode, config: &EngineConfig) -> EngineConfig {
    let length = Length::Steps(if probe.rehearse { 6 } else { 50 });
    EngineConfig { precision: (numbers.precision)(), length, ..config.clone() }
}

/// Compares the losses of a run on each device.
fn losses(
    worker: &Worker,
    recorded: &CpuLosses,
    name: &str,
    numbers: &NumericMode,
    config: &EngineConfig,
) -> Result<Value, Outcome> {
    let name = format!("{name}-losses");
    let (cpu, is_recorded) = recorded.of(worker, &name, config)?;
    let mut config = config.clone();
    config.gpu.matmul = numbers.matmul;
    let gpu = worker.train(&name, &config, 1)?;
    if cpu.skipped_steps != gpu.skipped() {
        let text = format!("{} skipped steps, expected {}, as on the CPU", gpu.skipped(), cpu.skipped_steps);
        return Err(Outcome::failed("losses", text));
    }
    let difference = compare_losses(&gpu.losses(), &cpu.losses, numbers.losses)?;
    let figures = json!({
        "steps": cpu.losses.len(),
        "cpuIsRecorded": is_recorded,
        "kernel": gpu.ready.kernel,
        "first": short(gpu.losses()[0]),
        "last": short(gpu.losses()[gpu.progress.len() - 1]),
        "skippedSteps": gpu.skipped(),
        "largestDifference": short(difference),
        "limit": numbers.losses,
    });
    check_paths(&gpu.paths(), figures)
}

/// Largest relative difference of the losses.
fn compare_losses(got: &[f64], wanted: &[f64], limit: f64) -> Result<f64, Outcome> {
    if got.len() != wanted.len() || got.is_empty() {
        return Err(Outcome::failed("losses", format!("{} steps, expected {}", got.len(), wanted.len())));
    }
    let share = |(got, wanted): (&f64, &f64)| (got - wanted).abs() / wanted.abs();
    let shares = got.iter().zip(wanted).map(share).map(|share| if share.is_nan() { f64::INFINITY } else { share });
    let (step, difference) = shares.enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or_default();
    check_limit("losses", difference, limit, || {
        format!("in step {}: {}, expected {}", step + 1, got[step], wanted[step])
    })?;
    Ok(difference)
}

fn check_limit(what: &str, difference: f64, limit: f64, place: impl Fn() -> String) -> Result<(), Outcome> {
    if difference <= limit {
        return Ok(());
    }
    Err(Outcome::failed(what, format!("relative difference {difference:.2e} {}; expected at most {limit}", place())))
}

/// Resumes a checkpoint of one device on the other.
pub(super) fn resume(probe: &Probe) -> Result<Value, Outcome> {
    let (_, device) = probe.require_device()?;
    let (worker, config) = (probe.worker()?, resumed(probe)?);
    let half = steps_before_resuming(probe);
    let across = |name: &str, devices: [Device; 2]| {
        let folder = crate::scratch::folder(name).map_err(|error| Outcome::failed("a folder", error.to_string()))?;
        let path = folder.join("checkpoints").display().to_string();
        let checkpoint = Some(Checkpoint { path, every_steps: 0, period_seconds: 0, keep: 1, on_suspend: true });
        let part = |attempt: u32, device| {
            let length = Length::Steps(half * u64::from(attempt));
            let config = EngineConfig { device, length, checkpoint: checkpoint.clone(), ..config.clone() };
            worker.train(name, &config, attempt)
        };
        let (first, second) = (part(1, devices[0])?, part(2, devices[1])?);
        match second.ready.resumed_step {
            Some(step) if step == half => Ok([first.losses(), second.losses()].concat()),
            other => Err(Outcome::failed("resume", format!("from step {other:?}, expected {half}"))),
        }
    };
    let (wanted, is_recorded) = probe.cpu_losses()?.of(&worker, "resume-cpu", &config)?;
    let wanted = wanted.losses;
    let cases = [("cpu-gpu", [Device::Cpu, Device::Cuda]), ("gpu-cpu", [Device::Cuda, Device::Cpu])];
    let rows = cases.map(|(name, devices)| {
        let judged =
            across(&format!("resume-{name}"), devices).and_then(|got| compare_losses(&got, &wanted, F32.losses));
        let figures = judged.map(|difference| json!({"largestDifference": short(difference), "limit": F32.losses}));
        (json!({"devices": name, "steps": wanted.len()}), figures)
    });
    gather(json!({"device": device.name, "cpuIsRecorded": is_recorded}), "runs", Vec::from(rows))
}

/// The uninterrupted run whose losses a resumed run must have.
fn resumed(probe: &Probe) -> Result<EngineConfig, Outcome> {
    let length = Length::Steps(2 * steps_before_resuming(probe));
    Ok(EngineConfig { length, ..small_gpt(probe)?.config })
}

fn steps_before_resuming(probe: &Probe) -> u64 {
    if probe.rehearse { 3 } else { 20 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensors(a: &[f32], b: &[f32]) -> Tensors {
        BTreeMap::from([("a".to_owned(), a.to_vec()), ("b".to_owned(), b.to_vec())])
    }

    #[test]
    fn the_tensor_with_a_wrong_gradient_is_named() {
        let start = tensors(&[1.0, 2.0], &[3.0]);
        let cpu = tensors(&[1.5, 2.0], &[2.5]);
        assert_eq!(worst([&start, &cpu, &cpu], 1e-3).1, 0.0);
        assert_eq!(worst([&start, &cpu, &tensors(&[1.5, 2.0], &[2.25])], 1e-3), ("b".into(), 0.5));
        assert_eq!(worst([&start, &cpu, &tensors(&[f32::NAN, 2.0], &[2.5])], 1e-3), ("a".into(), f64::INFINITY));
        assert_eq!(worst([&start, &cpu, &Tensors::new()], 1e-3).1, f64::INFINITY);
    }

    #[test]
    fn pure_rounding_errors_are_accepted() {
        let start = tensors(&[1.0], &[3.0]);
        let (cpu, gpu) = (tensors(&[1.0], &[2.0]), tensors(&[1.0 + 1e-7], &[2.0]));
        assert!(worst([&start, &cpu, &gpu], 1e-3).1 < 1e-3);
    }

    #[test]
    fn different_losses_are_reported_with_their_step() {
        assert_eq!(compare_losses(&[2.0, 1.0], &[2.0, 1.0], 1e-3).unwrap(), 0.0);
        for got in [&[2.0, 1.1][..], &[2.0, f64::NAN], &[2.0]] {
            assert!(matches!(compare_losses(got, &[2.0, 1.0], 1e-3), Err(Outcome::Failed { .. })), "{got:?}");
        }
        let Err(Outcome::Failed { text, .. }) = compare_losses(&[2.0, 1.5], &[2.0, 1.0], 1e-3) else {
            panic!("it passed")
        };
        assert_eq!(text, "relative difference 5.00e-1 in step 2: 1.5, expected 1; expected at most 0.001");
    }
}
