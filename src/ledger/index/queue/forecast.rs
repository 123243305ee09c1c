//! Start time estimates of queued jobs, from the running jobs and the queue. The rules are in
//! `plan::cluster::forecast`; this module applies them to the index.

use super::entries::QueueEntry;
use crate::index::Index;
use crate::job::{JobId, Key};
use crate::usage::RESERVED_PREFIX;
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_plan::cluster::forecast::{
    Forecast, ForecastInput, HeldResources, MAX_AHEAD, QueuedJob, RunningJob, Unknown,
};
use switchyard_plan::cluster::queue_order::{Basis, QueuePosition};
use switchyard_plan::cluster::waiting_period;

/// Forecasts computed together.
#[derive(Debug, Default)]
pub(super) struct Forecasts {
    at: Timestamp,
    by_job: BTreeMap<Key, Forecast>,
}

impl Index {
    /// When a queued job can start; `None` if it is not queued, or room would not help it. All
    /// forecasts are computed together, and only as often as their statuses may be written. Even
    /// with hundreds of queued jobs their cost is negligible next to the plans.
    pub fn forecast(&mut self, key: &Key, now: Timestamp) -> Option<Forecast> {
        let position = self.queue.entries.get(key).filter(|entry| can_get_room(entry))?.position.clone();
        let ahead = self.ahead_of_position(&position).count();
        if ahead >= MAX_AHEAD {
            return Some(Forecast { ahead, window: Err(Unknown::Far) });
        }
        let age = now.duration_since(self.queue.forecasts.at);
        let is_fresh = (SignedDuration::ZERO..waiting_period(self.queue.entries.len())).contains(&age);
        let cached = self.queue.forecasts.by_job.get(key).filter(|_| is_fresh);
        // The queue may have moved since the forecast was computed, so recompute the position and
        // the reason together.
        if let Some(Forecast { window: Err(Unknown::Ahead { .. }), .. }) = cached {
            let without = self.ahead_of_position(&position).filter(|key| self.has_no_limit(key)).count();
            if without > 0 {
                return Some(Forecast { ahead, window: Err(Unknown::Ahead { without, all: ahead }) });
            }
        } else if let Some(cached) = cached {
            return Some(Forecast { ahead, ..*cached });
        }
        (self.queue.forecasts.at, self.queue.forecasts.by_job) = (now, self.compute_forecasts(now));
        self.queue.forecasts.by_job.get(key).map(|forecast| Forecast { ahead, ..*forecast })
    }

    /// Queued jobs that are ahead of this position.
    fn ahead_of_position(&self, position: &QueuePosition) -> impl Iterator<Item = &Key> {
        let before =
            self.queue.entries.iter().filter(move |(_, other)| can_get_room(other) && other.position < *position);
        before.map(|(key, _)| key)
    }

    fn has_no_limit(&self, key: &Key) -> bool {
        self.jobs.get(key).is_none_or(|job| job.spec.active_deadline_seconds.is_none())
    }

    fn compute_forecasts(&self, now: Timestamp) -> BTreeMap<Key, Forecast> {
        let mut waiting: Vec<(&Key, &QueueEntry)> =
            self.queue.entries.iter().filter(|(_, entry)| can_get_room(entry)).collect();
        waiting.sort_by_key(|(_, entry)| &entry.position);
        waiting.truncate(MAX_AHEAD);
        let queued = waiting.iter().copied().filter_map(|(key, entry)| {
            let job = self.jobs.get(key)?;
            let limit = job.spec.active_deadline_seconds.map(SignedDuration::from_secs);
            let pods = usize::try_from(job.spec.trainer.num_nodes).ok()?;
            Some((key, QueuedJob { demand: entry.wake_condition.demand()?, pods, limit }))
        });
        let (keys, queue): (Vec<&Key>, Vec<QueuedJob<'_>>) = queued.unzip();
        let names: BTreeMap<&str, usize> =
            self.usage.nodes().keys().enumerate().map(|(at, name)| (name.as_str(), at)).collect();
        let is_held = |taker: &str| taker.starts_with(RESERVED_PREFIX);
        let nodes = self.queue.reservation.iter().flat_map(|held| &held.nodes).map(|placed| placed.node_name.as_str());
        let reserved =
            nodes.filter_map(|name| Some((*names.get(name)?, self.usage.node_without(name, is_held)?))).collect();
        let held_resources = |taker: &String| {
            let share = self.usage.share(taker)?;
            let counted = share.amount.get(GPU_RESOURCE) / 1000;
            let gpus = share.gpus.len().max(usize::try_from(counted).unwrap_or(0)) as u32;
            Some(HeldResources { node: *names.get(share.node.as_str())?, amount: &share.amount, gpus })
        };
        let running_job = |id: &JobId| {
            let held: Vec<HeldResources<'_>> = self.takers_of(id, |_| true).iter().filter_map(held_resources).collect();
            let status = self.job_of(id).and_then(|job| job.status.as_ref());
            let since = status.and_then(|status| status.placed_time.as_ref().or(status.start_time.as_ref()));
            RunningJob { held, since: since.map(|since| since.0), end: self.end_of(id, now) }
        };
        let input = ForecastInput {
            now,
            nodes: self.usage.nodes().values().collect(),
            reserved,
            running_jobs: self
                .job_states
                .keys()
                .map(running_job)
                .filter(|job: &RunningJob<'_>| !job.held.is_empty())
                .collect(),
            queue,
            early: self.queue.settings.early,
        };
        let mut forecasts = input.forecasts();
        // The nodes reserved for the head also satisfy its levels and links, which the forecast
        // ignores.
        let is_head = |position: &QueuePosition| waiting.first().is_some_and(|(_, first)| first.position == *position);
        let start = self.queue.reservation.as_ref().filter(|held| is_head(&held.position)).and_then(|held| held.start);
        if let (Some(Forecast { window: Ok(window), .. }), Some((start, Basis::Limits))) =
            (forecasts.first_mut(), start)
        {
            window.latest = window.latest.max(start);
        }
        keys.into_iter().cloned().zip(forecasts).collect()
    }
}

/// Whether the job is queued for room and could get it.
fn can_get_room(entry: &QueueEntry) -> bool {
    !entry.hopeless && entry.wake_condition.demand().is_some()
}
