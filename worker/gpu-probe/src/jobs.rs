//! Training jobs that the probe runs.

use crate::outcome::Outcome;
use crate::scratch;
use switchyard_worker_contract::config::*;

/// Lines of generated text that a small model can learn.
const LINES: usize = 4000;

/// A single-rank job: constant learning rate, a report per step, nothing saved, no validation.
pub(crate) fn job(model: Model, source: Source, batch: u32) -> EngineConfig {
    EngineConfig {
        device: Device::Cuda,
        model,
        label_smoothing: 0.0,
        data: Data {
            source,
            validation_fraction: 0.0,
            images: Images { size: 0, crop_padding: 0, flip: false, mean: vec![0.0], deviation: vec![1.0] },
            features: Features::Raw,
        },
        reader: Reader {
            workers: Some(2),
            double_buffer: true,
            infinite: true,
            sample_type: SampleType::UInt8,
            max_bad_samples: 0,
        },
        batch_size_per_process: batch,
        batch_merge: 1,
        length: Length::Steps(1),
        seed: 7,
        optimizer: Optimizer {
            rule: Rule::AdamW(Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 }),
            learning_rate: 1e-3,
            weight_decay: 0.1,
            gradient_clip_norm: Some(1.0),
            decay_exclusions: DecayExclusions::Vectors,
        },
        schedule: Schedule { kind: ScheduleKind::Constant, warmup_steps: Some(0), final_learning_rate: 0.0 },
        precision: Precision::Fp32,
        overlap: Overlap {
            enabled: true,
            bucket_size_mib: None,
            communicators: 1,
            wire_type: WireType::Fp32,
            sync_all_reduce: false,
        },
        sync: SyncPolicy::EveryStep,
        sharding: Sharding::None,
        recomputation: Recomputation::None,
        parameter_server: None,
        pipeline: None,
        algorithm: None,
        compression: None,
        memory: Memory { fraction: 0.9, release_every_steps: 0 },
        evaluation: Evaluation { every_steps: 0, batches: Some(1) },
        fetch_every_steps: 1,
        cpu_threads: 0,
        devices_per_process: 1,
        profile: None,
        checkpoint: None,
        bandwidth_check: None,
        watchdog: Watchdog::default(),
        gpu: Gpu::default(),
    }
}

/// Classes of synthetic samples.
pub(crate) const CLASSES: u32 = 10;

/// Synthetic samples, cheap to generate. Networks on features and images classify into [`CLASSES`].
/// `image`: side of square RGB images.
pub(crate) fn synthetic(samples: u64, image: Option<u32>) -> Source {
    let image = image.map(|side| ImageShape { height: side, width: side, channels: 3 });
    Source::Synthetic(Synthetic { samples, image, classes: CLASSES })
}

/// A deterministic text file.
pub(crate) fn text() -> Result<Source, Outcome> {
    let written = scratch::folder("text").and_then(|folder| {
        let path = folder.join("lines.txt");
        let line = |line: usize| format!("line {line} of the text, {}\n", line * 7919 % 1000);
        std::fs::write(&path, (0..LINES).map(line).collect::<String>())?;
        Ok(path.display().to_string())
    });
    let path = written.map_err(|error| Outcome::failed("a text for the worker", error.to_string()))?;
    Ok(Source::Text(Files { path, include: Vec::new(), exclude: Vec::new() }))
}

/// 16-bit mixed precision.
pub(crate) fn half(compute_type: HalfType, loss_scaling: LossScaling) -> Precision {
    Precision::Amp(Amp { compute_type, loss_scaling })
}

/// The first scales overflow in f16. The scale does not grow during a run: near the overflow limit,
/// CPU and GPU may disagree on whether gradients overflow.
pub(crate) const DYNAMIC: LossScaling = LossScaling::Dynamic {
    initial_scale: 16_777_216.0,
    growth_factor: 2.0,
    backoff_factor: 0.25,
    growth_interval_steps: 1000,
};
