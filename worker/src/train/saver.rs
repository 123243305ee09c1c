//! Saves checkpoints while training continues: each rank copies its share of the state, and a
//! thread writes it.
//!
//! ```text
//! due        every rank copies its pieces and continues; its thread writes them
//!            (format and guarantees: docs/dev/checkpoints.md)
//! later      the flags of a step count the ranks that have written; after the last one, rank 0
//!            gathers their digests
//! published  rank 0's thread writes the manifest and removes old checkpoints
//! ```
//!
//! At most one checkpoint is in progress. If the next one is due before it is complete, training
//! waits, which the step times show. A checkpoint that cannot be written is reported and abandoned;
//! the next due one is a new attempt.

use super::disk::CountedDisk;
use super::engine::Engine;
use super::progress::Progress;
use super::tensors::TensorIndex;
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use switchyard_checkpoint::format::CheckpointInfo;
use switchyard_checkpoint::lock::Lock;
use switchyard_checkpoint::{CheckpointError, CheckpointId, Manifest, Plan, ShardDigest, Store, TensorSource};

/// Settings shared by all checkpoints of a run.
pub(super) struct SaverConfig {
    pub disk: CountedDisk,
    pub directory: PathBuf,
    /// Of the directory, on rank 0; released when the saver ends.
    pub lock: Option<Lock>,
    pub job: String,
    pub config: String,
    /// Number of complete checkpoints to keep.
    pub keep: usize,
    pub rank: usize,
    /// Attempt under which this run writes.
    pub attempt: u32,
}

impl SaverConfig {
    fn check_lock(&self) -> Result<(), CheckpointError> {
        self.lock.as_ref().map_or(Ok(()), Lock::check)
    }
}

struct Snapshot {
    numbers: Vec<f32>,
    places: HashMap<(String, usize), Range<usize>>,
}

impl TensorSource for Snapshot {
    fn values(&self, name: &str, range: Range<usize>) -> Option<&[f32]> {
        let place = self.places.get(&(name.to_owned(), range.start))?;
        Some(&self.numbers[place.clone()])
    }
}

const THREAD_ENDED: &str = "the checkpoint thread ended";

enum Command {
    Write(CheckpointId, Snapshot),
    Publish(CheckpointId, Box<Progress>, Vec<ShardDigest>),
    /// Remove the written parts of this checkpoint.
    Discard(CheckpointId),
}

enum Completion {
    Written(Snapshot, Result<ShardDigest, String>),
    Published(Result<u64, String>),
    Discarded,
}

/// A checkpoint that was completed or abandoned.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Saved {
    pub step: u64,
    /// Bytes of all shards, or why the checkpoint was abandoned.
    pub outcome: Result<u64, String>,
    /// Seconds from the copy to the end.
    pub seconds: f64,
}

enum Stage {
    Writing,
    /// This rank's part is done; waiting for the others.
    Written(Result<ShardDigest, String>),
    /// Rank 0 only.
    Publishing,
    /// Rank 0 only; the reason, if rank 0 knows it.
    Discarding(Option<String>),
}

struct Pending {
    id: CheckpointId,
    progress: Progress,
    since: Instant,
    stage: Stage,
}

/// The writer thread and the checkpoint in progress.
pub(super) struct Saver {
    config: Arc<SaverConfig>,
    plan: Arc<Plan>,
    commands: Option<Sender<Command>>,
    done: Receiver<Completion>,
    thread: Option<JoinHandle<()>>,
    /// `None` while the thread writes it.
    snapshot: Option<Snapshot>,
    pending: Option<Pending>,
    /// Step of the newest complete checkpoint; used only on rank 0.
    complete: Option<u64>,
}

impl Saver {
    /// Starts the thread and allocates the snapshot. `resumed`: the step that the run resumes from.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(config: SaverConfig, plan: Plan, resumed: Option<u64>) -> std::io::Result<Saver> {
        let (config, plan) = (Arc::new(config), Arc::new(plan));
        let mut places = HashMap::new();
        let mut len = 0;
        for piece in plan.pieces(config.rank) {
            let name = plan.tensors()[piece.tensor].name.clone();
            places.insert((name, piece.range.start), len..len + piece.range.len());
            len += piece.range.len();
        }
        let snapshot = Some(Snapshot { numbers: vec![0.0; len], places });
        let (commands, receiver) = channel();
        let (report, done) = channel();
        let thread = {
            let (config, plan) = (Arc::clone(&config), Arc::clone(&plan));
            std::thread::Builder::new()
                .name("checkpoint".into())
                .spawn(move || write(&config, &plan, &receiver, &report))?
        };
        Ok(Saver {
            config,
            plan,
            commands: Some(commands),
            done,
            thread: Some(thread),
            snapshot,
            pending: None,
            complete: resumed,
        })
    }

    /// Whether a complete checkpoint holds this step, as far as this rank knows. Only rank 0 does.
    pub fn has_saved(&self, step: u64) -> bool {
        self.config.rank == 0 && self.complete == Some(step)
    }

    /// Whether a checkpoint is in progress.
    pub fn is_busy(&self) -> bool {
        self.pending.is_some()
    }

    /// Copies this rank's pieces and starts to write them. No other checkpoint may be in progress.
    /// Collective.
    pub fn begin(&mut self, engine: &mut dyn Engine, index: &TensorIndex, progress: Progress) {
        let id = CheckpointId { attempt: self.config.attempt, step: progress.step };
        let Some(mut snapshot) = self.snapshot.take() else {
            // The others still need this rank's part of the optimizer's state; and they must be
            // informed, or they would wait for this one.
            let stage = Stage::Written(Err(match engine.collect(&[], &mut []) {
                Ok(()) => THREAD_ENDED.into(),
                Err(error) => error.to_string(),
            }));
            self.pending = Some(Pending { id, progress, since: Instant::now(), stage });
            return;
        };
        let wanted = self.plan.pieces(self.config.rank).iter().filter_map(|piece| {
            let name = &self.plan.tensors()[piece.tensor].name;
            let place = snapshot.places.get(&(name.clone(), piece.range.start))?.clone();
            let (array, range) = index.find(name)?;
            Some((array, range.start + piece.range.start, place))
        });
        let wanted: Vec<_> = wanted.collect();
        if let Err(error) = engine.collect(&wanted, &mut snapshot.numbers) {
            let stage = Stage::Written(Err(error.to_string()));
            self.snapshot = Some(snapshot);
            self.pending = Some(Pending { id, progress, since: Instant::now(), stage });
            return;
        }
        self.pending = Some(Pending { id, progress, since: Instant::now(), stage: Stage::Writing });
        self.send(Command::Write(id, snapshot));
    }

    fn send(&mut self, command: Command) {
        if let Some(sender) = &self.commands {
            // The channel is open as long as this sender exists.
            let _ = sender.send(command);
        }
    }

    /// Handles the thread's completions; with `wait`, waits for one first. Returns a checkpoint
    /// that rank 0 has published or failed to publish.
    pub fn poll(&mut self, wait: bool) -> Option<Saved> {
        let working = matches!(&self.pending, Some(pending) if !matches!(pending.stage, Stage::Written(_)));
        if !working {
            return None;
        }
        let done = match wait {
            true => self.done.recv().ok(),
            false => match self.done.try_recv() {
                Ok(done) => Some(done),
                Err(TryRecvError::Empty) => return None,
                Err(TryRecvError::Disconnected) => None,
            },
        };
        let pending = self.pending.as_mut()?;
        match done {
            Some(Completion::Written(snapshot, digest)) => {
                self.snapshot = Some(snapshot);
                pending.stage = Stage::Written(digest);
                None
            }
            Some(Completion::Published(outcome)) => {
                if outcome.is_ok() {
                    self.complete = Some(pending.id.step);
                }
                self.finish(outcome)
            }
            Some(Completion::Discarded) => match &mut pending.stage {
                Stage::Discarding(Some(cause)) => {
                    let cause = std::mem::take(cause);
                    self.finish(Err(cause))
                }
                _ => {
                    self.pending = None;
                    None
                }
            },
            None => match &mut pending.stage {
                // The flags of the next step inform the other ranks.
                Stage::Writing => {
                    pending.stage = Stage::Written(Err(THREAD_ENDED.into()));
                    None
                }
                Stage::Discarding(cause) => {
                    let cause = cause.take();
                    self.finish(Err(cause.unwrap_or_else(|| THREAD_ENDED.into())))
                }
                _ => self.finish(Err(THREAD_ENDED.into())),
            },
        }
    }

    fn finish(&mut self, outcome: Result<u64, String>) -> Option<Saved> {
        let pending = self.pending.take()?;
        Some(Saved { step: pending.id.step, outcome, seconds: pending.since.elapsed().as_secs_f64() })
    }

    /// Result of this rank's part of the current checkpoint: `None` while pending.
    pub fn written(&self) -> Option<Result<&ShardDigest, &str>> {
        match &self.pending.as_ref()?.stage {
            Stage::Written(digest) => Some(digest.as_ref().map_err(String::as_str)),
            _ => None,
        }
    }

    /// Call when all ranks have written; `digests` are theirs. Rank 0 publishes next; for the
    /// others the checkpoint is done.
    pub fn publish(&mut self, digests: Vec<ShardDigest>) {
        let Some(pending) = &mut self.pending else { return };
        if self.config.rank == 0 {
            pending.stage = Stage::Publishing;
            let command = Command::Publish(pending.id, Box::new(pending.progress.clone()), digests);
            self.send(command);
        } else {
            self.pending = None;
        }
    }

    /// Abandons the checkpoint after a rank failed to write, and returns the reason on the rank
    /// that knows it. Rank 0 then removes the written parts, so that they do not fill the disk.
    pub fn abandon(&mut self) -> Option<Saved> {
        let cause = self.written().and_then(Result::err).map(str::to_owned);
        if self.config.rank > 0 {
            let saved = self.finish(Err(cause.clone().unwrap_or_default()));
            return saved.filter(|_| cause.is_some());
        }
        let pending = self.pending.as_mut()?;
        pending.stage = Stage::Discarding(cause);
        let id = pending.id;
        self.send(Command::Discard(id));
        None
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn write(config: &SaverConfig, plan: &Plan, commands: &Receiver<Command>, report: &Sender<Completion>) {
    let store = Store::new(&config.disk, &config.directory);
    while let Ok(command) = commands.recv() {
        let done = match command {
            Command::Write(id, snapshot) => {
                let digest =
                    config.check_lock().and_then(|()| store.write_shard(&config.job, id, config.rank, plan, &snapshot));
                Completion::Written(snapshot, digest.map_err(|error| error.to_string()))
            }
            Command::Publish(id, progress, digests) => {
                let published = publish(config, plan, &store, id, &progress, digests);
                if published.is_err() {
                    discard(&store, id);
                }
                Completion::Published(published)
            }
            Command::Discard(id) => {
                discard(&store, id);
                Completion::Discarded
            }
        };
        if report.send(done).is_err() {
            return;
        }
    }
}

/// Errors are ignored: the failure to write has already been reported.
fn discard(store: &Store<'_>, id: CheckpointId) {
    let _ = store.discard(id);
}

fn publish(
    config: &SaverConfig,
    plan: &Plan,
    store: &Store<'_>,
    id: CheckpointId,
    progress: &Progress,
    digests: Vec<ShardDigest>,
) -> Result<u64, String> {
    config.check_lock().map_err(|error| error.to_string())?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let progress = switchyard_checkpoint::Progress::new(progress).map_err(|error| error.to_string())?;
    let about = CheckpointInfo { job: config.job.clone(), id, config: config.config.clone(), created, progress };
    let manifest = Manifest::new(about, plan.clone(), digests).map_err(|fault| fault.to_string())?;
    store.publish(&manifest).map_err(|error| error.to_string())?;
    if let Err(error) = store.prune(&config.job, config.attempt, config.keep) {
        eprintln!("warning: old checkpoints in {}: {error}", config.directory.display());
    }
    Ok(manifest.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use switchyard_checkpoint::{Role, TensorSpec};

    /// A saver whose thread died while writing.
    fn dead(rank: usize, folder: &std::path::Path) -> Saver {
        let tensor = TensorSpec {
            name: "w".into(),
            shape: vec![8],
            role: Role::Weight,
            export_axes: None,
            export_names: Vec::new(),
        };
        let directory = folder.to_owned();
        let disk = CountedDisk::default();
        let (job, config) = ("job".into(), String::new());
        let config = SaverConfig { disk, directory, lock: None, job, config, keep: 1, rank, attempt: 1 };
        let mut saver = Saver::start(config, Plan::new(vec![tensor], 2).unwrap(), None).unwrap();
        saver.commands = None;
        saver.thread.take().unwrap().join().unwrap();
        saver.snapshot = None;
        let progress = json!({
            "step": 3, "optimizerSteps": 3, "scaler": null, "samplesPerStep": 8, "epoch": 0, "position": 24, "seed": 1,
            "rule": {"sgd": {"momentum": 0.9, "nesterov": false}}, "halfKernel": "f32",
        });
        saver.pending = Some(Pending {
            id: CheckpointId { attempt: 1, step: 3 },
            progress: serde_json::from_value(progress).unwrap(),
            since: Instant::now(),
            stage: Stage::Writing,
        });
        saver
    }

    #[test]
    fn a_dead_thread_is_reported_until_all_ranks_have_abandoned_the_checkpoint() {
        let folder = tempfile::tempdir().unwrap();
        for rank in [0, 1] {
            let mut saver = dead(rank, folder.path());
            assert_eq!(
                (saver.poll(true), saver.written()),
                (None, Some(Err(THREAD_ENDED))),
                "the others must be informed"
            );
            // By now all ranks have written or failed.
            let mut saved = saver.abandon();
            if rank == 0 {
                assert_eq!(saved, None);
                saved = saver.poll(true);
            }
            assert_eq!(saved.map(|saved| (saved.step, saved.outcome)), Some((3, Err(THREAD_ENDED.to_owned()))));
            assert!(!saver.is_busy());
        }
    }
}
