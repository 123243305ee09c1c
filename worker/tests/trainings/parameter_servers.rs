//! Parameter servers: synchronous ones give the bits of collective runs.

use crate::ranks::{History, blueprint, on_ranks, runs, saving, train, train_over};
use crate::same_bits::{assert_same_steps, dynamic, rules};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use switchyard_worker::comm::{CommError, Force};
use switchyard_worker::train::{StepRequest, TrainError, Trainer};
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::event::Event;

const STEPS: u64 = 5;

/// Large enough for four buckets.
fn gpt() -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let plain = crate::plain::gpt(&source, &["**/*.rs"]);
    let shape =
        Gpt { layers: 5, hidden_size: 112, heads: 4, context_length: 16, vocabulary_size: 256, tied_head: true };
    EngineConfig { model: Model::Gpt(shape), batch_size_per_process: 2, length: Length::Steps(STEPS), ..plain }
}

fn with(change: impl Fn(&mut EngineConfig)) -> EngineConfig {
    let mut config = gpt();
    change(&mut config);
    config
}

fn on_servers(config: &EngineConfig, servers: u32) -> EngineConfig {
    with_updates(config, servers, Updates::Synchronous)
}

fn dedicated(config: &EngineConfig) -> EngineConfig {
    let placement = ServerPlacement::Dedicated;
    let parameter_server = config.parameter_server.map(|servers| ParameterServers { placement, ..servers });
    EngineConfig { parameter_server, ..config.clone() }
}

fn learned(config: &EngineConfig, world: u32, transport: Force) -> History {
    // Ranks are compared bit by bit after every step.
    train_over(transport, config, world, STEPS, true).unwrap().1
}

/// Servers add in rank order, as ranks of one host do in shared memory.
fn assert_same_bits(name: &str, config: &EngineConfig, cases: &[(u32, u32)]) {
    for &(world, servers) in cases {
        let expected = learned(config, world, Force::Auto);
        for transport in [Force::Auto, Force::Tcp] {
            let got = learned(&on_servers(config, servers), world, transport);
            let name = format!("{name}: {world} ranks and {servers} servers over {transport:?}");
            assert_same_steps(&name, &got, &expected);
        }
    }
}

#[test]
fn any_number_of_servers_has_the_bits_of_a_collective_run() {
    let unclipped = with(|config| config.optimizer.gradient_clip_norm = None);
    for (name, config) in [("clipped", gpt()), ("not clipped", unclipped)] {
        let cases: Vec<(u32, u32)> = (1..=4).flat_map(|world| (1..=3).map(move |servers| (world, servers))).collect();
        assert_same_bits(name, &config, &cases);
    }
}

#[test]
fn dedicated_servers_have_the_bits_of_a_collective_run() {
    let unclipped = with(|config| config.optimizer.gradient_clip_norm = None);
    let skipping = with(|config| config.precision = dynamic(HalfType::Fp16, 1073741824.0));
    for (name, config, world, servers) in [
        ("clipped", gpt(), 2, 3),
        ("not clipped", unclipped, 3, 1),
        ("skipped steps", skipping, 2, 2),
        ("alone", gpt(), 1, 1),
    ] {
        let got = learned(&dedicated(&on_servers(&config, servers)), world, Force::Auto);
        assert_same_steps(name, &got, &learned(&config, world, Force::Auto));
    }
    let got = learned(&dedicated(&with_updates(&gpt(), 2, ASYNCHRONOUS)), 1, Force::Auto);
    assert_eq!(got.steps, learned(&gpt(), 1, Force::Auto).steps, "asynchronous");
}

/// Geo updates too: there each rank has its own optimizer state.
#[test]
fn checkpoints_restore_into_dedicated_servers_and_back() {
    for updates in [Updates::Synchronous, GEO] {
        let config = with_updates(&EngineConfig { length: Length::Steps(9), ..gpt() }, 2, updates);
        // With one rank, geo runs repeat bit for bit.
        let world = if updates == GEO { 1 } else { 2 };
        let (_, whole) = train(&config, world, 9, true).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let config = saving(&config, folder.path(), 3);
        for (kill, config) in [(4, dedicated(&config)), (7, config.clone()), (9, dedicated(&config))] {
            let (resumed, part) = train(&config, world, kill, kill == 9).unwrap();
            let from = resumed.unwrap_or(0) as usize;
            assert!(from.is_multiple_of(3) && (kill < 9 || from > 0), "to {kill} from {from}");
            assert_eq!(part.steps, whole.steps[from..kill as usize], "steps {from} to {kill}");
        }
    }
}

#[test]
fn every_optimizer_has_the_bits_of_a_collective_run() {
    for (name, rule, learning_rate) in rules() {
        for gradient_clip_norm in [None, Some(0.5)] {
            let config = with(|config| {
                config.optimizer = Optimizer { rule, learning_rate, gradient_clip_norm, ..config.optimizer };
            });
            assert_same_bits(&format!("{name}, clipped to {gradient_clip_norm:?}"), &config, &[(3, 2)]);
        }
    }
}

#[test]
fn every_option_has_the_bits_of_a_collective_run() {
    let resnet = EngineConfig { batch_size_per_process: 8, length: Length::Steps(STEPS), ..crate::plain::resnet() };
    for (name, config, servers) in [
        ("merge", with(|config| config.batch_merge = 2), 2),
        ("bf16", with(|config| config.precision = dynamic(HalfType::Bf16, 65536.0)), 2),
        // The first steps overflow and are skipped.
        ("f16", with(|config| config.precision = dynamic(HalfType::Fp16, 1073741824.0)), 2),
        ("no overlap", with(|config| config.overlap.enabled = false), 2),
        ("blocking", with(|config| config.overlap.sync_all_reduce = true), 2),
        ("evaluation", with(|config| config.evaluation.every_steps = 2), 3),
        ("batch statistics", resnet, 1),
    ] {
        assert_same_bits(name, &config, &[(3, servers)]);
    }
}

/// Each attempt has another number of ranks and of servers, or none; the batch stays the same.
#[test]
fn checkpoints_restore_under_any_number_of_servers_and_ranks() {
    let of = |world: u32| with(|config| (config.batch_size_per_process, config.batch_merge) = (4 / world, 1));
    for (name, rule, learning_rate) in rules() {
        let optimizer = Optimizer { rule, learning_rate, ..gpt().optimizer };
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        for (attempt, (world, servers)) in [(2_u32, 2), (4, 0), (1, 3), (2, 1)].into_iter().enumerate() {
            let length = Length::Steps(2 * (attempt as u64 + 1));
            let config = EngineConfig { optimizer, length, ..of(world) };
            let [got, expected] = [(servers, folders[0].path()), (0, folders[1].path())].map(|(servers, folder)| {
                let config = saving(&config, folder, 2);
                let config = if servers > 0 { on_servers(&config, servers) } else { config };
                runs(&config, world, folder, |_, _, _| ()).into_iter().for_each(|(outcome, _)| outcome.unwrap());
                std::fs::read(folder.join("model.safetensors")).unwrap()
            });
            assert!(got == expected, "{name}: attempt {attempt} on {world} ranks with {servers} servers");
        }
    }
}

#[test]
fn a_killed_run_resumes_with_the_same_bits() {
    let config = on_servers(&EngineConfig { length: Length::Steps(9), ..gpt() }, 2);
    let (_, whole) = train(&config, 2, 9, true).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = saving(&config, folder.path(), 2);
    for kill in [3, 5, 9] {
        let (resumed, part) = train(&config, 2, kill, kill == 9).unwrap();
        let from = resumed.unwrap_or(0) as usize;
        assert!(from.is_multiple_of(2) && (kill < 9 || from > 0), "to {kill} from {from}");
        assert_eq!(part.steps, whole.steps[from..kill as usize], "steps {from} to {kill}");
    }
}

#[test]
fn more_servers_than_buckets_are_refused() {
    let error = blueprint(&on_servers(&gpt(), 99), 2).err().unwrap().to_string();
    assert!(
        error.starts_with("spec.engine.communication.parameterServer.servers: got 99; expected at most "),
        "{error}"
    );
}

fn with_updates(config: &EngineConfig, servers: u32, updates: Updates) -> EngineConfig {
    let placement = ServerPlacement::Ranks;
    EngineConfig { parameter_server: Some(ParameterServers { servers, placement, updates }), ..config.clone() }
}

const ASYNCHRONOUS: Updates = Updates::Asynchronous { max_staleness: 2 };
const GEO: Updates = Updates::Geo { every_steps: 3, max_staleness: 1 };

/// A single rank is never stale: the server applies the same gradients.
#[test]
fn one_rank_with_asynchronous_servers_has_the_bits_of_a_collective_run() {
    for (name, rule, learning_rate) in rules() {
        for gradient_clip_norm in [None, Some(0.5)] {
            let config = with(|config| {
                config.optimizer = Optimizer { rule, learning_rate, gradient_clip_norm, ..config.optimizer };
            });
            let got = learned(&with_updates(&config, 2, ASYNCHRONOUS), 1, Force::Auto);
            assert_eq!(got.steps, learned(&config, 1, Force::Auto).steps, "{name}, {gradient_clip_norm:?}");
        }
    }
}

/// Rank 1 begins once rank 0 has run ahead as far as it may.
#[test]
fn a_slow_rank_slows_nobody_within_the_bound() {
    for (updates, steps, bound) in [(ASYNCHRONOUS, 8, 2), (GEO, 18, 1)] {
        let config = EngineConfig { length: Length::Steps(steps), ..with_updates(&gpt(), 2, updates) };
        let every = updates.geo().map_or(1, |geo| geo.every_steps);
        let (ready, begin) = mpsc::channel();
        let (ready, begin) = (Mutex::new(ready), Mutex::new(begin));
        let seen = on_ranks(2, |group| {
            let rank = || group.rank();
            let mut trainer = Trainer::join(blueprint(&config, 2).unwrap(), &group).unwrap();
            if rank() == 1 {
                begin.lock().unwrap().recv().unwrap();
            }
            let mut staleness = Vec::new();
            while trainer.steps_done() < steps {
                staleness.push(trainer.step(StepRequest::default()).unwrap().0.staleness);
                if rank() == 0 && staleness.len() as u64 == bound * every {
                    ready.lock().unwrap().send(()).unwrap();
                }
            }
            let digest = trainer.agree_on_weights().unwrap();
            trainer.leave().unwrap();
            (staleness, digest)
        });
        let first = seen[0].0.iter().skip(every as usize - 1).step_by(every as usize).take(bound as usize);
        assert_eq!(first.copied().collect::<Vec<_>>(), (1..=bound).collect::<Vec<_>>(), "{updates:?}");
        for (staleness, _) in &seen {
            assert!(staleness.iter().all(|steps| *steps <= bound), "{updates:?}: {staleness:?}");
            assert_eq!(staleness.last(), Some(&0), "the last step is a meeting");
        }
        assert_eq!(seen[0].1, seen[1].1);
    }
}

fn losses(config: &EngineConfig, world: u32) -> (f64, f64) {
    let folder = tempfile::tempdir().unwrap();
    let mut outcomes = runs(config, world, folder.path(), |_, _, _| ());
    let (outcome, events) = outcomes.swap_remove(0);
    outcome.unwrap();
    let finished = events.into_iter().find_map(|event| match event {
        Event::Finished(finished) => Some((finished.first_loss.unwrap(), finished.last_loss.unwrap())),
        _ => None,
    });
    finished.unwrap()
}

#[test]
fn asynchronous_runs_learn_with_every_option() {
    let mut resnet = EngineConfig { batch_size_per_process: 8, ..crate::plain::resnet() };
    // Servers take a step for each rank, with weights of different ages: the usual rate diverges.
    resnet.optimizer.learning_rate *= 0.1;
    let bf16 = Amp { compute_type: HalfType::Bf16, loss_scaling: LossScaling::Static { scale: 1.0 } };
    let blocking = with(|config| {
        config.overlap.sync_all_reduce = true;
        config.optimizer.gradient_clip_norm = None;
    });
    for updates in [ASYNCHRONOUS, GEO] {
        for (name, config, servers) in [
            ("AdamW", gpt(), 2),
            ("no clipping", with(|config| config.optimizer.gradient_clip_norm = None), 3),
            ("merge", with(|config| config.batch_merge = 2), 2),
            ("bf16", with(|config| config.precision = Precision::Amp(bf16)), 2),
            ("blocking", blocking.clone(), 2),
            ("evaluation", with(|config| config.evaluation.every_steps = 4), 2),
            ("batch statistics", resnet.clone(), 1),
        ] {
            let config = EngineConfig { length: Length::Steps(30), ..with_updates(&config, servers, updates) };
            let (first, last) = losses(&config, 3);
            assert!(last < 0.95 * first, "{name} with {updates:?}: {first} -> {last}");
        }
    }
}

/// A request to stop is met at a step that no rank had begun; the saved run resumes and completes.
#[test]
fn asynchronous_runs_stop_save_and_resume() {
    for updates in [ASYNCHRONOUS, GEO] {
        let folder = tempfile::tempdir().unwrap();
        let steps = 40;
        let config = EngineConfig { length: Length::Steps(steps), fetch_every_steps: 1, ..gpt() };
        let config = saving(&with_updates(&config, 2, updates), folder.path(), 0);
        let outcomes = runs(&config, 2, folder.path(), |rank, event, stop| {
            if let (1, Event::Progress(progress)) = (rank, event)
                && progress.step == 5
            {
                stop.store(15, Ordering::Relaxed);
            }
        });
        let stopped: Vec<u64> = outcomes
            .into_iter()
            .map(|(outcome, _)| match outcome {
                Err(TrainError::Stopped { step, saved: true, .. }) => step,
                other => panic!("{updates:?}: {other:?}"),
            })
            .collect();
        assert!(stopped[0] == stopped[1] && (6..steps).contains(&stopped[0]), "{updates:?}: {stopped:?}");
        let outcomes = runs(&config, 2, folder.path(), |rank, event, _| {
            if let (0, Event::Ready(ready)) = (rank, event) {
                assert_eq!(ready.resumed_step, Some(stopped[0]));
            }
        });
        outcomes.into_iter().for_each(|(outcome, _)| outcome.unwrap());
    }
}

#[test]
fn a_loss_scale_is_refused_with_asynchronous_servers() {
    let unscaled =
        |compute_type| Precision::Amp(Amp { compute_type, loss_scaling: LossScaling::Static { scale: 1.0 } });
    for updates in [ASYNCHRONOUS, GEO] {
        for precision in [
            dynamic(HalfType::Bf16, 65536.0),
            dynamic(HalfType::Fp16, 65536.0),
            // Activations overflow without a scale too.
            unscaled(HalfType::Fp16),
        ] {
            let config = with_updates(&with(|config| config.precision = precision), 2, updates);
            let error = blueprint(&config, 2).err().unwrap().to_string();
            assert!(error.starts_with("spec.engine.precision: got a loss scale; expected FP32"), "{error}");
        }
        blueprint(&with_updates(&with(|config| config.precision = unscaled(HalfType::Bf16)), 2, updates), 2).unwrap();
    }
}

/// The process of server 1 ends after three steps. The other rank gets that as the cause, and the
/// next attempt has the bits of a run that never lost a server.
#[test]
fn a_lost_server_is_the_only_cause_and_no_update_is_lost_or_repeated() {
    const TOTAL: u64 = 8;
    let config = on_servers(&EngineConfig { length: Length::Steps(TOTAL), ..gpt() }, 2);
    let (_, whole) = train(&config, 2, TOTAL, true).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = saving(&config, folder.path(), 2);
    let errors = on_ranks(2, |group| {
        let mut trainer = Trainer::join(blueprint(&config, 2).unwrap(), &group).unwrap();
        while group.rank() == 0 || trainer.steps_done() < 3 {
            if let Err(error) = trainer.step(StepRequest::default()) {
                return Some(error);
            }
        }
        None
    });
    match errors.as_slice() {
        [Some(TrainError::Comm(CommError::Failed(cause))), None] => assert_eq!(cause.origin_rank, 1, "{cause}"),
        other => panic!("{other:?}"),
    }
    let (resumed, rest) = train(&config, 2, TOTAL, true).unwrap();
    let from = resumed.unwrap_or(0) as usize;
    assert!(from.is_multiple_of(2), "{from}");
    assert_eq!(rest.steps, whole.steps[from..]);
}
