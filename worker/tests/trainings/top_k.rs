//! Top-k with error feedback: ranks send their largest gradients and keep the others for later.

use crate::ranks::{History, runs, saving, train, train_over};
use std::path::PathBuf;
use switchyard_worker::comm::Force;
use switchyard_worker::train::TrainError;
use switchyard_worker_contract::config::*;

const STEPS: u64 = 12;

fn gpt() -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let plain = crate::plain::gpt(&source, &["**/*.rs"]);
    EngineConfig { batch_size_per_process: 4, length: Length::Steps(STEPS), ..plain }
}

fn sparse(config: &EngineConfig, ratio: f64) -> EngineConfig {
    EngineConfig { compression: Some(Compression::TopK(TopK { ratio })), ..config.clone() }
}

fn learned(config: &EngineConfig, world: u32, transport: Force) -> History {
    // Ranks are compared bit by bit after every step.
    train_over(transport, config, world, STEPS, true).unwrap().1
}

fn dynamic(compute_type: HalfType, initial_scale: f64) -> Precision {
    let loss_scaling =
        LossScaling::Dynamic { initial_scale, growth_factor: 2.0, backoff_factor: 0.5, growth_interval_steps: 3 };
    Precision::Amp(Amp { compute_type, loss_scaling })
}

/// Every kind of job that top-k can be combined with.
fn jobs() -> Vec<(&'static str, EngineConfig)> {
    let with = |change: &dyn Fn(&mut EngineConfig)| {
        let mut config = gpt();
        change(&mut config);
        config
    };
    let adam = Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    let lamb = Optimizer { rule: Rule::Lamb(adam), learning_rate: 0.01, ..gpt().optimizer };
    vec![
        ("AdamW", gpt()),
        (
            "LAMB, merge",
            with(&|config| {
                (config.batch_size_per_process, config.batch_merge, config.optimizer) = (2, 2, lamb);
            }),
        ),
        ("no clipping", with(&|config| config.optimizer.gradient_clip_norm = None)),
        ("bf16", with(&|config| config.precision = dynamic(HalfType::Bf16, 65536.0))),
        // The first steps overflow and are skipped.
        ("f16", with(&|config| config.precision = dynamic(HalfType::Fp16, 1073741824.0))),
        (
            "batch statistics",
            EngineConfig { batch_size_per_process: 8, length: Length::Steps(STEPS), ..crate::plain::resnet() },
        ),
    ]
}

#[test]
fn all_ranks_hold_the_same_bits_over_every_transport() {
    for (name, config) in jobs() {
        let config = sparse(&config, 0.02);
        let [shared, tcp] = [Force::Shm, Force::Tcp].map(|transport| learned(&config, 3, transport).steps);
        assert_eq!(shared, tcp, "{name}");
    }
}

/// Two ranks add two numbers, in any order the same.
#[test]
fn a_ratio_of_one_sends_everything() {
    for (name, config) in jobs() {
        if config.precision == Precision::Fp32 {
            assert_eq!(learned(&sparse(&config, 1.0), 2, Force::Shm), learned(&config, 2, Force::Shm), "{name}");
        }
    }
}

#[test]
fn a_killed_run_resumes_with_its_unsent_gradients() {
    for (name, config) in jobs() {
        let config = sparse(&config, 0.02);
        let (_, whole) = train(&config, 2, STEPS, true).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let config = saving(&config, folder.path(), 2);
        for kill in [3, 5, 9, STEPS] {
            let (resumed, part) = train(&config, 2, kill, kill == STEPS).unwrap();
            let from = resumed.unwrap_or(0) as usize;
            assert!(from.is_multiple_of(2) && (kill < 9 || from > 0), "{name}: to {kill} from {from}");
            assert_eq!(part.steps, whole.steps[from..kill as usize], "{name}: steps {from} to {kill}");
        }
    }
}

#[test]
fn a_checkpoint_of_other_ranks_or_of_all_gradients_is_refused_with_a_reason() {
    let folder = tempfile::tempdir().unwrap();
    let config = saving(&sparse(&gpt(), 0.02), folder.path(), STEPS);
    runs(&config, 2, folder.path(), |_, _, _| ()).into_iter().for_each(|(outcome, _)| outcome.unwrap());
    let refused = |config: &EngineConfig, world| match train(config, world, STEPS, true) {
        Err(TrainError::Resume(text)) => text,
        other => panic!("{other:?}"),
    };
    let text = refused(&config, 3);
    let words =
        "spec.engine.communication.compression: each rank has its own unsent gradients: got 3 ranks; expected 2";
    assert!(text.contains(words), "{text}");
    let text = refused(&EngineConfig { compression: None, ..config }, 2);
    let words =
        "got sync.type EveryStep without communication.compression; expected communication.compression.type TopK";
    assert!(text.contains(words), "{text}");
}
