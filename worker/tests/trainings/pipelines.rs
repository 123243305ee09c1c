//! Pipelines have the bits of runs without stages.

use crate::ranks::{History, blueprint, group, on_ranks, runs, saving, train, train_over};
use crate::same_bits::{assert_same_steps, dynamic, rules};
use std::path::PathBuf;
use switchyard_worker::comm::Force;
use switchyard_worker::train::{StepReport, StepRequest, Trainer};
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::event::Event;

const STEPS: u64 = 5;
const MERGE: u32 = 4;

/// Several gradient buckets, of which some have parameters of two stages.
fn gpt(tied_head: bool) -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let plain = crate::plain::gpt(&source, &["**/*.rs"]);
    let shape = Gpt { layers: 5, hidden_size: 112, heads: 4, context_length: 16, vocabulary_size: 256, tied_head };
    EngineConfig {
        model: Model::Gpt(shape),
        batch_size_per_process: 2,
        batch_merge: MERGE,
        length: Length::Steps(STEPS),
        ..plain
    }
}

fn with(change: impl Fn(&mut EngineConfig)) -> EngineConfig {
    let mut config = gpt(false);
    change(&mut config);
    config
}

fn resnet() -> EngineConfig {
    EngineConfig {
        batch_size_per_process: 4,
        batch_merge: MERGE,
        length: Length::Steps(STEPS),
        ..crate::plain::resnet()
    }
}

fn bert() -> EngineConfig {
    let shape = Bert {
        layers: 3,
        hidden_size: 48,
        heads: 4,
        context_length: 32,
        vocabulary_size: 256,
        masked_fraction: 0.15,
        next_sentence: true,
    };
    EngineConfig { model: Model::Bert(shape), ..gpt(true) }
}

fn in_stages(config: &EngineConfig, stages: u32, order: RankOrder) -> EngineConfig {
    EngineConfig { pipeline: Some(Pipeline { stages, order }), ..config.clone() }
}

fn learned(config: &EngineConfig, world: u32, transport: Force) -> History {
    train_over(transport, config, world, STEPS, true).unwrap().1
}

/// Compares with as many ranks as there are pipelines.
fn assert_same_bits(name: &str, config: &EngineConfig, cases: &[(u32, u32)]) {
    for &(stages, replicas) in cases {
        let expected = learned(config, replicas, Force::Auto);
        for order in [RankOrder::ByPipeline, RankOrder::ByStage] {
            let got = learned(&in_stages(config, stages, order), stages * replicas, Force::Auto);
            assert_same_steps(&format!("{name}: {replicas} pipelines of {stages} stages, {order:?}"), &got, &expected);
        }
    }
}

#[test]
fn any_number_of_stages_has_the_bits_of_a_run_without() {
    let unclipped = with(|config| config.optimizer.gradient_clip_norm = None);
    let blocks = RankOrder::Blocks { stages: 2, pipelines: 2 };
    let in_blocks = learned(&in_stages(&gpt(false), 4, blocks), 8, Force::Auto);
    assert_same_steps("blocks of 2 stages of 2 pipelines", &in_blocks, &learned(&gpt(false), 2, Force::Auto));
    for (name, config) in [("clipped", gpt(false)), ("not clipped", unclipped)] {
        assert_same_bits(name, &config, &[(2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3)]);
    }
}

#[test]
fn a_residual_network_has_the_bits_of_a_run_without_stages() {
    let clipped = {
        let mut config = resnet();
        config.optimizer.gradient_clip_norm = Some(0.5);
        config
    };
    for (name, config) in [("not clipped", resnet()), ("clipped", clipped)] {
        assert_same_bits(name, &config, &[(2, 1), (4, 1), (3, 2)]);
    }
}

#[test]
fn every_optimizer_has_the_bits_of_a_run_without_stages() {
    for (name, rule, learning_rate) in rules() {
        let config = with(|config| {
            config.optimizer = Optimizer { rule, learning_rate, ..config.optimizer };
        });
        assert_same_bits(name, &config, &[(2, 2)]);
    }
}

#[test]
fn every_option_has_the_bits_of_a_run_without_stages() {
    for (name, config) in [
        ("fewer micro-batches than stages", with(|config| config.batch_merge = 2)),
        ("one micro-batch", with(|config| config.batch_merge = 1)),
        ("bf16", with(|config| config.precision = dynamic(HalfType::Bf16, 65536.0))),
        // The first steps overflow and are skipped.
        ("f16", with(|config| config.precision = dynamic(HalfType::Fp16, 1073741824.0))),
        ("no overlap", with(|config| config.overlap.enabled = false)),
        ("blocking", with(|config| config.overlap.sync_all_reduce = true)),
        ("two lanes", with(|config| config.overlap.communicators = 2)),
        ("evaluation of all samples", with(|config| config.evaluation.batches = None)),
        ("recomputed blocks", with(|config| config.recomputation = Recomputation::Blocks)),
    ] {
        assert_same_bits(name, &config, &[(3, 2)]);
    }
}

#[test]
fn messages_over_tcp_carry_the_same_bits() {
    let expected = learned(&gpt(false), 2, Force::Tcp);
    let got = learned(&in_stages(&gpt(false), 2, RankOrder::ByPipeline), 4, Force::Tcp);
    assert_same_steps("tcp", &got, &expected);
}

/// Each stage adds its own gradients of the shared table first, so only the last bits may differ
/// from a run without stages; among pipelines the order is the same.
#[test]
fn shared_weights_learn_the_same_up_to_rounding() {
    for (name, config) in [("GPT", gpt(true)), ("BERT", bert())] {
        let whole = learned(&config, 2, Force::Auto);
        let two = learned(&in_stages(&config, 2, RankOrder::ByPipeline), 4, Force::Auto);
        let three = learned(&in_stages(&config, 3, RankOrder::ByStage), 6, Force::Auto);
        assert_same_steps(&format!("{name} with 2 and 3 stages"), &three, &two);
        assert_ne!(two.steps[0].1, two.steps[1].1);
        for ((got, _), (expected, _)) in two.steps.iter().zip(&whole.steps) {
            assert!((got - expected).abs() < 1e-4 * expected, "{name}: {got} instead of {expected}");
        }
    }
}

/// Each attempt has another number of stages and pipelines, or none; the batch stays the same.
#[test]
fn checkpoints_restore_into_any_number_of_stages() {
    for (name, base) in [("GPT", gpt(false)), ("ResNet", resnet())] {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        for (attempt, (stages, replicas)) in [(2_u32, 1_u32), (1, 2), (3, 2), (4, 1), (2, 2)].into_iter().enumerate() {
            let length = Length::Steps(2 * (attempt as u64 + 1));
            let config = EngineConfig { length, batch_merge: MERGE / replicas, ..base.clone() };
            let [got, expected] = [(stages, folders[0].path()), (1, folders[1].path())].map(|(stages, folder)| {
                let config = saving(&config, folder, 2);
                let config = if stages > 1 { in_stages(&config, stages, RankOrder::ByPipeline) } else { config };
                let outcomes = runs(&config, stages * replicas, folder, |_, _, _| ());
                outcomes.into_iter().for_each(|(outcome, _)| outcome.unwrap());
                std::fs::read(folder.join("model.safetensors")).unwrap()
            });
            assert!(got == expected, "{name}: attempt {attempt} with {replicas} pipelines of {stages} stages");
        }
    }
}

#[test]
fn a_killed_run_resumes_with_the_same_bits() {
    let config = in_stages(&EngineConfig { length: Length::Steps(9), ..gpt(false) }, 2, RankOrder::ByStage);
    let (_, whole) = train(&config, 4, 9, true).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = saving(&config, folder.path(), 2);
    for kill in [3, 5, 9] {
        let (resumed, part) = train(&config, 4, kill, kill == 9).unwrap();
        let from = resumed.unwrap_or(0) as usize;
        assert!(from.is_multiple_of(2) && (kill < 9 || from > 0), "to {kill} from {from}");
        assert_eq!(part.steps, whole.steps[from..kill as usize], "steps {from} to {kill}");
    }
}

/// Weights, gradients and moments are those of a stage.
#[test]
fn a_rank_needs_the_memory_of_one_stage() {
    let deep = with(|config| {
        let Model::Gpt(gpt) = &mut config.model else { return };
        gpt.layers = 32;
    });
    let whole = blueprint(&deep, 1).unwrap().memory();
    for stages in [2, 4, 8] {
        let part = blueprint(&in_stages(&deep, stages, RankOrder::ByPipeline), stages).unwrap().memory();
        for (name, part, whole) in [
            ("weights", part.weights, whole.weights),
            ("gradients", part.gradients, whole.gradients),
            ("optimizer", part.optimizer, whole.optimizer),
        ] {
            let share = part as f64 * f64::from(stages) / whole as f64;
            assert!((0.95..1.3).contains(&share), "{name} with {stages} stages: {part} of {whole}");
        }
    }
}

#[test]
fn bad_numbers_of_stages_are_refused() {
    let error = |stages, world| {
        let config = in_stages(&gpt(false), stages, RankOrder::ByPipeline);
        blueprint(&config, world).err().unwrap().to_string()
    };
    let text = error(2, 3);
    assert!(text.starts_with("spec.engine.parallelism.pipelineStages: got 2 with 3 ranks; expected"), "{text}");
    let text = error(64, 64);
    assert!(text.starts_with("spec.engine.parallelism.pipelineStages: got 64; expected at most "), "{text}");
}

#[test]
fn every_rank_reports_the_same_run_and_rank_0_has_the_whole_model() {
    let folder = tempfile::tempdir().unwrap();
    let config = in_stages(&gpt(false), 2, RankOrder::ByPipeline);
    let outcomes = runs(&config, 2, folder.path(), |_, _, _| ());
    let finished = outcomes.into_iter().map(|(outcome, events)| {
        outcome.unwrap();
        events.into_iter().find_map(|event| match event {
            Event::Finished(finished) => Some((finished.last_loss, finished.validation_loss, finished.weights_digest)),
            _ => None,
        })
    });
    let finished: Vec<_> = finished.map(Option::unwrap).collect();
    assert!(finished[0].0.is_some() && finished[0].1.is_some());
    assert_eq!(finished[0], finished[1]);
    assert!(folder.path().join("model.safetensors").exists());
}

/// The times of a step say how long a stage waited for others. The last stage waits at its end.
#[test]
fn stages_report_what_they_wait_for() {
    let config = in_stages(&gpt(false), 2, RankOrder::ByPipeline);
    let waits = on_ranks(2, |group| {
        let mut trainer = Trainer::join(blueprint(&config, 2).unwrap(), &group).unwrap();
        let (report, _) = trainer.step(StepRequest::default()).unwrap();
        trainer.agree_on_weights().unwrap();
        trainer.leave().unwrap();
        report
    });
    for StepReport { pipeline_wait, communication_wait, forward, backward, optimizer, total, .. } in waits {
        assert!(!pipeline_wait.is_zero());
        assert!(pipeline_wait + communication_wait + forward + backward + optimizer <= total, "the parts are disjoint");
    }
    let alone = on_ranks(1, |_| {
        let mut trainer = Trainer::join(blueprint(&gpt(false), 1).unwrap(), &group(1, 0, 1)).unwrap();
        trainer.step(StepRequest::default()).unwrap().0.pipeline_wait
    });
    assert!(alone[0].is_zero());
}
