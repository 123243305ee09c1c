//! An interrupted and resumed training run equals an uninterrupted one, bit for bit after every
//! step.

use crate::ranks::{History, blueprint, on_ranks, runs, saving, train};
use std::path::Path;
use std::sync::atomic::Ordering;
use switchyard_worker::train::{StepRequest, TrainError, Trainer};
use switchyard_worker_contract::config::*;
use switchyard_worker_contract::event::Event;
use tempfile::TempDir;

/// Optimizer steps of a whole run: slightly more than two epochs.
const STEPS: u64 = 12;

fn dynamic(compute_type: HalfType, initial_scale: f64) -> Precision {
    let loss_scaling =
        LossScaling::Dynamic { initial_scale, growth_factor: 2.0, backoff_factor: 0.5, growth_interval_steps: 3 };
    Precision::Amp(Amp { compute_type, loss_scaling })
}

/// A GPT that takes 12 samples per step and finishes an epoch after 5 steps; the text is in the
/// folder.
fn gpt(folder: &Path) -> EngineConfig {
    let text: String = (0..).map(|n| format!("{} and then {n}; ", n * 7919 % 1000)).take(1000).collect();
    let file = folder.join("text");
    // 64 windows of 32 tokens for training, after a tenth of the text for validation.
    std::fs::write(&file, &text[..2650]).unwrap();
    let plain = crate::plain::gpt(&file, &[]);
    let Model::Gpt(gpt) = plain.model.clone() else { unreachable!() };
    let model = Model::Gpt(Gpt { layers: 1, hidden_size: 32, ..gpt });
    EngineConfig { model, length: Length::Steps(STEPS), fetch_every_steps: 1, ..plain }
}

fn resnet() -> EngineConfig {
    let image = Some(ImageShape { height: 8, width: 8, channels: 3 });
    let plain = crate::plain::resnet();
    EngineConfig {
        data: Data { source: Source::Synthetic(Synthetic { samples: 80, image, classes: 4 }), ..plain.data },
        length: Length::Steps(STEPS),
        ..plain
    }
}

fn divided(config: EngineConfig, world: u32, merge: u32) -> EngineConfig {
    EngineConfig { batch_size_per_process: 12 / world / merge, batch_merge: merge, ..config }
}

/// Repeatedly kills a training run after these steps; each time it resumes from a checkpoint.
fn killed(config: &EngineConfig, world: u32, what: &str) {
    const EVERY: u64 = 2;
    let (_, whole) = train(config, world, STEPS, true).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = saving(config, folder.path(), EVERY);
    for kill in [3, 5, 6, 9, STEPS] {
        let (resumed, part) = train(&config, world, kill, kill == STEPS).unwrap();
        let from = resumed.unwrap_or(0);
        // Every second checkpoint waits for the previous one.
        assert!(from % EVERY == 0 && (kill < 6 || from >= EVERY), "{what}: to {kill} from {from}");
        let (from, to) = (from as usize, kill as usize);
        assert_eq!(part.steps, whole.steps[from..to], "{what}: steps {from} to {to}");
        assert_eq!(part.evaluations, whole.evaluations[from / 4..to / 4], "{what}: evaluations {from} to {to}");
    }
}

#[test]
fn a_killed_gpt_resumes_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let gpt = gpt(folder.path());
    let order = blueprint(&gpt, 1).unwrap().training.order;
    assert_eq!(
        (order.steps_per_epoch(), order.samples().is_multiple_of(12)),
        (5, false),
        "{} samples",
        order.samples()
    );
    for world in 1..=3 {
        killed(&divided(gpt.clone(), world, 1), world, &format!("{world} ranks"));
    }
    let lamb = Optimizer {
        rule: Rule::Lamb(Adam { beta1: 0.9, beta2: 0.99, epsilon: 1e-6 }),
        learning_rate: 0.01,
        ..gpt.optimizer
    };
    killed(&EngineConfig { optimizer: lamb, ..divided(gpt, 2, 2) }, 2, "LAMB, merge 2");
}

#[test]
fn killed_mixed_precision_resumes_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let gpt = gpt(folder.path());
    // 2^30 overflows f16 in the first steps: the scale falls, and grows again.
    for (half, scale, world, merge) in [(HalfType::Bf16, 65536.0, 2, 1), (HalfType::Fp16, 1073741824.0, 2, 2)] {
        let config = EngineConfig { precision: dynamic(half, scale), ..divided(gpt.clone(), world, merge) };
        killed(&config, world, &format!("{half:?}"));
    }
    let mut narrow = divided(gpt, 2, 1);
    narrow.overlap.wire_type = WireType::Fp16;
    killed(&narrow, 2, "gradients in f16");
    let config = EngineConfig { precision: dynamic(HalfType::Fp16, 1024.0), ..divided(resnet(), 2, 1) };
    killed(&config, 2, "ResNet in f16");
}

#[test]
fn a_changed_loss_scale_applies_from_the_resume_on() {
    let (data, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let fixed =
        |scale| Precision::Amp(Amp { compute_type: HalfType::Bf16, loss_scaling: LossScaling::Static { scale } });
    let gpt = saving(&divided(gpt(data.path()), 2, 1), folder.path(), 100);
    for (steps, precision, scale) in [
        (2, dynamic(HalfType::Bf16, 512.0), 512.0),
        (4, fixed(128.0), 128.0),
        (6, fixed(1024.0), 1024.0),
        (8, dynamic(HalfType::Bf16, 64.0), 64.0),
    ] {
        let config = EngineConfig { precision, length: Length::Steps(steps), ..gpt.clone() };
        for (outcome, events) in runs(&config, 2, data.path(), |_, _, _| ()) {
            outcome.unwrap();
            let scales: Vec<(u64, Option<f64>)> = events
                .iter()
                .filter_map(|event| match event {
                    Event::Progress(progress) => Some((progress.step, progress.loss_scale)),
                    _ => None,
                })
                .collect();
            assert_eq!(scales, [(steps - 1, Some(scale)), (steps, Some(scale))]);
        }
    }
}

#[test]
fn a_killed_resnet_keeps_its_statistics_and_momentum() {
    for world in [1, 3] {
        killed(&divided(resnet(), world, 1), world, &format!("ResNet on {world} ranks"));
    }
}

/// Weights digest and validation loss.
type FinalResult = (String, Option<f64>);

/// Loss of each step, and the final result of a run.
fn results(events: &[Event]) -> (Vec<(u64, f64)>, Option<FinalResult>) {
    let losses = events.iter().filter_map(|event| match event {
        Event::Progress(progress) => Some((progress.step, progress.loss)),
        _ => None,
    });
    let finished = events.iter().find_map(|event| match event {
        Event::Finished(finished) => Some((finished.weights_digest.clone(), finished.validation_loss)),
        _ => None,
    });
    (losses.collect(), finished)
}

#[test]
fn a_stopped_run_saves_and_resumes() {
    let data = tempfile::tempdir().unwrap();
    let out = tempfile::tempdir().unwrap();
    let gpt =
        EngineConfig { evaluation: Evaluation { every_steps: 4, batches: Some(1) }, ..divided(gpt(data.path()), 2, 1) };
    let whole = runs(&gpt, 2, out.path(), |_, _, _| ()).swap_remove(0);
    let (losses, end) = results(&whole.1);
    assert_eq!((whole.0.is_ok(), losses.len()), (true, 12));
    // A run notices the stop in the step after the event, or in the evaluation before it. Cases: in
    // the middle of an epoch, before an evaluation, at the end of an epoch, in a step that is saved
    // anyway, at the very end, and before the last evaluation.
    for (stop_at, stopped) in [(1, 2), (4, 4), (5, 6), (11, 12), (12, 12)] {
        let folder = tempfile::tempdir().unwrap();
        let config = saving(&gpt, folder.path(), 3);
        let first = runs(&config, 2, out.path(), |rank, event, stop| {
            if matches!(event, Event::Progress(progress) if progress.step == stop_at && rank == 1) {
                stop.store(15, Ordering::Relaxed);
            }
        });
        for (rank, (outcome, events)) in first.iter().enumerate() {
            let error = outcome.as_ref().unwrap_err();
            assert!(matches!(error, TrainError::Stopped { step, saved: true, .. } if *step == stopped), "{error}");
            assert_eq!(error.exit(rank as u32).code(), 143);
            let failed = |event: &&Event| matches!(event, Event::Checkpoint(report) if report.failure.is_some());
            assert_eq!(events.iter().find(failed), None);
        }
        let last = first[0].1.iter().rev().find_map(|event| match event {
            Event::Checkpoint(report) => Some(report.step),
            _ => None,
        });
        assert_eq!(last, Some(stopped));
        let second = runs(&config, 2, out.path(), |_, _, _| ()).swap_remove(0);
        assert!(second.0.is_ok(), "{second:?}");
        assert!(matches!(&second.1[0], Event::Ready(ready) if ready.resumed_step == Some(stopped)), "{second:?}");
        let (later, later_end) = results(&second.1);
        assert_eq!((&later[..], &later_end), (&losses[stopped as usize..], &end), "stopped after {stop_at}");
    }
}

#[test]
fn a_restarted_finished_run_finishes_immediately() {
    let (data, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = saving(&divided(gpt(data.path()), 2, 1), folder.path(), 5);
    let first = runs(&config, 2, data.path(), |_, _, _| ());
    let saved = complete(&folder);
    let second = runs(&config, 2, data.path(), |_, _, _| ());
    for ((one, before), (two, after)) in first.iter().zip(&second) {
        assert!(one.is_ok() && two.is_ok(), "{one:?} {two:?}");
        assert!(results(before).1.is_some());
        assert_eq!((results(before).1, results(after).0.len()), (results(after).1, 0));
    }
    assert_eq!((complete(&folder), saved.len()), (saved, 2), "no new checkpoints");
}

/// Names of the complete checkpoints, oldest first.
fn complete(folder: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(folder.path()).unwrap().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| entry.path().join("manifest.json").exists())
        .map(|entry| entry.file_name().display().to_string())
        .collect();
    names.sort();
    names
}

#[test]
fn a_different_division_of_the_batch_resumes_with_the_same_samples() {
    let (data, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let gpt = gpt(data.path());
    let (_, whole) = train(&divided(gpt.clone(), 2, 1), 2, STEPS, true).unwrap();
    let mut done = 0;
    for (world, merge, until) in [(2, 1, 5), (3, 1, 8), (1, 1, 10), (2, 3, STEPS)] {
        let config = saving(&divided(gpt.clone(), world, merge), folder.path(), 1);
        let (resumed, part) = train(&config, world, until, until == STEPS).unwrap();
        let from = resumed.unwrap_or(0);
        // The checkpoint before the last one is complete; the last one may be.
        assert!(done == 0 || (from >= done - 2 && from < done + 1), "{from} after {done}");
        for (index, ((loss, _), (expected, _))) in part.steps.iter().zip(&whole.steps[from as usize..]).enumerate() {
            let step = from as usize + index + 1;
            assert!((loss - expected).abs() <= 1e-4 * expected, "{world} ranks, step {step}: {loss}, {expected}");
        }
        assert_eq!(part.steps.len() as u64, until - from);
        done = until;
    }
}

/// If the weights do not change, the sum of losses over an epoch does not depend on the order, but
/// skipping or repeating a sample changes it.
#[test]
fn a_different_global_batch_uses_each_sample_of_the_epoch_once() {
    let (data, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut gpt = gpt(data.path());
    gpt.optimizer.learning_rate = 0.0;
    gpt.schedule = Schedule { kind: ScheduleKind::Constant, warmup_steps: Some(0), final_learning_rate: 0.0 };
    let batch = |size| EngineConfig { batch_size_per_process: size, ..gpt.clone() };
    let samples = blueprint(&batch(1), 1).unwrap().training.order.samples();
    let sum = |history: &History, size: u64| history.steps.iter().map(|(loss, _)| loss * size as f64).sum::<f64>();
    let all = sum(&train(&batch(1), 1, samples, true).unwrap().1, 1);
    // Four steps of 12, the last of which may not be saved; then 3 samples per step, until the
    // epoch is over.
    let (_, first) = train(&saving(&batch(6), folder.path(), 1), 2, 4, false).unwrap();
    let config = saving(&batch(1), folder.path(), 1);
    let (resumed, end) = {
        let start = on_ranks(3, |group| {
            let trainer = Trainer::join(blueprint(&config, 3)?, &group)?;
            let order = trainer.training().order;
            trainer.leave()?;
            Ok::<_, TrainError>(order.steps_of(1))
        });
        let end = *start[0].as_ref().unwrap();
        let (resumed, history) = train(&config, 3, end, true).unwrap();
        (resumed.unwrap(), history)
    };
    let part = History { steps: first.steps[..resumed as usize].to_vec(), ..History::default() };
    let (one, rest) = (sum(&part, 12), sum(&end, 3));
    let left = (samples - 12 * resumed) % 3;
    assert_eq!(end.steps.len() as u64, (samples - 12 * resumed) / 3);
    let mean = all / samples as f64;
    // The rest of the epoch, fewer than 3 samples, is skipped; each has about the mean loss.
    let expected = all - left as f64 * mean;
    let tolerance = if left == 0 { 1e-5 * all } else { 0.5 * mean };
    assert!((one + rest - expected).abs() <= tolerance, "{one} + {rest} is not {expected}: {left} left of {samples}");
}

#[test]
fn incompatible_checkpoints_are_refused() {
    let (data, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = saving(&divided(gpt(data.path()), 2, 1), folder.path(), 1);
    train(&config, 2, 4, true).unwrap();
    let refused = |change: &dyn Fn(&mut EngineConfig), words: &[&str]| {
        let mut other = config.clone();
        change(&mut other);
        for result in on_ranks(2, |group| Trainer::join(blueprint(&other, 2)?, &group)) {
            let error = result.err().unwrap();
            let text = error.to_string();
            assert_eq!(error.exit(0).code(), 6, "{text}");
            assert!(words.iter().all(|word| text.contains(word)), "{words:?} in {text}");
        }
    };
    refused(&|config| config.seed = 8, &["spec.engine.seed", "got 8", "expected 7"]);
    let wider = |config: &mut EngineConfig| {
        let Model::Gpt(gpt) = &mut config.model else { unreachable!() };
        gpt.hidden_size = 64;
    };
    refused(&wider, &["tensor `", "[32]", "[64]"]);
    let deeper = |config: &mut EngineConfig| {
        let Model::Gpt(gpt) = &mut config.model else { unreachable!() };
        gpt.layers = 2;
    };
    refused(&deeper, &["tensor `"]);
    let adam = Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    refused(&|config| config.optimizer.rule = Rule::Adam(adam), &["spec.engine.optimizer", "got Adam;", "AdamW"]);
    let text = std::fs::read_to_string(data.path().join("text")).unwrap();
    for (name, text, field) in [
        ("longer", format!("{text}{text}"), "training samples: got 1"),
        ("a byte longer", format!("{text}."), "bytes: got 2651; expected 2650"),
        ("another", text.replace('7', "8"), "digest: got "),
    ] {
        let file = data.path().join(name);
        std::fs::write(&file, text).unwrap();
        let of_file = |config: &mut EngineConfig| config.data = crate::plain::gpt(&file, &[]).data;
        refused(&of_file, &["spec.engine.data", field, "as the checkpoint has"]);
    }
    let sgd = Rule::Sgd(Momentum { momentum: 0.9, nesterov: false });
    refused(&|config| config.optimizer.rule = sgd, &["tensor"]);
    let results = on_ranks(2, |group| {
        let group = switchyard_worker::comm::GroupConfig { job: "other".into(), ..group };
        Trainer::join(blueprint(&config, 2)?, &group)
    });
    for result in results {
        let error = result.err().unwrap();
        assert_eq!(error.exit(0).code(), 6);
        let text = error.to_string();
        assert!(text.contains("got `training-test`; expected `other`"), "{text}");
    }
}

#[test]
fn a_damaged_checkpoint_is_skipped_and_having_no_usable_one_is_an_error() {
    let (data, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = saving(&divided(gpt(data.path()), 2, 1), folder.path(), 2);
    let (_, whole) = train(&config, 2, 9, true).unwrap();
    let names = complete(&folder);
    assert_eq!(names.len(), 2, "keep 2 of {names:?}");
    let step = |name: &str| name[5..14].parse::<u64>().unwrap();
    let damage = |name: &str| {
        let file = folder.path().join(name).join("rank-1.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let last = bytes.len() - 5;
        bytes[last] ^= 4;
        std::fs::write(file, bytes).unwrap();
    };
    damage(&names[1]);
    let never =
        EngineConfig { checkpoint: config.checkpoint.clone().map(|c| Checkpoint { every_steps: 0, ..c }), ..config };
    let (resumed, rest) = train(&never, 2, 9, true).unwrap();
    assert_eq!(resumed, Some(step(&names[0])));
    assert_eq!(rest.steps, whole.steps[step(&names[0]) as usize..]);
    damage(&names[0]);
    let error = train(&never, 2, 9, true).unwrap_err();
    let text = error.to_string();
    assert!(
        error.exit(0).code() == 6 && text.contains("no checkpoint can be used") && text.contains("damaged"),
        "{text}"
    );
}

#[test]
fn a_failed_checkpoint_is_reported_and_training_continues() {
    let (data, folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (directory, aside) = (folder.path().join("checkpoints"), folder.path().join("aside"));
    let config = saving(&divided(gpt(data.path()), 2, 1), &directory, 2);
    let (_, whole) = train(&divided(gpt(data.path()), 2, 1), 2, STEPS, true).unwrap();
    // Immediately, because a rank that finds nothing there creates a new directory.
    std::fs::write(&aside, "").unwrap();
    let exchange = || {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        renameat_with(CWD, &directory, CWD, &aside, RenameFlags::EXCHANGE).unwrap();
    };
    // Both ranks may report the write failure.
    let restored = std::sync::Once::new();
    let ended = runs(&config, 2, data.path(), |rank, event, _| match event {
        // A file in place of the directory, in which not even root can write.
        Event::Checkpoint(report) if rank == 0 && report.step == 2 => {
            exchange();
        }
        Event::Checkpoint(report) if report.failure.is_some() => restored.call_once(exchange),
        _ => {}
    });
    let mut reports = Vec::new();
    for (outcome, events) in &ended {
        outcome.as_ref().unwrap();
        reports.extend(events.iter().filter_map(|event| match event {
            Event::Checkpoint(report) => Some(report.clone()),
            _ => None,
        }));
        assert_eq!(results(events).1.unwrap().0, whole.steps[STEPS as usize - 1].1);
    }
    let failed: Vec<_> = reports.iter().filter_map(|report| Some((report.step, report.failure.as_ref()?))).collect();
    assert!(!failed.is_empty() && failed.iter().all(|(_, text)| text.contains("checkpoints")), "{reports:?}");
    let saved: Vec<u64> = reports.iter().filter(|report| report.bytes.is_some()).map(|report| report.step).collect();
    assert!(saved.starts_with(&[2]) && saved.ends_with(&[STEPS]), "{reports:?}");
}

/// A run without checkpoints writes none: no directory, no stop.
#[test]
fn without_checkpoints_nothing_is_saved() {
    let data = tempfile::tempdir().unwrap();
    let config = divided(gpt(data.path()), 1, 1);
    let results = on_ranks(1, |group| {
        let mut trainer = Trainer::join(blueprint(&config, 1)?, &group)?;
        let (_, agreed) = trainer.step(StepRequest { stop: true })?;
        Ok::<_, TrainError>((agreed.stop, trainer.resumed_step()))
    });
    assert_eq!(*results[0].as_ref().unwrap(), (true, None));
    assert_eq!(std::fs::read_dir(data.path()).unwrap().count(), 1);
}
