//! Start time estimates of queued jobs, from the running jobs and the queue. The rules are in
//! `plan::cluster::forecast`; this module applies them to the index.

use super::{Index, Waiting};
use crate::job::{JobId, Key};
use crate::usage::HELD;
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_plan::cluster::forecast::{EARLY, Forecast, Held, MOST_AHEAD, Queued, Runs, Scene, Unknown};
use switchyard_plan::cluster::turn::{Basis, Turn};
use switchyard_plan::cluster::waiting_period;

/// Forecasts computed together.
#[derive(Debug)]
pub struct Forecasts {
    at: Timestamp,
    of: BTreeMap<Key, Forecast>,
    /// See `plan::cluster::forecast::EARLY`.
    pub early: i32,
}

impl Default for Forecasts {
    fn default() -> Forecasts {
        Forecasts { at: Timestamp::default(), of: BTreeMap::new(), early: EARLY }
    }
}

impl Index {
    /// When a queued job can start; `None` if it is not queued, or room would not help it. All
    /// forecasts are computed together, and only as often as their statuses may be written. Even
    /// with hundreds of queued jobs their cost is negligible next to the plans.
    pub fn forecast(&mut self, key: &Key, now: Timestamp) -> Option<Forecast> {
        let turn = self.waiting.get(key).filter(|own| is_asked(own))?.turn.clone();
        let ahead = self.ahead_of_turn(&turn).count();
        if ahead >= MOST_AHEAD {
            return Some(Forecast { ahead, window: Err(Unknown::Far) });
        }
        let age = now.duration_since(self.forecasts.at);
        let is_fresh = (SignedDuration::ZERO..waiting_period(self.waiting.len())).contains(&age);
        let made = self.forecasts.of.get(key).filter(|_| is_fresh);
        // The queue may have moved since the forecast was computed, so recompute the position and
        // the reason together.
        if let Some(Forecast { window: Err(Unknown::Ahead { .. }), .. }) = made {
            let without = self.ahead_of_turn(&turn).filter(|key| self.has_no_limit(key)).count();
            if without > 0 {
                return Some(Forecast { ahead, window: Err(Unknown::Ahead { without, all: ahead }) });
            }
        } else if let Some(made) = made {
            return Some(Forecast { ahead, ..*made });
        }
        (self.forecasts.at, self.forecasts.of) = (now, self.forecasts_of_all(now));
        self.forecasts.of.get(key).map(|forecast| Forecast { ahead, ..*forecast })
    }

    /// Queued jobs that come before this turn.
    fn ahead_of_turn(&self, turn: &Turn) -> impl Iterator<Item = &Key> {
        let before = self.waiting.iter().filter(move |(_, other)| is_asked(other) && other.turn < *turn);
        before.map(|(key, _)| key)
    }

    fn has_no_limit(&self, key: &Key) -> bool {
        self.jobs.get(key).is_none_or(|job| job.spec.active_deadline_seconds.is_none())
    }

    fn forecasts_of_all(&self, now: Timestamp) -> BTreeMap<Key, Forecast> {
        let mut waiting: Vec<(&Key, &Waiting)> = self.waiting.iter().filter(|(_, waiting)| is_asked(waiting)).collect();
        waiting.sort_by_key(|(_, waiting)| &waiting.turn);
        waiting.truncate(MOST_AHEAD);
        let queued = waiting.iter().copied().filter_map(|(key, waiting)| {
            let job = self.jobs.get(key)?;
            let limit = job.spec.active_deadline_seconds.map(SignedDuration::from_secs);
            let pods = usize::try_from(job.spec.trainer.num_nodes).ok()?;
            Some((key, Queued { demand: waiting.waits_for.demand()?, pods, limit }))
        });
        let (keys, queue): (Vec<&Key>, Vec<Queued<'_>>) = queued.unzip();
        let names: BTreeMap<&str, usize> =
            self.usage.nodes().keys().enumerate().map(|(at, name)| (name.as_str(), at)).collect();
        let is_held = |taker: &str| taker.starts_with(HELD);
        let nodes = self.reservation.iter().flat_map(|held| &held.nodes).map(|placed| placed.node_name.as_str());
        let held =
            nodes.filter_map(|name| Some((*names.get(name)?, self.usage.node_without(name, is_held)?))).collect();
        let holds = |taker: &String| {
            let share = self.usage.share(taker)?;
            let counted = share.amount.get(GPU_RESOURCE) / 1000;
            let gpus = share.gpus.len().max(usize::try_from(counted).unwrap_or(0)) as u32;
            Some(Held { node: *names.get(share.node.as_str())?, amount: &share.amount, gpus })
        };
        let runs = |id: &JobId| {
            let holds: Vec<Held<'_>> = self.takers_of(id, |_| true).iter().filter_map(holds).collect();
            let status = self.job_of(id).and_then(|job| job.status.as_ref());
            let since = status.and_then(|status| status.placed_time.as_ref().or(status.start_time.as_ref()));
            Runs { holds, since: since.map(|since| since.0), end: self.end_of(id, now) }
        };
        let scene = Scene {
            now,
            nodes: self.usage.nodes().values().collect(),
            held,
            runs: self.families.keys().map(runs).filter(|run| !run.holds.is_empty()).collect(),
            queue,
            early: self.forecasts.early,
        };
        let mut forecasts = scene.forecasts();
        // The nodes reserved for the head also satisfy its levels and links, which the forecast
        // ignores.
        let is_head = |turn: &Turn| waiting.first().is_some_and(|(_, first)| first.turn == *turn);
        let start = self.reservation.as_ref().filter(|held| is_head(&held.turn)).and_then(|held| held.start);
        if let (Some(Forecast { window: Ok(window), .. }), Some((start, Basis::Limits))) =
            (forecasts.first_mut(), start)
        {
            window.latest = window.latest.max(start);
        }
        keys.into_iter().cloned().zip(forecasts).collect()
    }
}

/// Whether the job is queued for room and could get it.
fn is_asked(waiting: &Waiting) -> bool {
    !waiting.hopeless && waiting.waits_for.demand().is_some()
}
