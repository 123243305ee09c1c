//! Mixed precision: the order of its parts, and the handling of gradient overflows.

use crate::ranks::{History, blueprint, on_ranks, runs, train};
use std::path::{Path, PathBuf};
use switchyard_worker::model::Registry;
use switchyard_worker::train::{Blueprint, StepRequest, TrainError, Trainer, open};
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::event::Event;

fn amp(compute_type: HalfType, loss_scaling: LossScaling) -> Precision {
    Precision::Amp(Amp { compute_type, loss_scaling })
}

fn dynamic(initial_scale: f64) -> LossScaling {
    LossScaling::Dynamic { initial_scale, growth_factor: 2.0, backoff_factor: 0.5, growth_interval_steps: 1000 }
}

/// An MLP on 80 lines of f16 features, with 8 lines per step on four ranks; the lines selected by
/// `huge` exceed the range of f16.
fn features(folder: &Path, huge: impl Fn(u32) -> bool, loss_scaling: LossScaling) -> EngineConfig {
    let line = |n: u32| {
        let feature = |k: u32| f64::from((n * 37 + k * 11) % 17) / 17.0 * if huge(n) { 1e6 } else { 1.0 };
        let features: Vec<String> = (0..6).map(|k| feature(k).to_string()).collect();
        format!("{},{}\n", features.join(","), n % 3)
    };
    let path = folder.join("features.csv").display().to_string();
    std::fs::write(&path, (0..80).map(line).collect::<String>()).unwrap();
    let plain = crate::plain::gpt(folder, &[]);
    EngineConfig {
        model: Model::Mlp(Mlp { hidden_sizes: vec![16], activation: Activation::Relu }),
        data: Data {
            source: Source::Csv(Csv { path, image: None, largest: 1.0, label: None, header: Header::Auto }),
            validation_fraction: 0.0,
            ..plain.data
        },
        precision: amp(HalfType::Fp16, loss_scaling),
        batch_size_per_process: 2,
        length: Length::Steps(1000),
        ..plain
    }
}

#[test]
fn an_overflow_on_one_rank_of_four_skips_the_step_on_all() {
    let folder = tempfile::tempdir().unwrap();
    let config = features(folder.path(), |n| n == 41, dynamic(1024.0));
    let seen = on_ranks(4, |group| {
        let mut trainer = Trainer::join(blueprint(&config, 4)?, &group)?;
        let mut seen = vec![(true, 1024.0, trainer.weights_digest()?)];
        // One epoch: the line is in one micro-batch of one rank.
        for _ in 0..10 {
            let (report, _) = trainer.step(StepRequest::default())?;
            seen.push((report.gradient_norm.is_some(), report.loss_scale, trainer.agree_on_weights()?));
        }
        let skipped = trainer.skipped_steps();
        trainer.leave()?;
        Ok::<_, TrainError>((seen, skipped))
    });
    let seen: Vec<_> = seen.into_iter().map(Result::unwrap).collect();
    assert!(seen.iter().all(|rank| rank == &seen[0]), "{seen:?}");
    let (steps, skipped) = &seen[0];
    assert_eq!(*skipped, Some(1), "{steps:?}");
    let at = steps.iter().position(|(stepped, ..)| !stepped).unwrap();
    for (index, pair) in steps.windows(2).enumerate() {
        let (before, after) = (&pair[0], &pair[1]);
        assert_eq!(after.0, after.2 != before.2, "step {}: it either changes the weights or is skipped", index + 1);
        assert_eq!(after.1, if index < at { 1024.0 } else { 512.0 }, "scale of step {}", index + 1);
    }
}

#[test]
fn a_static_scale_gives_up_after_a_hundred_steps() {
    let folder = tempfile::tempdir().unwrap();
    let config = features(folder.path(), |_| true, LossScaling::Static { scale: 8.0 });
    let ended = runs(&config, 2, folder.path(), |_, _, _| ());
    let mut own = 0;
    for (rank, (outcome, events)) in ended.into_iter().enumerate() {
        let error = outcome.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("gradients overflowed in 100 steps in a row with a loss scale of 8; lower"), "{text}");
        // The slower rank may learn of it from the other one before it notices on its own.
        let is_own = text.starts_with("gradients overflowed");
        assert_eq!(error.exit(rank as u32).code(), if is_own { 9 } else { 4 }, "{text}");
        own += usize::from(is_own);
        assert!(events.iter().all(|event| matches!(event, Event::Ready(_))), "no loss to report: {events:?}");
    }
    assert!(own >= 1);
    let config = features(folder.path(), |_| true, dynamic(1024.0));
    let error = train(&config, 2, 1000, true).unwrap_err().to_string();
    assert!(error.contains("not finite even with a loss scale of") && error.contains("25 skipped"), "{error}");
}

fn gpt(batch: u32, merge: u32, precision: Precision) -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    EngineConfig {
        batch_size_per_process: batch,
        batch_merge: merge,
        precision,
        ..crate::plain::gpt(&source, &["**/*.rs"])
    }
}

/// A power of two changes no bit of a bf16 value if it is divided out of the sum and the norm is
/// computed without it.
#[test]
fn the_scale_is_removed_after_the_reduction() {
    let scaled = |scale| {
        let config = gpt(3, 2, amp(HalfType::Bf16, LossScaling::Static { scale }));
        train(&config, 2, 12, true).unwrap().1
    };
    let plain = scaled(1.0);
    assert_eq!(plain, scaled(4096.0));
    assert_eq!(plain, scaled(0.125));
    assert_ne!(plain, scaled(3.0), "three is not a power of two, so the scale must show");
}

#[test]
fn all_ranks_multiply_bf16_with_one_kernel() {
    let precision = amp(HalfType::Bf16, LossScaling::Static { scale: 1.0 });
    let config = gpt(3, 1, precision);
    // Rank 1 is limited to f32 arithmetic; rank 0 has the best kernel of this machine.
    let kernels = on_ranks(2, |group| {
        let word = (group.rank() == 1).then_some("portable");
        let blueprint = Blueprint::new(&config, open(&config)?, (2, 0), word, &Registry::new())?;
        let trainer = Trainer::join(blueprint, &group)?;
        let kernel = trainer.kernel();
        trainer.leave()?;
        Ok::<_, TrainError>(kernel)
    });
    for kernel in kernels {
        // A bf16 kernel would be listed after a plus sign.
        assert!(kernel.as_ref().is_ok_and(|kernel| !kernel.contains('+')), "{kernel:?}");
    }
}

fn assert_close(one: &History, other: &History, tolerance: f64, what: &str) {
    for (step, ((a, _), (b, _))) in one.steps.iter().zip(&other.steps).enumerate() {
        assert!((a - b).abs() <= tolerance * a, "{what}: step {}: {a} and {b}", step + 1);
    }
}

#[test]
fn merged_16_bit_batches_equal_one_large_batch() {
    for half in [HalfType::Bf16, HalfType::Fp16] {
        let precision = amp(half, dynamic(1024.0));
        let (_, big) = train(&gpt(12, 1, precision), 1, 20, true).unwrap();
        for (world, merge) in [(1, 4), (2, 3), (3, 2)] {
            let (_, merged) = train(&gpt(12 / world / merge, merge, precision), world, 20, true).unwrap();
            assert_close(&big, &merged, 3e-3, &format!("{half:?}, {world} ranks, merge {merge}"));
        }
        let (_, exact) = train(&gpt(12, 1, Precision::Fp32), 1, 20, true).unwrap();
        assert_close(&exact, &big, 1e-2, &format!("{half:?} against f32"));
    }
}

#[test]
fn mixed_precision_saves_memory_as_planned() {
    let tokens =
        Gpt { layers: 4, hidden_size: 256, heads: 4, context_length: 256, vocabulary_size: 256, tied_head: true };
    let masked = Bert {
        layers: 4,
        hidden_size: 256,
        heads: 4,
        context_length: 256,
        vocabulary_size: 256,
        masked_fraction: 0.15,
        next_sentence: false,
    };
    let image = Some(ImageShape { height: 32, width: 32, channels: 3 });
    let resnet = crate::plain::resnet();
    let synthetic = Source::Synthetic(Synthetic { samples: 1000, image, classes: 10 });
    let cases = [
        ("GPT", 0.62, EngineConfig { model: Model::Gpt(tokens), ..gpt(32, 1, Precision::Fp32) }),
        ("BERT", 0.62, EngineConfig { model: Model::Bert(masked), ..gpt(32, 1, Precision::Fp32) }),
        (
            "ResNet-18",
            0.65,
            EngineConfig {
                model: Model::ResNet(ResNet { depth: ResNetDepth::D18, stem: Stem::Small, width: 64 }),
                data: Data { source: synthetic, ..resnet.data },
                batch_size_per_process: 128,
                ..resnet
            },
        ),
    ];
    for (name, most, config) in cases {
        let full = blueprint(&config, 1).unwrap().inspection().unwrap();
        assert_eq!(full.fp32_memory_bytes, None);
        for half in [HalfType::Bf16, HalfType::Fp16] {
            let config = EngineConfig { precision: amp(half, dynamic(1024.0)), ..config.clone() };
            let mixed = blueprint(&config, 1).unwrap().inspection().unwrap();
            let fp32_bytes = mixed.fp32_memory_bytes.unwrap();
            let near = (fp32_bytes as f64 / full.memory.total() as f64 - 1.0).abs();
            assert!(near < 0.02, "{name}: {fp32_bytes} reported, {} in f32", full.memory.total());
            let share = mixed.memory.activations as f64 / full.memory.activations as f64;
            let total = mixed.memory.total() as f64 / fp32_bytes as f64;
            println!("{name} {half:?}: activations {share:.3}, all {total:.3} of {} MiB", fp32_bytes >> 20);
            assert!(share <= 0.51 && total <= most, "{name} {half:?}: activations {share:.3}, all {total:.3} of f32's");
        }
    }
}
