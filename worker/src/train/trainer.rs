//! One rank's training state, advanced one optimizer step at a time.

use super::blueprint::{Blueprint, Plan};
use super::config::most_reader_threads;
use super::cpu_engine::CpuEngine;
use super::cuda_engine::CudaEngine;
use super::digest::{digest, state_digest, weights_digest};
use super::disk::CountedDisk;
use super::engine::{AddSpan, Engine, Flags, Measure, Reductions};
use super::exchange::TopKExchange;
use super::pace::Pace;
use super::preparation::Preparation;
use super::progress::{Progress, model_metadata};
use super::resume;
use super::saver::{Saved, Saver, SaverConfig};
use super::tensors::{TensorIndex, private_tensors, tensors};
use super::training::Training;
use super::watchdog::Watch;
use super::{TrainError, directory, save};
use crate::comm::{Cause, CommError, Group, GroupConfig};
use crate::data::{Prefetcher, ValidationSet};
use crate::nn::Layout;
use crate::recorder::{Identity, Recorder};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use switchyard_worker_contract::config::{Compression, EngineConfig};
use switchyard_worker_contract::event::{GpuCalls, GpuPaths, Slowest};
use switchyard_worker_contract::kernels::KernelTimes;
use switchyard_worker_contract::layers::LayerTime;
use switchyard_worker_contract::recorder::Operation;

/// Name of the tensors that rank 0 requests to save the model.
const MODEL: &str = "the model";

pub(super) struct Checkpoints {
    pub saver: Saver,
    pub index: TensorIndex,
    /// Start of the last checkpoint; used only on rank 0.
    pub last: Instant,
    /// Checkpoints that rank 0 has completed or abandoned and not yet reported.
    pub saved: Vec<Saved>,
}

pub struct Trainer {
    pub(super) training: Training,
    // Dropped before the group, whose end would abort the engine's reductions.
    pub(super) engine: Box<dyn Engine>,
    pub(super) group: Group,
    pub(super) reader: Prefetcher,
    /// Steps that have begun.
    pub(super) begun: u64,
    /// Steps whose outcome is known.
    pub(super) done: u64,
    /// Skipped steps in mixed precision, as of the last known outcome.
    pub(super) skipped_steps: Option<u64>,
    /// Busy times of all ranks.
    pub(super) pace: Pace,
    /// A rank requested to stop.
    pub(super) stopping: bool,
    /// A checkpoint is due by rank 0's clock.
    pub(super) due: bool,
    /// All ranks hold the same weights after the steps done.
    pub(super) synchronised: bool,
    pub(super) checkpoints: Option<Checkpoints>,
    /// Steps that had begun when the last checkpoint was completed or abandoned.
    pub(super) settled: u64,
    pub(super) validation: Option<ValidationSet>,
    resumed: Option<u64>,
    disk: CountedDisk,
    pub(super) recorder: Arc<Recorder>,
}

impl Trainer {
    /// Joins the group, and sets the initial weights or those of the newest checkpoint. All ranks
    /// must have read the same data with the same configuration.
    ///
    /// # Errors
    /// The group cannot form, its ranks differ, or the data or the checkpoint cannot be used.
    pub fn join<'a>(preparation: impl Into<Preparation<'a>>, config: &GroupConfig) -> Result<Trainer, TrainError> {
        let identity = Identity { rank: config.rank(), world: config.world(), attempt: config.attempt };
        let watch = Watch::new(Recorder::private(identity));
        Trainer::join_watched(preparation, config, &watch, |engine| engine)
    }

    /// Like [`Trainer::join`], with a watchdog. `wrap` can replace the plan's engine, for tests.
    pub(super) fn join_watched<'a>(
        preparation: impl Into<Preparation<'a>>,
        config: &GroupConfig,
        watch: &Watch,
        wrap: impl FnOnce(Box<dyn Engine>) -> Box<dyn Engine>,
    ) -> Result<Trainer, TrainError> {
        let (preparation, recorder) = (preparation.into(), Arc::clone(&watch.recorder));
        let servers = preparation.config().dedicated_servers();
        let mut group = Group::join(&GroupConfig { servers, ..config.clone() })?;
        group.record_to(&recorder);
        watch.set_aborter(group.aborter());
        let disk = CountedDisk::default();
        recorder.add_counter({
            let disk = disk.clone();
            move || disk.completed_calls()
        });
        // The number of threads can differ between nodes, because results do not depend on it.
        let shared = EngineConfig { cpu_threads: 0, ..preparation.config().clone() };
        let configuration = digest(&serde_json::to_vec(&shared).unwrap_or_default());
        group.agree("the engine configuration", configuration.as_bytes())?;
        let blueprint = preparation.plan(&mut group, &recorder).inspect_err(|error| report_failure(&group, error))?;
        group.agree("the training data", blueprint.training.dataset.facts().digest.as_bytes())?;
        recorder.begin(Operation::Restore, 0);
        let lock = match &blueprint.training.config.checkpoint {
            Some(checkpoint) if group.rank() == 0 => {
                let lock = directory::lock(&disk, Path::new(&checkpoint.path), &config.job, config.attempt);
                lock.inspect_err(|error| report_failure(&group, error))?
            }
            _ => None,
        };
        if let Some(checkpoint) = &blueprint.training.config.checkpoint {
            let compared = directory::compare(&mut group, (&disk, Path::new(&checkpoint.path)), lock.as_ref());
            compared.inspect_err(|error| report_failure(&group, error))?;
        }
        let start = blueprint.training.config.checkpoint.as_ref().map(|checkpoint| {
            resume::find(&mut group, (&disk, Path::new(&checkpoint.path)), &config.job, config.attempt)
        });
        let start = start.transpose().inspect_err(|error| report_failure(&group, error))?;
        let saved = start.as_ref().and_then(|start| start.checkpoint.as_ref());
        let saved = saved.and_then(|(_, progress)| progress.half_kernel);
        let Blueprint { mut training, plan } = blueprint;
        let connected: Result<Box<dyn Engine>, TrainError> = match plan {
            Plan::Cpu(plan) => CpuEngine::connect(&training, *plan, &mut group, saved, &recorder)
                .map(|engine| Box::new(engine) as Box<dyn Engine>),
            Plan::Gpu(plan) => CudaEngine::connect(&training, *plan, (&mut group, config.local_rank), &recorder)
                .map(|engine| Box::new(engine) as Box<dyn Engine>),
        };
        let mut engine = wrap(connected.inspect_err(|error| report_failure(&group, error))?);
        let (mut checkpoints, mut resumed) = (None, None);
        if let (Some(checkpoint), Some(start)) = (training.config.checkpoint.clone(), start) {
            let (directory, keep) = (PathBuf::from(&checkpoint.path), checkpoint.keep.max(1) as usize);
            if let Some((checkpoint, progress)) = &start.checkpoint {
                training.resume_at(progress.step, progress.epoch, progress.position);
                let restored =
                    resume::restore(&mut *engine, (&training, &mut group), (&disk, &directory), checkpoint, progress);
                let changed = restored.inspect_err(|error| report_failure(&group, error))?;
                changed.iter().filter(|_| group.rank() == 0).for_each(|text| eprintln!("note: {text}"));
                resumed = Some(progress.step);
            }
            let private = (0..training.world).map(|rank| private_tensors(&*engine, rank)).collect();
            let plan = switchyard_checkpoint::Plan::with_private(tensors(&*engine), private)
                .map_err(|fault| TrainError::Usage(format!("checkpoints of this model: {fault}")))?;
            if group.rank() == 0 {
                let probed = directory::probe((&disk, &directory), plan.bytes(), resumed.is_some());
                probed.inspect_err(|error| report_failure(&group, error))?;
            }
            let saver_config = SaverConfig {
                disk: disk.clone(),
                lock,
                directory,
                job: config.job.clone(),
                config: configuration,
                keep,
                rank: group.rank() as usize,
                attempt: start.attempt,
            };
            let saver = Saver::start(saver_config, plan, resumed)
                .map_err(|error| TrainError::Usage(format!("cannot start the checkpoint thread: {error}")))?;
            let index = TensorIndex::new(&*engine, group.rank());
            checkpoints = Some(Checkpoints { saver, index, last: Instant::now(), saved: Vec::new() });
        }
        let done = resumed.unwrap_or(0);
        let EngineConfig { reader, batch_size_per_process, evaluation, .. } = &training.config;
        let replica = training.replica(group.rank());
        let mut reader = Prefetcher::start(Arc::clone(&training.dataset), training.order, replica, done, reader)?;
        if training.config.reader.workers.is_none() && training.config.reader.double_buffer {
            reader.adapt(most_reader_threads(&training.config), group.rank() == 0);
        }
        let begun = reader.begun();
        recorder.add_counter(move || begun.load(Ordering::Relaxed));
        recorder.set_step(done);
        let validation = ValidationSet::new(
            &training.dataset,
            *batch_size_per_process,
            evaluation.batches,
            training.replicas(),
            reader.bad_samples().clone(),
        );
        let skipped_steps = engine.counters().scaler.map(|scaler| scaler.skipped_steps);
        let mut trainer = Trainer {
            training,
            engine,
            group,
            reader,
            begun: done,
            done,
            skipped_steps,
            pace: Pace::new((config.rank(), config.world(), config.procs_per_node), done),
            stopping: false,
            due: false,
            synchronised: true,
            checkpoints,
            settled: done,
            validation,
            resumed,
            disk,
            recorder,
        };
        trainer.agree_on_weights()?;
        Ok(trainer)
    }

    pub fn training(&self) -> &Training {
        &self.training
    }

    /// Layout of the model's parameters.
    pub fn layout(&self) -> &Layout {
        self.engine.layout()
    }

    /// Name of the kernels in use.
    pub fn kernel(&self) -> String {
        self.engine.kernel()
    }

    pub(super) fn gpu_paths(&self) -> Option<GpuPaths> {
        self.engine.gpu_paths()
    }

    pub fn group(&self) -> &Group {
        &self.group
    }

    pub fn steps_done(&self) -> u64 {
        self.done
    }

    /// Steps in the checkpoint that this run resumed from.
    pub fn resumed_step(&self) -> Option<u64> {
        self.resumed
    }

    /// The slowest rank of the last window; `None` before all ranks have reported times.
    pub fn slowest(&mut self) -> Option<Slowest> {
        self.pace.slowest()
    }

    /// The straggler of the last window, if there is one.
    pub(super) fn straggler(&self) -> Option<Slowest> {
        self.pace.last().filter(Slowest::is_straggler)
    }

    /// Steps skipped so far in mixed precision.
    pub fn skipped_steps(&self) -> Option<u64> {
        self.skipped_steps
    }

    /// Turns recording of spans for [`Trainer::trace`] on or off.
    pub(super) fn record(&mut self, on: bool) {
        self.engine.record(on);
    }

    /// Adds the spans of the last step.
    pub(super) fn trace(&mut self, add: &mut AddSpan<'_>) {
        self.engine.trace(add);
    }

    pub(super) fn kernel_times(&self) -> Option<&KernelTimes> {
        self.engine.kernel_times()
    }

    pub(super) fn layer_times(&self) -> Vec<LayerTime> {
        self.engine.layer_times()
    }

    pub(super) fn calls(&self) -> Option<GpuCalls> {
        self.engine.calls()
    }

    pub(super) fn reductions(&self) -> Reductions {
        self.engine.reductions()
    }

    /// Bytes of gradients or weights reduced in a step; 0 with a single rank.
    pub(super) fn reduced_bytes(&self, step: u64) -> u64 {
        let Training { config, world, buckets, total_steps, .. } = &self.training;
        if self.training.replicas() == 1 || !config.exchanges(step, *total_steps) {
            return 0;
        }
        4 * match config.compression {
            Some(Compression::TopK(settings)) => TopKExchange::bucket_len(settings, buckets, *world) as u64,
            None => buckets.iter().map(|bucket| bucket.range.len() as u64).sum::<u64>() / u64::from(config.stages()),
        }
    }

    /// Milliseconds to all-reduce all gradients: the best of three after a warm-up. Collective,
    /// before the first step.
    ///
    /// # Errors
    /// The group failed.
    pub fn measure_all_reduce(&mut self) -> Result<f64, TrainError> {
        // Parameter servers reduce nothing without updating weights.
        if self.group.world() == 1 || self.training.config.parameter_server.is_some() {
            return Ok(0.0);
        }
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            self.group.barrier()?;
            let start = Instant::now();
            self.engine.reduce(Measure::Gradients)?;
            best = best.min(start.elapsed().as_secs_f64() * 1e3);
        }
        Ok(best)
    }

    /// Starts a checkpoint of the steps done, after the current one has finished. Skipped if a
    /// complete checkpoint already holds these steps. Collective; no step may be in flight.
    ///
    /// # Errors
    /// The group failed.
    pub(super) fn save_checkpoint(&mut self) -> Result<(), TrainError> {
        self.recorder.begin(Operation::Checkpoint, 0);
        if self.finish_checkpoint()? {
            return Ok(());
        }
        if self.checkpoints.is_none() {
            return Ok(());
        }
        self.engine.complete_weights()?;
        // Each rank writes its own part, so that diverged replicas would be mixed for good: the
        // ranks that resume from this checkpoint agree.
        self.agree_on_state()?;
        let progress = Progress::new(self.done, self.engine.counters(), &self.training);
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(()) };
        checkpoints.saver.begin(&mut *self.engine, &checkpoints.index, progress);
        checkpoints.last = Instant::now();
        self.due = false;
        Ok(())
    }

    /// Waits for the current checkpoint, if any. Returns on all ranks whether a complete checkpoint
    /// holds the steps done. Collective.
    ///
    /// # Errors
    /// The group failed.
    pub(super) fn finish_checkpoint(&mut self) -> Result<bool, TrainError> {
        self.recorder.begin(Operation::Checkpoint, 0);
        loop {
            let Some(checkpoints) = &mut self.checkpoints else { return Ok(false) };
            checkpoints.saved.extend(checkpoints.saver.poll(true));
            // Other ranks may have nothing in progress, because only rank 0 publishes.
            let [busy, held] = [checkpoints.saver.is_busy(), checkpoints.saver.has_saved(self.done)];
            let flags = self.checkpoint_flags();
            let own = [f64::from(u8::from(busy)), flags.written.into(), flags.failed.into(), f64::from(u8::from(held))];
            let [busy, written, failed, held] = self.group.sum("the checkpoint", own)?;
            if busy == 0.0 {
                return Ok(held > 0.0);
            }
            self.advance_checkpoint(written, failed)?;
        }
    }

    /// State of this rank's part of the current checkpoint.
    pub(super) fn checkpoint_flags(&self) -> Flags {
        let written = self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.saver.written());
        Flags {
            written: f32::from(u8::from(matches!(written, Some(Ok(_))))),
            failed: f32::from(u8::from(matches!(written, Some(Err(_))))),
            ..Flags::default()
        }
    }

    /// Advances the current checkpoint once all ranks have written or one has failed; returns
    /// whether it did.
    pub(super) fn advance_checkpoint(&mut self, written: f64, failed: f64) -> Result<bool, TrainError> {
        let world = f64::from(self.training.world);
        let Some(checkpoints) = &mut self.checkpoints else { return Ok(false) };
        let all = written + failed >= world;
        if failed > 0.0 && all {
            checkpoints.saved.extend(checkpoints.saver.abandon());
        } else if written >= world {
            let own = match checkpoints.saver.written() {
                Some(Ok(digest)) => serde_json::to_vec(digest).unwrap_or_default(),
                _ => Vec::new(),
            };
            // Only rank 0 publishes, so only it receives them.
            let digests = self.group.gather("the digests of a checkpoint", &own)?;
            let digests: Result<Vec<_>, _> = digests.iter().map(|bytes| serde_json::from_slice(bytes)).collect();
            match digests {
                Ok(digests) => checkpoints.saver.publish(digests),
                Err(_) => drop(checkpoints.saver.abandon()),
            }
        }
        Ok(all)
    }

    /// Checkpoints completed or abandoned since the last call; each is reported by one rank.
    pub(super) fn take_saved(&mut self) -> Vec<Saved> {
        let Some(checkpoints) = &mut self.checkpoints else { return Vec::new() };
        checkpoints.saved.extend(checkpoints.saver.poll(false));
        std::mem::take(&mut checkpoints.saved)
    }

    /// Digest of all weights: 32 hexadecimal digits. Collective with pipelines and sharding.
    ///
    /// # Errors
    /// The engine or the group failed.
    pub fn weights_digest(&mut self) -> Result<String, TrainError> {
        weights_digest(&mut *self.engine)
    }

    /// Compares the digest of the weights over all ranks.
    ///
    /// # Errors
    /// The digests differ, or the group failed.
    pub fn agree_on_weights(&mut self) -> Result<String, TrainError> {
        let digest = self.weights_digest()?;
        self.group.agree("the weights", digest.as_bytes())?;
        Ok(digest)
    }

    /// Compares all that a checkpoint holds over all ranks. Collective; no step may be in flight.
    fn agree_on_state(&mut self) -> Result<(), TrainError> {
        if self.group.world() == 1 {
            return Ok(());
        }
        let digest = state_digest(&*self.engine)?;
        if self.training.config.pipeline.is_some() {
            return self.agree_in_stages(&digest);
        }
        self.group.agree("the state", digest.as_bytes()).map_err(|error| match error {
            CommError::Disagreement(text) => TrainError::Replicas { step: self.done, text },
            error => error.into(),
        })
    }

    /// Compares the digests of the ranks of each stage.
    fn agree_in_stages(&mut self, own: &str) -> Result<(), TrainError> {
        let digests = self.group.all_gather("the state", own.as_bytes())?;
        let place = |rank: u32| self.training.config.place(rank, self.training.world);
        for (rank, digest) in (0..).zip(&digests) {
            let first = place(rank).rank_of(place(rank).stage, 0);
            let expected = &digests[first as usize];
            if digest != expected {
                let [got, expected] = [digest, expected].map(|digest| String::from_utf8_lossy(digest));
                let text = format!("the state: rank {rank} has {got}, rank {first} of the same stage has {expected}");
                return Err(TrainError::Replicas { step: self.done, text });
            }
        }
        Ok(())
    }

    /// Writes the weights to a safetensors file, completely or not at all. With pipelines, all
    /// other ranks must be in `Trainer::serve_weights`; with sharding, all ranks must have compared
    /// their weights after the last step.
    ///
    /// # Errors
    /// The file cannot be written, or the group failed.
    pub fn save(&mut self, file: &Path) -> Result<(), TrainError> {
        self.recorder.begin(Operation::Save, 0);
        self.engine.complete_weights()?;
        let metadata = model_metadata(&self.training.dataset);
        let announce = || self.group.broadcast(MODEL, &[1]).map(drop);
        save::model(&self.disk, file, &mut *self.engine, announce, (self.done, &metadata))
    }

    /// With pipelines: sends this rank's weights to rank 0 while that saves the model; on rank 0,
    /// ends this on all other ranks.
    ///
    /// # Errors
    /// The group failed.
    pub(super) fn serve_weights(&mut self) -> Result<(), TrainError> {
        if self.training.config.pipeline.is_none() {
            return Ok(());
        }
        self.recorder.begin(Operation::Save, 0);
        while !self.group.broadcast(MODEL, &[])?.is_empty() {
            self.engine.collect(&[], &mut [])?;
        }
        Ok(())
    }

    /// Reports this rank's failure to the group. An earlier cause takes precedence.
    pub fn report_failure(&self, error: &TrainError) {
        report_failure(&self.group, error);
    }

    /// Leaves the group gracefully, together with all other ranks.
    ///
    /// # Errors
    /// A rank failed first.
    pub fn leave(mut self) -> Result<(), TrainError> {
        self.engine.await_weights()?;
        Ok(self.group.leave()?)
    }
}

fn report_failure(group: &Group, error: &TrainError) {
    if !matches!(error, TrainError::Comm(_) | TrainError::Stopped { .. }) {
        group.abort(Cause::failed(group.rank(), error.to_string()));
    }
}
