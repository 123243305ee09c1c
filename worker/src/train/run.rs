//! A whole run of one rank: join, train, evaluate, save, leave; and what it tells its launcher.

use super::fault::Fault;
use super::{Blueprint, StepReport, TrainError, Trainer};
use crate::comm::{Aborter, CommError, GroupConfig};
use std::io::Write;
use std::path::Path;
use std::time::Duration;
use switchyard_worker_contract::event::{Event, Finished, Progress, Ready};

/// Prints events, one JSON object per line.
pub struct Reporter<W> {
    out: W,
}

impl<W: Write> Reporter<W> {
    /// Prints to `out`.
    pub fn new(out: W) -> Self {
        Reporter { out }
    }

    /// Prints one event. A launcher that no longer listens is no reason to stop: it ends this process when it means to.
    pub fn event(&mut self, event: &Event) {
        if let Ok(mut line) = serde_json::to_string(event) {
            line.push('\n');
            let _ = self.out.write_all(line.as_bytes()).and_then(|()| self.out.flush());
        }
    }
}

/// Trains to the end. `joined` gets the handle by which a signal can end the group.
///
/// # Errors
/// Anything that ends training early; the group has been told.
pub fn run<W: Write>(
    blueprint: Blueprint,
    group: &GroupConfig,
    run_dir: &Path,
    fault: Option<Fault>,
    reporter: &mut Reporter<W>,
    joined: impl FnOnce(Aborter),
) -> Result<(), TrainError> {
    let mut trainer = Trainer::join(blueprint, group)?;
    joined(trainer.communicator().aborter());
    let finished = match to_the_end(&mut trainer, group.attempt, run_dir, fault, reporter) {
        Ok(finished) => finished,
        Err(error) => {
            trainer.tell(&error);
            return Err(error);
        }
    };
    // A rank is finished only when all are: a failure while another one saves is a failure of the job.
    trainer.leave()?;
    reporter.event(&Event::Finished(finished));
    Ok(())
}

fn to_the_end<W: Write>(
    trainer: &mut Trainer,
    attempt: u32,
    run_dir: &Path,
    fault: Option<Fault>,
    reporter: &mut Reporter<W>,
) -> Result<Finished, TrainError> {
    let all_reduce_ms = trainer.measure_all_reduce()?;
    let communicator = trainer.communicator();
    let rank = communicator.rank();
    reporter.event(&Event::Ready(Ready {
        rank,
        pid: std::process::id(),
        host: communicator.host().to_string(),
        cpus: crate::process::allowed().to_string(),
        threads: trainer.blueprint().config.cpu_threads,
        kernel: trainer.blueprint().isa.name().to_string(),
        address: communicator.local_address().to_string(),
        transport: communicator.transport(),
        all_reduce_ms,
    }));
    let total = trainer.blueprint().total_steps;
    let tokens_per_step = trainer.blueprint().tokens_per_step();
    let fetch_every = u64::from(trainer.blueprint().config.fetch_every_steps);
    let evaluate_every = trainer.blueprint().config.evaluation.every_steps;
    let mut interval = Interval::default();
    let mut step_times: Vec<f32> = Vec::with_capacity(usize::try_from(total).unwrap_or(0).min(1 << 20));
    let (mut first_loss, mut last_loss) = (f64::NAN, f64::NAN);
    while trainer.steps_done() < total {
        let next = trainer.steps_done() + 1;
        if let Some(fault) = fault.filter(|fault| fault.due(next, rank, attempt)) {
            fault.strike();
        }
        if let Some(cause) = trainer.communicator().failure() {
            return Err(CommError::Failed(cause).into());
        }
        let report = trainer.step()?;
        if report.step == 1 {
            first_loss = report.loss;
        }
        if step_times.len() < step_times.capacity() {
            step_times.push(report.total.as_secs_f32() * 1e3);
        }
        interval.add(&report);
        if report.step % fetch_every == 0 || report.step == total {
            last_loss = interval.loss / interval.steps as f64;
            reporter.event(&Event::Progress(interval.progress(rank, &report, total, tokens_per_step)));
            interval = Interval::default();
        }
        let evaluation_due = evaluate_every > 0 && report.step % evaluate_every == 0 && report.step != total;
        if evaluation_due
            && let Some(loss) = trainer.evaluate()?
            && rank == 0
        {
            reporter.event(&Event::Evaluation { step: report.step, loss });
        }
    }
    let validation_loss = trainer.evaluate()?;
    if let (0, Some(loss)) = (rank, validation_loss) {
        reporter.event(&Event::Evaluation { step: total, loss });
    }
    let weights_digest = trainer.agree_on_weights()?;
    let model_file = run_dir.join("model.safetensors");
    if rank == 0 {
        trainer.save(&model_file)?;
    }
    step_times.sort_by(f32::total_cmp);
    Ok(Finished {
        rank,
        step: total,
        first_loss,
        last_loss,
        validation_loss,
        weights_digest,
        step_ms_p50: percentile(&step_times, 50),
        step_ms_p99: percentile(&step_times, 99),
        model_file: (rank == 0).then(|| model_file.display().to_string()),
    })
}

/// Nearest-rank percentile of sorted values.
fn percentile(sorted: &[f32], percent: usize) -> f64 {
    let position = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(position).map_or(0.0, |value| f64::from(*value))
}

/// Sums over the steps since the last progress event.
#[derive(Debug, Default)]
struct Interval {
    steps: u64,
    loss: f64,
    longest: Duration,
    sum: StepReport,
}

impl Interval {
    fn add(&mut self, report: &StepReport) {
        self.steps += 1;
        self.loss += report.loss;
        self.longest = self.longest.max(report.total);
        self.sum.total += report.total;
        self.sum.forward += report.forward;
        self.sum.backward += report.backward;
        self.sum.communication_wait += report.communication_wait;
        self.sum.input_wait += report.input_wait;
        self.sum.optimizer += report.optimizer;
    }

    fn progress(&self, rank: u32, last: &StepReport, total_steps: u64, tokens_per_step: u64) -> Progress {
        let steps = self.steps as f64;
        let mean = |time: Duration| time.as_secs_f64() * 1e3 / steps;
        Progress {
            rank,
            step: last.step,
            total_steps,
            interval_steps: self.steps,
            loss: self.loss / steps,
            learning_rate: last.learning_rate,
            gradient_norm: last.gradient_norm,
            tokens_per_second: steps * tokens_per_step as f64 / self.sum.total.as_secs_f64(),
            step_ms: mean(self.sum.total),
            max_step_ms: self.longest.as_secs_f64() * 1e3,
            forward_ms: mean(self.sum.forward),
            backward_ms: mean(self.sum.backward),
            communication_wait_ms: mean(self.sum.communication_wait),
            input_wait_ms: mean(self.sum.input_wait),
            optimizer_ms: mean(self.sum.optimizer),
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
