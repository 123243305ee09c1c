//! Runs of the job that only measure its steps.

use super::settings::Settings;
use crate::failure::Failure;
use serde::Serialize;
use std::time::Instant;
use switchyard_crds::TrainJob;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_local::{self as local, Observer, RunDir, RunDirError, Update, Worker};
use switchyard_plan::local::Devices;
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::record::{self, StepRecord};

/// Steps that the report keeps apart as well.
const WARM_UPS: u64 = 10;
/// Counted steps of the run that estimates how long others take.
const ESTIMATE: u64 = 10;
/// Fewer say nothing, and more no more.
const LEAST_STEPS: u64 = 10;
const MOST_STEPS: u64 = 2000;

/// The steps of a run with some settings, as rank 0 recorded them. The ranks step together.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Trial {
    #[serde(flatten)]
    pub settings: Settings,
    /// Steps after the warm-up.
    pub steps: u64,
    /// Median step, ms.
    pub step_ms: f64,
    /// 99th percentile.
    pub step_ms_p99: f64,
    /// Mean wait for reductions after the backward pass.
    pub communication_ms: f64,
}

/// Runs trials one after another.
pub(super) struct Bench<'a> {
    pub job: &'a TrainJob,
    pub topology: &'a GPUTopology,
    pub worker: &'a Worker,
    /// Has a run directory for each trial.
    pub run_dir: &'a RunDir,
    pub quiet: bool,
    pub trials: Vec<Trial>,
}

impl Bench<'_> {
    /// The steps of each of `trials` runs that together take about this time.
    pub(super) async fn steps_within(&self, seconds: f64, trials: usize, settings: &Settings) -> Result<u64, Failure> {
        let start = Instant::now();
        let estimate = self.measure("estimate", settings, ESTIMATE).await?;
        let taken = start.elapsed().as_secs_f64();
        let step = estimate.step_ms / 1e3;
        let before = (taken - step * ESTIMATE as f64).max(0.0);
        let each = (seconds - taken) / trials as f64 - before;
        Ok(((each / step.max(1e-6)) as u64).clamp(LEAST_STEPS, MOST_STEPS))
    }

    /// Runs a trial; returns its position.
    pub(super) async fn run(&mut self, settings: &Settings, steps: u64) -> Result<usize, Failure> {
        let number = self.trials.len() + 1;
        let trial = self.measure(&format!("trial-{number}"), settings, steps).await?;
        if !self.quiet {
            let [threads, communicators, bucket] = settings.words();
            eprintln!(
                "trial {number}: {:.3} ms a step with cpuThreads {threads}, communicators {communicators}, bucketSizeMiB {bucket}",
                trial.step_ms
            );
        }
        self.trials.push(trial);
        Ok(number - 1)
    }

    async fn measure(&self, name: &str, settings: &Settings, steps: u64) -> Result<Trial, Failure> {
        let job = shortened(self.job, settings, WARM_UPS + steps);
        let run_dir = RunDir::existing(&self.run_dir.path().join(name));
        let devices = Devices::default();
        let ended = local::run(job, devices, self.topology, None, &run_dir, self.worker, &mut Silent).await?;
        if ended.exit != Exit::Done {
            let cause = ended.cause.map_or_else(String::new, |cause| format!(": rank {}: {}", cause.rank, cause.cause));
            let message = format!("{name}: {}{cause}; logs in {}", ended.exit.meaning(), run_dir.short());
            return Err(Failure::new(message, ended.exit));
        }
        // Nobody needs the model of so few steps.
        let _ = std::fs::remove_file(run_dir.path().join("model.safetensors"));
        let path = run_dir.path().join(record::DIR).join(record::steps_file(0));
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Failure::unexpected(format!("cannot read {}: {error}", path.display())))?;
        let counted = text.lines().filter_map(|line| serde_json::from_str::<StepRecord>(line).ok());
        let counted: Vec<StepRecord> = counted.filter(|step| step.step > WARM_UPS).collect();
        if counted.is_empty() {
            return Err(Failure::unexpected(format!("{}: no step was recorded", path.display())));
        }
        let mut times: Vec<f64> = counted.iter().map(|step| f64::from(step.total_ms)).collect();
        times.sort_by(f64::total_cmp);
        let waits: f64 = counted.iter().map(|step| f64::from(step.communication_ms + step.gather_ms)).sum();
        Ok(Trial {
            settings: settings.clone(),
            steps,
            step_ms: times[times.len() / 2],
            step_ms_p99: times[(times.len() * 99 / 100).min(times.len() - 1)],
            communication_ms: waits / counted.len() as f64,
        })
    }
}

/// The job with few steps and without what happens between them.
fn shortened(job: &TrainJob, settings: &Settings, steps: u64) -> TrainJob {
    let mut job = job.clone();
    settings.apply(&mut job);
    job.spec.checkpoint = None;
    job.spec.failure_policy.max_restarts = 0;
    if let Some(engine) = &mut job.spec.engine {
        (engine.steps, engine.epochs) = (i64::try_from(steps).ok(), None);
        // Its rates do not matter, and its warm-up can be longer than the trial.
        engine.schedule = None;
        engine.profile = None;
        engine.evaluation.every_steps = 0;
        engine.evaluation.batches = k8s_openapi::apimachinery::pkg::util::intstr::IntOrString::Int(1);
    }
    job
}

struct Silent;

impl Observer for Silent {
    fn observe(&mut self, _: Update<'_>) -> Result<(), RunDirError> {
        Ok(())
    }
}
