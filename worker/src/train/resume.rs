//! Finds the checkpoint to resume from, together with all ranks, and reads it.

use super::TrainError;
use super::disk::CountedDisk;
use super::engine::Engine;
use super::load::load;
use super::progress::{Difference, Fingerprint, Progress, exchange};
use super::tensors::{EngineSink, private_tensors, tensors};
use super::training::Training;
use crate::comm::{CommError, Group};
use crate::retry::retry;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::path::Path;
use switchyard_checkpoint::store::{Latest, State as Stored, StoreEntry};
use switchyard_checkpoint::{Checkpoint, CheckpointError, CheckpointId, Store, TensorSpec};
use switchyard_worker_contract::config::{Rule, SyncPolicy};

/// The name of the exchanges before a run resumes.
const WHAT: &str = "the checkpoint to resume from";

/// What rank 0 sends to all ranks.
#[derive(Debug, Clone, Serialize, Deserialize)]
enum Message {
    /// Each rank verifies its share of this checkpoint: attempt and step.
    Verify(u32, u64),
    Resume(ResumePoint),
}

/// Where all ranks start.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ResumePoint {
    /// Attempt and step of the checkpoint; `None`: start from the beginning.
    id: Option<(u32, u64)>,
    /// Attempt under which this run writes.
    attempt: u32,
    /// Rank 0's error.
    error: Option<Refusal>,
}

/// Why a rank cannot use a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Refusal {
    text: String,
    /// Whether the error is the file system's, so that another attempt can succeed.
    is_io: bool,
}

impl From<&CheckpointError> for Refusal {
    fn from(error: &CheckpointError) -> Refusal {
        Refusal { text: error.to_string(), is_io: error.is_io() }
    }
}

impl From<Refusal> for TrainError {
    fn from(Refusal { text, is_io }: Refusal) -> TrainError {
        if is_io { TrainError::Storage(text) } else { TrainError::Resume(text) }
    }
}

impl From<CheckpointError> for TrainError {
    fn from(error: CheckpointError) -> TrainError {
        Refusal::from(&error).into()
    }
}

/// Where to start; the same on all ranks.
pub(super) struct Start {
    pub checkpoint: Option<(Checkpoint, Progress)>,
    /// Attempt under which this run writes.
    pub attempt: u32,
}

/// Finds the job's newest checkpoint. Each rank verifies a share of its bytes.
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
    let point = if group.rank() == 0 { search(group, &store, job, launched)? } else { follow(group, &store)? };
    if let Some(error) = point.error {
        return Err(error.into());
    }
    let checkpoint = match point.id {
        None => None,
        Some((attempt, step)) => {
            let checkpoint = with_retries(|| Ok(store.open_manifest(CheckpointId { attempt, step })?))?;
            let progress = checkpoint.manifest().info().progress.read();
            Some((checkpoint, progress.map_err(|error| TrainError::Resume(format!("progress: {error}")))?))
        }
    };
    Ok(Start { checkpoint, attempt: point.attempt })
}

/// Rank 0 looks for the newest checkpoint that all ranks can use.
fn search(group: &mut Group, store: &Store<'_>, job: &str, launched: u32) -> Result<ResumePoint, TrainError> {
    let found = with_retries(|| {
        check_owner(store.list()?, job)?;
        let latest = store.latest(job, |checkpoint| verify(group, store, checkpoint))?;
        Ok((require_undamaged(latest)?, store.next_attempt(launched)?))
    });
    let point = match found {
        Ok((latest, attempt)) => {
            for (id, error) in &latest.skipped {
                eprintln!("warning: the checkpoint {id} is skipped: {error}");
            }
            let id = latest.checkpoint.map(|checkpoint| checkpoint.manifest().info().id);
            ResumePoint { id: id.map(|id| (id.attempt, id.step)), attempt, error: None }
        }
        Err(TrainError::Storage(text)) => {
            ResumePoint { id: None, attempt: launched, error: Some(Refusal { text, is_io: true }) }
        }
        Err(TrainError::Resume(text)) => {
            ResumePoint { id: None, attempt: launched, error: Some(Refusal { text, is_io: false }) }
        }
        Err(error) => return Err(error),
    };
    group.broadcast(WHAT, &encode(&Message::Resume(point.clone())))?;
    Ok(point)
}

/// Verifies a checkpoint on all ranks; returns the damage that they found.
fn verify(group: &mut Group, store: &Store<'_>, checkpoint: &Checkpoint) -> Result<Vec<CheckpointError>, TrainError> {
    let CheckpointId { attempt, step } = checkpoint.manifest().info().id;
    group.broadcast(WHAT, &encode(&Message::Verify(attempt, step)))?;
    let mut faults = store.verify_share(checkpoint, (0, group.world() as usize));
    let refusals = group.gather(WHAT, &[])?;
    for (rank, bytes) in (0..).zip(refusals).skip(1) {
        match decode::<Option<Refusal>>(&bytes, rank)? {
            None => {}
            Some(Refusal { text, is_io: true }) => return Err(TrainError::Storage(format!("rank {rank}: {text}"))),
            Some(Refusal { text, is_io: false }) => faults.push(CheckpointError::Reported { text }),
        }
    }
    Ok(faults)
}

/// The other ranks verify what rank 0 has found, until it has decided.
fn follow(group: &mut Group, store: &Store<'_>) -> Result<ResumePoint, TrainError> {
    loop {
        let (attempt, step) = match decode(&group.broadcast(WHAT, &[])?, 0)? {
            Message::Verify(attempt, step) => (attempt, step),
            Message::Resume(point) => return Ok(point),
        };
        let share = (group.rank() as usize, group.world() as usize);
        let faults = match store.open_manifest(CheckpointId { attempt, step }) {
            Ok(checkpoint) => store.verify_share(&checkpoint, share),
            Err(error) => vec![error],
        };
        group.gather(WHAT, &encode(&faults.first().map(Refusal::from)))?;
    }
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).expect("invariant: numbers and texts are JSON")
}

fn decode<T: DeserializeOwned>(bytes: &[u8], from: u32) -> Result<T, TrainError> {
    let protocol = |error: serde_json::Error| CommError::Protocol {
        with: format!("rank {from}"),
        text: format!("{WHAT}: {error}"),
    };
    Ok(serde_json::from_slice(bytes).map_err(protocol)?)
}

/// Repeats a read that fails with an I/O error.
fn with_retries<T>(read: impl FnMut() -> Result<T, TrainError>) -> Result<T, TrainError> {
    let transient = |error: &TrainError| match error {
        TrainError::Storage(text) => Some(text.clone()),
        _ => None,
    };
    retry(transient, read)
}

/// Rejects a directory with another job's checkpoints: a run that starts there would be mistaken
/// for that job.
fn check_owner(all: Vec<StoreEntry>, job: &str) -> Result<(), TrainError> {
    for found in all {
        if let Stored::Complete(checkpoint) = found.state
            && checkpoint.manifest().info().job != job
        {
            let (at, other) = (checkpoint.directory().display(), &checkpoint.manifest().info().job);
            let text = format!("{at}: job: got `{other}`; expected `{job}`: each job has its own directory");
            return Err(TrainError::Resume(text));
        }
    }
    Ok(())
}

/// Fails if every complete checkpoint is damaged, because only the user can decide to start over.
fn require_undamaged(latest: Latest) -> Result<Latest, TrainError> {
    let damaged = latest.skipped.iter().find(|(_, error)| !matches!(error, CheckpointError::Incomplete { .. }));
    match (&latest.checkpoint, damaged) {
        (None, Some((_, error))) => {
            let text = format!("no checkpoint can be used; to start over, set another path; the newest: {error}");
            Err(TrainError::Resume(text))
        }
        _ => Ok(latest),
    }
}

/// Reads a checkpoint into the engine. Returns a note for the log if the configuration has changed
/// since. Collective.
///
/// # Errors
/// The checkpoint is damaged, or belongs to another model or optimizer, or the group failed.
pub(super) fn restore(
    engine: &mut dyn Engine,
    (training, group): (&Training, &mut Group),
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
    let common = tensors(engine);
    let tensors = [&common[..], &private].concat();
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
    let names = |tensors: Vec<TensorSpec>| tensors.into_iter().map(|tensor| tensor.name).collect::<HashSet<_>>();
    let (common, own) = (names(common), names(private_tensors(engine, group.rank())));
    let wanted = (|it: &TensorSpec| common.contains(&it.name), |it: &TensorSpec| own.contains(&it.name));
    let mut sink = EngineSink::new(engine, group.rank());
    load(group, (&Store::new(disk, directory), checkpoint), wanted, &mut sink)?;
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
        let read = with_retries(|| kinds.pop().map_or(Ok(7), |kind| Err(error(kind).into())));
        assert_eq!(read.ok(), Some(7));
    }

    #[test]
    fn damage_is_not_read_again_and_ends_the_job() {
        let mut reads = 0;
        let read = with_retries(|| {
            reads += 1;
            Err::<(), _>(error(io::ErrorKind::NotFound).into())
        });
        assert_eq!(reads, 1);
        assert!(matches!(read, Err(TrainError::Resume(_))));
        assert!(matches!(TrainError::from(error(io::ErrorKind::Other)), TrainError::Storage(_)));
    }
}
