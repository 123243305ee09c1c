//! A whole run of one rank: join, train, evaluate, save, leave; and what it reports to its launcher.

use super::engine::Engine;
use super::fault::Fault;
use super::memory;
use super::recording::Recording;
use super::step::Wishes;
use super::watchdog::{OnAlarm, Watch, Watchdog};
use super::{Blueprint, Judgement, StepReport, TrainError, Trainer};
use crate::comm::{Aborter, CommError, Group, GroupConfig};
use crate::recorder::{Identity, Recorder};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;
use switchyard_worker_contract::event::{CheckpointReport, Event, Finished, Progress, Ready};
use switchyard_worker_contract::recorder::Operation;

/// Steps whose median the watchdog knows.
const LATELY: usize = 20;

/// Prints events, one JSON object per line.
pub struct Reporter<W> {
    out: W,
}

impl<W: Write> Reporter<W> {
    pub fn new(out: W) -> Self {
        Reporter { out }
    }

    /// Prints one event. A launcher that no longer listens is no reason to stop: it ends this process when it wants to.
    pub fn event(&mut self, event: &Event) {
        if let Ok(mut line) = serde_json::to_string(event) {
            line.push('\n');
            let _ = self.out.write_all(line.as_bytes()).and_then(|()| self.out.flush());
        }
    }
}

/// What affects a run from outside.
pub struct Outside<'a> {
    /// Where all files of this run go.
    pub run_dir: &'a Path,
    /// A fault, for tests.
    pub fault: Option<Fault>,
    /// The signal that asked this process to stop, or 0. Read only if a checkpoint is to be saved first.
    pub stop: &'a AtomicI32,
    /// What follows if a rank stands still for too long. `None`: only the group ends.
    pub on_alarm: Option<OnAlarm>,
}

/// Trains to the end. `joined` gets the handle through which a signal can end the group.
///
/// # Errors
/// Anything that ends training early. The group has been informed by then.
pub fn run<W: Write>(
    blueprint: Blueprint,
    group: &GroupConfig,
    outside: &Outside<'_>,
    reporter: &mut Reporter<W>,
    joined: impl FnOnce(Aborter),
) -> Result<(), TrainError> {
    let identity = Identity { rank: group.rank(), world: group.world(), attempt: group.attempt };
    let recorder = Recorder::in_file(outside.run_dir, identity).unwrap_or_else(|error| {
        eprintln!("warning: cannot write the flight recorder: {error}; the training continues without it");
        Recorder::private(identity)
    });
    let (watch, config) = (Watch::new(recorder), blueprint.training.config.watchdog);
    let watchdog = Watchdog::start(config, identity, Arc::clone(&watch), outside.on_alarm.clone());
    let watchdog =
        watchdog.map_err(|error| TrainError::Usage(format!("cannot start the thread of the watchdog: {error}")))?;
    let finished = train(blueprint, group, &watch, outside, reporter, joined, |engine| engine);
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
pub(super) fn train<W: Write>(
    blueprint: Blueprint,
    group: &GroupConfig,
    watch: &Watch,
    outside: &Outside<'_>,
    reporter: &mut Reporter<W>,
    joined: impl FnOnce(Aborter),
    wrap: impl FnOnce(Box<dyn Engine>) -> Box<dyn Engine>,
) -> Result<Finished, TrainError> {
    let mut trainer = Trainer::join_watched(blueprint, group, watch, wrap)?;
    joined(trainer.group().aborter());
    let mut run = Run { trainer: &mut trainer, attempt: group.attempt, outside, reporter };
    let finished = match run.train_all() {
        Ok(finished) => finished,
        // All ranks learn of it at the same time, and none failed.
        Err(error @ (TrainError::Stopped { .. } | TrainError::Preflight(..))) => {
            trainer.leave()?;
            return Err(error);
        }
        Err(error) => {
            trainer.tell(&error);
            return Err(first_cause(error, trainer.group()));
        }
    };
    // A rank is finished only when all are: a failure while another rank saves is a failure of the job.
    trainer.leave()?;
    Ok(finished)
}

/// If two ranks fail at once, one of them was first for the whole group. The other one reports that cause too; its own
/// error is in its log.
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
    outside: &'a Outside<'a>,
    reporter: &'a mut Reporter<W>,
}

impl<W: Write> Run<'_, W> {
    /// Rank 0 reports what was measured, even if that ends the run.
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
            cpus: crate::process::allowed().to_string(),
            threads: self.trainer.training().config.cpu_threads,
            kernel: self.trainer.kernel(),
            address: group.local_address().to_string(),
            transport: reductions.transport,
            links: reductions.links,
            bucket_bytes: if group.rank() == 0 { reductions.bytes } else { Vec::new() },
            all_reduce_ms,
            resumed_step: self.trainer.resumed_step(),
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
        let mut recording = Recording::start(self.trainer, self.outside.run_dir, self.attempt);
        let mut interval = Interval::default();
        let mut step_times: Vec<f32> = Vec::with_capacity(usize::try_from(total).unwrap_or(0).min(1 << 20));
        let (mut first_loss, mut last_loss) = (None, None);
        let (mut lately, mut straggler) = ([0.0; LATELY], None);
        while self.trainer.steps_done() < total {
            let next = self.trainer.steps_done() + 1;
            if let Some(fault) = self.outside.fault.filter(|fault| fault.due(next, rank, self.attempt)) {
                fault.strike();
            }
            if let Some(cause) = self.trainer.group().failure() {
                return Err(CommError::Failed(cause).into());
            }
            recording.before(self.trainer);
            let stop = saves_first && self.outside.stop.load(Ordering::Relaxed) != 0;
            let (report, agreed) = self.trainer.step(Wishes { stop })?;
            first_loss = first_loss.or(Some(report.loss).filter(|loss| loss.is_finite()));
            if step_times.len() < step_times.capacity() {
                step_times.push(report.total.as_secs_f32() * 1e3);
            }
            lately[(report.step % LATELY as u64) as usize] = report.total.as_secs_f64();
            if report.step % LATELY as u64 == 0 && lately.iter().all(|time| *time > 0.0) {
                self.trainer.recorder.set_median(median(lately));
            }
            self.name_straggler(&mut straggler);
            interval.add(&report);
            recording.after(self.trainer, &report);
            self.tell_saved();
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
            let evaluate_every = config.evaluation.every_steps;
            if evaluate_every > 0 && report.step % evaluate_every == 0 && report.step != total {
                self.evaluate(&mut recording)?;
            }
        }
        self.trainer.save_checkpoint()?;
        let judgement = self.evaluate(&mut recording)?;
        self.trainer.finish_checkpoint()?;
        self.tell_saved();
        let weights_digest = self.trainer.agree_on_weights()?;
        let model_file = self.outside.run_dir.join("model.safetensors");
        if rank == 0 {
            self.trainer.save(&model_file)?;
        }
        step_times.sort_by(f32::total_cmp);
        Ok(Finished {
            rank,
            step: total,
            first_loss,
            last_loss,
            validation_loss: judgement.map(|judgement| judgement.loss),
            accuracy: judgement.and_then(|judgement| judgement.accuracy),
            weights_digest,
            step_ms_p50: percentile(&step_times, 50),
            step_ms_p99: percentile(&step_times, 99),
            gpu_calls: self.trainer.calls(),
            model_file: (rank == 0).then(|| model_file.display().to_string()),
        })
    }

    /// Rank 0 says it in the log when a rank becomes a straggler, and when none is left. `known`: the one that was named.
    fn name_straggler(&mut self, known: &mut Option<u32>) {
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

    fn evaluate(&mut self, recording: &mut Recording) -> Result<Option<Judgement>, TrainError> {
        let stop = self.outside.stop;
        let (judgement, agreed) =
            self.trainer.evaluate_unless(&mut || Wishes { stop: stop.load(Ordering::Relaxed) != 0 })?;
        if agreed.stop {
            return Err(self.stop()?);
        }
        if let (0, Some(Judgement { loss, accuracy })) = (self.trainer.group().rank(), judgement) {
            let step = self.trainer.steps_done();
            recording.scalars(step, &[("loss/validation", loss)]);
            if let Some(accuracy) = accuracy {
                recording.scalars(step, &[("accuracy/validation", accuracy)]);
            }
            self.reporter.event(&Event::Evaluation { step, loss, accuracy });
        }
        Ok(judgement)
    }

    fn tell_saved(&mut self) {
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

    /// Saves, because a rank was asked to stop; returns the error that says so.
    fn stop(&mut self) -> Result<TrainError, TrainError> {
        self.trainer.save_checkpoint()?;
        let saved = self.trainer.finish_checkpoint()?;
        self.tell_saved();
        let step = self.trainer.steps_done();
        let interrupted = self.outside.stop.load(Ordering::Relaxed) == signal_hook::consts::SIGINT;
        Ok(TrainError::Stopped { step, saved, interrupted })
    }
}

/// The median of some times in seconds.
fn median(mut times: [f64; LATELY]) -> Duration {
    times.sort_unstable_by(f64::total_cmp);
    Duration::from_secs_f64(times[LATELY / 2])
}

fn percentile(sorted: &[f32], percent: usize) -> f64 {
    let position = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(position).map_or(0.0, |value| f64::from(*value))
}

/// Sums over the steps since the last progress event.
#[derive(Debug, Default)]
struct Interval {
    steps: u64,
    /// Sum and count of the finite losses: in mixed precision the loss of a skipped step may not be finite.
    loss: f64,
    losses: u64,
    longest: Duration,
    sum: StepReport,
    /// Norm of the last step that was not skipped.
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
            input_wait_ms: mean(self.sum.input_wait),
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
    fn percentiles_are_values_that_occur() {
        let values: Vec<f32> = (1..=100).map(|value| value as f32).collect();
        assert_eq!((percentile(&values, 50), percentile(&values, 99)), (50.0, 99.0));
        assert_eq!((percentile(&[7.0], 99), percentile(&[], 50)), (7.0, 0.0));
    }
}
