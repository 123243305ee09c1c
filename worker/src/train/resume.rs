//! Finding the checkpoint to resume from, on all ranks together, and reading it.

use super::TrainError;
use super::blueprint::Blueprint;
use super::buckets::Buckets;
use super::disk::CountedDisk;
use super::exchange::ROOM;
use super::state::{Difference, Fingerprint, Names, Progress, TrainingState};
use crate::comm::Communicator;
use serde::{Deserialize, Serialize};
use std::path::Path;
use switchyard_checkpoint::store::{Latest, State as Stored};
use switchyard_checkpoint::{Checkpoint, CheckpointError, CheckpointId, Store, TensorSink};
use switchyard_worker_contract::config::Rule;

/// What rank 0 sends to the others.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Found {
    /// Attempt and step of the checkpoint; `None`: start from the beginning.
    id: Option<(u32, u64)>,
    /// Attempt under which this run writes.
    attempt: u32,
    /// Why rank 0 found no answer.
    error: Option<String>,
}

/// Where to start; the same on all ranks.
pub(super) struct Start {
    pub checkpoint: Option<(Checkpoint, Progress)>,
    /// Attempt under which this run writes.
    pub attempt: u32,
}

/// Finds the newest checkpoint of the job.
///
/// # Errors
/// The directory cannot be read, or the group failed.
pub(super) fn find(
    communicator: &mut Communicator,
    buckets: &Buckets,
    (disk, directory): (&CountedDisk, &Path),
    job: &str,
    launched: u32,
) -> Result<Start, TrainError> {
    let store = Store::new(disk, directory);
    let own = if communicator.rank() == 0 { serde_json::to_vec(&look(&store, job, launched)) } else { Ok(Vec::new()) };
    let told = buckets.gather(communicator, &own.unwrap_or_default())?;
    let found: Found = serde_json::from_slice(&told[0]).map_err(|error| TrainError::Resume(error.to_string()))?;
    if let Some(error) = found.error {
        return Err(TrainError::Resume(error));
    }
    let checkpoint = match found.id {
        None => None,
        Some((attempt, step)) => {
            let refused = |error: CheckpointError| TrainError::Resume(error.to_string());
            let checkpoint = store.open(CheckpointId { attempt, step }).map_err(refused)?;
            let progress = checkpoint.manifest().about().progress.read();
            Some((checkpoint, progress.map_err(|error| TrainError::Resume(format!("progress: {error}")))?))
        }
    };
    Ok(Start { checkpoint, attempt: found.attempt })
}

fn look(store: &Store<'_>, job: &str, launched: u32) -> Found {
    let refuse = |error: CheckpointError| error.to_string();
    let answer = foreign(store, job)
        .and_then(|()| Ok((store.latest(job).map_err(refuse)?, store.next_attempt(launched).map_err(refuse)?)));
    match answer.and_then(|(latest, attempt)| Ok((usable(latest)?, attempt))) {
        Ok((latest, attempt)) => {
            for (id, error) in &latest.passed {
                eprintln!("warning: the checkpoint {id} is skipped: {error}");
            }
            let id = latest.checkpoint.map(|checkpoint| checkpoint.manifest().about().id);
            Found { id: id.map(|id| (id.attempt, id.step)), attempt, error: None }
        }
        Err(mut text) => {
            text.truncate((0..=ROOM / 2).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0));
            Found { id: None, attempt: launched, error: Some(text) }
        }
    }
}

/// A directory belongs to one job: a run that starts among another job's checkpoints would be mistaken for that job.
fn foreign(store: &Store<'_>, job: &str) -> Result<(), String> {
    for found in store.list().map_err(|error| error.to_string())? {
        if let Stored::Complete(checkpoint) = found.state
            && checkpoint.manifest().about().job != job
        {
            let (at, other) = (checkpoint.directory().display(), &checkpoint.manifest().about().job);
            return Err(format!("{at}: job: got `{other}`; expected `{job}`: each job has its own directory"));
        }
    }
    Ok(())
}

/// If every complete checkpoint is damaged, only a person may decide to start over.
fn usable(latest: Latest) -> Result<Latest, String> {
    let damaged = latest.passed.iter().find(|(_, error)| !matches!(error, CheckpointError::Incomplete { .. }));
    match (&latest.checkpoint, damaged) {
        (None, Some((_, error))) => {
            Err(format!("no checkpoint can be used; remove them to start over; the newest: {error}"))
        }
        _ => Ok(latest),
    }
}

/// Reads a checkpoint into the state. Returns what the configuration has changed since, for the log.
///
/// # Errors
/// The checkpoint is damaged, or belongs to another model or optimizer.
pub(super) fn restore(
    state: &mut TrainingState,
    blueprint: &Blueprint,
    (disk, directory): (&CountedDisk, &Path),
    checkpoint: &Checkpoint,
    progress: &Progress,
) -> Result<Option<String>, TrainError> {
    let tensors = state.tensors(blueprint);
    let refused = |text: String| TrainError::Resume(format!("{}: {text}", checkpoint.directory().display()));
    checkpoint.manifest().check_tensors(&tensors).map_err(|fault| refused(fault.to_string()))?;
    if progress.seed != blueprint.config.seed {
        let (got, expected) = (blueprint.config.seed, progress.seed);
        return Err(refused(format!("spec.engine.seed: got {got}; expected {expected}, as the checkpoint has")));
    }
    let (got, expected) = (word(blueprint.config.optimizer.rule), word(progress.rule));
    if got != expected {
        return Err(refused(format!("spec.engine.optimizer: got {got}; expected {expected}, as the checkpoint has")));
    }
    // A position in an epoch means nothing for other samples.
    let own = Fingerprint::of(blueprint.dataset.facts());
    if let Some(Difference { field, got, expected }) = progress.data.as_ref().and_then(|data| own.difference(data)) {
        return Err(refused(format!(
            "spec.engine.data: {field}: got {got}; expected {expected}, as the checkpoint has"
        )));
    }
    let names = Names::new(state, blueprint);
    let mut sink = Sink { state, names: &names };
    Store::new(disk, directory).restore(checkpoint, &mut sink).map_err(|error| refused(error.to_string()))?;
    state.resume(progress, blueprint)
}

fn word(rule: Rule) -> &'static str {
    match rule {
        Rule::Sgd(_) => "SGD",
        Rule::Adam(_) => "Adam",
        Rule::AdamW(_) => "AdamW",
        Rule::Lamb(_) => "LAMB",
        Rule::Lars(_) => "LARS",
    }
}

struct Sink<'a> {
    state: &'a mut TrainingState,
    names: &'a Names,
}

impl TensorSink for Sink<'_> {
    fn tensor(&mut self, name: &str) -> Option<&mut [f32]> {
        self.state.tensor_mut(self.names, name)
    }
}
