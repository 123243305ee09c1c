//! Options that change how a training run is computed must not change what it learns; the others
//! change it as documented.

use crate::ranks::{History, blueprint, runs, train, train_over};
use std::path::PathBuf;
use switchyard_worker::comm::Force;
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::event::{Event, Finished};

const STEPS: u64 = 12;

/// A GPT with at least three buckets.
fn gpt() -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let plain = crate::plain::gpt(&source, &["**/*.rs"]);
    let Model::Gpt(small) = plain.model.clone() else { unreachable!() };
    let model = Model::Gpt(Gpt { hidden_size: 128, layers: 3, ..small });
    EngineConfig { model, batch_size_per_process: 3, length: Length::Steps(STEPS), ..plain }
}

fn small() -> EngineConfig {
    EngineConfig { model: crate::plain::gpt(&PathBuf::new(), &[]).model, ..gpt() }
}

fn with(config: &EngineConfig, change: impl FnOnce(&mut EngineConfig)) -> EngineConfig {
    let mut config = config.clone();
    change(&mut config);
    config
}

fn learned(config: &EngineConfig, world: u32, transport: Force) -> History {
    train_over(transport, config, world, STEPS, true).unwrap().1
}

type Change = (&'static str, fn(&mut EngineConfig));

#[test]
fn transport_and_overlap_do_not_change_any_bit() {
    let changes: [Change; 6] = [
        ("no overlap", |config| config.overlap.enabled = false),
        ("waiting for each", |config| config.overlap.sync_all_reduce = true),
        ("no overlap, waiting", |config| {
            (config.overlap.enabled, config.overlap.sync_all_reduce) = (false, true);
        }),
        ("two communicators", |config| config.overlap.communicators = 2),
        ("four communicators", |config| config.overlap.communicators = 4),
        ("four, no overlap", |config| (config.overlap.communicators, config.overlap.enabled) = (4, false)),
    ];
    let gpt = gpt();
    assert!(blueprint(&gpt, 2).unwrap().training.buckets.len() >= 3);
    for transport in [Force::Shm, Force::Tcp] {
        let whole = learned(&gpt, 2, transport);
        for (name, change) in changes {
            assert_eq!(whole, learned(&with(&gpt, change), 2, transport), "{name}, {transport:?}");
        }
    }
}

#[test]
fn recomputation_does_not_change_any_bit() {
    let changes: [Change; 4] = [
        ("plain", |_| ()),
        ("merged batches", |config| config.batch_merge = 2),
        ("f16", |config| config.precision = crate::same_bits::dynamic(HalfType::Fp16, 1073741824.0)),
        ("sharded", |config| config.sharding = Sharding::Optimizer),
    ];
    for model in [small(), crate::plain::resnet()] {
        for (name, change) in changes {
            let kept = with(&with(&model, change), |config| config.length = Length::Steps(STEPS));
            let recomputed = with(&kept, |config| config.recomputation = Recomputation::Blocks);
            assert_eq!(learned(&kept, 2, Force::Auto), learned(&recomputed, 2, Force::Auto), "{name}");
        }
    }
}

#[test]
fn a_model_without_blocks_is_not_recomputed() {
    let model = Model::Mlp(Mlp { hidden_sizes: vec![8], activation: Activation::Relu });
    let mlp = with(&crate::plain::resnet(), |config| config.model = model);
    let refused = blueprint(&with(&mlp, |config| config.recomputation = Recomputation::Blocks), 2).err().unwrap();
    assert!(refused.to_string().contains("got Blocks; expected None: the model marks no blocks"), "{refused}");
}

#[test]
fn reader_options_do_not_change_any_bit() {
    let changes: [Change; 3] = [
        ("workers", |config| config.reader.workers = Some(3)),
        ("no double buffer", |config| config.reader.double_buffer = false),
        ("finite", |config| config.reader.infinite = false),
    ];
    let resnet = with(&crate::plain::resnet(), |config| {
        config.batch_size_per_process = 40;
        (config.data.images.crop_padding, config.data.images.flip) = (2, true);
    });
    assert!(blueprint(&resnet, 2).unwrap().training.order.steps_per_epoch() < STEPS / 2, "epochs end during the run");
    let whole = learned(&resnet, 2, Force::Auto);
    for (name, change) in changes {
        assert_eq!(whole, learned(&with(&resnet, change), 2, Force::Auto), "{name}");
    }
    let floats = learned(&with(&resnet, |config| config.reader.sample_type = SampleType::Float32), 2, Force::Auto);
    for (step, ((bytes, _), (floats, _))) in whole.steps.iter().zip(&floats.steps).enumerate() {
        assert!((bytes - floats).abs() <= 1e-4 * bytes, "finished floats, step {}: {bytes}, {floats}", step + 1);
    }
}

fn finished(config: &EngineConfig) -> Finished {
    let folder = tempfile::tempdir().unwrap();
    let ended = runs(config, 2, folder.path(), |_, _, _| ());
    let finished = ended.iter().map(|(outcome, events)| match events.last() {
        Some(Event::Finished(finished)) => finished.clone(),
        last => panic!("{outcome:?}: {last:?}"),
    });
    let finished: Vec<Finished> = finished.collect();
    assert_eq!(finished[0].weights_digest, finished[1].weights_digest);
    finished[0].clone()
}

#[test]
fn reporting_checkpointing_and_memory_release_do_not_change_any_bit() {
    let changes: [Change; 5] = [
        ("fetch", |config| config.fetch_every_steps = 1),
        ("release", |config| config.memory.release_every_steps = 2),
        ("profile", |config| config.profile = Some(Profile { from_step: 3, steps: 4 })),
        ("evaluation", |config| config.evaluation = Evaluation { every_steps: 3, batches: Some(2) }),
        ("threads", |config| config.cpu_threads = 2),
    ];
    let whole = finished(&small());
    for (name, change) in changes {
        assert_eq!(whole.weights_digest, finished(&with(&small(), change)).weights_digest, "{name}");
    }
}

#[test]
fn two_byte_wire_formats_learn_the_same() {
    // A ResNet this small learns chaotically: after some steps any rounding leads it elsewhere, but
    // not before.
    let resnet = with(&crate::plain::resnet(), |config| {
        (config.batch_size_per_process, config.optimizer.learning_rate) = (16, 0.002);
    });
    for (config, from, to) in [(small(), 30, 40), (resnet, 5, 15)] {
        let config = with(&config, |config| config.length = Length::Steps(40));
        let mean = |config: &EngineConfig| {
            // Ranks are compared bit by bit after every step.
            let (_, history) = train_over(Force::Tcp, config, 3, to as u64, true).unwrap();
            let part = &history.steps[from..];
            (part.iter().map(|(loss, _)| loss).sum::<f64>() / part.len() as f64, history)
        };
        let (exact, whole) = mean(&config);
        for wire in [WireType::Fp16, WireType::Bf16] {
            let (loss, history) = mean(&with(&config, |config| config.overlap.wire_type = wire));
            assert!((loss - exact).abs() <= 0.01 * exact, "{wire:?}: {loss}, not {exact}");
            assert_ne!(history, whole, "{wire:?} has an effect");
        }
    }
}

fn rules() -> [Rule; 7] {
    let adam = Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    [
        Rule::Sgd(Momentum { momentum: 0.0, nesterov: false }),
        Rule::Sgd(Momentum { momentum: 0.9, nesterov: true }),
        Rule::Sgd(Momentum { momentum: 0.9, nesterov: false }),
        Rule::Adam(adam),
        Rule::AdamW(adam),
        Rule::Lamb(adam),
        Rule::Lars(Lars { momentum: 0.9, trust_coefficient: 0.01 }),
    ]
}

#[test]
fn updating_buckets_early_equals_a_clip_norm_that_is_never_reached() {
    for rule in rules() {
        let clipped = |norm| {
            let rate = if matches!(rule, Rule::Sgd(_)) { 0.05 } else { 0.003 };
            with(&gpt(), |config| {
                config.optimizer =
                    Optimizer { rule, learning_rate: rate, gradient_clip_norm: norm, ..config.optimizer };
            })
        };
        assert_eq!(learned(&clipped(None), 2, Force::Auto), learned(&clipped(Some(1e30)), 2, Force::Auto), "{rule:?}");
    }
}

#[test]
fn every_optimizer_learns_with_every_schedule() {
    let kinds = [
        ScheduleKind::Constant,
        ScheduleKind::Cosine,
        ScheduleKind::Linear,
        ScheduleKind::Step { every: 10, factor: 0.5 },
    ];
    for (index, rule) in rules().into_iter().enumerate() {
        let learning_rate = match rule {
            Rule::Sgd(Momentum { momentum: 0.0, .. }) => 0.5,
            Rule::Sgd(_) => 0.1,
            Rule::Lars(_) => 1.0,
            Rule::Lamb(_) => 0.02,
            Rule::Adam(_) | Rule::AdamW(_) => 0.005,
        };
        let config = with(&small(), |config| {
            config.length = Length::Steps(40);
            config.optimizer = Optimizer { rule, learning_rate, ..config.optimizer };
            config.schedule = Schedule { kind: kinds[index % 4], warmup_steps: Some(3), final_learning_rate: 0.0 };
        });
        let (_, history) = train(&config, 2, 40, true).unwrap();
        let mean = |part: &[(f64, String)]| part.iter().map(|(loss, _)| loss).sum::<f64>() / part.len() as f64;
        let (first, last) = (mean(&history.steps[..5]), mean(&history.steps[35..]));
        assert!(last < 0.9 * first, "{rule:?} with {:?}: {first} to {last}", kinds[index % 4]);
    }
}

/// Cross entropy weighted (1 - e), plus e times its mean over all classes: linear in e.
#[test]
fn label_smoothing_mixes_in_the_mean_over_all_classes() {
    let first = |smoothing| {
        let config = with(&small(), |config| config.label_smoothing = smoothing);
        train(&config, 2, 1, true).unwrap().1.steps[0].0
    };
    let (plain, half) = (first(0.0), first(0.5));
    let uniform = 2.0 * half - plain;
    // Its minimum is the entropy of 256 equal classes, which a fresh network is close to.
    assert!(uniform > 256f64.ln() && uniform < 1.1 * 256f64.ln(), "{uniform}");
    for smoothing in [0.1, 0.3] {
        let (got, expected) = (first(smoothing), (1.0 - smoothing) * plain + smoothing * uniform);
        assert!((got - expected).abs() < 1e-5 * expected, "{smoothing}: {got}, not {expected}");
    }
    assert!((half - plain).abs() > 1e-4, "{half} and {plain}");
}

#[test]
fn the_validation_loss_is_not_smoothed() {
    let first = |smoothing| {
        let config = with(&small(), |config| {
            config.label_smoothing = smoothing;
            config.optimizer.learning_rate = 0.0;
            config.schedule =
                Schedule { kind: ScheduleKind::Constant, warmup_steps: Some(0), final_learning_rate: 0.0 };
        });
        let history = train(&config, 2, 4, true).unwrap().1;
        (history.steps[0].0, history.evaluations[0].unwrap())
    };
    let (plain, smooth) = (first(0.0), first(0.5));
    assert_eq!(plain.1, smooth.1);
    assert!((plain.0 - smooth.0).abs() > 1e-4, "{plain:?} and {smooth:?}");
}

#[test]
fn infeasible_jobs_are_refused_before_the_first_step() {
    let error = |config: &EngineConfig| blueprint(config, 2).err().unwrap();
    let tight = error(&with(&gpt(), |config| config.memory.fraction = 1e-6));
    let text = tight.to_string();
    assert_eq!(tight.exit(0).code(), 8, "{text}");
    for word in ["not placeable: a rank needs", "spec.engine.memory.fraction 0.000001", "smallest change that fits"] {
        assert!(text.contains(word) && !text.contains("  "), "{word} in {text}");
    }
    // Slightly less than it needs: a smaller batch would fit.
    let large = with(&gpt(), |config| config.batch_size_per_process = 64);
    let mut fractions = (0..400).map(|n| 0.95f64.powi(n));
    let little_less = fractions.find_map(|fraction| {
        blueprint(&with(&large, |config| config.memory.fraction = fraction), 2).err().map(|error| error.to_string())
    });
    let text = little_less.unwrap();
    let fits = text.split("batchSizePerProcess: ").nth(1).and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    assert!(fits.is_some_and(|batch| (1..64).contains(&batch)), "{text}");
    let custom = Custom { name: "mine".into(), parameters: [].into() };
    let unknown = error(&with(&crate::plain::resnet(), |config| config.model = Model::Custom(custom)));
    let text = unknown.to_string();
    assert!(unknown.exit(0).code() == 2 && text.contains("spec.engine.model") && text.contains("`mine`"), "{text}");
}
