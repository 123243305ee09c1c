//! Run time estimates for jobs without a limit, from the run times of earlier jobs. An estimate
//! only affects which job starts first; no job is stopped because of it.

use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, VecDeque};
use switchyard_crds::TrainJob;
use switchyard_plan::job::{pods, total_gpus};

/// Parameters of the estimates. `cargo xtask bench queue --part constants` measures the effect of
/// halving and doubling each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PredictorSettings {
    /// Number of run times kept per kind of job. If run times are independent of their order, the
    /// next job outlasts all of 20 with probability 1/21, whatever their distribution.
    pub samples: usize,
    /// Median remaining run time of a running job, in percent of its elapsed time. 100 because run
    /// times are heavy-tailed (see `plan::cluster::forecast` for the source).
    pub remaining_percent: i32,
    /// Lower bound on the remaining run time, because start-up and compilation say nothing about
    /// the total.
    pub min_remaining: SignedDuration,
}

impl Default for PredictorSettings {
    fn default() -> PredictorSettings {
        PredictorSettings { samples: 20, remaining_percent: 100, min_remaining: SignedDuration::from_mins(10) }
    }
}

/// Jobs considered alike: same namespace, number of pods, and GPUs.
type JobKind = (Option<String>, i32, u64);

/// Run times of the last jobs of each kind.
#[derive(Debug, Default)]
pub struct Predictor {
    settings: PredictorSettings,
    past: BTreeMap<JobKind, VecDeque<SignedDuration>>,
}

impl Predictor {
    /// Starts without any run times.
    pub fn new(settings: PredictorSettings) -> Predictor {
        Predictor { settings, past: BTreeMap::new() }
    }

    /// Adds the run time of a job that has ended.
    pub(crate) fn learn(&mut self, job: &TrainJob) {
        let Some(status) = &job.status else { return };
        let (Some(from), Some(to)) = (&status.placed_time, &status.completion_time) else { return };
        let past = self.past.entry(job_kind(job)).or_default();
        past.truncate(self.settings.samples - 1);
        past.push_front(to.0.duration_since(from.0));
    }

    /// Estimated end of a job if it starts now and runs no longer than the earlier ones; `None` if
    /// too few are known.
    pub(crate) fn end_of_next(&self, job: &TrainJob, now: Timestamp) -> Option<Timestamp> {
        let past = self.past.get(&job_kind(job)).filter(|past| past.len() == self.settings.samples)?;
        now.checked_add(*past.iter().max()?).ok()
    }

    /// Median estimate of when a running job ends.
    pub(crate) fn end_of_running(&self, job: &TrainJob, now: Timestamp) -> Option<Timestamp> {
        let since = job.status.as_ref()?.placed_time.as_ref()?.0;
        let remaining = now.duration_since(since).saturating_mul(self.settings.remaining_percent) / 100;
        now.checked_add(remaining.max(self.settings.min_remaining)).ok()
    }
}

fn job_kind(job: &TrainJob) -> JobKind {
    (job.metadata.namespace.clone(), pods(job), total_gpus(job))
}
