//! Checkpoints while the training continues: each rank copies its share of the state, and a thread writes it.
//!
//! ```text
//! due        every rank copies its pieces and continues; its thread writes them (format and guarantees:
//! docs/dev/checkpoints.md)
//! later      the flags of a step say how many ranks have written; once all have, rank 0 gathers their digests
//! published  the thread of rank 0 writes the manifest and removes old checkpoints
//! ```
//!
//! At most one checkpoint is in progress. If the next one is due before it is complete, the training waits: that is a
//! stall, and the figures show it. A checkpoint that cannot be written is reported and abandoned; the next one that is
//! due is a new attempt.

use super::disk::CountedDisk;
use super::engine::Engine;
use super::progress::Progress;
use super::tensors::Names;
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use switchyard_checkpoint::format::CheckpointInfo;
use switchyard_checkpoint::{CheckpointId, Manifest, Plan, ShardDigest, Store, TensorSource};

/// What the checkpoints of a run have in common.
pub(super) struct Site {
    pub disk: CountedDisk,
    pub directory: PathBuf,
    pub job: String,
    pub config: String,
    /// Complete checkpoints that are kept.
    pub keep: usize,
    pub rank: usize,
    /// Attempt under which this run writes.
    pub attempt: u32,
}

struct Copied {
    numbers: Vec<f32>,
    places: HashMap<(String, usize), Range<usize>>,
}

impl TensorSource for Copied {
    fn values(&self, name: &str, range: Range<usize>) -> Option<&[f32]> {
        let place = self.places.get(&(name.to_owned(), range.start))?;
        Some(&self.numbers[place.clone()])
    }
}

/// Why nothing is written any more.
const ENDED: &str = "the thread that writes checkpoints ended";

enum Work {
    Write(CheckpointId, Copied),
    Publish(CheckpointId, Progress, Vec<ShardDigest>),
    /// Remove what was written of this checkpoint.
    Discard(CheckpointId),
}

enum Done {
    Written(Copied, Result<ShardDigest, String>),
    Published(Result<u64, String>),
    Discarded,
}

/// A checkpoint that is complete, or was abandoned.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Saved {
    pub step: u64,
    /// Bytes of all shards, or why the checkpoint was abandoned.
    pub outcome: Result<u64, String>,
    /// Seconds from the copy to the end.
    pub seconds: f64,
}

/// Progress of the current checkpoint.
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

/// The thread that writes, and the checkpoint in progress.
pub(super) struct Saver {
    site: Arc<Site>,
    plan: Arc<Plan>,
    work: Option<Sender<Work>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    /// `None` while the thread writes it.
    copied: Option<Copied>,
    pending: Option<Pending>,
    /// Step of the newest complete checkpoint; rank 0 decides by it.
    complete: Option<u64>,
}

impl Saver {
    /// Starts the thread and allocates the memory of the copy. `resumed`: the step that the run resumes from.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(site: Site, plan: Plan, resumed: Option<u64>) -> std::io::Result<Saver> {
        let (site, plan) = (Arc::new(site), Arc::new(plan));
        let mut places = HashMap::new();
        let mut len = 0;
        for piece in plan.pieces(site.rank) {
            let name = plan.tensors()[piece.tensor].name.clone();
            places.insert((name, piece.range.start), len..len + piece.range.len());
            len += piece.range.len();
        }
        let copied = Some(Copied { numbers: vec![0.0; len], places });
        let (work, orders) = channel();
        let (report, done) = channel();
        let thread = {
            let (site, plan) = (Arc::clone(&site), Arc::clone(&plan));
            std::thread::Builder::new()
                .name("checkpoint".into())
                .spawn(move || write(&site, &plan, &orders, &report))?
        };
        Ok(Saver { site, plan, work: Some(work), done, thread: Some(thread), copied, pending: None, complete: resumed })
    }

    /// Whether a complete checkpoint holds these steps, as far as this rank knows. Rank 0 always knows.
    pub fn holds(&self, step: u64) -> bool {
        self.site.rank == 0 && self.complete == Some(step)
    }

    /// Whether a checkpoint is in progress.
    pub fn busy(&self) -> bool {
        self.pending.is_some()
    }

    /// Copies this rank's pieces and starts to write them. No other checkpoint may be in progress.
    pub fn begin(&mut self, engine: &dyn Engine, names: &Names, progress: Progress) {
        let id = CheckpointId { attempt: self.site.attempt, step: progress.step };
        let Some(mut copied) = self.copied.take() else {
            // The other ranks have to hear of it, or they would wait for this one.
            let stage = Stage::Written(Err(ENDED.into()));
            self.pending = Some(Pending { id, progress, since: Instant::now(), stage });
            return;
        };
        for piece in self.plan.pieces(self.site.rank) {
            let name = &self.plan.tensors()[piece.tensor].name;
            let place = copied.places.get(&(name.clone(), piece.range.start)).cloned();
            if let (Some((array, range)), Some(place)) = (names.find(name), place) {
                let read = engine.read(array, range.start + piece.range.start, &mut copied.numbers[place]);
                if let Err(error) = read {
                    let stage = Stage::Written(Err(error.to_string()));
                    self.copied = Some(copied);
                    self.pending = Some(Pending { id, progress, since: Instant::now(), stage });
                    return;
                }
            }
        }
        self.pending = Some(Pending { id, progress, since: Instant::now(), stage: Stage::Writing });
        self.order(Work::Write(id, copied));
    }

    fn order(&mut self, work: Work) {
        if let Some(sender) = &self.work {
            // The thread outlives every sender but this one.
            let _ = sender.send(work);
        }
    }

    /// Handles what the thread has done; with `wait`, waits for it first. Returns a checkpoint that rank 0 has
    /// published or failed to publish.
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
            Some(Done::Written(copied, digest)) => {
                self.copied = Some(copied);
                pending.stage = Stage::Written(digest);
                None
            }
            Some(Done::Published(outcome)) => {
                if outcome.is_ok() {
                    self.complete = Some(pending.id.step);
                }
                self.close(outcome)
            }
            Some(Done::Discarded) => match &mut pending.stage {
                Stage::Discarding(Some(cause)) => {
                    let cause = std::mem::take(cause);
                    self.close(Err(cause))
                }
                _ => {
                    self.pending = None;
                    None
                }
            },
            None => match &mut pending.stage {
                // The other ranks do not know: the flags of the next step tell them.
                Stage::Writing => {
                    pending.stage = Stage::Written(Err(ENDED.into()));
                    None
                }
                Stage::Discarding(cause) => {
                    let cause = cause.take();
                    self.close(Err(cause.unwrap_or_else(|| ENDED.into())))
                }
                _ => self.close(Err(ENDED.into())),
            },
        }
    }

    fn close(&mut self, outcome: Result<u64, String>) -> Option<Saved> {
        let pending = self.pending.take()?;
        Some(Saved { step: pending.id.step, outcome, seconds: pending.since.elapsed().as_secs_f64() })
    }

    /// Result of this rank's part of the current checkpoint: pending, written, or failed.
    pub fn written(&self) -> Option<Result<&ShardDigest, &str>> {
        match &self.pending.as_ref()?.stage {
            Stage::Written(digest) => Some(digest.as_ref().map_err(String::as_str)),
            _ => None,
        }
    }

    /// All ranks have written, and these are their digests. Rank 0 publishes next; for the others the checkpoint is
    /// over.
    pub fn publish(&mut self, digests: Vec<ShardDigest>) {
        let Some(pending) = &mut self.pending else { return };
        if self.site.rank == 0 {
            pending.stage = Stage::Publishing;
            let work = Work::Publish(pending.id, pending.progress.clone(), digests);
            self.order(work);
        } else {
            self.pending = None;
        }
    }

    /// A rank could not write: abandons the checkpoint, and returns the reason on the rank that knows it. Rank 0 then
    /// removes what was written, so that a full disk does not stay full because of it.
    pub fn give_up(&mut self) -> Option<Saved> {
        let cause = self.written().and_then(Result::err).map(str::to_owned);
        if self.site.rank > 0 {
            let saved = self.close(Err(cause.clone().unwrap_or_default()));
            return saved.filter(|_| cause.is_some());
        }
        let pending = self.pending.as_mut()?;
        pending.stage = Stage::Discarding(cause);
        let id = pending.id;
        self.order(Work::Discard(id));
        None
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn write(site: &Site, plan: &Plan, orders: &Receiver<Work>, report: &Sender<Done>) {
    let store = Store::new(&site.disk, &site.directory);
    while let Ok(work) = orders.recv() {
        let done = match work {
            Work::Write(id, copied) => {
                let digest = store.write_shard(&site.job, id, site.rank, plan, &copied);
                Done::Written(copied, digest.map_err(|error| error.to_string()))
            }
            Work::Publish(id, progress, digests) => {
                let published = publish(site, plan, &store, id, &progress, digests);
                if published.is_err() {
                    discard(&store, id);
                }
                Done::Published(published)
            }
            Work::Discard(id) => {
                discard(&store, id);
                Done::Discarded
            }
        };
        if report.send(done).is_err() {
            return;
        }
    }
}

/// If the checkpoint could not be written, a failure to remove it is no news.
fn discard(store: &Store<'_>, id: CheckpointId) {
    let _ = store.discard(id);
}

fn publish(
    site: &Site,
    plan: &Plan,
    store: &Store<'_>,
    id: CheckpointId,
    progress: &Progress,
    digests: Vec<ShardDigest>,
) -> Result<u64, String> {
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let progress = switchyard_checkpoint::Progress::new(progress).map_err(|error| error.to_string())?;
    let about = CheckpointInfo { job: site.job.clone(), id, config: site.config.clone(), created, progress };
    let manifest = Manifest::new(about, plan.clone(), digests).map_err(|fault| fault.to_string())?;
    store.publish(&manifest).map_err(|error| error.to_string())?;
    if let Err(error) = store.prune(&site.job, site.attempt, site.keep) {
        eprintln!("warning: old checkpoints in {}: {error}", site.directory.display());
    }
    Ok(manifest.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use switchyard_checkpoint::{Role, TensorSpec};

    /// A saver of a rank whose thread has died while it wrote.
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
        let site = Site { disk, directory, job: "job".into(), config: String::new(), keep: 1, rank, attempt: 1 };
        let mut saver = Saver::start(site, Plan::new(vec![tensor], 2).unwrap(), None).unwrap();
        saver.work = None;
        saver.thread.take().unwrap().join().unwrap();
        saver.copied = None;
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
    fn a_rank_whose_thread_died_says_so_until_all_have_given_the_checkpoint_up() {
        let folder = tempfile::tempdir().unwrap();
        for rank in [0, 1] {
            let mut saver = dead(rank, folder.path());
            assert_eq!((saver.poll(true), saver.written()), (None, Some(Err(ENDED))), "the others must hear of it");
            // All ranks have written or failed.
            let mut saved = saver.give_up();
            if rank == 0 {
                assert_eq!(saved, None);
                saved = saver.poll(true);
            }
            assert_eq!(saved.map(|saved| (saved.step, saved.outcome)), Some((3, Err(ENDED.to_owned()))));
            assert!(!saver.busy());
        }
    }
}
