//! Placement delay: a gang that could start on a poor placement waits for a better one.
//!
//! A placement is poor if it has at most half the bandwidth of the best one in the empty cluster.
//! Only the first job of the queue waits, only if the limits of running jobs promise a better
//! placement, and only for a fraction of its own limit. Meanwhile it reserves the better placement,
//! and jobs behind it use the poor one. No program enables this until it has been evaluated on
//! traces in both speed models (`cargo xtask bench queue`, part `patience`).

use super::reservation::PlannedStart;
use crate::index::Index;
use crate::job::{Key, key_of};
use crate::usage::UsageOverlay;
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::{PlacementStatus, TrainJob};
use switchyard_plan::cluster::place_with_fabric::place_with_fabric;
use switchyard_plan::cluster::{PlacementRequest, PlacementRules};
use switchyard_plan::resources::bytes_per_second;

/// Upper bound on the placement delay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementDelay {
    /// Percentage of the job's limit. At half the bandwidth, a job that communicates for a fifth of
    /// its time takes a fifth longer, and jobs run for about half of their limit. The better
    /// placement therefore gains a tenth of the limit.
    pub percent_of_limit: i32,
}

impl Default for PlacementDelay {
    fn default() -> PlacementDelay {
        PlacementDelay { percent_of_limit: 10 }
    }
}

fn is_poor(placement: &PlacementStatus) -> bool {
    let rates = [&placement.predicted_bus_bandwidth, &placement.best_possible];
    matches!(rates.map(|rate| rate.as_ref().and_then(bytes_per_second)), [Some(is), Some(best)] if is * 2.0 <= best)
}

impl Index {
    /// Whether a job should wait for a better placement than this one.
    pub fn should_delay(&mut self, key: &Key, placement: &PlacementStatus, rules: PlacementRules<'_>) -> bool {
        let Some(job) =
            self.jobs.get(key).filter(|_| self.queue.settings.placement_delay.is_some() && is_poor(placement)).cloned()
        else {
            return false;
        };
        let position = self.queue_position(&job);
        let is_ahead = |(other, entry): (&Key, &super::entries::QueueEntry)| {
            other != key && !entry.hopeless && entry.position < position
        };
        if self.queue.entries.iter().any(is_ahead) {
            return false;
        }
        self.queue.startable_since.entry(key.clone()).or_insert(rules.now);
        // The job may already hold the better placement.
        let ignorable = self.ignorable_takers(&job, rules.now);
        let mut without = UsageOverlay::new(self, &ignorable);
        without.with_request(&job, rules, |index, request| index.better_placement(request)).flatten().is_some()
    }

    /// The end of the placement delay of a job that could already have started.
    fn delay_ends(&self, job: &TrainJob) -> Option<Timestamp> {
        let since = self.queue.startable_since.get(&key_of(&job.metadata))?;
        let limit = SignedDuration::from_secs(job.spec.active_deadline_seconds?);
        since.checked_add(limit.saturating_mul(self.queue.settings.placement_delay?.percent_of_limit) / 100).ok()
    }

    /// A placement that is not poor, and when it becomes free according to the limits of running
    /// jobs, if that is before the placement delay ends.
    pub(super) fn better_placement(&mut self, request: &PlacementRequest<'_>) -> Option<PlannedStart> {
        let until = self.delay_ends(request.job).filter(|until| request.rules.now < *until)?;
        let good = |request: &PlacementRequest<'_>, nodes: &_| {
            place_with_fabric(request, nodes).is_ok_and(|found| !is_poor(&found.placed.status))
        };
        self.start_where(request, good).filter(|(_, start)| start.is_some_and(|(at, _)| at <= until))
    }
}
