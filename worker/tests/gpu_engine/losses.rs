//! GPU losses match CPU losses.

use crate::pods::Job;
use crate::products::NOTE;
use crate::support::{Change, RunOutput, amp, bert, gpt, mlp, on, relu, resnet, run};
use switchyard_cuda_libraries::environment;
use switchyard_worker_contract::config::*;

const STEPS: u64 = 20;

const STATIC: LossScaling = LossScaling::Static { scale: 1.0 };

/// Runs the job with this change on both devices, one after the other.
pub fn compare(
    name: &str,
    (nodes, ranks): (u32, u32),
    extra: &[(&str, &str)],
    most: f64,
    change: impl Fn(&mut EngineConfig),
) -> RunOutput {
    let libraries = environment();
    let expected = run(&Job::new(nodes, ranks, STEPS).with(on(Device::Cpu, STEPS, &change)), &[], &[]);
    let losses = expected.losses();
    assert!(losses.len() > 1, "{name}: {}", expected.log);
    let got = run(&Job::new(nodes, ranks, STEPS).with(on(Device::Cuda, STEPS, &change)), &libraries, extra);
    assert_eq!(got.difference(&expected, most), None, "{name}");
    assert_eq!(got.kernel.as_deref(), Some("cuda sm_90, NVRTC 13.0"), "{name}");
    let skipped = |output: &RunOutput| output.progress.last().unwrap().skipped_steps;
    assert_eq!(skipped(&got), skipped(&expected), "{name}");
    got
}

/// Fifty steps of each model; the ResNet's losses may differ by `most_of_resnet`. cuBLASLt computes
/// epilogues, and in 16 bits cuDNN computes attention.
fn compare_every_model(precision: Precision, most: f64, most_of_resnet: f64) {
    let models: [(&str, Change, f64); 5] = [
        ("mlp", mlp, most),
        ("mlp with ReLU", relu, most),
        ("resnet", steady_resnet, most_of_resnet),
        ("gpt", gpt, most),
        ("bert", bert, most),
    ];
    for (name, model, most) in models {
        let output = compare(name, (1, 1), &[("SWITCHYARD_REFERENCE_SEED", "7")], most, |config| {
            model(config);
            // Most of the time is the ResNet's; `graphs` merges its batches.
            config.batch_merge = if name == "resnet" { 1 } else { 2 };
            config.length = Length::Steps(50);
            config.evaluation.every_steps = 20;
            config.precision = precision;
        });
        assert!(!output.log.contains(NOTE), "{name}: {}", output.log);
        let by_cudnn = precision != Precision::Fp32 && matches!(name, "gpt" | "bert");
        assert_eq!(output.log.contains("accepts 2 of 2 kinds of attention"), by_cudnn, "{name}: {}", output.log);
    }
}

/// At a high rate, batch norms over few elements amplify rounding so much that after forty steps
/// the last bit of one weight moves the loss by a percent, even in f32 on CPUs. With larger batches
/// and a smaller rate the loss falls as far, and the two devices stay together.
fn steady_resnet(config: &mut EngineConfig) {
    resnet(config);
    config.batch_size_per_process = 16;
    config.optimizer.learning_rate = 0.003;
}

#[test]
fn every_model_in_f32() {
    compare_every_model(Precision::Fp32, 1e-4, 1e-3);
}

#[test]
fn every_model_in_bf16() {
    compare_every_model(amp(HalfType::Bf16, STATIC), 5e-3, 3e-2);
}

#[test]
fn every_model_in_fp16() {
    compare_every_model(amp(HalfType::Fp16, LossScaling::Static { scale: 256.0 }), 1e-3, 3e-2);
}

/// The rows of the last batch that have no sample are ignored.
#[test]
fn every_validation_sample_once() {
    for (name, model) in [("mlp", mlp as Change), ("bert", bert)] {
        compare(name, (1, 1), &[], 1e-3, |config| {
            model(config);
            config.length = Length::Steps(6);
            config.data.validation_fraction = 0.1;
            config.evaluation = Evaluation { every_steps: 0, batches: None };
        });
    }
}

/// Regression test: CLS, SEP and MASK, which are not in the data's vocabulary, were not sorted, so
/// two warps added to the same row.
#[test]
fn a_bert_with_more_special_tokens_than_one_warp_sums() {
    compare("bert", (1, 1), &[], 1e-3, |config| {
        bert(config);
        config.length = Length::Steps(6);
        config.batch_size_per_process = 16;
    });
}

#[test]
fn tf32_products_round_their_factors() {
    let libraries = environment();
    let with = |matmul, precision| {
        run(
            &Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, |config| {
                gpt(config);
                config.length = Length::Steps(6);
                config.gpu.matmul = matmul;
                config.precision = precision;
            })),
            &libraries,
            &[],
        )
    };
    let [exact, rounded] = [Matmul::Ieee, Matmul::Tf32].map(|matmul| with(matmul, Precision::Fp32));
    assert_eq!(rounded.difference(&exact, 1e-2), None);
    assert_ne!(rounded.digest, exact.digest);
    assert_eq!(rounded.kernel.as_deref(), Some("cuda sm_90, NVRTC 13.0, TF32"));
    let half = [Matmul::Ieee, Matmul::Tf32].map(|matmul| with(matmul, amp(HalfType::Bf16, STATIC)).digest);
    assert_eq!(half[0], half[1], "16-bit products are unaffected");
}

#[test]
fn images_as_bytes_or_floats() {
    for sample_type in [SampleType::UInt8, SampleType::Float32] {
        compare(&format!("{sample_type:?}"), (1, 1), &[], 1e-3, |config| {
            mlp(config);
            let image = Some(ImageShape { height: 5, width: 3, channels: 3 });
            config.data.source = Source::Synthetic(Synthetic { samples: 200, image, classes: 5 });
            config.data.images = Images { mean: vec![0.4], deviation: vec![0.3], ..config.data.images.clone() };
            config.reader.sample_type = sample_type;
        });
    }
}

#[test]
fn a_dynamic_scale_that_overflows_at_first() {
    let loss_scaling = LossScaling::Dynamic {
        initial_scale: f64::from(1u32 << 24),
        growth_factor: 2.0,
        backoff_factor: 0.25,
        growth_interval_steps: 4,
    };
    let output = compare("gpt", (1, 1), &[], 1e-2, |config| {
        gpt(config);
        config.precision = amp(HalfType::Fp16, loss_scaling);
    });
    let scales: Vec<f64> = output.progress.iter().filter_map(|progress| progress.loss_scale).collect();
    assert!(scales.windows(2).any(|pair| pair[1] < pair[0]), "the scale backs off: {scales:?}");
    assert!(scales.windows(2).any(|pair| pair[1] > pair[0]), "the scale grows again: {scales:?}");
}

#[test]
fn two_ranks_with_a_gpu_each() {
    compare("two ranks", (1, 2), &[("SWITCHYARD_REFERENCE_DEVICES", "2")], 1e-3, resnet);
    // A single GPU that both ranks select by name.
    compare("two ranks on a GPU", (1, 2), &[("CUDA_VISIBLE_DEVICES", "0")], 1e-3, gpt);
    compare("two devices of a process", (1, 2), &[("SWITCHYARD_REFERENCE_DEVICES", "2")], 1e-3, |config| {
        mlp(config);
        config.devices_per_process = 2;
    });
}

#[test]
fn two_ranks_with_several_buckets() {
    let wide = |config: &mut EngineConfig| {
        mlp(config);
        config.model = Model::Mlp(Mlp { hidden_sizes: vec![600, 600], activation: Activation::Relu });
        config.batch_merge = 2;
        config.length = Length::Steps(4);
        config.overlap.bucket_size_mib = None;
    };
    let two_gpus = ("SWITCHYARD_REFERENCE_DEVICES", "2");
    for (enabled, sync_all_reduce, seed) in [(true, false, "3"), (true, true, "4"), (false, false, "5")] {
        let extra = [two_gpus, ("SWITCHYARD_REFERENCE_SEED", seed)];
        compare(&format!("overlap {enabled}, sync {sync_all_reduce}"), (1, 2), &extra, 1e-3, |config| {
            wide(config);
            config.overlap = Overlap { enabled, sync_all_reduce, ..config.overlap };
        });
    }
    compare("two hosts", (2, 1), &[], 1e-2, |config| {
        wide(config);
        config.overlap.wire_type = WireType::Fp16;
    });
}

#[test]
fn every_optimizer() {
    let adam = Adam { beta1: 0.9, beta2: 0.99, epsilon: 1e-6 };
    let rules = [
        Rule::Sgd(Momentum { momentum: 0.9, nesterov: true }),
        Rule::Adam(adam),
        Rule::Lamb(adam),
        Rule::Lars(Lars { momentum: 0.9, trust_coefficient: 0.02 }),
    ];
    for rule in rules {
        compare(&format!("{rule:?}"), (1, 1), &[], 1e-3, |config| {
            mlp(config);
            config.optimizer.rule = rule;
        });
    }
}

#[test]
fn a_different_rate_is_detected() {
    let libraries = environment();
    let expected = run(&Job::new(1, 1, STEPS).with(on(Device::Cpu, STEPS, mlp)), &[], &[]);
    let other = |config: &mut EngineConfig| {
        mlp(config);
        config.optimizer.learning_rate *= 1.5;
    };
    let got = run(&Job::new(1, 1, STEPS).with(on(Device::Cuda, STEPS, other)), &libraries, &[]);
    assert!(got.difference(&expected, 1e-3).is_some());
}
