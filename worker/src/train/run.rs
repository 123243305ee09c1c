//! A complete run of one rank: join, train, evaluate, save, leave, and report to the launcher.

use super::engine::Engine;
use super::fault::Fault;
use super::memory;
use super::recording::Recording;
use super::step::StepRequest;
use super::watchdog::{OnAlarm, Watch, Watchdog};
use super::{Preparation, StepReport, TrainError, Trainer, ValidationResult};
use crate::comm::{Aborter, CommError, Group, GroupConfig};
use crate::recorder::{Identity, Recorder};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;
use switchyard_worker_contract::config::idle_share;
use switchyard_worker_contract::event::{CheckpointReport, Event, Finished, Progress, Ready};
use switchyard_worker_contract::recorder::Operation;

/// Recent steps whose median the watchdog uses.
const MEDIAN_STEPS: usize = 20;
/// Class names in the log.
const LISTED_CLASSES: usize = 20;

/// Prints events, one JSON object per line.
pub struct Reporter<W> {
    out: W,
}

impl<W: Write> Reporter<W> {
    pub fn new(out: W) -> Self {
        Reporter { out }
    }

    /// Prints one event. Write errors are ignored: if the launcher has gone away, it ends this
    /// process itself.
    pub fn event(&mut self, event: &Event) {
        if let Ok(mut line) = serde_json::to_string(event) {
            line.push('\n');
            let _ = self.out.write_all(line.as_bytes()).and_then(|()| self.out.flush());
        }
    }
}

/// Options of a run.
pub struct RunOptions<'a> {
    /// Directory for all files of this run.
    pub run_dir: &'a Path,
    /// Fault to inject, for tests.
    pub fault: Option<Fault>,
    /// The received stop signal, or 0. Read only if a checkpoint is to be saved first.
    pub stop: &'a AtomicI32,
    /// Called with the watchdog's alarms. `None`: only the group ends.
    pub on_alarm: Option<OnAlarm>,
}

/// Trains to the end. `on_joined` receives the handle with which a signal handler can end the
/// group.
///
/// # Errors
/// Anything that ends training early. The group has been informed by then.
pub fn run<'a, W: Write>(
    preparation: impl Into<Preparation<'a>>,
    group: &GroupConfig,
    options: &RunOptions<'_>,
    reporter: &mut Reporter<W>,
    on_joined: impl FnOnce(Aborter),
) -> Result<(), TrainError> {
    let identity = Identity { rank: group.rank(), world: group.world(), attempt: group.attempt };
    let recorder = Recorder::in_file(options.run_dir, identity).unwrap_or_else(|error| {
        eprintln!("warning: cannot write the flight recorder: {error}; training continues without it");
        Recorder::private(identity)
    });
    let preparation = preparation.into();
    let (watch, config) = (Watch::new(recorder), preparation.config().watchdog);
    let watchdog = Watchdog::start(config, identity, Arc::clone(&watch), options.on_alarm.clone());
    let watchdog = watchdog.map_err(|error| TrainError::Usage(format!("cannot start the watchdog thread: {error}")))?;
    let finished = train(preparation, group, &watch, options, reporter, on_joined, |engine| engine);
    let last = if finished.is_ok() { Operation::Finished } else { Operation::Failed };
    watch.recorder.begin(last, 0);
    drop(watchdog);
    if let Some(report) = watch.recorder.gpu_report() {
        reporter.event(&Event::Gpu(report));
    }
    reporter.event(&Event::Finished(finished?));
    Ok(())
}

/// `wrap`: see [`Trainer::join_watched`].
pub(super) fn train<'a, W: Write>(
    preparation: impl Into<Preparation<'a>>,
    group: &GroupConfig,
    watch: &Watch,
    options: &RunOptions<'_>,
    reporter: &mut Reporter<W>,
    on_joined: impl FnOnce(Aborter),
    wrap: impl FnOnce(Box<dyn Engine>) -> Box<dyn Engine>,
) -> Result<Finished, TrainError> {
    let mut trainer = Trainer::join_watched(preparation, group, watch, wrap)?;
    if group.rank() == 0 {
        for skipped in &trainer.training().dataset.facts().skipped {
            eprintln!("warning: {skipped}");
        }
        if let Some(text) = list_classes(trainer.training().dataset.class_names()) {
            eprintln!("note: {text}");
        }
    }
    on_joined(trainer.group().aborter());
    let mut run = Run { trainer: &mut trainer, attempt: group.attempt, options, reporter };
    let finished = match run.train_all() {
        Ok(finished) => finished,
        // All ranks know this outcome at the same time, and none has failed.
        Err(error @ (TrainError::Stopped { .. } | TrainError::Preflight(..))) => {
            trainer.leave()?;
            return Err(error);
        }
        Err(error) => {
            trainer.report_failure(&error);
            return Err(first_cause(error, trainer.group()));
        }
    };
    // A rank is finished only when all are: if another rank fails while saving, the job has failed.
    trainer.leave()?;
    Ok(finished)
}

/// The first classes with their numbers; `None` if they have no names.
fn list_classes(names: &[String]) -> Option<String> {
    let listed = names.iter().take(LISTED_CLASSES).enumerate().map(|(class, name)| format!("{class} `{name}`"));
    let listed = listed.collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => None,
        1..=LISTED_CLASSES => Some(format!("classes: {listed}")),
        count => Some(format!("classes: {listed} and {} more, which the model file lists", count - LISTED_CLASSES)),
    }
}

/// If two ranks fail at once, the group knows one of them as the first. The other rank reports that
/// cause too; its own error is in its log.
fn first_cause(error: TrainError, group: &Group) -> TrainError {
    match group.failure() {
        Some(cause) if cause.origin_rank != group.rank() && !matches!(error, TrainError::Comm(_)) => {
            eprintln!("error: rank {}, after a failure of rank {}: {error}", group.rank(), cause.origin_rank);
            CommError::Failed(cause).into()
        }
        _ => error,
    }
}

struct Run<'a, W> {
    trainer: &'a mut Trainer,
    attempt: u32,
    options: &'a RunOptions<'a>,
    reporter: &'a mut Reporter<W>,
}

impl<W: Write> Run<'_, W> {
    /// Checks the bandwidth. Rank 0 reports the measurement even if it ends the run.
    fn check(&mut self) -> Result<(), TrainError> {
        let checked = self.trainer.check_bandwidth();
        let measured = match &checked {
            Ok(measured) => measured.as_ref(),
            Err(TrainError::Preflight(measured, _)) => Some(&**measured),
            Err(_) => None,
        };
        if let Some(measured) = measured.filter(|_| self.trainer.group().rank() == 0) {
            self.reporter.event(&Event::Measured(measured.clone()));
        }
        checked.map(drop)
    }

    fn ready(&mut self) -> Result<(), TrainError> {
        let all_reduce_ms = self.trainer.measure_all_reduce()?;
        let (group, reductions) = (self.trainer.group(), self.trainer.reductions());
        let ready = Ready {
            rank: group.rank(),
            pid: std::process::id(),
            host: group.host().to_string(),
            cpus: crate::process::allowed_cpus().to_string(),
            threads: self.trainer.training().config.cpu_threads,
            kernel: self.trainer.kernel(),
            address: group.local_address().to_string(),
            transport: reductions.transport,
            links: reductions.links,
            bucket_bytes: if group.rank() == 0 { reductions.bytes } else { Vec::new() },
            algorithms: if group.rank() == 0 { reductions.algorithms } else { Vec::new() },
            all_reduce_ms,
            resumed_step: self.trainer.resumed_step(),
            gpu: self.trainer.gpu_paths(),
        };
        self.reporter.event(&Event::Ready(ready));
        Ok(())
    }

    fn train_all(&mut self) -> Result<Finished, TrainError> {
        self.check()?;
        self.ready()?;
        let rank = self.trainer.group().rank();
        let config = self.trainer.training().config.clone();
        let total = self.trainer.training().total_steps;
        let fetch_every = u64::from(config.fetch_every_steps);
        let saves_first = config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.on_suspend);
        let mut recording = Recording::start(self.trainer, self.options.run_dir, self.attempt);
        let mut interval = Interval::default();
        let mut step_times: Vec<f32> = Vec::with_capacity(usize::try_from(total).unwrap_or(0).min(1 << 20));
        let (mut first_loss, mut last_loss) = (None, None);
        let mut staleness = 0;
        let (mut waited, mut trained) = (Duration::ZERO, Duration::ZERO);
        let (mut recent, mut straggler) = ([0.0; MEDIAN_STEPS], None);
        while self.trainer.steps_done() < total {
            let next = self.trainer.steps_done() + 1;
            if let Some(fault) = self.options.fault.filter(|fault| fault.due(next, rank, self.attempt)) {
                fault.strike();
            }
            if let Some(cause) = self.trainer.group().failure() {
                return Err(CommError::Failed(cause).into());
            }
            recording.before_step(self.trainer);
            let stop = saves_first && self.options.stop.load(Ordering::Relaxed) != 0;
            let (report, agreed) = self.trainer.step(StepRequest { stop })?;
            first_loss = first_loss.or(Some(report.loss).filter(|loss| loss.is_finite()));
            if step_times.len() < step_times.capacity() {
                step_times.push(report.total.as_secs_f32() * 1e3);
            }
            staleness = staleness.max(report.staleness);
            waited += report.pipeline_wait;
            trained += report.total;
            recent[(report.step % MEDIAN_STEPS as u64) as usize] = report.total.as_secs_f64();
            if report.step % MEDIAN_STEPS as u64 == 0 && recent.iter().all(|time| *time > 0.0) {
                self.trainer.recorder.set_median(median(recent));
            }
            self.log_straggler(&mut straggler);
            interval.add(&report);
            recording.after_step(self.trainer, &report);
            self.report_checkpoints();
            let fetch = report.step % fetch_every == 0 || report.step == total || agreed.stop;
            if let Some(loss) = interval.loss().filter(|_| fetch) {
                last_loss = Some(loss);
                let slowest = self.trainer.slowest().filter(|_| rank == 0);
                let progress = Progress { slowest, ..interval.progress(rank, loss, &report, self.trainer) };
                recording.progress(&progress);
                self.reporter.event(&Event::Progress(progress));
                interval = Interval::default();
            }
            if agreed.stop {
                return Err(self.stop()?);
            }
            let release = u64::from(config.memory.release_every_steps);
            if release > 0 && report.step % release == 0 {
                memory::release();
            }
            if self.trainer.is_due(config.evaluation.every_steps) && report.step != total {
                self.evaluate(&mut recording)?;
            }
        }
        if config.is_asynchronous() {
            eprintln!("note: the weights of rank {rank} lacked at most {staleness} pushes of the slowest rank");
        }
        if let Some(pipeline) = config.pipeline {
            let stage = pipeline.place(rank, self.trainer.group().world()).stage;
            let share = 100.0 * waited.as_secs_f64() / trained.as_secs_f64().max(1e-9);
            let least = 100.0 * idle_share(pipeline.stages, config.batch_merge);
            eprintln!(
                "note: stage {stage} on rank {rank} waited for other stages in {share:.1} % of its steps' time; equal \
                 stages would wait {least:.1} %"
            );
        }
        self.trainer.save_checkpoint()?;
        let validation = self.evaluate(&mut recording)?;
        self.trainer.finish_checkpoint()?;
        self.report_checkpoints();
        let weights_digest = self.trainer.agree_on_weights()?;
        let model_file = if rank == 0 { Some(self.save_model()?) } else { None };
        self.trainer.serve_weights()?;
        step_times.sort_by(f32::total_cmp);
        Ok(Finished {
            rank,
            step: total,
            first_loss,
            last_loss,
            validation_loss: validation.map(|result| result.loss),
            accuracy: validation.and_then(|result| result.accuracy),
            weights_digest,
            step_ms_p50: percentile(&step_times, 50),
            step_ms_p99: percentile(&step_times, 99),
            gpu_calls: self.trainer.calls(),
            model_file: model_file.map(|file| file.display().to_string()),
        })
    }

    /// Writes the model to the run directory. If that fails, for example because its disk is full,
    /// writes it next to the checkpoints or to the directory of temporary files, because training
    /// again for the same model costs more than a file in another place. Returns the file.
    fn save_model(&mut self) -> Result<PathBuf, TrainError> {
        const NAME: &str = "model.safetensors";
        let file = self.options.run_dir.join(NAME);
        let Err(first) = self.trainer.save(&file) else { return Ok(file) };
        eprintln!("warning: {first}");
        let beside = self.trainer.training().config.checkpoint.as_ref().map(|it| Path::new(&it.path).join(NAME));
        let temporary = std::env::temp_dir().join(format!("switchyard-{}-{NAME}", std::process::id()));
        let written = beside.into_iter().chain([temporary]).find(|file| match self.trainer.save(file) {
            Ok(()) => true,
            Err(error) => {
                eprintln!("warning: {error}");
                false
            }
        });
        let file = written.ok_or(first)?;
        eprintln!("warning: the model is in {}", file.display());
        Ok(file)
    }

    /// Logs on rank 0 when the straggler changes and when there is none any more. `known`: the last
    /// one logged.
    fn log_straggler(&mut self, known: &mut Option<u32>) {
        if self.trainer.group().rank() != 0 {
            return;
        }
        let straggler = self.trainer.straggler();
        let rank = straggler.map(|slowest| slowest.rank);
        if rank == *known {
            return;
        }
        *known = rank;
        match straggler {
            Some(slowest) => eprintln!("warning: {slowest}"),
            None => eprintln!("note: no rank is a straggler any more"),
        }
    }

    fn evaluate(&mut self, recording: &mut Recording) -> Result<Option<ValidationResult>, TrainError> {
        let stop = self.options.stop;
        let (validation, agreed) =
            self.trainer.evaluate_unless(&mut || StepRequest { stop: stop.load(Ordering::Relaxed) != 0 })?;
        if agreed.stop {
            return Err(self.stop()?);
        }
        if let (0, Some(ValidationResult { loss, accuracy })) = (self.trainer.group().rank(), validation) {
            let step = self.trainer.steps_done();
            recording.scalars(step, &[("loss/validation", loss)]);
            if let Some(accuracy) = accuracy {
                recording.scalars(step, &[("accuracy/validation", accuracy)]);
            }
            self.reporter.event(&Event::Evaluation { step, loss, accuracy });
        }
        Ok(validation)
    }

    fn report_checkpoints(&mut self) {
        for saved in self.trainer.take_saved() {
            let (bytes, failure) = match saved.outcome {
                Ok(bytes) => (Some(bytes), None),
                Err(cause) => (None, Some(cause)),
            };
            if let Some(cause) = &failure {
                eprintln!("warning: the checkpoint of step {} is not saved: {cause}", saved.step);
            }
            let report = CheckpointReport { step: saved.step, bytes, seconds: saved.seconds, failure };
            self.reporter.event(&Event::Checkpoint(report));
        }
    }

    /// Saves because of a stop request; returns the error for it.
    fn stop(&mut self) -> Result<TrainError, TrainError> {
        self.trainer.save_checkpoint()?;
        let saved = self.trainer.finish_checkpoint()?;
        self.report_checkpoints();
        let step = self.trainer.steps_done();
        let interrupted = self.options.stop.load(Ordering::Relaxed) == signal_hook::consts::SIGINT;
        Ok(TrainError::Stopped { step, saved, interrupted })
    }
}

fn median(mut times: [f64; MEDIAN_STEPS]) -> Duration {
    times.sort_unstable_by(f64::total_cmp);
    Duration::from_secs_f64(times[MEDIAN_STEPS / 2])
}

fn percentile(sorted: &[f32], percent: usize) -> f64 {
    let position = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(position).map_or(0.0, |value| f64::from(*value))
}

/// Sums over the steps since the last progress event.
#[derive(Debug, Default)]
struct Interval {
    steps: u64,
    /// Sum and count of the finite losses: in mixed precision the loss of a skipped step may not be
    /// finite.
    loss: f64,
    losses: u64,
    longest: Duration,
    sum: StepReport,
    /// Gradient norm of the last step that was not skipped.
    gradient_norm: f64,
}

impl Interval {
    fn add(&mut self, report: &StepReport) {
        self.steps += 1;
        if report.loss.is_finite() {
            self.loss += report.loss;
            self.losses += 1;
        }
        self.longest = self.longest.max(report.total);
        self.gradient_norm = report.gradient_norm.unwrap_or(self.gradient_norm);
        self.sum.total += report.total;
        self.sum.forward += report.forward;
        self.sum.backward += report.backward;
        self.sum.communication_wait += report.communication_wait;
        self.sum.pipeline_wait += report.pipeline_wait;
        self.sum.input_wait += report.input_wait;
        self.sum.optimizer += report.optimizer;
    }

    /// Mean loss; `None` if no step had a finite one.
    fn loss(&self) -> Option<f64> {
        (self.losses > 0).then(|| self.loss / self.losses as f64)
    }

    fn progress(&self, rank: u32, loss: f64, last: &StepReport, trainer: &Trainer) -> Progress {
        let steps = self.steps as f64;
        let mean = |time: Duration| time.as_secs_f64() * 1e3 / steps;
        let training = trainer.training();
        let mixed = training.half_type().is_some();
        Progress {
            rank,
            step: last.step,
            total_steps: training.total_steps,
            interval_steps: self.steps,
            loss,
            learning_rate: last.learning_rate,
            gradient_norm: self.gradient_norm,
            item: training.dataset.facts().item,
            items_per_second: steps * training.items_per_step() as f64 / self.sum.total.as_secs_f64(),
            step_ms: mean(self.sum.total),
            max_step_ms: self.longest.as_secs_f64() * 1e3,
            forward_ms: mean(self.sum.forward),
            backward_ms: mean(self.sum.backward),
            communication_wait_ms: mean(self.sum.communication_wait),
            pipeline_wait_ms: training.config.pipeline.map(|_| mean(self.sum.pipeline_wait)),
            input_wait_ms: mean(self.sum.input_wait),
            reader_threads: Some(trainer.reader.thread_count()),
            optimizer_ms: mean(self.sum.optimizer),
            loss_scale: mixed.then_some(last.loss_scale),
            skipped_steps: trainer.skipped_steps(),
            slowest: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn percentiles_are_observed_values() {
        let values: Vec<f32> = (1..=100).map(|value| value as f32).collect();
        assert_eq!((percentile(&values, 50), percentile(&values, 99)), (50.0, 99.0));
        assert_eq!((percentile(&[7.0], 99), percentile(&[], 50)), (7.0, 0.0));
    }
}
