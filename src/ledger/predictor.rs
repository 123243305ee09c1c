//! How long jobs without a limit may run, guessed from those before them. A guess decides who goes first; no job is stopped for it.

use jiff::{SignedDuration, Timestamp};
use std::collections::{BTreeMap, VecDeque};
use switchyard_crds::TrainJob;
use switchyard_plan::job::gpus;

/// What a guess is made of. How much these numbers matter: `cargo xtask bench queue --part constants` plays each at half and twice its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guess {
    /// Jobs whose run times are kept of each kind. If their order says nothing, the next one runs longer than all of 20 in one case of 21,
    /// whatever the run times are like.
    pub kept: usize,
    /// A job that runs has ended in one case of two after so much more of the time that it has run, percent: as much again, by the heavy tails of run
    /// times (the source is with `plan::cluster::forecast`).
    pub again_percent: i32,
    /// A job that has run for less than this may as well end in so much time: start-up and compilation say nothing of how long it runs.
    pub least: SignedDuration,
}

impl Default for Guess {
    fn default() -> Guess {
        Guess { kept: 20, again_percent: 100, least: SignedDuration::from_mins(10) }
    }
}

/// Jobs that are like each other: namespace, pods, GPUs of each pod.
type Likeness = (Option<String>, i32, u32);

/// How long the last jobs of each kind ran.
#[derive(Debug, Default)]
pub struct Predictor {
    guess: Guess,
    past: BTreeMap<Likeness, VecDeque<SignedDuration>>,
}

impl Predictor {
    /// Knows no job yet.
    pub fn new(guess: Guess) -> Predictor {
        Predictor { guess, past: BTreeMap::new() }
    }

    /// A job has ended.
    pub(crate) fn learn(&mut self, job: &TrainJob) {
        let Some(status) = &job.status else { return };
        let (Some(from), Some(to)) = (&status.placed_time, &status.completion_time) else { return };
        let past = self.past.entry(likeness(job)).or_default();
        past.truncate(self.guess.kept - 1);
        past.push_front(to.0.duration_since(from.0));
    }

    /// When a job has ended if it starts now and runs no longer than those before it; `None`: too few are known.
    pub(crate) fn end_of_next(&self, job: &TrainJob, now: Timestamp) -> Option<Timestamp> {
        let past = self.past.get(&likeness(job)).filter(|past| past.len() == self.guess.kept)?;
        now.checked_add(*past.iter().max()?).ok()
    }

    /// When a job that runs has ended in one case of two.
    pub(crate) fn end_of_running(&self, job: &TrainJob, now: Timestamp) -> Option<Timestamp> {
        let since = job.status.as_ref()?.placed_time.as_ref()?.0;
        let again = now.duration_since(since).saturating_mul(self.guess.again_percent) / 100;
        now.checked_add(again.max(self.guess.least)).ok()
    }
}

fn likeness(job: &TrainJob) -> Likeness {
    (job.metadata.namespace.clone(), job.spec.trainer.num_nodes, gpus(job))
}
