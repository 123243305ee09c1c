//! Trainer tests with an engine that returns a step's outcome only after the next step has begun,
//! as a device does.

use super::altered_engine::{AlteredEngine, on_two_ranks, plain};
use crate::comm::GroupConfig;
use crate::model::Registry;
use crate::recorder::{Identity, Recorder};
use crate::train::watchdog::Watch;
use crate::train::{Blueprint, StepRequest, TrainError, Trainer, open};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::{Checkpoint, EngineConfig, Evaluation, Length};

const STEPS: u64 = 10;

fn config(directory: &Path, every_steps: u64, period_seconds: u64) -> EngineConfig {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/comm");
    let path = directory.display().to_string();
    EngineConfig {
        batch_size_per_process: 2,
        length: Length::Steps(STEPS),
        evaluation: Evaluation { every_steps: 4, batches: Some(1) },
        checkpoint: Some(Checkpoint { path, every_steps, period_seconds, keep: 9, on_suspend: true }),
        ..plain::gpt(&source, &["**/*.rs"])
    }
}

/// Observations of one rank.
#[derive(Debug, Clone, PartialEq, Default)]
struct Observed {
    /// Number, loss and norm of each step.
    steps: Vec<(u64, f64, Option<f64>)>,
    evaluations: Vec<(u64, f64)>,
    /// The run ended because of a stop request.
    stopped: bool,
    weights: String,
    /// Steps of complete checkpoints, on the rank that reports them.
    saved: Vec<u64>,
}

/// Trains on two ranks like a run. `before` is called before each step, with the rank and the step
/// that begins next; it returns whether the rank requests to stop.
fn train(
    config: &EngineConfig,
    delayed: bool,
    before: impl Fn(&mut Trainer, u32, u64) -> bool + Sync,
) -> Vec<Result<Observed, TrainError>> {
    on_two_ranks(|group| train_rank(config, delayed, &group, &before))
}

fn train_rank(
    config: &EngineConfig,
    delayed: bool,
    group: &GroupConfig,
    before: &(dyn Fn(&mut Trainer, u32, u64) -> bool + Sync),
) -> Result<Observed, TrainError> {
    let blueprint = Blueprint::new(config, open(config)?, (2, 0), None, &Registry::new())?;
    let watch = Watch::new(Recorder::private(Identity { rank: group.rank(), world: 2, attempt: 1 }));
    let mut trainer = Trainer::join_watched(blueprint, group, &watch, |engine| {
        Box::new(AlteredEngine::new(engine, delayed, |_| ()))
    })?;
    let mut observed = Observed::default();
    while trainer.steps_done() < STEPS && !observed.stopped {
        let next = trainer.begun + 1;
        let stop = before(&mut trainer, group.rank(), next);
        let (report, agreed) = trainer.step(StepRequest { stop })?;
        observed.steps.push((report.step, report.loss, report.gradient_norm));
        observed.stopped = agreed.stop;
        if report.step.is_multiple_of(4) && !agreed.stop {
            let result = trainer.evaluate()?;
            observed.evaluations.extend(result.map(|result| (report.step, result.loss)));
        }
    }
    trainer.save_checkpoint()?;
    assert!(trainer.finish_checkpoint()?, "a checkpoint holds the last step");
    observed.saved = trainer.take_saved().into_iter().map(|saved| (saved.outcome.unwrap(), saved.step).1).collect();
    observed.weights = trainer.agree_on_weights()?;
    trainer.leave()?;
    Ok(observed)
}

/// The shards of all checkpoints, by path.
fn shards(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "safetensors") {
                found.insert(path.strip_prefix(folder).unwrap().to_owned(), std::fs::read(path).unwrap());
            }
        }
    }
    found
}

#[test]
fn delayed_outcomes_give_the_same_losses_evaluations_and_checkpoints() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let seen = [false, true].map(|delayed| {
        let config = config(folders[usize::from(delayed)].path(), 3, 0);
        train(&config, delayed, |_, _, _| false).into_iter().map(Result::unwrap).collect::<Vec<_>>()
    });
    let zero = &seen[0][0];
    assert_eq!(zero.steps.iter().map(|step| step.0).collect::<Vec<_>>(), (1..=STEPS).collect::<Vec<_>>());
    assert_eq!((zero.saved.as_slice(), zero.evaluations.len()), (&[3, 6, 9, 10][..], 2));
    assert_eq!(seen[0], seen[1]);
    let shards = folders.each_ref().map(|folder| shards(folder.path()));
    assert_eq!(shards[0].len(), 8);
    assert!(shards[0] == shards[1], "the same bytes in the same files");
}

#[test]
fn a_stop_takes_effect_after_the_step_in_flight_and_keeps_its_outcome() {
    let plain = tempfile::tempdir().unwrap();
    let through = train(&config(plain.path(), 0, 0), false, |_, _, _| false);
    for (delayed, last) in [(false, 5), (true, 6)] {
        let folder = tempfile::tempdir().unwrap();
        let stopping = |_: &mut Trainer, rank, next| rank == 1 && next >= 5;
        for (rank, seen) in train(&config(folder.path(), 0, 0), delayed, stopping).into_iter().enumerate() {
            let seen = seen.unwrap();
            assert!(seen.stopped && seen.steps.len() == last, "delayed: {delayed}: {:?}", seen.steps);
            assert_eq!(seen.steps, through[rank].as_ref().unwrap().steps[..last]);
            assert_eq!(seen.saved, if rank == 0 { vec![last as u64] } else { Vec::new() });
        }
    }
}

#[test]
fn a_checkpoint_due_by_the_clock_includes_the_step_in_flight() {
    for (delayed, step) in [(false, 5), (true, 6)] {
        let folder = tempfile::tempdir().unwrap();
        let hour = Duration::from_secs(3600);
        let due = |trainer: &mut Trainer, rank, next| {
            if let (0, 5, Some(checkpoints)) = (rank, next, &mut trainer.checkpoints) {
                checkpoints.last = Instant::now().checked_sub(hour).unwrap();
            }
            false
        };
        let seen = train(&config(folder.path(), 0, hour.as_secs()), delayed, due);
        let saved: Vec<_> = seen.into_iter().map(|seen| seen.unwrap().saved).collect();
        assert_eq!(saved, [vec![step, STEPS], Vec::new()], "delayed: {delayed}");
    }
}

#[test]
fn a_non_finite_loss_is_reported_for_its_own_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut diverging = EngineConfig { checkpoint: None, ..config(folder.path(), 0, 0) };
    diverging.optimizer.learning_rate = 1e30;
    diverging.optimizer.gradient_clip_norm = None;
    diverging.schedule.warmup_steps = Some(0);
    let errors = [false, true].map(|delayed| {
        let errors = train(&diverging, delayed, |_, _, _| false).into_iter().map(|seen| seen.unwrap_err().to_string());
        let mut errors: Vec<String> = errors.collect();
        errors.sort();
        errors
    });
    let own = |errors: &[String]| errors.iter().find(|error| error.starts_with("the loss of step")).cloned();
    assert!(own(&errors[0]).is_some(), "{errors:?}");
    assert_eq!(own(&errors[0]), own(&errors[1]));
}
