//! Recordings of a run: a line per step, scalars for TensorBoard, a trace of the profiled steps.
//!
//! A failure here never ends training: what cannot be written is reported once and dropped.

use super::report::StepReport;
use super::trainer::Trainer;
use crate::profile::{EventFile, Row, StepFile, Trace, write_kernel_times, write_layer_times};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use switchyard_worker_contract::config::Profile;
use switchyard_worker_contract::event::Progress;
use switchyard_worker_contract::layers::LayerTimes;
use switchyard_worker_contract::record::StepRecord;

/// A rank's recording files.
pub(super) struct Recording {
    run_dir: PathBuf,
    attempt: u32,
    steps: Option<StepFile>,
    scalars: Option<EventFile>,
    profile: Option<Profile>,
    trace: Option<Trace>,
    layers: LayerTimes,
    /// End of the previous step.
    last: Instant,
    clock_offset_us: i64,
}

impl Recording {
    /// Opens the files in the run directory.
    pub fn start(trainer: &Trainer, run_dir: &Path, attempt: u32) -> Recording {
        let rank = trainer.group().rank();
        let steps = or_warn("the step records", StepFile::open(run_dir, rank));
        let scalars = (rank == 0).then(|| or_warn("TensorBoard events", EventFile::create(run_dir, attempt))).flatten();
        Recording {
            run_dir: run_dir.to_owned(),
            attempt,
            steps,
            scalars,
            profile: trainer.training().config.profile,
            trace: None,
            layers: LayerTimes { attempt, ..LayerTimes::default() },
            last: Instant::now(),
            clock_offset_us: trainer.group().clock_offset(),
        }
    }

    /// Called before a step; starts profiling if the step is selected.
    pub fn before_step(&mut self, trainer: &mut Trainer) {
        let Some(profile) = self.profile else { return };
        let step = trainer.steps_done() + 1;
        let on = (profile.from_step..profile.from_step + u64::from(profile.steps)).contains(&step);
        if on && self.trace.is_none() {
            self.trace = Some(Trace::new(trainer.group().rank(), self.clock_offset_us));
        }
        trainer.record(on);
    }

    /// Called after a step.
    pub fn after_step(&mut self, trainer: &mut Trainer, report: &StepReport) {
        let now = Instant::now();
        let total = now - self.last;
        let known = report.input_wait
            + report.forward
            + report.backward
            + report.communication_wait
            + report.pipeline_wait
            + report.optimizer
            + report.checkpoint;
        let ms = |time: Duration| time.as_secs_f32() * 1e3;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as i64);
        if let Some(steps) = &mut self.steps {
            steps.push(&StepRecord {
                attempt: self.attempt,
                step: report.step,
                end_us: wall + self.clock_offset_us,
                total_ms: ms(total),
                input_ms: ms(report.input_wait),
                forward_ms: ms(report.forward),
                backward_ms: ms(report.backward),
                communication_ms: ms(report.communication_wait.saturating_sub(report.gather_wait)),
                gather_ms: ms(report.gather_wait),
                pipeline_ms: ms(report.pipeline_wait),
                optimizer_ms: ms(report.optimizer),
                checkpoint_ms: ms(report.checkpoint),
                other_ms: ms(total.saturating_sub(known)),
                reduce_ms: ms(report.reduce),
                reduce_bytes: trainer.reduced_bytes(report.step),
                left_bytes: report.left_bytes,
                read_ms: ms(report.read),
                loss: report.loss as f32,
                gradient_norm: report.gradient_norm.map(|norm| norm as f32),
                loss_scale: report.loss_scale as f32,
                learning_rate: report.learning_rate as f32,
            });
        }
        self.trace_step(trainer, report, now - total, now);
        self.last = now;
    }

    fn trace_step(&mut self, trainer: &mut Trainer, report: &StepReport, start: Instant, end: Instant) {
        let (Some(profile), Some(trace)) = (self.profile, &mut self.trace) else { return };
        if report.step >= profile.from_step && report.step < profile.from_step + u64::from(profile.steps) {
            trace.add(Row::Step, &format!("step {}", report.step), start, end, json!({"loss": report.loss}));
            trainer.trace(&mut |row, name, start, end, arguments| trace.add(row, name, start, end, arguments));
            let layers = trainer.layer_times();
            if !layers.is_empty() {
                self.layers.add(layers);
                let written = write_layer_times(&self.run_dir, trainer.group().rank(), &self.layers);
                or_warn("the layer times", written);
            }
            // Written after each profiled step, because the run may end before the last.
            if let Some(times) = trainer.kernel_times() {
                let written = write_kernel_times(&self.run_dir, trainer.group().rank(), self.attempt, times);
                or_warn("the kernel times", written);
            }
        }
        if report.step + 1 == profile.from_step + u64::from(profile.steps) + 1
            && let Some(trace) = self.trace.take()
        {
            or_warn("the trace", trace.write(&self.run_dir));
        }
    }

    /// Called with a progress report: writes the buffered steps.
    pub fn progress(&mut self, progress: &Progress) {
        if let Some(steps) = &mut self.steps {
            steps.flush();
            if let Some(error) = steps.failure() {
                or_warn::<()>("the step records", Err(error));
                self.steps = None;
            }
        }
        let scalars = [
            ("loss/train", progress.loss),
            ("learning_rate", progress.learning_rate),
            ("gradient_norm", progress.gradient_norm),
            ("items_per_second", progress.items_per_second),
            ("step_ms/total", progress.step_ms),
            ("step_ms/input_wait", progress.input_wait_ms),
            ("step_ms/communication_wait", progress.communication_wait_ms),
        ];
        self.scalars(progress.step, &scalars);
        if let Some(scale) = progress.loss_scale {
            self.scalars(progress.step, &[("loss_scale", scale)]);
        }
    }

    /// Writes scalars of a step for TensorBoard.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) {
        let Some(file) = &mut self.scalars else { return };
        if or_warn("TensorBoard events", file.scalars(step, scalars)).is_none() {
            self.scalars = None;
        }
    }
}

fn or_warn<T>(what: &str, result: std::io::Result<T>) -> Option<T> {
    result.map_err(|error| eprintln!("warning: cannot write {what}: {error}; training continues without it")).ok()
}
