//! Sharded optimizer state: weights with the same bits as without it.

use crate::ranks::{History, blueprint, on_ranks, runs, saving, train, train_over};
use crate::same_bits::{assert_same_steps, dynamic, rules};
use std::path::PathBuf;
use switchyard_worker::comm::{Force, GroupConfig};
use switchyard_worker::train::{StepRequest, Trainer};
use switchyard_worker_contract::config::*;

const STEPS: u64 = 8;

fn gpt() -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let plain = crate::plain::gpt(&source, &["**/*.rs"]);
    EngineConfig { batch_size_per_process: 2, length: Length::Steps(STEPS), ..plain }
}

fn with(change: impl Fn(&mut EngineConfig)) -> EngineConfig {
    let mut config = gpt();
    change(&mut config);
    config
}

const KINDS: [Sharding; 2] = [Sharding::Optimizer, Sharding::Gradients];

fn sharded(sharding: Sharding, config: &EngineConfig) -> EngineConfig {
    EngineConfig { sharding, ..config.clone() }
}

fn learned(config: &EngineConfig, world: u32, transport: Force) -> History {
    // Ranks are compared bit by bit after every step.
    train_over(transport, config, world, STEPS, true).unwrap().1
}

/// Whether the API accepts the combination.
fn is_accepted(sharding: Sharding, config: &EngineConfig) -> bool {
    sharding != Sharding::Gradients || config.batch_merge == 1 && config.overlap.enabled
}

fn assert_same_bits(name: &str, config: &EngineConfig, worlds: &[u32]) {
    for &world in worlds {
        for transport in [Force::Auto, Force::Tcp] {
            let expected = learned(config, world, transport);
            for sharding in KINDS.into_iter().filter(|sharding| is_accepted(*sharding, config)) {
                let got = learned(&sharded(sharding, config), world, transport);
                assert_same_steps(
                    &format!("{name}: {sharding:?} on {world} ranks over {transport:?}"),
                    &got,
                    &expected,
                );
            }
        }
    }
}

#[test]
fn every_optimizer_has_the_bits_of_an_unsharded_run() {
    for (name, rule, learning_rate) in rules() {
        for gradient_clip_norm in [None, Some(0.5)] {
            let config = with(|config| {
                config.optimizer = Optimizer { rule, learning_rate, gradient_clip_norm, ..config.optimizer };
            });
            assert_same_bits(&format!("{name}, clipped to {gradient_clip_norm:?}"), &config, &[1, 2, 3, 4]);
        }
    }
}

/// Every kind of job that sharding can be combined with.
fn jobs() -> Vec<(&'static str, EngineConfig)> {
    vec![
        ("merge", with(|config| config.batch_merge = 2)),
        ("bf16", with(|config| config.precision = dynamic(HalfType::Bf16, 65536.0))),
        // The first steps overflow and are skipped.
        ("f16", with(|config| config.precision = dynamic(HalfType::Fp16, 1073741824.0))),
        ("gradients in bf16", with(|config| config.overlap.wire_type = WireType::Bf16)),
        ("gradients in f16", with(|config| config.overlap.wire_type = WireType::Fp16)),
        ("two communicators", with(|config| config.overlap.communicators = 2)),
        ("no overlap", with(|config| config.overlap.enabled = false)),
        ("blocking", with(|config| config.overlap.sync_all_reduce = true)),
        ("ring", with(|config| config.algorithm = Some(Algorithm::Ring))),
        ("halving-doubling", with(|config| config.algorithm = Some(Algorithm::HalvingDoubling))),
        ("recursive doubling", with(|config| config.algorithm = Some(Algorithm::RecursiveDoubling))),
        ("tree", with(|config| config.algorithm = Some(Algorithm::Tree))),
        (
            "batch statistics",
            EngineConfig { batch_size_per_process: 8, length: Length::Steps(STEPS), ..crate::plain::resnet() },
        ),
    ]
}

#[test]
fn every_option_has_the_bits_of_an_unsharded_run() {
    for (name, config) in jobs() {
        assert_same_bits(name, &config, &[3, 4]);
    }
}

/// Digest and validation loss after the last step. No step waits for the weights of the one before.
fn uninterrupted(config: &EngineConfig, world: u32, transport: Force) -> (String, Option<f64>) {
    let outcomes = on_ranks(world, |group| {
        let group = GroupConfig { transport, ..group };
        let mut trainer = Trainer::join(blueprint(config, world).unwrap(), &group).unwrap();
        while trainer.steps_done() < STEPS {
            trainer.step(StepRequest::default()).unwrap();
        }
        let validation = trainer.evaluate().unwrap().map(|validation| validation.loss);
        let digest = trainer.agree_on_weights().unwrap();
        trainer.leave().unwrap();
        (digest, validation)
    });
    outcomes.into_iter().next().unwrap()
}

/// Ranks that compare weights after every step wait for them there.
#[test]
fn weights_that_arrive_during_forward_have_the_same_bits() {
    let not_clipped = with(|config| config.optimizer.gradient_clip_norm = None);
    for (name, config) in jobs().into_iter().chain([("not clipped", not_clipped), ("many buckets", many_buckets())]) {
        for transport in [Force::Auto, Force::Tcp] {
            let expected = uninterrupted(&config, 3, transport);
            for sharding in KINDS.into_iter().filter(|sharding| is_accepted(*sharding, &config)) {
                let got = uninterrupted(&sharded(sharding, &config), 3, transport);
                assert_eq!(got.0, expected.0, "{name}: {sharding:?} over {transport:?}");
                // Batch statistics travel in a message of their own, which adds in another order.
                let [got, expected] = [got.1, expected.1].map(Option::unwrap);
                assert!((got - expected).abs() <= 1e-6 * expected, "{name}: {got}, not {expected}");
            }
        }
    }
}

/// Each attempt shards differently over another number of ranks; the batch stays the same.
#[test]
fn checkpoints_restore_under_any_sharding_and_number_of_ranks() {
    let mixed = [("bf16", HalfType::Bf16), ("f16", HalfType::Fp16)]
        .map(|(name, compute_type)| (name, with(|config| config.precision = dynamic(compute_type, 1024.0))));
    let optimizers = rules().map(|(name, rule, learning_rate)| {
        (name, with(|config| config.optimizer = Optimizer { rule, learning_rate, ..config.optimizer }))
    });
    for (name, job) in optimizers.into_iter().chain(mixed) {
        let of = |world: u32| EngineConfig { batch_size_per_process: 4 / world, batch_merge: 1, ..job.clone() };
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        // Two runs that shard differently: the same bits after every attempt.
        for (attempt, world) in [2_u32, 4, 1, 2].into_iter().enumerate() {
            let [got, expected] = [0, 1].map(|run| {
                // Each run goes through all kinds.
                let sharding = [Sharding::Optimizer, Sharding::Gradients, Sharding::None][(attempt + run) % 3];
                let config = saving(&sharded(sharding, &of(world)), folders[run].path(), 2);
                let config = EngineConfig { length: Length::Steps(2 * (attempt as u64 + 1)), ..config };
                let outcomes = runs(&config, world, folders[run].path(), |_, _, _| ());
                outcomes.into_iter().for_each(|(outcome, _)| outcome.unwrap());
                train(&config, world, 0, true).unwrap().0
            });
            assert_eq!(got, Some(2 * (attempt as u64 + 1)), "{name}");
            assert_eq!(got, expected, "{name}");
            let models =
                folders.each_ref().map(|folder| std::fs::read(folder.path().join("model.safetensors")).unwrap());
            assert!(models[0] == models[1], "{name}: attempt {attempt} on {world} ranks");
        }
    }
}

#[test]
fn the_state_of_a_rank_is_divided_by_the_ranks() {
    let bytes = |config: &EngineConfig, world| blueprint(config, world).unwrap().inspection().unwrap().memory.optimizer;
    for (name, rule, learning_rate) in rules() {
        let config = with(|config| config.optimizer = Optimizer { rule, learning_rate, ..config.optimizer });
        let whole = bytes(&config, 1);
        for world in 1..=4 {
            for sharding in KINDS {
                let part = bytes(&sharded(sharding, &config), world);
                // Parts are whole cache lines.
                let most = whole / u64::from(world) + 64 * 16;
                assert!(
                    (whole / u64::from(world)..=most).contains(&part),
                    "{name}: {part} of {whole} on {world} ranks"
                );
            }
        }
    }
}

/// With many buckets, the places are a small part of all gradients.
#[test]
fn the_gradients_of_a_rank_are_divided_by_the_ranks() {
    let Model::Gpt(small) = gpt().model else { unreachable!() };
    let model = Model::Gpt(Gpt { hidden_size: 256, layers: 12, tied_head: false, ..small });
    let config = EngineConfig { model, batch_size_per_process: 1, ..gpt() };
    let bytes = |config: &EngineConfig, world| blueprint(config, world).unwrap().inspection().unwrap().memory.gradients;
    let whole = bytes(&config, 1);
    for world in 1..=4 {
        assert_eq!(bytes(&sharded(Sharding::Optimizer, &config), world), whole);
        let part = bytes(&sharded(Sharding::Gradients, &config), world);
        // Two places of a bucket each.
        let most = whole / u64::from(world) + 3 * (1 << 20);
        assert!(part <= most, "{part} of {whole} on {world} ranks, expected at most {most}");
    }
}

/// Many buckets, and a tied embedding to which the first and the last layer of backward add.
fn many_buckets() -> EngineConfig {
    let Model::Gpt(small) = gpt().model else { unreachable!() };
    let model = Model::Gpt(Gpt { hidden_size: 128, layers: 4, tied_head: true, ..small });
    EngineConfig { model, ..gpt() }
}

#[test]
fn places_are_used_again_and_again() {
    let config = EngineConfig { length: Length::Steps(4), ..many_buckets() };
    assert!(blueprint(&config, 2).unwrap().training.buckets.len() >= 4);
    for (transport, communicators) in [(Force::Auto, 1), (Force::Tcp, 3)] {
        let mut config = config.clone();
        config.overlap.communicators = communicators;
        let learned = |config: &EngineConfig| train_over(transport, config, 2, 4, true).unwrap().1;
        let (got, expected) = (learned(&sharded(Sharding::Gradients, &config)), learned(&config));
        assert_same_steps(&format!("{transport:?}"), &got, &expected);
    }
}
