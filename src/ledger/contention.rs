//! Jobs that compete for nodes: the head of the queue, its reservation, and preemption. The rules
//! are in `plan::cluster::queue_order`; this module applies them to the index.

use crate::devices::taker;
use crate::index::{Index, PlannedStart, QueueEntry, Reservation, WakeCondition, is_usable};
use crate::job::{JobId, Key, attempt_of, is_live, key_of, placement_of};
use crate::usage::{RESTART_PREFIX, Share, Usage, UsageOverlay};
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::{PlacedNode, Preemption, TrainJob, conditions};
use switchyard_plan::cluster::admitted::Admitted;
use switchyard_plan::cluster::avoidance;
use switchyard_plan::cluster::clock::exceeds_placed_limit;
use switchyard_plan::cluster::ownership;
use switchyard_plan::cluster::place_with_fabric::place_with_fabric;
use switchyard_plan::cluster::queue_order::{self, Basis, JobAhead, PreemptionOrder, QueuePosition};
use switchyard_plan::cluster::reserve::reserve;
use switchyard_plan::cluster::{Avoided, Demand, PlacementRequest, PlacementRules, WaitReason};
use switchyard_plan::objects::Kind;
use switchyard_plan::{self as plan, ValidJob};

/// Preemption victims, and the nodes that the preempting job would get.
pub struct PreemptionPlan {
    pub victims: Vec<Key>,
    nodes: Vec<PlacedNode>,
}

/// The nodes a job would get if the shares of these takers were free.
fn place_without_takers(
    request: &PlacementRequest<'_>,
    usage: &mut Usage,
    takers: &[String],
) -> Option<Vec<PlacedNode>> {
    let overlay = UsageOverlay::new(usage, takers);
    place_with_fabric(request, overlay.nodes()).ok().map(|found| found.placed.status.nodes)
}

impl Index {
    pub fn queue_position(&self, job: &TrainJob) -> QueuePosition {
        let state = self.job_states.get(&JobId::of(&job.metadata));
        let priority = state.and_then(|state| state.pods.values().map(|pod| pod.priority).max()).unwrap_or(0);
        let namespace = job.metadata.namespace.as_deref().unwrap_or_default();
        let share = self.fairness.as_ref().map_or(0, |fairness| fairness.share(namespace));
        let position = QueuePosition::of(job, priority, share, self.slowdown);
        let position =
            if self.refusals.is_demoted(namespace, self.slowdown.at) { position.demoted() } else { position };
        let holds = self.reservation.as_ref().is_some_and(|held| held.job == JobId::of(&job.metadata));
        if holds { position.with_reservation() } else { position }
    }

    pub(crate) fn job_of(&self, id: &JobId) -> Option<&TrainJob> {
        let key = self.job_states.get(id)?.key.as_ref()?;
        self.jobs.get(key).map(|job| &**job).filter(|job| JobId::of(&job.metadata) == *id)
    }

    /// UIDs of the job's pods in the attempts that `is_of` selects, and the takers of their
    /// resource claims.
    pub fn takers_of(&self, job: &JobId, is_of: impl Fn(u32) -> bool) -> Vec<String> {
        let Some(state) = self.job_states.get(job) else { return Vec::new() };
        let pods = state.pods.values().filter(|pod| is_of(pod.attempt));
        // A claim is named after its pod, and keeps its devices for a while after the pod is gone.
        let is_named = |name: &str| ownership::position(name).is_some_and(|(attempt, _)| is_of(attempt));
        let is_theirs = |(kind, name): &(Kind, String)| *kind == Kind::ResourceClaim && is_named(name);
        let claims = state.objects.iter().filter(|(object, _)| is_theirs(object));
        pods.map(|pod| pod.uid.clone()).chain(claims.map(|(_, claim)| taker(&claim.uid))).collect()
    }

    /// Shares that a job may ignore: its own from earlier attempts that it is about to release, the
    /// held GPUs of its own and of lower-priority jobs, and the reservation of the head of the
    /// queue if that job is behind it or can only start after this one ends.
    pub fn ignorable_takers(&self, job: &TrainJob, now: Timestamp) -> Vec<String> {
        let id = &JobId::of(&job.metadata);
        let position = self.queue_position(job);
        let mut takers = Vec::new();
        if placement_of(job).is_none() && job.status.as_ref().is_some_and(|status| status.placement.is_some()) {
            let attempt = attempt_of(job);
            takers.extend(self.takers_of(id, |of| of < attempt));
        }
        for (other, restart_holds) in &self.restart_holds {
            let is_lower = || {
                let other = self.job_of(other).map(|job| self.queue_position(job));
                !position.is_demoted() && other.is_some_and(|other| other.priority() < position.priority())
            };
            if other == id || is_lower() {
                takers.extend(restart_holds.iter().cloned());
            }
        }
        if let Some(held) = &self.reservation {
            let is_free = held.job == *id || position < held.position || self.backfill_basis(held, job, now).is_some();
            // Only a job of higher priority may take the nodes of a restarting gang.
            let can_keep_nodes = self.restart_holds.contains_key(id) && held.position.priority() <= position.priority();
            let own = job.status.as_ref().and_then(|status| status.placement.as_ref()).filter(|_| can_keep_nodes);
            let own: Vec<&str> = own.iter().flat_map(|own| &own.nodes).map(|node| node.node_name.as_str()).collect();
            let nodes = held.nodes.iter().map(|node| node.node_name.as_str());
            takers.extend(held.takers().zip(nodes).filter(|(_, node)| is_free || own.contains(node)).map(|(t, _)| t));
        }
        takers
    }

    /// The job ahead of this one that holds a reservation.
    pub fn job_ahead(&self, job: &TrainJob, now: Timestamp) -> Option<JobAhead> {
        let id = JobId::of(&job.metadata);
        let held =
            self.reservation.as_ref().filter(|held| held.job != id && held.position < self.queue_position(job))?;
        Some(JobAhead {
            name: self.name_for(job, &held.position),
            nodes: held.nodes.iter().map(|node| node.node_name.clone()).collect(),
            start: held.start,
            ends_before: self.backfill_basis(held, job, now),
        })
    }

    fn backfill_basis(&self, held: &Reservation, job: &TrainJob, now: Timestamp) -> Option<Basis> {
        held.backfill_basis(job, now, self.predictor.as_ref())
    }

    /// Holds the GPUs of a restarting gang on its nodes until planning shows that it cannot be
    /// placed. Returns the nodes on which it released some.
    pub fn update_restart_hold(&mut self, id: &JobId) -> BTreeSet<String> {
        let wanted = self.job_of(id).filter(|job| is_live(job) && !job.spec.suspend).and_then(|job| {
            let status = job.status.as_ref()?;
            let placed = status.condition(conditions::PLACED)?;
            let restarts = placed.status == "False" && placed.reason == conditions::RESTARTING;
            status.placement.clone().filter(|_| restarts)
        });
        let nodes = wanted.map(|placement| placement.nodes).unwrap_or_default();
        let next: Vec<String> = (0..nodes.len()).map(|rank| format!("{RESTART_PREFIX}{}/{rank}", id.uid)).collect();
        let mut freed = BTreeSet::new();
        for gone in self.restart_holds.remove(id).into_iter().flatten().skip(next.len()) {
            freed.extend(self.usage.set_share(&gone, None));
        }
        for (taker, PlacedNode { node_name, gpus, .. }) in next.iter().zip(nodes) {
            freed.extend(self.usage.set_share(taker, Some(Share { node: node_name, gpus, ..Share::default() })));
        }
        if !next.is_empty() {
            self.restart_holds.insert(id.clone(), next);
        }
        freed
    }

    /// A job was placed, or left the queue: releases its reservation. Returns the other jobs to
    /// reconcile.
    pub fn leave_queue(&mut self, key: &Key, job: &JobId) -> BTreeSet<Key> {
        let head = self.head();
        self.startable_since.remove(key);
        self.cooldowns.remove(key);
        if self.queue.remove(key).is_none() {
            return BTreeSet::new();
        }
        let freed = self.release(job);
        self.jobs_to_reconcile(key, head, &freed)
    }

    /// The other jobs to reconcile after a queued job was planned: those that can use the nodes it
    /// freed, and a new head of the queue.
    pub(crate) fn jobs_to_reconcile(
        &mut self,
        key: &Key,
        head: Option<Key>,
        freed: &BTreeSet<String>,
    ) -> BTreeSet<Key> {
        let mut others = self.jobs_helped_by(freed);
        others.extend(self.head().filter(|now| Some(now) != head.as_ref()));
        others.remove(key);
        others
    }

    /// Nodes that a job avoids because of its own failures there, or those of other jobs.
    pub fn avoided_nodes(&self, job: &JobId, now: Timestamp) -> BTreeMap<String, Avoided> {
        let status = self.job_of(job).and_then(|job| job.status.as_ref());
        let mut avoided_nodes =
            status.map(|status| avoidance::avoided(status, self.usage.nodes(), now)).unwrap_or_default();
        for (node, avoided) in self.incidents.avoided(job, self.usage.nodes(), now) {
            if !avoided.is_last_resort || !avoided_nodes.contains_key(&node) {
                avoided_nodes.insert(node, avoided);
            }
        }
        avoided_nodes
    }

    /// The earliest time at which one of the avoided nodes becomes usable again.
    pub fn avoidance_ends(&self, job: &JobId, now: Timestamp) -> Option<Timestamp> {
        let own = self.job_of(job).and_then(|job| avoidance::next(job.status.as_ref()?, now));
        own.into_iter().chain(self.incidents.next(self.usage.nodes(), now)).min()
    }

    /// The resource requests of the pods of the job's current attempt.
    pub fn admitted(&self, job: &TrainJob, valid: &ValidJob) -> Admitted {
        let attempt = attempt_of(job);
        let state = self.job_states.get(&JobId::of(&job.metadata));
        let pods = state.into_iter().flat_map(|state| state.pods.values()).filter(|pod| pod.attempt == attempt);
        Admitted::of(valid, job.status.as_ref(), pods)
    }

    /// A job found no placement and enters the queue. Returns the jobs to reconcile.
    pub fn enqueue(&mut self, key: &Key, reason: WaitReason, rules: PlacementRules<'_>) -> BTreeSet<Key> {
        let head = self.head();
        let Some(job) = self.jobs.get(key).cloned() else { return BTreeSet::new() };
        let position = self.queue_position(&job);
        let hopeless = reason == WaitReason::Fabric;
        let version = job.metadata.resource_version.clone();
        self.queue.insert(
            key.clone(),
            QueueEntry { position, hopeless, wake_condition: WakeCondition::Anything, version, plan_due: false },
        );
        let (victims, freed) = match reason {
            WaitReason::Room { open } => self.enqueue_for_room(key, &job, open, rules),
            WaitReason::Fabric => (Vec::new(), self.release(&JobId::of(&job.metadata))),
        };
        let mut others = self.jobs_to_reconcile(key, head, &freed);
        others.extend(victims);
        others
    }

    /// Queues a job that lacks room. The head of the queue also reserves nodes, and may preempt
    /// jobs. Returns the preempted jobs, and the nodes on which reservations were released.
    fn enqueue_for_room(
        &mut self,
        key: &Key,
        job: &TrainJob,
        open: u32,
        rules: PlacementRules<'_>,
    ) -> (Vec<Key>, BTreeSet<String>) {
        let position = self.queue_position(job);
        let update_entry = |index: &mut Index, request: &PlacementRequest<'_>| {
            if let Some(entry) = index.queue.get_mut(key) {
                entry.wake_condition = WakeCondition::nodes(Demand::of(request), request.valid.request.nodes, open);
            }
            if index.head().as_ref() == Some(key) {
                index.reserve_for_head(request, &position)
            } else {
                (Vec::new(), index.release(&JobId::of(&job.metadata)))
            }
        };
        self.with_request(job, rules, update_entry).unwrap_or_default()
    }

    /// Runs `f` with the placement request of the job as it is now; `None` if the job is
    /// invalid.
    pub(crate) fn with_request<R>(
        &mut self,
        job: &TrainJob,
        rules: PlacementRules<'_>,
        f: impl FnOnce(&mut Index, &PlacementRequest<'_>) -> R,
    ) -> Option<R> {
        let valid = plan::validate(job).ok()?;
        let admitted = self.admitted(job, &valid);
        let avoided_nodes = self.avoided_nodes(&JobId::of(&job.metadata), rules.now);
        let request =
            PlacementRequest { job, valid: &valid, rules, admitted: &admitted, avoided_nodes: &avoided_nodes };
        Some(f(self, &request))
    }

    /// Reserves nodes for the head of the queue. Returns the jobs that it preempts, and the nodes
    /// that other jobs can use now.
    fn reserve_for_head(
        &mut self,
        request: &PlacementRequest<'_>,
        position: &QueuePosition,
    ) -> (Vec<Key>, BTreeSet<String>) {
        let id = JobId::of(&request.job.metadata);
        let ignorable = self.ignorable_takers(request.job, request.rules.now);
        let mut overlay = UsageOverlay::new(self, &ignorable);
        // Reserve the nodes that the victims free, because the victims would otherwise be first to
        // retake them.
        let (victims, reserved) = match overlay.plan_preemption(request, position) {
            Some(PreemptionPlan { victims, nodes }) => (victims, Some(Some((nodes, None)))),
            None => (Vec::new(), overlay.choose_reservation(&id, request)),
        };
        drop(overlay);
        let freed = match reserved {
            None => BTreeSet::new(),
            Some(None) => {
                let key = key_of(&request.job.metadata);
                if let Some(entry) = self.queue.get_mut(&key) {
                    entry.hopeless = true;
                }
                self.release(&id)
            }
            Some(Some(start)) => self.reserve(start, position.clone(), request),
        };
        (victims, freed)
    }

    /// The reservation that a queued job should hold now, and its start time. `None` keeps the
    /// current reservation, which is usable and not stale; `Some(None)` if no set of nodes would
    /// do.
    fn choose_reservation(&mut self, id: &JobId, request: &PlacementRequest<'_>) -> Option<Option<PlannedStart>> {
        let held = self.reservation.as_ref().filter(|held| held.job == *id && is_usable(held, &self.usage));
        if held.is_some_and(|held| !held.is_stale) {
            return None;
        }
        let nodes = held.map(|held| held.nodes.clone()).unwrap_or_default();
        let first = self.earliest_start(request);
        Some(first.or_else(|| reserve(request, self.usage.nodes(), &nodes).map(|nodes| (nodes, None))))
    }

    /// Recomputes a stale reservation before a job behind its holder is planned, because that job
    /// could take nodes on which the holder can start now. Returns the jobs to reconcile.
    pub fn refresh_reservation(&mut self, job: &TrainJob, rules: PlacementRules<'_>) -> BTreeSet<Key> {
        let mut others = self.expire_reservation(rules.now);
        if let Some(head) = self.reorder(rules.now) {
            // The job being planned was the head until now, and would otherwise overtake the new
            // head.
            others.extend(self.reserve_for(&head, rules));
            others.insert(head);
        }
        let is_ahead =
            |held: &&Reservation| held.job != JobId::of(&job.metadata) && held.position < self.queue_position(job);
        let held = self.reservation.as_ref().filter(|held| held.is_stale).filter(is_ahead);
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
    fn release(&mut self, job: &JobId) -> BTreeSet<String> {
        self.unreserve(|held| held.job == *job)
    }

    pub(crate) fn unreserve(&mut self, which: impl FnOnce(&mut Reservation) -> bool) -> BTreeSet<String> {
        let Some(held) = self.reservation.take_if(which) else { return BTreeSet::new() };
        let holder = self.job_of(&held.job).map(|job| (key_of(&job.metadata), self.queue_position(job)));
        if let Some((entry, position)) = holder.and_then(|(key, position)| Some((self.queue.get_mut(&key)?, position)))
        {
            entry.position = position;
        }
        held.takers().filter_map(|taker| self.usage.set_share(&taker, None)).collect()
    }

    /// The first job of the queue that could be placed: neither hopeless nor in its cooldown.
    pub fn head(&self) -> Option<Key> {
        let open = self.queue.iter().filter(|(key, entry)| !entry.hopeless && !self.cooldowns.contains_key(key));
        open.min_by_key(|(_, entry)| &entry.position).map(|(key, _)| key.clone())
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
        let before = self.reservation.as_ref().and_then(|held| held.start).map(|(at, _)| at);
        let previous = self.reservation.as_ref().filter(|held| held.job == job);
        let new_start = start.map(|(at, _)| at);
        let (first_start, since) =
            (previous.and_then(|held| held.first_start).or(new_start), previous.map(|held| held.since));
        let since = since.or_else(|| self.take_held_since(&job));
        let mut freed = self.unreserve(|_| true);
        let position = position.with_reservation();
        if let Some(entry) = self.queue.get_mut(&key_of(&request.job.metadata)) {
            entry.position.clone_from(&position);
        }
        let at = request.rules.now;
        let next =
            Reservation { job, position, nodes, start, first_start, at, since: since.unwrap_or(at), is_stale: false };
        self.hold(request, next.takers(), &next.nodes);
        for PlacedNode { node_name, .. } in &next.nodes {
            if new_start > before {
                freed.insert(node_name.clone())
            } else {
                freed.remove(node_name)
            };
        }
        self.reservation = Some(next);
        freed
    }

    /// Gives each taker the share of one pod of the job, on one of these nodes each.
    pub fn hold(&mut self, request: &PlacementRequest<'_>, takers: impl Iterator<Item = String>, nodes: &[PlacedNode]) {
        let amount = &request.admitted.requests;
        for (taker, placed) in takers.zip(nodes) {
            let share = Share {
                node: placed.node_name.clone(),
                amount: amount.clone(),
                gpus: placed.gpus.clone(),
                ..Share::default()
            };
            self.usage.set_share(&taker, Some(share));
        }
    }

    /// Whether a job may preempt others, according to its policy and the priority classes of its
    /// pods.
    fn preempts(&self, job: &TrainJob) -> bool {
        let pods = self.job_states.get(&JobId::of(&job.metadata)).into_iter().flat_map(|state| state.pods.values());
        let mut never = pods.filter_map(|pod| pod.never_preempts.as_ref());
        job.spec.topology_policy.preemption == Preemption::LowerPriority
            && never.all(|class| self.gang_classes.contains(class))
    }

    /// The name of the job at this queue position, hidden from readers in other namespaces unless
    /// `names_others` is set.
    fn name_for(&self, reader: &TrainJob, position: &QueuePosition) -> String {
        let namespace = position.name().split('/').next();
        if self.names_others || namespace == reader.metadata.namespace.as_deref() {
            position.name().to_string()
        } else {
            "a job of another namespace".to_string()
        }
    }

    /// Selects the jobs to preempt; none if enough nodes are already being vacated. `None` if
    /// preemption would not help.
    pub fn plan_preemption(
        &mut self,
        request: &PlacementRequest<'_>,
        position: &QueuePosition,
    ) -> Option<PreemptionPlan> {
        let now = request.rules.now;
        let preempts = self.preempts(request.job);
        if position.is_demoted() || !(preempts || self.jobs.values().any(|job| exceeds_placed_limit(job, now))) {
            return None;
        }
        let mut leaving = Vec::new();
        let mut candidates = Vec::new();
        for (key, job) in &self.jobs {
            let id = &JobId::of(&job.metadata);
            let attempt = attempt_of(job);
            let is_preempted = self.job_states.get(id).is_some_and(|state| state.preempted_attempt == Some(attempt));
            leaving.extend(self.takers_of(id, |of| of < attempt || is_preempted || !is_live(job)));
            let theirs = self.queue_position(job);
            let is_lower = preempts && theirs.priority() < position.priority();
            let is_overdue = theirs.priority() <= position.priority() && exceeds_placed_limit(job, now);
            if placement_of(job).is_some() && !is_preempted && (is_lower || is_overdue) {
                let order = PreemptionOrder::of(job, &theirs, now);
                candidates.push((order, key.clone(), self.takers_of(id, |of| of == attempt)));
            }
        }
        candidates.sort_by(|a, b| a.0.cmp(&b.0));
        let mut place_without = |without: &[usize]| {
            let theirs = without.iter().flat_map(|candidate| candidates[*candidate].2.iter());
            let takers: Vec<String> = leaving.iter().chain(theirs).cloned().collect();
            place_without_takers(request, &mut self.usage, &takers)
        };
        let chosen = queue_order::fewest(candidates.len(), |without| place_without(without).is_some())?;
        let nodes = place_without(&chosen)?;
        let victims: Vec<Key> = chosen.into_iter().map(|candidate| candidates[candidate].1.clone()).collect();
        for key in &victims {
            let Some(job) = self.jobs.get(key) else { continue };
            let attempt = attempt_of(job);
            let mut to = format!("{} (priority {})", self.name_for(job, position), position.priority());
            if exceeds_placed_limit(job, now) {
                to.push_str("; its limit was raised after placement, and the original limit has passed");
            }
            if let Some(state) = self.job_states.get_mut(&JobId::of(&job.metadata)) {
                state.preempted_attempt = Some(attempt);
                state.preempted_by = Some(to);
            }
        }
        Some(PreemptionPlan { victims, nodes })
    }
}
