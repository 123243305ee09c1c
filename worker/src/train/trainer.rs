//! One rank's training state, moved one optimizer step at a time.

use super::blueprint::Blueprint;
use super::buckets::{Buckets, Flags};
use super::disk::CountedDisk;
use super::kernel;
use super::resume;
use super::saver::{Saved, Saver, Site};
use super::sink::Places;
use super::state::{Names, TrainingState};
use super::watchdog::Watch;
use super::{TrainError, save};
use crate::comm::{Cause, Communicator, GroupConfig, Timing};
use crate::cpu::pool::Span;
use crate::data::{Making, Prefetcher, ValidationSet};
use crate::nn;
use crate::recorder::{Identity, Recorder};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use switchyard_checkpoint::Plan;
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::recorder::Operation;
use xxhash_rust::xxh3::xxh3_128;

/// Measurements of one step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepReport {
    /// Optimizer steps done, including this one.
    pub step: u64,
    /// Mean loss over all ranks in nats.
    pub loss: f64,
    pub learning_rate: f64,
    /// Norm of the global gradient before clipping; `None` if the step was skipped because of an overflow.
    pub gradient_norm: Option<f64>,
    pub loss_scale: f64,
    /// Wall-clock time.
    pub total: Duration,
    pub forward: Duration,
    /// Backward passes, including the reductions that they start.
    pub backward: Duration,
    /// Waiting for reductions after backward: exposed communication.
    pub communication_wait: Duration,
    /// Waiting for the reader.
    pub input_wait: Duration,
    /// Norm, clipping, optimizer.
    pub optimizer: Duration,
    /// Copying for a checkpoint, or waiting for the previous one.
    pub checkpoint: Duration,
    /// Time in which at least one reduction was running.
    pub reduce: Duration,
    /// Work of the reader's threads for this step.
    pub read: Duration,
    /// Bytes of gradients that were not reduced when backward ended; 0 with a single rank.
    pub left_bytes: u64,
}

pub(super) struct Checkpoints {
    pub saver: Saver,
    pub names: Names,
    /// When the last checkpoint started; rank 0 decides by it.
    pub last: Instant,
    /// Checkpoints that rank 0 has completed or abandoned and not yet reported.
    pub saved: Vec<Saved>,
}

/// A rank in training.
pub struct Trainer {
    pub(super) blueprint: Blueprint,
    pub(super) communicator: Communicator,
    pub(super) reader: Prefetcher,
    pub(super) places: Places,
    pub(super) buckets: Buckets,
    pub(super) state: TrainingState,
    pub(super) checkpoints: Option<Checkpoints>,
    /// This rank's part of the mean of the batch statistics, summed over the micro-batches of a step.
    pub(super) statistics: Vec<f32>,
    /// How the reader made the micro-batches of the last step.
    pub(super) makings: Vec<Making>,
    pub(super) validation: Option<ValidationSet>,
    resumed: Option<u64>,
    disk: CountedDisk,
    pub(super) recorder: Arc<Recorder>,
}

impl Trainer {
    /// Joins the group, and sets the initial weights or those of the newest checkpoint. All ranks must have read the
    /// same data with the same configuration.
    ///
    /// # Errors
    /// The group cannot form, its ranks differ, or the checkpoint cannot be used.
    pub fn join(blueprint: Blueprint, group: &GroupConfig) -> Result<Trainer, TrainError> {
        let identity = Identity { rank: group.rank(), world: group.world(), attempt: group.attempt };
        Trainer::join_watched(blueprint, group, &Watch::new(Recorder::private(identity)))
    }

    /// The same, under the eyes of a watchdog.
    pub(super) fn join_watched(
        blueprint: Blueprint,
        group: &GroupConfig,
        watch: &Watch,
    ) -> Result<Trainer, TrainError> {
        let recorder = Arc::clone(&watch.recorder);
        let mut state = TrainingState::new(&blueprint);
        let tensors = state.tensors(&blueprint);
        let buckets = Buckets::new(&blueprint);
        let mut communicator = Communicator::connect(group, &buckets.lens, &buckets.options)?;
        communicator.record_to(&recorder);
        watch.joined(communicator.aborter());
        let disk = CountedDisk::default();
        recorder.count({
            let disk = disk.clone();
            move || disk.done()
        });
        // The number of threads may differ between nodes: it does not change a bit of the results.
        let shared = EngineConfig { cpu_threads: 0, ..blueprint.config.clone() };
        let configuration = digest(&serde_json::to_vec(&shared).unwrap_or_default());
        communicator.agree("the engine configuration", configuration.as_bytes())?;
        communicator.agree("the training data", blueprint.dataset.facts().digest.as_bytes())?;
        let found = |communicator: &mut Communicator, path: &str| {
            resume::find(communicator, &buckets, (&disk, Path::new(path)), &group.job, group.attempt)
        };
        recorder.begin(Operation::Restore, 0);
        let start = blueprint.config.checkpoint.as_ref().map(|config| found(&mut communicator, &config.path));
        let start = start.transpose().inspect_err(|error| tell(&communicator, error))?;
        let saved = start.as_ref().and_then(|start| start.checkpoint.as_ref());
        let saved = saved.and_then(|(_, progress)| progress.half_kernel);
        let agreed = kernel::agree(blueprint, &mut communicator, &buckets, saved);
        let mut blueprint = agreed.inspect_err(|error| tell(&communicator, error))?;
        let (mut checkpoints, mut resumed) = (None, None);
        if let (Some(config), Some(start)) = (blueprint.config.checkpoint.clone(), start) {
            let directory = PathBuf::from(&config.path);
            if let Some((checkpoint, progress)) = &start.checkpoint {
                blueprint.go_on_from(progress.step, progress.epoch, progress.position);
                let restored =
                    resume::restore(&mut state, &blueprint, (&disk, directory.as_path()), checkpoint, progress);
                let changed = restored.inspect_err(|error| tell(&communicator, error))?;
                changed.iter().filter(|_| communicator.rank() == 0).for_each(|text| eprintln!("note: {text}"));
                resumed = Some(state.step);
            }
            let plan = Plan::new(tensors, blueprint.world as usize)
                .map_err(|fault| TrainError::Usage(format!("checkpoints of this model: {fault}")))?;
            let site = Site {
                disk: disk.clone(),
                directory,
                job: group.job.clone(),
                config: configuration,
                keep: config.keep.max(1) as usize,
                rank: communicator.rank() as usize,
                attempt: start.attempt,
            };
            let saver = Saver::start(site, plan, resumed)
                .map_err(|error| TrainError::Usage(format!("cannot start the thread for checkpoints: {error}")))?;
            let names = Names::new(&state, &blueprint);
            checkpoints = Some(Checkpoints { saver, names, last: Instant::now(), saved: Vec::new() });
        }
        let rank = communicator.rank();
        let reader = &blueprint.config.reader;
        let reader = Prefetcher::start(Arc::clone(&blueprint.dataset), blueprint.order, rank, state.step, reader)?;
        let begun = reader.begun();
        recorder.count(move || begun.load(Ordering::Relaxed));
        recorder.follow(&blueprint.network);
        recorder.step(state.step);
        let config = &blueprint.config;
        let validation = ValidationSet::new(
            &blueprint.dataset,
            config.batch_size_per_process,
            config.evaluation.batches,
            blueprint.world,
            reader.bad_samples().clone(),
        );
        let places = Places::new(blueprint.network.layout(), &blueprint.buckets);
        let statistics = vec![0.0; blueprint.network.batch_statistics().len()];
        let makings = Vec::with_capacity(blueprint.config.batch_merge as usize);
        let mut trainer = Trainer {
            blueprint,
            communicator,
            reader,
            places,
            buckets,
            state,
            checkpoints,
            statistics,
            makings,
            validation,
            resumed,
            disk,
            recorder,
        };
        trainer.agree_on_weights()?;
        trainer.fuse()?;
        Ok(trainer)
    }

    pub fn blueprint(&self) -> &Blueprint {
        &self.blueprint
    }

    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    pub fn steps_done(&self) -> u64 {
        self.state.step
    }

    /// Steps in the checkpoint that this run resumed from.
    pub fn resumed_step(&self) -> Option<u64> {
        self.resumed
    }

    /// Steps skipped so far in mixed precision.
    pub fn skipped_steps(&self) -> Option<u64> {
        self.state.scaler.as_ref().map(|scaler| scaler.state().skipped_steps)
    }

    /// Turns the recording of layer times for [`Trainer::operations`] on or off.
    pub(super) fn record_operations(&mut self, on: bool) {
        self.blueprint.network.record(on);
        self.blueprint.cpu.pool.record(on);
    }

    /// When the other compute threads were busy in the last step.
    pub(super) fn spans(&self) -> Vec<Span> {
        self.blueprint.cpu.pool.record(true)
    }

    /// Names, kinds and times of the layers of the last micro-batch.
    pub(super) fn operations(&self, each: &mut dyn FnMut(&str, &str, &nn::Operation)) {
        let network = &self.blueprint.network;
        for operation in network.operations() {
            let (name, kind) = network.name(operation.node as usize);
            each(name, kind, operation);
        }
    }

    /// The reductions of the last step, by their first bucket.
    pub(super) fn timings(&self) -> impl Iterator<Item = (usize, Timing)> {
        let timed = |bucket| Some((bucket, self.communicator.timing(bucket)?));
        (0..self.buckets.gradients).filter_map(timed)
    }

    /// Bytes of gradients that a step reduces; 0 with a single rank.
    pub(super) fn gradient_bytes(&self) -> u64 {
        let numbers: usize = self.blueprint.buckets.iter().map(|bucket| bucket.range.len()).sum();
        if self.communicator.world() == 1 { 0 } else { 4 * numbers as u64 }
    }

    /// Bytes of each all-reduce of gradients, in order; none with a single rank.
    pub(super) fn bucket_bytes(&self) -> Vec<u64> {
        let bytes = |bucket: usize| 4 * self.blueprint.buckets[bucket].range.len() as u64;
        let runs = self.buckets.runs.iter().filter(|_| self.communicator.world() > 1);
        runs.map(|run| run.clone().map(bytes).sum()).collect()
    }

    /// Milliseconds of the all-reduces of all gradients: the best of three after a warm-up. All ranks call it
    /// together, before the first step.
    ///
    /// # Errors
    /// The group failed.
    pub fn measure_all_reduce(&mut self) -> Result<f64, TrainError> {
        if self.communicator.world() == 1 {
            return Ok(0.0);
        }
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            self.communicator.barrier()?;
            let start = Instant::now();
            for (number, run) in self.buckets.runs.iter().enumerate() {
                self.communicator.start_all(run.clone(), number);
            }
            for bucket in 0..self.buckets.gradients {
                self.communicator.wait(bucket)?;
            }
            best = best.min(start.elapsed().as_secs_f64() * 1e3);
        }
        Ok(best)
    }

    /// Starts a checkpoint of the steps done, once the current one is finished; skipped if a complete checkpoint
    /// already holds these steps. All ranks call it together.
    ///
    /// # Errors
    /// The group failed.
    pub(super) fn save_checkpoint(&mut self) -> Result<(), TrainError> {
        self.recorder.begin(Operation::Checkpoint, 0);
        if self.finish_checkpoint()? {
            return Ok(());
        }
        let progress = self.state.progress(&self.blueprint);
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        checkpoints.saver.begin(&self.state, &checkpoints.names, progress);
        checkpoints.last = Instant::now();
        Ok(())
    }

    /// Waits for the current checkpoint, if any. Returns on all ranks whether a complete checkpoint holds the steps
    /// done. All ranks call it together.
    ///
    /// # Errors
    /// The group failed.
    pub(super) fn finish_checkpoint(&mut self) -> Result<bool, TrainError> {
        self.recorder.begin(Operation::Checkpoint, 0);
        loop {
            let Some(checkpoints) = &mut self.checkpoints else { return Ok(false) };
            checkpoints.saved.extend(checkpoints.saver.poll(true));
            // Other ranks may have nothing in progress: only rank 0 publishes.
            let [busy, held] = [checkpoints.saver.busy(), checkpoints.saver.holds(self.state.step)];
            let flags = self.checkpoint_flags();
            let own = [f32::from(u8::from(busy)), flags.written, flags.failed, f32::from(u8::from(held))];
            let [busy, written, failed, held] = self.buckets.sum(&mut self.communicator, own)?;
            if busy == 0.0 {
                return Ok(held > 0.0);
            }
            self.advance_checkpoint(written, failed)?;
        }
    }

    /// The state of this rank's part of the current checkpoint.
    pub(super) fn checkpoint_flags(&self) -> Flags {
        let written = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.saver.written());
        Flags {
            written: f32::from(u8::from(matches!(written, Some(Ok(_))))),
            failed: f32::from(u8::from(matches!(written, Some(Err(_))))),
            ..Flags::default()
        }
    }

    /// Advances the current checkpoint once all ranks have written or one has failed.
    pub(super) fn advance_checkpoint(&mut self, written: f32, failed: f32) -> Result<(), TrainError> {
        let world = self.blueprint.world as f32;
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        if failed > 0.0 && written + failed >= world {
            checkpoints.saved.extend(checkpoints.saver.give_up());
        } else if written >= world {
            let own = match checkpoints.saver.written() {
                Some(Ok(digest)) => serde_json::to_vec(digest).unwrap_or_default(),
                _ => Vec::new(),
            };
            let told = self.buckets.gather(&mut self.communicator, &own)?;
            let digests: Result<Vec<_>, _> = told.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
            match digests {
                Ok(digests) => checkpoints.saver.publish(digests),
                Err(_) => drop(checkpoints.saver.give_up()),
            }
        }
        Ok(())
    }

    /// Checkpoints that were completed or abandoned since the last call; each is reported by one rank.
    pub(super) fn take_saved(&mut self) -> Vec<Saved> {
        let Some(checkpoints) = &mut self.checkpoints else { return Vec::new() };
        checkpoints.saved.extend(checkpoints.saver.poll(false));
        std::mem::take(&mut checkpoints.saved)
    }

    /// Digest of all weights: 32 hexadecimal digits.
    pub fn weights_digest(&self) -> String {
        digest(bytemuck::cast_slice(&self.state.weights))
    }

    /// Compares the digest of the weights over all ranks.
    ///
    /// # Errors
    /// The digests differ, or the group failed.
    pub fn agree_on_weights(&mut self) -> Result<String, TrainError> {
        let digest = self.weights_digest();
        self.communicator.agree("the weights", digest.as_bytes())?;
        Ok(digest)
    }

    /// Writes the weights to a safetensors file, completely or not at all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, file: &Path) -> Result<(), TrainError> {
        self.recorder.begin(Operation::Save, 0);
        save::model(&self.disk, file, &self.blueprint, &self.state)
    }

    /// Informs the other ranks why this one gives up. If the group already knows a cause, that one stays.
    pub fn tell(&self, error: &TrainError) {
        tell(&self.communicator, error);
    }

    /// Leaves the group in good order, together with all other ranks.
    ///
    /// # Errors
    /// A rank failed before.
    pub fn leave(self) -> Result<(), TrainError> {
        Ok(self.communicator.leave()?)
    }
}

fn tell(communicator: &Communicator, error: &TrainError) {
    if !matches!(error, TrainError::Comm(_) | TrainError::Stopped { .. }) {
        communicator.abort(Cause::failed(communicator.rank(), error.to_string()));
    }
}

/// 32 hexadecimal digits of a digest of these bytes.
fn digest(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}
