//! Jobs that compete for nodes: the head of the queue, its reservation, and preemption. The rules
//! are in `plan::cluster::turn`; this module applies them to the index.

use crate::devices::taker;
use crate::index::{Index, Place, Reservation, Waiting, WaitsFor, is_usable};
use crate::job::{JobId, Key, attempt_of, is_live, key_of, placement_of};
use crate::usage::{HOLE, Share, Usage, Without};
use jiff::Timestamp;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::{PlacedNode, Preemption, TrainJob, conditions};
use switchyard_plan::cluster::admitted::Admitted;
use switchyard_plan::cluster::avoidance;
use switchyard_plan::cluster::clock::breaks_promise;
use switchyard_plan::cluster::find::find;
use switchyard_plan::cluster::ownership;
use switchyard_plan::cluster::reserve::reserve;
use switchyard_plan::cluster::turn::{self, Ahead, Basis, GivesWay, Turn};
use switchyard_plan::cluster::{Avoided, Demand, PlacementRules, Question, Waits};
use switchyard_plan::objects::Kind;
use switchyard_plan::{self as plan, ValidJob};

/// Preemption victims, and the nodes that the preempting job would get.
pub struct Departure {
    pub victims: Vec<Key>,
    nodes: Vec<PlacedNode>,
}

/// The nodes a job would get if the shares of these takers were free.
fn place_without(question: &Question<'_>, usage: &mut Usage, takers: &[String]) -> Option<Vec<PlacedNode>> {
    let without = Without::new(usage, takers);
    find(question, without.nodes()).ok().map(|found| found.placed.status.nodes)
}

impl Index {
    pub fn turn(&self, job: &TrainJob) -> Turn {
        let family = self.families.get(&JobId::of(&job.metadata));
        let priority = family.and_then(|family| family.pods.values().map(|pod| pod.priority).max()).unwrap_or(0);
        let namespace = job.metadata.namespace.as_deref().unwrap_or_default();
        let share = self.fairness.as_ref().map_or(0, |fairness| fairness.share(namespace));
        let turn = Turn::of(job, priority, share, self.lateness);
        let turn = if self.refusals.set_back(namespace, self.lateness.at) { turn.set_back() } else { turn };
        let holds = self.reservation.as_ref().is_some_and(|held| held.job == JobId::of(&job.metadata));
        if holds { turn.held() } else { turn }
    }

    pub(crate) fn job_of(&self, id: &JobId) -> Option<&TrainJob> {
        let key = self.families.get(id)?.key.as_ref()?;
        self.jobs.get(key).map(|job| &**job).filter(|job| JobId::of(&job.metadata) == *id)
    }

    /// UIDs of the job's pods in the attempts that `is_of` selects, and the takers of their
    /// resource claims.
    pub fn takers_of(&self, job: &JobId, is_of: impl Fn(u32) -> bool) -> Vec<String> {
        let Some(family) = self.families.get(job) else { return Vec::new() };
        let pods = family.pods.values().filter(|pod| is_of(pod.attempt));
        // A claim is named after its pod, and keeps its devices for a while after the pod is gone.
        let is_named = |name: &str| ownership::position(name).is_some_and(|(attempt, _)| is_of(attempt));
        let is_theirs = |(kind, name): &(Kind, String)| *kind == Kind::ResourceClaim && is_named(name);
        let claims = family.objects.iter().filter(|(object, _)| is_theirs(object));
        pods.map(|pod| pod.uid.clone()).chain(claims.map(|(_, claim)| taker(&claim.uid))).collect()
    }

    /// Shares that a job may ignore: its own from earlier attempts that it is about to release, the
    /// held GPUs of its own and of lower-priority jobs, and the reservation of the head of the
    /// queue if that job is behind it or can only start after this one ends.
    pub fn not_in_the_way(&self, job: &TrainJob, now: Timestamp) -> Vec<String> {
        let id = &JobId::of(&job.metadata);
        let turn = self.turn(job);
        let mut takers = Vec::new();
        if placement_of(job).is_none() && job.status.as_ref().is_some_and(|status| status.placement.is_some()) {
            let attempt = attempt_of(job);
            takers.extend(self.takers_of(id, |of| of < attempt));
        }
        for (other, holes) in &self.holes {
            let is_lower = || {
                let other = self.job_of(other).map(|job| self.turn(job));
                !turn.is_set_back() && other.is_some_and(|other| other.priority() < turn.priority())
            };
            if other == id || is_lower() {
                takers.extend(holes.iter().cloned());
            }
        }
        if let Some(held) = &self.reservation {
            let is_free = held.job == *id || turn < held.turn || self.begins_after(held, job, now).is_some();
            // Only a job of higher priority may take the nodes of a restarting gang.
            let keeps = self.holes.contains_key(id) && held.turn.priority() <= turn.priority();
            let own = job.status.as_ref().and_then(|status| status.placement.as_ref()).filter(|_| keeps);
            let own: Vec<&str> = own.iter().flat_map(|own| &own.nodes).map(|node| node.node_name.as_str()).collect();
            let nodes = held.nodes.iter().map(|node| node.node_name.as_str());
            takers.extend(held.takers().zip(nodes).filter(|(_, node)| is_free || own.contains(node)).map(|(t, _)| t));
        }
        takers
    }

    /// The job ahead of this one that holds a reservation.
    pub fn ahead_of(&self, job: &TrainJob, now: Timestamp) -> Option<Ahead> {
        let id = JobId::of(&job.metadata);
        let held = self.reservation.as_ref().filter(|held| held.job != id && held.turn < self.turn(job))?;
        Some(Ahead {
            name: self.name_for(job, &held.turn),
            nodes: held.nodes.iter().map(|node| node.node_name.clone()).collect(),
            start: held.start,
            ends_before: self.begins_after(held, job, now),
        })
    }

    fn begins_after(&self, held: &Reservation, job: &TrainJob, now: Timestamp) -> Option<Basis> {
        held.is_begun_after(job, now, self.predictor.as_ref())
    }

    /// Holds the GPUs of a restarting gang on its nodes until planning shows that it cannot be
    /// placed. Returns the nodes on which it released some.
    pub fn hold_holes(&mut self, id: &JobId) -> BTreeSet<String> {
        let wanted = self.job_of(id).filter(|job| is_live(job) && !job.spec.suspend).and_then(|job| {
            let status = job.status.as_ref()?;
            let placed = status.condition(conditions::PLACED)?;
            let restarts = placed.status == "False" && placed.reason == conditions::RESTARTING;
            status.placement.clone().filter(|_| restarts)
        });
        let nodes = wanted.map(|placement| placement.nodes).unwrap_or_default();
        let next: Vec<String> = (0..nodes.len()).map(|rank| format!("{HOLE}{}/{rank}", id.uid)).collect();
        let mut freed = BTreeSet::new();
        for gone in self.holes.remove(id).into_iter().flatten().skip(next.len()) {
            freed.extend(self.usage.set_share(&gone, None));
        }
        for (taker, PlacedNode { node_name, gpus, .. }) in next.iter().zip(nodes) {
            freed.extend(self.usage.set_share(taker, Some(Share { node: node_name, gpus, ..Share::default() })));
        }
        if !next.is_empty() {
            self.holes.insert(id.clone(), next);
        }
        freed
    }

    /// A job was placed, or left the queue: releases its reservation. Returns the other jobs to
    /// reconcile.
    pub fn waits_no_more(&mut self, key: &Key, job: &JobId) -> BTreeSet<Key> {
        let head = self.head();
        self.could_begin.remove(key);
        self.rests.remove(key);
        if self.waiting.remove(key).is_none() {
            return BTreeSet::new();
        }
        let freed = self.release(job);
        self.concerned(key, head, &freed)
    }

    /// The other jobs to reconcile after a queued job was planned: those that can use the nodes it
    /// freed, and a new head of the queue.
    pub(crate) fn concerned(&mut self, key: &Key, head: Option<Key>, freed: &BTreeSet<String>) -> BTreeSet<Key> {
        let mut others = self.helped(freed);
        others.extend(self.head().filter(|now| Some(now) != head.as_ref()));
        others.remove(key);
        others
    }

    /// Nodes that a job avoids because of its own failures there, or those of other jobs.
    pub fn left_out(&self, job: &JobId, now: Timestamp) -> BTreeMap<String, Avoided> {
        let status = self.job_of(job).and_then(|job| job.status.as_ref());
        let mut left_out = status.map(|status| avoidance::avoided(status, self.usage.nodes(), now)).unwrap_or_default();
        for (node, avoided) in self.incidents.avoided(job, self.usage.nodes(), now) {
            if !avoided.is_last_resort || !left_out.contains_key(&node) {
                left_out.insert(node, avoided);
            }
        }
        left_out
    }

    /// The earliest time at which one of the avoided nodes becomes usable again.
    pub fn asked_again(&self, job: &JobId, now: Timestamp) -> Option<Timestamp> {
        let own = self.job_of(job).and_then(|job| avoidance::next(job.status.as_ref()?, now));
        own.into_iter().chain(self.incidents.next(self.usage.nodes(), now)).min()
    }

    /// The resource requests of the pods of the job's current attempt.
    pub fn admitted(&self, job: &TrainJob, valid: &ValidJob) -> Admitted {
        let attempt = attempt_of(job);
        let family = self.families.get(&JobId::of(&job.metadata));
        let pods = family.into_iter().flat_map(|family| family.pods.values()).filter(|pod| pod.attempt == attempt);
        Admitted::of(valid, job.status.as_ref(), pods)
    }

    /// A job found no placement and enters the queue. Returns the jobs to reconcile.
    pub fn waits(&mut self, key: &Key, waits: Waits, rules: PlacementRules<'_>) -> BTreeSet<Key> {
        let head = self.head();
        let Some(job) = self.jobs.get(key).cloned() else { return BTreeSet::new() };
        let turn = self.turn(&job);
        let hopeless = waits == Waits::Fabric;
        let version = job.metadata.resource_version.clone();
        self.waiting
            .insert(key.clone(), Waiting { turn, hopeless, waits_for: WaitsFor::Anything, version, is_owed: false });
        let (victims, freed) = match waits {
            Waits::Room { open } => self.waits_for_room(key, &job, open, rules),
            Waits::Fabric => (Vec::new(), self.release(&JobId::of(&job.metadata))),
        };
        let mut others = self.concerned(key, head, &freed);
        others.extend(victims);
        others
    }

    /// Queues a job that lacks room. The head of the queue also reserves nodes, and may preempt
    /// jobs. Returns the preempted jobs, and the nodes on which reservations were released.
    fn waits_for_room(
        &mut self,
        key: &Key,
        job: &TrainJob,
        open: u32,
        rules: PlacementRules<'_>,
    ) -> (Vec<Key>, BTreeSet<String>) {
        let turn = self.turn(job);
        let waits = |index: &mut Index, question: &Question<'_>| {
            if let Some(waiting) = index.waiting.get_mut(key) {
                waiting.waits_for = WaitsFor::nodes(Demand::of(question), question.valid.request.nodes, open);
            }
            if index.head().as_ref() == Some(key) {
                index.head_waits(question, &turn)
            } else {
                (Vec::new(), index.release(&JobId::of(&job.metadata)))
            }
        };
        self.asked(job, rules, waits).unwrap_or_default()
    }

    /// Runs `ask` with the placement question of the job as it is now; `None` if the job is
    /// invalid.
    pub(crate) fn asked<R>(
        &mut self,
        job: &TrainJob,
        rules: PlacementRules<'_>,
        ask: impl FnOnce(&mut Index, &Question<'_>) -> R,
    ) -> Option<R> {
        let valid = plan::validate(job).ok()?;
        let admitted = self.admitted(job, &valid);
        let left_out = self.left_out(&JobId::of(&job.metadata), rules.now);
        let question = Question { job, valid: &valid, rules, admitted: &admitted, left_out: &left_out };
        Some(ask(self, &question))
    }

    /// Reserves nodes for the head of the queue. Returns the jobs that it preempts, and the nodes
    /// that other jobs can use now.
    fn head_waits(&mut self, question: &Question<'_>, turn: &Turn) -> (Vec<Key>, BTreeSet<String>) {
        let id = JobId::of(&question.job.metadata);
        let aside = self.not_in_the_way(question.job, question.rules.now);
        let mut without = Without::new(self, &aside);
        // Reserve the nodes that the victims free, because the victims would otherwise be first to
        // retake them.
        let (victims, reserved) = match without.departure(question, turn) {
            Some(Departure { victims, nodes }) => (victims, Some(Some((nodes, None)))),
            None => (Vec::new(), without.chosen_again(&id, question)),
        };
        drop(without);
        let freed = match reserved {
            None => BTreeSet::new(),
            Some(None) => {
                let key = key_of(&question.job.metadata);
                if let Some(waiting) = self.waiting.get_mut(&key) {
                    waiting.hopeless = true;
                }
                self.release(&id)
            }
            Some(Some(place)) => self.reserve(place, turn.clone(), question),
        };
        (victims, freed)
    }

    /// The reservation that a queued job should hold now, and its start time. `None` keeps the
    /// current reservation, which is usable and not stale; `Some(None)` if no set of nodes would
    /// do.
    fn chosen_again(&mut self, id: &JobId, question: &Question<'_>) -> Option<Option<Place>> {
        let held = self.reservation.as_ref().filter(|held| held.job == *id && is_usable(held, &self.usage));
        if held.is_some_and(|held| !held.is_stale) {
            return None;
        }
        let nodes = held.map(|held| held.nodes.clone()).unwrap_or_default();
        let first = self.first_start(question);
        Some(first.or_else(|| reserve(question, self.usage.nodes(), &nodes).map(|nodes| (nodes, None))))
    }

    /// Recomputes a stale reservation before a job behind its holder is planned, because that job
    /// could take nodes on which the holder can start now. Returns the jobs to reconcile.
    pub fn float(&mut self, job: &TrainJob, rules: PlacementRules<'_>) -> BTreeSet<Key> {
        let mut others = self.rest(rules.now);
        if let Some(head) = self.reorder(rules.now) {
            // The job being planned was the head until now, and would otherwise overtake the new
            // head.
            others.extend(self.choose(&head, rules));
            others.insert(head);
        }
        let is_ahead = |held: &&Reservation| held.job != JobId::of(&job.metadata) && held.turn < self.turn(job);
        let held = self.reservation.as_ref().filter(|held| held.is_stale).filter(is_ahead);
        let holder = held.and_then(|held| self.job_of(&held.job)).map(|holder| key_of(&holder.metadata));
        // If another job has become the head, reserving nodes is up to that job.
        if let Some(holder) = holder.filter(|holder| self.head().as_ref() == Some(holder)) {
            others.extend(self.choose(&holder, rules));
        }
        others
    }

    /// Reserves nodes for the head of the queue. Returns the other jobs to reconcile.
    fn choose(&mut self, head: &Key, rules: PlacementRules<'_>) -> BTreeSet<Key> {
        let Some(holder) = self.jobs.get(head).cloned() else { return BTreeSet::new() };
        let turn = self.turn(&holder);
        let waits = |index: &mut Index, question: &Question<'_>| index.head_waits(question, &turn);
        let (victims, freed) = self.asked(&holder, rules, waits).unwrap_or_default();
        let mut others = self.concerned(head, Some(head.clone()), &freed);
        others.extend(victims);
        others
    }

    /// Releases the reservation of a job. Returns its nodes.
    fn release(&mut self, job: &JobId) -> BTreeSet<String> {
        self.unreserve(|held| held.job == *job)
    }

    pub(crate) fn unreserve(&mut self, which: impl FnOnce(&mut Reservation) -> bool) -> BTreeSet<String> {
        let Some(held) = self.reservation.take_if(which) else { return BTreeSet::new() };
        let turn = self.job_of(&held.job).map(|job| (key_of(&job.metadata), self.turn(job)));
        if let Some((waiting, turn)) = turn.and_then(|(key, turn)| Some((self.waiting.get_mut(&key)?, turn))) {
            waiting.turn = turn;
        }
        held.takers().filter_map(|taker| self.usage.set_share(&taker, None)).collect()
    }

    /// The first job of the queue that could be placed: neither hopeless nor resting.
    pub fn head(&self) -> Option<Key> {
        let open = self.waiting.iter().filter(|(key, waiting)| !waiting.hopeless && !self.rests.contains_key(key));
        open.min_by_key(|(_, waiting)| &waiting.turn).map(|(key, _)| key.clone())
    }

    /// Replaces the reservation. Returns the nodes that other jobs can use now: those released, and
    /// all reserved ones if their holder starts later than expected.
    fn reserve(&mut self, (nodes, start): Place, turn: Turn, question: &Question<'_>) -> BTreeSet<String> {
        let job = JobId::of(&question.job.metadata);
        let before = self.reservation.as_ref().and_then(|held| held.start).map(|(at, _)| at);
        let same = self.reservation.as_ref().filter(|held| held.job == job);
        let begins = start.map(|(at, _)| at);
        let (first_start, since) = (same.and_then(|held| held.first_start).or(begins), same.map(|held| held.since));
        let since = since.or_else(|| self.held_before(&job));
        let mut freed = self.unreserve(|_| true);
        let turn = turn.held();
        if let Some(waiting) = self.waiting.get_mut(&key_of(&question.job.metadata)) {
            waiting.turn.clone_from(&turn);
        }
        let at = question.rules.now;
        let next =
            Reservation { job, turn, nodes, start, first_start, at, since: since.unwrap_or(at), is_stale: false };
        self.hold(question, next.takers(), &next.nodes);
        for PlacedNode { node_name, .. } in &next.nodes {
            if begins > before {
                freed.insert(node_name.clone())
            } else {
                freed.remove(node_name)
            };
        }
        self.reservation = Some(next);
        freed
    }

    /// Gives each taker the share of one pod of the job, on one of these nodes each.
    pub fn hold(&mut self, question: &Question<'_>, takers: impl Iterator<Item = String>, nodes: &[PlacedNode]) {
        let amount = &question.admitted.requests;
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
        let pods = self.families.get(&JobId::of(&job.metadata)).into_iter().flat_map(|family| family.pods.values());
        let mut never = pods.filter_map(|pod| pod.never_preempts.as_ref());
        job.spec.topology_policy.preemption == Preemption::LowerPriority
            && never.all(|class| self.gang_classes.contains(class))
    }

    /// The name of the job that has this turn, hidden from readers in other namespaces unless
    /// `names_others` is set.
    fn name_for(&self, reader: &TrainJob, turn: &Turn) -> String {
        let namespace = turn.name().split('/').next();
        if self.names_others || namespace == reader.metadata.namespace.as_deref() {
            turn.name().to_string()
        } else {
            "a job of another namespace".to_string()
        }
    }

    /// Selects the jobs to preempt; none if enough nodes are already being vacated. `None` if
    /// preemption would not help.
    pub fn departure(&mut self, question: &Question<'_>, turn: &Turn) -> Option<Departure> {
        let now = question.rules.now;
        let preempts = self.preempts(question.job);
        if turn.is_set_back() || !(preempts || self.jobs.values().any(|job| breaks_promise(job, now))) {
            return None;
        }
        let mut leaving = Vec::new();
        let mut candidates = Vec::new();
        for (key, job) in &self.jobs {
            let id = &JobId::of(&job.metadata);
            let attempt = attempt_of(job);
            let gives_way = self.families.get(id).is_some_and(|family| family.gives_way_in == Some(attempt));
            leaving.extend(self.takers_of(id, |of| of < attempt || gives_way || !is_live(job)));
            let theirs = self.turn(job);
            let is_lower = preempts && theirs.priority() < turn.priority();
            let is_overdue = theirs.priority() <= turn.priority() && breaks_promise(job, now);
            if placement_of(job).is_some() && !gives_way && (is_lower || is_overdue) {
                let order = GivesWay::of(job, &theirs, now);
                candidates.push((order, key.clone(), self.takers_of(id, |of| of == attempt)));
            }
        }
        candidates.sort_by(|a, b| a.0.cmp(&b.0));
        let mut place_without = |without: &[usize]| {
            let theirs = without.iter().flat_map(|candidate| candidates[*candidate].2.iter());
            let takers: Vec<String> = leaving.iter().chain(theirs).cloned().collect();
            place_without(question, &mut self.usage, &takers)
        };
        let chosen = turn::fewest(candidates.len(), |without| place_without(without).is_some())?;
        let nodes = place_without(&chosen)?;
        let victims: Vec<Key> = chosen.into_iter().map(|candidate| candidates[candidate].1.clone()).collect();
        for key in &victims {
            let Some(job) = self.jobs.get(key) else { continue };
            let attempt = attempt_of(job);
            let mut to = format!("{} (priority {})", self.name_for(job, turn), turn.priority());
            if breaks_promise(job, now) {
                to.push_str(
                    "; its limit was raised after it was placed, and the one that it was placed with has passed",
                );
            }
            if let Some(family) = self.families.get_mut(&JobId::of(&job.metadata)) {
                family.gives_way_in = Some(attempt);
                family.gives_way_to = Some(to);
            }
        }
        Some(Departure { victims, nodes })
    }
}
