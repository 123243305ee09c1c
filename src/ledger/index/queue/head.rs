//! The head of the queue: it reserves nodes, and may preempt jobs.

use super::preemption::PreemptionPlan;
use super::reservation::{PlannedStart, Reservation, is_usable};
use crate::index::Index;
use crate::job::{JobId, Key, key_of};
use crate::usage::UsageOverlay;
use std::collections::BTreeSet;
use switchyard_crds::{PlacedNode, TrainJob};
use switchyard_plan::cluster::queue_order::QueuePosition;
use switchyard_plan::cluster::reserve::reserve;
use switchyard_plan::cluster::{PlacementRequest, PlacementRules};

impl Index {
    /// The first job of the queue that could be placed: neither hopeless nor in its cooldown.
    pub fn head(&self) -> Option<Key> {
        let open =
            self.queue.entries.iter().filter(|(key, entry)| !entry.hopeless && !self.queue.cooldowns.contains_key(key));
        open.min_by_key(|(_, entry)| &entry.position).map(|(key, _)| key.clone())
    }

    /// Reserves nodes for the head of the queue. Returns the jobs that it preempts, and the nodes
    /// that other jobs can use now.
    pub(super) fn reserve_for_head(
        &mut self,
        request: &PlacementRequest<'_>,
        position: &QueuePosition,
    ) -> (Vec<Key>, BTreeSet<String>) {
        let id = JobId::of(&request.job.metadata);
        let ignorable = self.ignorable_takers(request.job, request.rules.now);
        let mut overlay = UsageOverlay::new(self, &ignorable);
        // Reserve the nodes that the victims free, because the victims would otherwise be first to
        // retake them.
        let (victims, reserved, is_vacated) = match overlay.plan_preemption(request, position) {
            Some(PreemptionPlan { victims, nodes }) => (victims, Some(Some((nodes, None))), true),
            None => (Vec::new(), overlay.choose_reservation(&id, request), false),
        };
        drop(overlay);
        let freed = match reserved {
            None => BTreeSet::new(),
            Some(None) => {
                let key = key_of(&request.job.metadata);
                if let Some(entry) = self.queue.entries.get_mut(&key) {
                    entry.hopeless = true;
                }
                self.release(&id)
            }
            Some(Some(start)) => {
                let freed = self.reserve(start, position.clone(), request);
                if let Some(held) = &mut self.queue.reservation {
                    held.is_vacated = is_vacated;
                }
                freed
            }
        };
        (victims, freed)
    }

    /// The reservation that a queued job should hold now, and its start time. `None` keeps the
    /// current reservation, which is usable and not stale; `Some(None)` if no set of nodes would
    /// do. A start by preemption is overdue if preemptible jobs took the nodes meanwhile.
    fn choose_reservation(&mut self, id: &JobId, request: &PlacementRequest<'_>) -> Option<Option<PlannedStart>> {
        let held = self.queue.reservation.as_ref().filter(|held| held.job == *id && is_usable(held, &self.usage));
        let now = request.rules.now;
        let is_overdue = |held: &Reservation| {
            self.queue.settings.policy.preempts() && held.start.is_some_and(|(start, _)| start <= now)
        };
        if held.is_some_and(|held| !held.is_stale && !is_overdue(held)) {
            return None;
        }
        let nodes = held.map(|held| held.nodes.clone()).unwrap_or_default();
        let first = self.earliest_start(request);
        Some(first.or_else(|| reserve(request, self.usage.nodes(), &nodes).map(|nodes| (nodes, None))))
    }

    /// Recomputes a stale reservation before a job behind its holder is planned, because that job
    /// could take nodes on which the holder can start now. Returns the jobs to reconcile.
    pub(super) fn refresh_reservation(&mut self, job: &TrainJob, rules: PlacementRules<'_>) -> BTreeSet<Key> {
        let mut others = self.expire_reservation(rules.now);
        if let Some(head) = self.reorder(rules.now) {
            // The job being planned was the head until now, and would otherwise overtake the new
            // head.
            others.extend(self.reserve_for(&head, rules));
            others.insert(head);
        }
        let is_ahead =
            |held: &&Reservation| held.job != JobId::of(&job.metadata) && held.position < self.queue_position(job);
        let held = self.queue.reservation.as_ref().filter(|held| held.is_stale).filter(is_ahead);
        let holder = held.and_then(|held| self.job_of(&held.job)).map(|holder| key_of(&holder.metadata));
        // If another job has become the head, reserving nodes is up to that job.
        if let Some(holder) = holder.filter(|holder| self.head().as_ref() == Some(holder)) {
            others.extend(self.reserve_for(&holder, rules));
        }
        others
    }

    /// Reserves nodes for the head of the queue. Returns the other jobs to reconcile.
    fn reserve_for(&mut self, head: &Key, rules: PlacementRules<'_>) -> BTreeSet<Key> {
        let Some(holder) = self.jobs.get(head).cloned() else { return BTreeSet::new() };
        let position = self.queue_position(&holder);
        let reserve = |index: &mut Index, request: &PlacementRequest<'_>| index.reserve_for_head(request, &position);
        let (victims, freed) = self.with_request(&holder, rules, reserve).unwrap_or_default();
        let mut others = self.jobs_to_reconcile(head, Some(head.clone()), &freed);
        others.extend(victims);
        others
    }

    /// Releases the reservation of a job. Returns its nodes.
    pub(super) fn release(&mut self, job: &JobId) -> BTreeSet<String> {
        self.unreserve(|held| held.job == *job)
    }

    pub(super) fn unreserve(&mut self, which: impl FnOnce(&mut Reservation) -> bool) -> BTreeSet<String> {
        let Some(held) = self.queue.reservation.take_if(which) else { return BTreeSet::new() };
        let holder = self.job_of(&held.job).map(|job| (key_of(&job.metadata), self.queue_position(job)));
        if let Some((entry, position)) =
            holder.and_then(|(key, position)| Some((self.queue.entries.get_mut(&key)?, position)))
        {
            entry.position = position;
        }
        held.takers().filter_map(|taker| self.usage.set_share(&taker, None)).collect()
    }

    /// Replaces the reservation. Returns the nodes that other jobs can use now: those released, and
    /// all reserved ones if their holder starts later than expected.
    fn reserve(
        &mut self,
        (nodes, start): PlannedStart,
        position: QueuePosition,
        request: &PlacementRequest<'_>,
    ) -> BTreeSet<String> {
        let job = JobId::of(&request.job.metadata);
        let before = self.queue.reservation.as_ref().and_then(|held| held.start).map(|(at, _)| at);
        let previous = self.queue.reservation.as_ref().filter(|held| held.job == job);
        let new_start = start.map(|(at, _)| at);
        let (first_start, since) =
            (previous.and_then(|held| held.first_start).or(new_start), previous.map(|held| held.since));
        let since = since.or_else(|| self.take_held_since(&job));
        let mut freed = self.unreserve(|_| true);
        let position = position.with_reservation();
        if let Some(entry) = self.queue.entries.get_mut(&key_of(&request.job.metadata)) {
            entry.position.clone_from(&position);
        }
        let at = request.rules.now;
        let next = Reservation {
            job,
            position,
            nodes,
            start,
            first_start,
            at,
            since: since.unwrap_or(at),
            is_vacated: false,
            is_stale: false,
        };
        self.hold(request, next.takers(), &next.nodes);
        for PlacedNode { node_name, .. } in &next.nodes {
            if new_start > before {
                freed.insert(node_name.clone())
            } else {
                freed.remove(node_name)
            };
        }
        self.queue.reservation = Some(next);
        freed
    }
}
