//! Placement delay: a gang that could start on a poor placement waits for a better one.
//!
//! A placement is poor if it has at most half the bandwidth of the best one in the empty cluster.
//! Only the first job of the queue waits, only if the limits of running jobs promise a better
//! placement, and only for a fraction of its own limit. Meanwhile it reserves the better placement,
//! and jobs behind it use the poor one. No program enables this until it has been evaluated on
//! traces in both speed models (`cargo xtask bench queue`, part `patience`).

use super::Index;
use super::reservation::Place;
use crate::job::{Key, key_of};
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::{PlacementStatus, TrainJob};
use switchyard_plan::cluster::find::find;
use switchyard_plan::cluster::{PlacementRules, Question};
use switchyard_plan::resources::bytes_per_second;

/// Upper bound on the placement delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Percentage of the job's limit. At half the bandwidth, a job that communicates for a fifth of
    /// its time takes a fifth longer, and jobs run for about half of their limit. The better
    /// placement therefore gains a tenth of the limit.
    pub percent_of_limit: i32,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { percent_of_limit: 10 }
    }
}

fn is_poor(placement: &PlacementStatus) -> bool {
    let rates = [&placement.predicted_bus_bandwidth, &placement.best_possible];
    matches!(rates.map(|rate| rate.as_ref().and_then(bytes_per_second)), [Some(is), Some(best)] if is * 2.0 <= best)
}

impl Index {
    /// Whether a job should wait for a better placement than this one.
    pub fn waits_for_better(&mut self, key: &Key, placement: &PlacementStatus, rules: PlacementRules<'_>) -> bool {
        let Some(job) = self.jobs.get(key).filter(|_| self.patience.is_some() && is_poor(placement)).cloned() else {
            return false;
        };
        let turn = self.turn(&job);
        let is_ahead =
            |(other, waiting): (&Key, &super::Waiting)| other != key && !waiting.hopeless && waiting.turn < turn;
        if self.waiting.iter().any(is_ahead) {
            return false;
        }
        self.could_begin.entry(key.clone()).or_insert(rules.now);
        self.asked(&job, rules, |index, question| index.better_start(question)).flatten().is_some()
    }

    /// The end of the placement delay of a job that could already have started.
    fn patient_until(&self, job: &TrainJob) -> Option<Timestamp> {
        let since = self.could_begin.get(&key_of(&job.metadata))?;
        let limit = SignedDuration::from_secs(job.spec.active_deadline_seconds?);
        since.checked_add(limit.saturating_mul(self.patience?.percent_of_limit) / 100).ok()
    }

    /// A placement that is not poor, and when it becomes free according to the limits of running
    /// jobs, if that is before the placement delay ends.
    pub(super) fn better_start(&mut self, question: &Question<'_>) -> Option<Place> {
        let until = self.patient_until(question.job).filter(|until| question.rules.now < *until)?;
        let good = |question: &Question<'_>, nodes: &_| {
            find(question, nodes).is_ok_and(|found| !is_poor(&found.placed.status))
        };
        self.start_where(question, good).filter(|(_, start)| start.is_some_and(|(at, _)| at <= until))
    }
}
