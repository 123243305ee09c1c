//! Local steps: ranks train on their own data and average their weights every few steps.

use crate::ranks::{blueprint, on_ranks, saving, train};
use std::path::{Path, PathBuf};
use switchyard_worker::train::{StepRequest, TrainError, Trainer};
use switchyard_worker_contract::config::*;

const EVERY: u64 = 4;
/// Not a multiple of [`EVERY`].
const STEPS: u64 = 14;

const DILOCO: OuterOptimizer = OuterOptimizer::Nesterov(Nesterov { learning_rate: 0.7, momentum: 0.9 });

fn local(every_steps: u64, outer_optimizer: OuterOptimizer) -> SyncPolicy {
    SyncPolicy::Local(LocalSteps { every_steps, outer_optimizer })
}

fn gpt() -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let plain = crate::plain::gpt(&source, &["**/*.rs"]);
    EngineConfig { batch_size_per_process: 4, length: Length::Steps(STEPS), ..plain }
}

fn resnet() -> EngineConfig {
    EngineConfig { batch_size_per_process: 8, length: Length::Steps(STEPS), ..crate::plain::resnet() }
}

/// A step as all ranks saw it.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    /// Mean over all ranks.
    loss: f64,
    is_skipped: bool,
    /// The weights of each rank.
    digests: Vec<String>,
}

/// Trains until `steps` are done, then leaves or drops everything, like a kill. Returns the step
/// from which it resumed.
fn trained(config: &EngineConfig, world: u32, steps: u64, leave: bool) -> Result<(Option<u64>, Vec<Seen>), TrainError> {
    let ranks = on_ranks(world, |group| {
        let mut trainer = Trainer::join(blueprint(config, world)?, &group)?;
        let (resumed, mut seen) = (trainer.resumed_step(), Vec::new());
        while trainer.steps_done() < steps {
            let (report, _) = trainer.step(StepRequest::default())?;
            seen.push((report.loss, report.gradient_norm, trainer.weights_digest()?));
        }
        // A rank that drops its membership ends the group, even for a rank that is behind.
        trainer.evaluate()?;
        if leave {
            trainer.leave()?;
        }
        Ok((resumed, seen))
    });
    let mut errors: Vec<_> = Vec::new();
    let mut known = Vec::new();
    for rank in ranks {
        match rank {
            Ok(rank) => known.push(rank),
            Err(error) => errors.push(error),
        }
    }
    errors.sort_by_key(|error| matches!(error, TrainError::Comm(_)));
    if let Some(error) = errors.into_iter().next() {
        return Err(error);
    }
    let (resumed, first) = known[0].clone();
    let steps = first.into_iter().enumerate().map(|(step, (loss, norm, _))| {
        let is_same = known.iter().all(|(_, seen)| (seen[step].0, seen[step].1) == (loss, norm));
        assert!(is_same, "step {step}: not all ranks see the same loss and norm");
        let digests = known.iter().map(|(_, seen)| seen[step].2.clone()).collect();
        Seen { loss, is_skipped: norm.is_none(), digests }
    });
    Ok((resumed, steps.collect()))
}

fn dynamic(compute_type: HalfType, initial_scale: f64) -> Precision {
    let loss_scaling =
        LossScaling::Dynamic { initial_scale, growth_factor: 2.0, backoff_factor: 0.5, growth_interval_steps: 3 };
    Precision::Amp(Amp { compute_type, loss_scaling })
}

/// Every kind of job that local steps can be combined with.
fn jobs() -> Vec<(&'static str, EngineConfig)> {
    let adam = Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    let with = |change: &dyn Fn(&mut EngineConfig)| {
        let mut config = gpt();
        change(&mut config);
        config
    };
    let rule =
        |rule, learning_rate| with(&|config| config.optimizer = Optimizer { rule, learning_rate, ..config.optimizer });
    vec![
        ("AdamW", gpt()),
        ("SGD", rule(Rule::Sgd(Momentum { momentum: 0.0, nesterov: false }), 0.1)),
        ("momentum", rule(Rule::Sgd(Momentum { momentum: 0.9, nesterov: true }), 0.05)),
        ("LAMB", rule(Rule::Lamb(adam), 0.01)),
        ("LARS", rule(Rule::Lars(Lars { momentum: 0.9, trust_coefficient: 0.01 }), 1.0)),
        ("no clipping", with(&|config| config.optimizer.gradient_clip_norm = None)),
        ("merge", with(&|config| (config.batch_size_per_process, config.batch_merge) = (2, 2))),
        ("bf16", with(&|config| config.precision = dynamic(HalfType::Bf16, 65536.0))),
        // The scale falls until f16 can hold the gradients.
        ("f16", with(&|config| config.precision = dynamic(HalfType::Fp16, 1073741824.0))),
        ("changes in bf16", with(&|config| config.overlap.wire_type = WireType::Bf16)),
        ("two communicators", with(&|config| config.overlap.communicators = 2)),
        ("batch statistics", resnet()),
    ]
}

#[test]
fn ranks_hold_the_same_weights_after_an_average_and_only_then() {
    for (name, config) in jobs() {
        for outer in [OuterOptimizer::Average, DILOCO] {
            let config = EngineConfig { sync: local(EVERY, outer), ..config.clone() };
            let (_, seen) = trained(&config, 3, STEPS, true).unwrap();
            let (_, again) = trained(&config, 3, STEPS, true).unwrap();
            assert_eq!(seen, again, "{name}, {outer:?}: two runs");
            let mut is_apart = false;
            for (step, Seen { is_skipped, digests, .. }) in (1..).zip(&seen) {
                is_apart = !config.sync.synchronises(step, STEPS) && (is_apart || !is_skipped);
                let is_equal = digests.iter().all(|digest| *digest == digests[0]);
                assert_eq!(is_equal, !is_apart, "{name}, {outer:?}: step {step}");
            }
            assert!(seen.iter().any(|step| step.is_skipped) == (name == "f16"), "{name}");
        }
    }
}

/// With plain SGD, the mean of weights that were each updated once is an update by the mean.
#[test]
fn an_average_after_every_step_of_plain_sgd_is_every_step() {
    let mut config = gpt();
    config.optimizer.rule = Rule::Sgd(Momentum { momentum: 0.0, nesterov: false });
    (config.optimizer.learning_rate, config.optimizer.gradient_clip_norm) = (0.1, None);
    let (_, whole) = train(&config, 2, STEPS, true).unwrap();
    let (_, seen) =
        trained(&EngineConfig { sync: local(1, OuterOptimizer::Average), ..config }, 2, STEPS, true).unwrap();
    for (step, ((expected, _), Seen { loss: got, .. })) in whole.steps.iter().zip(&seen).enumerate() {
        assert!((got - expected).abs() <= 1e-5 * expected, "step {}: {got}, not {expected}", step + 1);
    }
}

/// Kills a run after these steps; each time it resumes from the last average that was saved.
fn killed(config: &EngineConfig, world: u32, what: &str) {
    let (_, whole) = trained(config, world, STEPS, true).unwrap();
    let folder = tempfile::tempdir().unwrap();
    // Due after 3, 6, 9 and 12 steps: saved after 4, 8 and 12.
    let config = saving(config, folder.path(), 3);
    for kill in [6, 7, 10, 13, STEPS] {
        let (resumed, part) = trained(&config, world, kill, kill == STEPS).unwrap();
        let from = resumed.unwrap_or(0);
        // The checkpoint of step 8 waits for that of step 4.
        assert!(from % EVERY == 0 && (kill < 13 || from >= EVERY), "{what}: to {kill} from {from}");
        assert_eq!(part, whole[from as usize..kill as usize], "{what}: steps {from} to {kill}");
    }
}

#[test]
fn a_killed_run_resumes_bit_for_bit() {
    for (name, config) in jobs() {
        for outer in [OuterOptimizer::Average, DILOCO] {
            let config = EngineConfig { sync: local(EVERY, outer), ..config.clone() };
            killed(&config, 2, &format!("{name}, {outer:?}"));
        }
    }
}

fn saved(config: &EngineConfig, folder: &Path, world: u32) {
    let config = EngineConfig { length: Length::Steps(EVERY), ..saving(config, folder, EVERY) };
    let outcomes = crate::ranks::runs(&config, world, folder, |_, _, _| ());
    outcomes.into_iter().for_each(|(outcome, _)| outcome.unwrap());
}

#[test]
fn a_checkpoint_of_other_ranks_or_another_policy_is_refused_with_a_reason() {
    let config = EngineConfig { sync: local(EVERY, OuterOptimizer::Average), ..gpt() };
    let refused = |config: &EngineConfig, folder: &Path, world| {
        let error = trained(&saving(config, folder, EVERY), world, STEPS, true).unwrap_err();
        assert!(matches!(error, TrainError::Resume(_)), "{error}");
        error.to_string()
    };
    let folder = tempfile::tempdir().unwrap();
    saved(&config, folder.path(), 2);
    let text = refused(&config, folder.path(), 3);
    let words = "spec.engine.sync.type Local: each rank has its own optimizer state: got 3 ranks; expected 2";
    assert!(text.contains(words), "{text}");
    let text = refused(&gpt(), folder.path(), 2);
    let words = "got sync.type EveryStep without communication.compression; expected sync.type Local";
    assert!(text.contains(words), "{text}");
    // Ranks that have no state of their own can be any number.
    let mut plain = config;
    plain.optimizer.rule = Rule::Sgd(Momentum { momentum: 0.0, nesterov: false });
    let folder = tempfile::tempdir().unwrap();
    saved(&plain, folder.path(), 2);
    assert_eq!(trained(&saving(&plain, folder.path(), EVERY), 3, STEPS, true).unwrap().0, Some(EVERY));
}
