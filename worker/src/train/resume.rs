//! Finds the checkpoint to resume from, together with all ranks, and reads it.

use super::TrainError;
use super::disk::CountedDisk;
use super::engine::Engine;
use super::progress::{Difference, Fingerprint, Progress, exchange};
use super::tensors::{EngineSink, private_tensors, tensors};
use super::training::Training;
use crate::comm::Group;
use crate::retry::retry;
use serde::{Deserialize, Serialize};
use std::path::Path;
use switchyard_checkpoint::store::{Latest, State as Stored, StoreEntry};
use switchyard_checkpoint::{Checkpoint, CheckpointError, CheckpointId, Store};
use switchyard_worker_contract::config::{Rule, SyncPolicy};

/// Maximum bytes of rank 0's error text.
const MAX_ERROR_BYTES: usize = 512;

/// Rank 0's answer, sent to all ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ResumePoint {
    /// Attempt and step of the checkpoint; `None`: start from the beginning.
    id: Option<(u32, u64)>,
    /// Attempt under which this run writes.
    attempt: u32,
    /// Rank 0's error.
    error: Option<String>,
    /// Whether the error is the file system's, so that another attempt can succeed.
    is_io: bool,
}

/// Where to start; the same on all ranks.
pub(super) struct Start {
    pub checkpoint: Option<(Checkpoint, Progress)>,
    /// Attempt under which this run writes.
    pub attempt: u32,
}

/// Finds the job's newest checkpoint.
///
/// # Errors
/// The directory cannot be read, or the group failed.
pub(super) fn find(
    group: &mut Group,
    (disk, directory): (&CountedDisk, &Path),
    job: &str,
    launched: u32,
) -> Result<Start, TrainError> {
    let store = Store::new(disk, directory);
    let own = if group.rank() == 0 { serde_json::to_vec(&find_latest(&store, job, launched)) } else { Ok(Vec::new()) };
    let answers = group.all_gather("the checkpoint to resume from", &own.unwrap_or_default())?;
    let found: ResumePoint =
        serde_json::from_slice(&answers[0]).map_err(|error| TrainError::Resume(error.to_string()))?;
    if let Some(error) = found.error {
        return Err(if found.is_io { TrainError::Storage(error) } else { TrainError::Resume(error) });
    }
    let checkpoint = match found.id {
        None => None,
        Some((attempt, step)) => {
            let checkpoint = with_retries(|| store.open(CheckpointId { attempt, step })).map_err(failed)?;
            let progress = checkpoint.manifest().info().progress.read();
            Some((checkpoint, progress.map_err(|error| TrainError::Resume(format!("progress: {error}")))?))
        }
    };
    Ok(Start { checkpoint, attempt: found.attempt })
}

fn find_latest(store: &Store<'_>, job: &str, launched: u32) -> ResumePoint {
    let read = with_retries(|| Ok((store.list()?, store.latest(job)?, store.next_attempt(launched)?)));
    let answer = read.map_err(|error| (error.to_string(), error.is_io())).and_then(|(all, latest, attempt)| {
        let usable = check_owner(all, job).and_then(|()| require_undamaged(latest));
        Ok((usable.map_err(|text| (text, false))?, attempt))
    });
    match answer {
        Ok((latest, attempt)) => {
            for (id, error) in &latest.skipped {
                eprintln!("warning: the checkpoint {id} is skipped: {error}");
            }
            let id = latest.checkpoint.map(|checkpoint| checkpoint.manifest().info().id);
            ResumePoint { id: id.map(|id| (id.attempt, id.step)), attempt, error: None, is_io: false }
        }
        Err((mut text, is_io)) => {
            text.truncate((0..=MAX_ERROR_BYTES).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0));
            ResumePoint { id: None, attempt: launched, error: Some(text), is_io }
        }
    }
}

/// Repeats a read that fails with an I/O error.
fn with_retries<T>(read: impl FnMut() -> Result<T, CheckpointError>) -> Result<T, CheckpointError> {
    retry(|error: &CheckpointError| error.is_io().then(|| error.to_string()), read)
}

fn failed(error: CheckpointError) -> TrainError {
    let text = error.to_string();
    if error.is_io() { TrainError::Storage(text) } else { TrainError::Resume(text) }
}

/// Rejects a directory with another job's checkpoints: a run that starts there would be mistaken
/// for that job.
fn check_owner(all: Vec<StoreEntry>, job: &str) -> Result<(), String> {
    for found in all {
        if let Stored::Complete(checkpoint) = found.state
            && checkpoint.manifest().info().job != job
        {
            let (at, other) = (checkpoint.directory().display(), &checkpoint.manifest().info().job);
            return Err(format!("{at}: job: got `{other}`; expected `{job}`: each job has its own directory"));
        }
    }
    Ok(())
}

/// Fails if every complete checkpoint is damaged, because only the user can decide to start over.
fn require_undamaged(latest: Latest) -> Result<Latest, String> {
    let damaged = latest.skipped.iter().find(|(_, error)| !matches!(error, CheckpointError::Incomplete { .. }));
    match (&latest.checkpoint, damaged) {
        (None, Some((_, error))) => {
            Err(format!("no checkpoint can be used; to start over, set another path; the newest: {error}"))
        }
        _ => Ok(latest),
    }
}

/// Reads a checkpoint into the engine. Returns a note for the log if the configuration has changed
/// since.
///
/// # Errors
/// The checkpoint is damaged, or belongs to another model or optimizer.
pub(super) fn restore(
    engine: &mut dyn Engine,
    (training, rank): (&Training, u32),
    (disk, directory): (&CountedDisk, &Path),
    checkpoint: &Checkpoint,
    progress: &Progress,
) -> Result<Option<String>, TrainError> {
    let private: Vec<_> = (0..training.world).flat_map(|rank| private_tensors(engine, rank)).collect();
    let refused = |text: String| TrainError::Resume(format!("{}: {text}", checkpoint.directory().display()));
    let config = &training.config;
    let (got, expected) = (exchange(config.sync, config.compression), exchange(progress.sync, progress.compression));
    if got != expected {
        return Err(refused(format!("spec.engine: got {got}; expected {expected}, as the checkpoint has")));
    }
    let (got, expected) = (training.world, checkpoint.manifest().plan().world());
    if !private.is_empty() && got as usize != expected {
        let field = match config.sync {
            _ if config.is_asynchronous() => {
                "communication.parameterServer.updates Geo: each rank has its own optimizer state"
            }
            SyncPolicy::Local(_) => "sync.type Local: each rank has its own optimizer state",
            SyncPolicy::EveryStep => "communication.compression: each rank has its own unsent gradients",
        };
        return Err(refused(format!(
            "spec.engine.{field}: got {got} ranks; expected {expected}, as the checkpoint has"
        )));
    }
    let tensors = [tensors(engine), private].concat();
    checkpoint.manifest().check_tensors(&tensors).map_err(|fault| refused(fault.to_string()))?;
    if progress.seed != training.config.seed {
        let (got, expected) = (training.config.seed, progress.seed);
        return Err(refused(format!("spec.engine.seed: got {got}; expected {expected}, as the checkpoint has")));
    }
    let (got, expected) = (rule_name(training.config.optimizer.rule), rule_name(progress.rule));
    if got != expected {
        return Err(refused(format!("spec.engine.optimizer: got {got}; expected {expected}, as the checkpoint has")));
    }
    // A position in an epoch is meaningless for other samples.
    let own = Fingerprint::of(training.dataset.facts());
    if let Some(Difference { field, got, expected }) = progress.data.as_ref().and_then(|data| own.difference(data)) {
        return Err(refused(format!(
            "spec.engine.data: {field}: got {got}; expected {expected}, as the checkpoint has"
        )));
    }
    let mut sink = EngineSink::new(engine, rank);
    let store = Store::new(disk, directory);
    with_retries(|| store.restore(checkpoint, &mut sink)).map_err(failed)?;
    sink.finish()?;
    engine.resume(&progress.counters())
}

fn rule_name(rule: Rule) -> &'static str {
    match rule {
        Rule::Sgd(_) => "SGD",
        Rule::Adam(_) => "Adam",
        Rule::AdamW(_) => "AdamW",
        Rule::Lamb(_) => "LAMB",
        Rule::Lars(_) => "LARS",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;
    use std::path::PathBuf;

    fn error(kind: io::ErrorKind) -> CheckpointError {
        CheckpointError::Io { file: PathBuf::from("f"), action: "read it", needed: None, source: kind.into() }
    }

    #[test]
    fn a_read_that_fails_for_a_moment_is_repeated() {
        let mut kinds = vec![io::ErrorKind::StaleNetworkFileHandle, io::ErrorKind::PermissionDenied];
        let read = with_retries(|| kinds.pop().map_or(Ok(7), |kind| Err(error(kind))));
        assert_eq!(read.ok(), Some(7));
    }

    #[test]
    fn damage_is_not_read_again_and_ends_the_job() {
        let mut reads = 0;
        let read = with_retries(|| {
            reads += 1;
            Err::<(), _>(error(io::ErrorKind::NotFound))
        });
        assert_eq!(reads, 1);
        assert!(matches!(read.map_err(failed), Err(TrainError::Resume(_))));
        assert!(matches!(failed(error(io::ErrorKind::Other)), TrainError::Storage(_)));
    }
}
