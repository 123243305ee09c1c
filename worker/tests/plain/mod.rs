//! Engine configurations that tests modify.
#![allow(dead_code)]

use std::path::Path;
use switchyard_worker_contract::config::*;

/// A small GPT on the bytes of these files: 50 steps of 12 sequences with AdamW.
pub fn gpt(path: &Path, include: &[&str]) -> EngineConfig {
    EngineConfig {
        device: Device::Cpu,
        model: Model::Gpt(Gpt {
            layers: 2,
            hidden_size: 48,
            heads: 4,
            context_length: 32,
            vocabulary_size: 256,
            tied_head: true,
        }),
        label_smoothing: 0.0,
        data: Data {
            source: Source::Text(Files {
                path: path.display().to_string(),
                include: include.iter().map(|pattern| (*pattern).to_owned()).collect(),
                exclude: Vec::new(),
            }),
            validation_fraction: 0.1,
            images: Images { size: 0, crop_padding: 0, flip: false, mean: vec![0.0], deviation: vec![1.0] },
            features: Features::Raw,
        },
        reader: Reader {
            workers: Some(1),
            double_buffer: true,
            infinite: true,
            sample_type: SampleType::UInt8,
            max_bad_samples: 0,
        },
        batch_size_per_process: 12,
        batch_merge: 1,
        length: Length::Steps(50),
        seed: 7,
        optimizer: Optimizer {
            rule: Rule::AdamW(Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 }),
            learning_rate: 0.003,
            weight_decay: 0.1,
            gradient_clip_norm: Some(1.0),
            decay_exclusions: DecayExclusions::Vectors,
        },
        schedule: Schedule { kind: ScheduleKind::Cosine, warmup_steps: Some(5), final_learning_rate: 0.0003 },
        precision: Precision::Fp32,
        overlap: Overlap {
            enabled: true,
            bucket_size_mib: Some(1),
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
        fetch_every_steps: 10,
        cpu_threads: 1,
        devices_per_process: 1,
        profile: None,
        checkpoint: None,
        bandwidth_check: None,
        watchdog: Watchdog::default(),
        gpu: Gpu::default(),
    }
}

/// A small ResNet-18 on synthetic images.
pub fn resnet() -> EngineConfig {
    let image = Some(ImageShape { height: 8, width: 8, channels: 3 });
    let plain = gpt(Path::new("."), &[]);
    EngineConfig {
        model: Model::ResNet(ResNet { depth: ResNetDepth::D18, stem: Stem::Small, width: 8 }),
        data: Data { source: Source::Synthetic(Synthetic { samples: 400, image, classes: 4 }), ..plain.data },
        optimizer: Optimizer {
            rule: Rule::Sgd(Momentum { momentum: 0.9, nesterov: false }),
            learning_rate: 0.05,
            weight_decay: 0.0005,
            gradient_clip_norm: None,
            ..plain.optimizer
        },
        ..plain
    }
}
