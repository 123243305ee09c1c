//! The reservation of the head of the queue, and backfill: which jobs may use it until the head can
//! start.

use super::predictor::Predictor;
use super::preemption::PolicyHead;
use super::room::WithoutJobs;
use crate::index::Index;
use crate::job::{JobId, is_live, placement_of};
use crate::usage::{RESERVED_PREFIX, Usage};
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use switchyard_crds::{PlacedNode, TrainJob};
use switchyard_plan::cluster::clock::{deadline, promised_end};
use switchyard_plan::cluster::queue_order::{Basis, QueuePosition};
use switchyard_plan::cluster::queue_policy::PolicySettings;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{PlacementRequest, gang};

/// The reservation of the head of the queue.
#[derive(Debug)]
pub struct Reservation {
    pub job: JobId,
    pub position: QueuePosition,
    pub nodes: Vec<PlacedNode>,
    /// When the job can start there, provided that limits hold or run times stay the same. `None`
    /// if unknown, or if other jobs are being preempted for it.
    pub start: Option<(Timestamp, Basis)>,
    /// The start time that was first computed.
    pub first_start: Option<Timestamp>,
    /// When the reservation was computed.
    pub at: Timestamp,
    /// Since when the job has held a reservation.
    pub since: Timestamp,
    /// Whether other jobs are being preempted for it.
    pub is_vacated: bool,
    /// Whether resources were released or a limit changed since then.
    pub is_stale: bool,
}

impl Reservation {
    /// Names of the takers that hold its nodes in the usage.
    pub fn takers(&self) -> impl Iterator<Item = String> {
        (0..self.nodes.len()).map(|rank| format!("{RESERVED_PREFIX}{}/{rank}", self.job.uid))
    }

    /// The basis on which a job that starts now ends before the holder can start; `None` if it may
    /// still run then.
    pub fn backfill_basis(&self, job: &TrainJob, now: Timestamp, predictor: Option<&Predictor>) -> Option<Basis> {
        let (start, start_basis) = self.start?;
        // A start promised by limits must not be delayed because of an estimate.
        let is_estimate = start_basis == Basis::RunTimes && self.first_start.is_some_and(|first| now <= first);
        let predictor = || predictor.filter(|_| is_estimate);
        let (end, basis) = end_from(job, now)
            .map(|end| (end, Basis::Limits))
            .or_else(|| Some((predictor()?.end_of_next(job, now)?, Basis::RunTimes)))?;
        (end <= start).then_some(basis)
    }

    /// Whether a job behind the holder may use the nodes because the holder can preempt it: its
    /// quantum ends before the holder can start, that start is unknown, or the start that was
    /// computed first is still ahead. Until then most jobs end by themselves, and the nodes would
    /// be idle. Since no job starts there afterwards, the holder waits for at most one quantum
    /// more.
    pub(super) fn is_open_to_preemptible(&self, job: &TrainJob, now: Timestamp, policy: &PolicySettings) -> bool {
        let ends = now.saturating_add(policy.quantum).unwrap_or(Timestamp::MAX);
        let is_in_time = self.start.is_none_or(|(start, _)| ends <= start);
        let is_early = self.first_start.is_none_or(|first| now < first);
        !self.is_vacated && policy.is_preemptible(job, now) && (is_in_time || is_early)
    }
}

/// Reserved nodes, and when their holder can start there.
pub(super) type PlannedStart = (Vec<PlacedNode>, Option<(Timestamp, Basis)>);

impl Index {
    /// Where and when a job without room can start, once enough running jobs have reached their
    /// limits. `None` if jobs without a limit would have to end too, and there is no estimate for
    /// them.
    pub(super) fn earliest_start(&mut self, request: &PlacementRequest<'_>) -> Option<PlannedStart> {
        self.better_placement(request).or_else(|| self.start_where(request, gang::fits))
    }

    /// Like `earliest_start`, for placements that satisfy `good`.
    pub(super) fn start_where(
        &mut self,
        request: &PlacementRequest<'_>,
        good: impl Fn(&PlacementRequest<'_>, &BTreeMap<String, NodeView>) -> bool,
    ) -> Option<PlannedStart> {
        let now = request.rules.now;
        let head = PolicyHead::of(self, request);
        let makes_way = |id: &JobId| {
            let job = self.job_of(id).filter(|job| placement_of(job).is_some())?;
            Some((head.preempts_from(self, job, &self.queue_position(job), now)?, Basis::Limits))
        };
        let by_policy = self.queue.settings.policy.preempts();
        let mut ending: Vec<(Timestamp, Basis, JobId)> = self
            .job_states
            .keys()
            .filter(|id| **id != JobId::of(&request.job.metadata))
            // A job that ran past its limit can end at any moment.
            .filter_map(|id| {
                let end = self.end_of(id, now).map(|end| (end, Basis::Limits));
                let by_limit = || end.into_iter().chain(by_policy.then(|| makes_way(id)).flatten()).min();
                let estimated =
                    || Some((self.queue.predictor.as_ref()?.end_of_running(self.job_of(id)?, now)?, Basis::RunTimes));
                let (end, basis) = by_limit().or_else(estimated)?;
                Some((end.max(now), basis, id.clone()))
            })
            .collect();
        ending.sort();
        let takers: Vec<Vec<String>> = ending.iter().map(|(.., id)| self.takers_of(id, |_| true)).collect();
        let mut without = WithoutJobs::new(request, &mut self.usage, &takers);
        let enough = without.first(good)?;
        let at = ending[..enough].last().map_or(now, |(end, ..)| *end);
        let basis = ending[..enough].iter().map(|(_, basis, _)| *basis).max().unwrap_or(Basis::Limits);
        without.placement_without(0..enough).map(|nodes| (nodes, Some((at, basis))))
    }

    /// The latest end of a placed job; `None` if unknown, or if the job is not placed.
    pub(super) fn end_of(&self, id: &JobId, now: Timestamp) -> Option<Timestamp> {
        let state = self.job_states.get(id)?;
        let known = state.key.as_ref().and_then(|key| self.jobs.get(key));
        let Some(job) = known.filter(|job| JobId::of(&job.metadata) == *id && is_live(job)) else {
            // The job is over or deleted, and its pods are being deleted.
            return Some(now);
        };
        // A job that was placed a moment ago starts now; the cache does not show its placement yet.
        let is_assumed = placement_of(job).is_none() && state.assumed.is_some();
        if is_assumed { end_from(job, now) } else { promised_end(job) }
    }
}

/// The latest end of a job that is placed, or is placed now.
fn end_from(job: &TrainJob, now: Timestamp) -> Option<Timestamp> {
    let limit = job.spec.active_deadline_seconds.map(SignedDuration::from_secs);
    deadline(job).or_else(|| now.checked_add(limit?).ok())
}

/// Whether all reserved nodes are still usable.
pub(super) fn is_usable(held: &Reservation, usage: &Usage) -> bool {
    let nodes = usage.nodes();
    held.nodes
        .iter()
        .all(|placed| nodes.get(&placed.node_name).is_some_and(|node| node.facts.ready && !node.facts.unschedulable))
}
