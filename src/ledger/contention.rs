//! Jobs that compete for room: which job is at the head of the queue, what it reserves, and which jobs it preempts. The rules are those of
//! `plan::cluster::turn`; this applies them to the index.

use crate::devices::taker;
use crate::index::Index;
use crate::job::{JobId, Key, attempt_of, is_live, placement_of};
use crate::reservation::Reservation;
use crate::usage::{Share, Usage, Without};
use jiff::Timestamp;
use std::collections::BTreeMap;
use switchyard_core::quantity::Resources;
use switchyard_crds::{PlacedNode, Preemption, TrainJob, conditions};
use switchyard_plan::cluster::admitted::Admitted;
use switchyard_plan::cluster::find::find;
use switchyard_plan::cluster::turn::{self, Turn};
use switchyard_plan::cluster::view;
use switchyard_plan::cluster::{PlacementRules, Question};
use switchyard_plan::objects::Kind;
use switchyard_plan::{self as plan, ValidJob};

/// Jobs that give way, and where the one that they give way to goes then.
pub struct Departure {
    pub victims: Vec<Key>,
    nodes: Vec<PlacedNode>,
}

/// Where a job would go without these takers.
fn place_without(question: &Question<'_>, usage: &mut Usage, takers: &[String]) -> Option<Vec<PlacedNode>> {
    let without = Without::new(usage, takers);
    find(question, without.nodes()).ok().map(|found| found.placed.status.nodes)
}

impl Index {
    pub fn turn(&self, job: &TrainJob) -> Turn {
        let family = self.families.get(&JobId::of(&job.metadata));
        let priority = family.and_then(|family| family.pods.values().map(|pod| pod.priority).max()).unwrap_or(0);
        Turn::of(job, priority)
    }

    fn job_of(&self, id: &JobId) -> Option<&TrainJob> {
        let key = self.families.get(id)?.key.as_ref()?;
        self.jobs.get(key).map(|job| &**job).filter(|job| JobId::of(&job.metadata) == *id)
    }

    /// What the pods of a job take, and their claims.
    pub fn takers_of(&self, job: &JobId, is_of: impl Fn(u32) -> bool) -> Vec<String> {
        let Some(family) = self.families.get(job) else { return Vec::new() };
        let pods = family.pods.values().filter(|pod| is_of(pod.attempt));
        // A claim keeps its devices for a while after its pod is gone, whose name it has.
        let is_named = |name: &str| view::position(name).is_some_and(|(attempt, _)| is_of(attempt));
        let is_theirs = |(kind, name): &(Kind, String)| *kind == Kind::ResourceClaim && is_named(name);
        let claims = family.objects.iter().filter(|(object, _)| is_theirs(object));
        pods.map(|pod| pod.uid.clone()).chain(claims.map(|(_, claim)| taker(&claim.uid))).collect()
    }

    /// Everything that does not stand in the way of a job: what it held itself and is about to give back, and what is held for jobs
    /// behind it.
    pub fn not_in_the_way(&self, job: &TrainJob) -> Vec<String> {
        let id = &JobId::of(&job.metadata);
        let turn = self.turn(job);
        let mut takers = Vec::new();
        if placement_of(job).is_none() && job.status.as_ref().is_some_and(|status| status.placement.is_some()) {
            let attempt = attempt_of(job);
            takers.extend(self.takers_of(id, |of| of < attempt));
        }
        for (other, holes) in &self.holes {
            let is_lower = || self.job_of(other).is_some_and(|job| self.turn(job).priority() < turn.priority());
            if other == id || is_lower() {
                takers.extend(holes.iter().cloned());
            }
        }
        if let Some(held) = &self.reservation {
            let is_behind = held.job == *id || turn < held.turn;
            // Nobody but a job of higher priority gets the nodes of a gang that starts again.
            let keeps = self.holes.contains_key(id) && held.turn.priority() <= turn.priority();
            let own = job.status.as_ref().and_then(|status| status.placement.as_ref()).filter(|_| keeps);
            let own: Vec<&str> = own.iter().flat_map(|own| &own.nodes).map(|node| node.node_name.as_str()).collect();
            let nodes = held.nodes.iter().map(|node| node.node_name.as_str());
            takers.extend(held.takers().zip(nodes).filter(|(_, node)| is_behind || own.contains(node)).map(|(t, _)| t));
        }
        takers
    }

    /// Who is ahead of a job and holds nodes, in words.
    pub fn held_for(&self, job: &TrainJob) -> Option<String> {
        let id = JobId::of(&job.metadata);
        let held = self.reservation.as_ref().filter(|held| held.job != id && held.turn < self.turn(job))?;
        let (count, name) = (held.nodes.len(), held.turn.name());
        let verb = if count == 1 { "node is" } else { "nodes are" };
        Some(format!("{count} {verb} held for {name}, which is ahead in the queue"))
    }

    /// A gang that restarts keeps the GPUs of its nodes until it is known that it cannot be placed. Returns whether it released some.
    pub fn hold_holes(&mut self, id: &JobId) -> bool {
        let wanted = self.job_of(id).filter(|job| is_live(job) && !job.spec.suspend).and_then(|job| {
            let status = job.status.as_ref()?;
            let placed = status.condition(conditions::PLACED)?;
            let restarts = placed.status == "False" && placed.reason == conditions::RESTARTING;
            status.placement.clone().filter(|_| restarts)
        });
        let nodes = wanted.map(|placement| placement.nodes).unwrap_or_default();
        let next: Vec<String> = (0..nodes.len()).map(|rank| format!("hole/{}/{rank}", id.uid)).collect();
        let mut freed = false;
        for gone in self.holes.remove(id).into_iter().flatten().skip(next.len()) {
            freed |= self.usage.set_share(&gone, None);
        }
        for (taker, PlacedNode { node_name, gpus, .. }) in next.iter().zip(nodes) {
            self.usage.set_share(taker, Some(Share { node: node_name, amount: Resources::default(), gpus }));
        }
        if !next.is_empty() {
            self.holes.insert(id.clone(), next);
        }
        freed
    }

    /// A job was placed, or no longer waits: it releases what it held. Returns whether it held anything.
    pub fn waits_no_more(&mut self, job: &JobId) -> bool {
        if let Some(family) = self.families.get_mut(job) {
            family.hopeless = false;
        }
        self.release(job)
    }

    /// Nodes that a job is not asked to take now, and why.
    pub fn left_out(&self, job: &JobId, now: Timestamp) -> BTreeMap<String, String> {
        let refused = self.families.get(job).map(|family| family.refusals.left_out(now)).unwrap_or_default();
        self.incidents.left_out(now).chain(refused).collect()
    }

    /// When the next of them may be used.
    pub fn asked_again(&self, job: &JobId, now: Timestamp) -> Option<Timestamp> {
        let refused = self.families.get(job).and_then(|family| family.refusals.next(now));
        refused.into_iter().chain(self.incidents.next(now)).min()
    }

    /// What the pods of the current attempt of a job ask for.
    pub fn admitted(&self, job: &TrainJob, valid: &ValidJob) -> Admitted {
        let attempt = attempt_of(job);
        let family = self.families.get(&JobId::of(&job.metadata));
        let pods = family.into_iter().flat_map(|family| family.pods.values()).filter(|pod| pod.attempt == attempt);
        Admitted::of(valid, job.status.as_ref(), pods)
    }

    /// A job found no place. At the head of the queue it holds nodes, and jobs of lower priority may have to give way: those are answered.
    pub fn waits(&mut self, key: &Key, rules: PlacementRules<'_>) -> Vec<Key> {
        let Some(job) = self.jobs.get(key).cloned() else { return Vec::new() };
        let Ok(valid) = plan::validate(&job) else { return Vec::new() };
        let id = JobId::of(&job.metadata);
        let turn = self.turn(&job);
        let admitted = self.admitted(&job, &valid);
        let left_out = self.left_out(&id, rules.now);
        let question = Question { job: &job, valid: &valid, rules, admitted: &admitted, left_out: &left_out };
        if !self.is_head(key, &turn) {
            self.waits_no_more(&id);
            return Vec::new();
        }
        let aside = self.not_in_the_way(&job);
        let mut without = Without::new(self, &aside);
        let is_kept = without.reservation.as_ref().is_some_and(|held| held.job == id && without.is_usable(held));
        // What others leave for it is what it holds, or they would be the first to take it again.
        let (victims, reserved) = match without.departure(&question, &turn) {
            Some(Departure { victims, nodes }) => (victims, Some(Some(nodes))),
            None if is_kept => (Vec::new(), None),
            None => (Vec::new(), Some(turn::reserve(&question, without.usage.nodes()))),
        };
        drop(without);
        let hopeless = matches!(reserved, Some(None));
        if let Some(family) = self.families.get_mut(&id) {
            family.hopeless = hopeless;
        }
        if hopeless {
            self.release(&id);
        }
        if let Some(Some(nodes)) = reserved {
            self.reserve(Reservation { job: id, turn, nodes }, &question);
        }
        victims
    }

    /// A job waits for something other than room: it holds nothing, and others come first. Returns whether it held anything.
    pub fn waits_aside(&mut self, job: &JobId) -> bool {
        if let Some(family) = self.families.get_mut(job) {
            family.hopeless = true;
        }
        self.release(job)
    }

    /// Gives back what a job holds. Returns whether it held anything.
    fn release(&mut self, job: &JobId) -> bool {
        let Some(held) = self.reservation.take_if(|held| held.job == *job) else { return false };
        for taker in held.takers() {
            self.usage.set_share(&taker, None);
        }
        true
    }

    /// Whether no job that waits and could be placed comes first.
    fn is_head(&self, key: &Key, turn: &Turn) -> bool {
        let is_ahead = |other: &Key| {
            let Some(job) = self.jobs.get(other) else { return false };
            let family = self.families.get(&JobId::of(&job.metadata));
            !family.is_some_and(|family| family.hopeless) && self.turn(job) < *turn
        };
        !self.waiting.iter().any(|other| other != key && is_ahead(other))
    }

    /// Whether all nodes that are held may still be used.
    fn is_usable(&self, held: &Reservation) -> bool {
        let nodes = self.usage.nodes();
        held.nodes.iter().all(|placed| {
            nodes.get(&placed.node_name).is_some_and(|node| node.facts.ready && !node.facts.unschedulable)
        })
    }

    fn reserve(&mut self, next: Reservation, question: &Question<'_>) {
        if let Some(before) = self.reservation.as_ref().map(|before| before.job.clone()) {
            self.release(&before);
        }
        self.hold(question, next.takers(), &next.nodes);
        self.reservation = Some(next);
    }

    /// Takes what the pods of a job would take on these nodes, one taker for each.
    pub fn hold(&mut self, question: &Question<'_>, takers: impl Iterator<Item = String>, nodes: &[PlacedNode]) {
        let amount = &question.admitted.requests;
        for (taker, placed) in takers.zip(nodes) {
            let share = Share { node: placed.node_name.clone(), amount: amount.clone(), gpus: placed.gpus.clone() };
            self.usage.set_share(&taker, Some(share));
        }
    }

    /// The jobs that have to give way: none while others do already that are enough. `None`: that would not help.
    pub fn departure(&mut self, question: &Question<'_>, turn: &Turn) -> Option<Departure> {
        if question.job.spec.topology_policy.preemption != Preemption::LowerPriority {
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
            if placement_of(job).is_some() && !gives_way && theirs.priority() < turn.priority() {
                candidates.push((theirs, key.clone(), self.takers_of(id, |of| of == attempt)));
            }
        }
        // The lowest priority first, and of equal ones the youngest.
        candidates.sort_by(|a, b| b.0.cmp(&a.0));
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
            if let Some(family) = self.families.get_mut(&JobId::of(&job.metadata)) {
                family.gives_way_in = Some(attempt);
                family.gives_way_to = Some(format!("{} (priority {})", turn.name(), turn.priority()));
            }
        }
        Some(Departure { victims, nodes })
    }
}
