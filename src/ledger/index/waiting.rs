//! Queued jobs, and which changes justify planning one of them again. With hundreds of queued jobs,
//! not every release of resources does.
//!
//! A gang needs nodes that each have room for a pod. A plan that found too few of them therefore
//! cannot succeed until as many other nodes as were missing have changed and have room. Only the
//! head of the queue reacts to every change, because it may preempt jobs.
//!
//! Of the jobs that a change may help, the first one planned often takes what was released. The
//! others need no new plan then.

use super::{Index, Reservation};
use crate::job::{Key, is_queued};
use crate::predictor::Predictor;
use crate::usage::{HELD, HOLE, Usage};
use std::collections::BTreeSet;
use std::sync::Arc;
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::turn::Turn;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{Demand, PlacementRules};

/// A queued job, as its last plan left it.
#[derive(Debug)]
pub struct Waiting {
    /// Queue position. It is stored because every plan compares it with all others.
    pub(crate) turn: Turn,
    /// Whether room alone would not help, because the job does not fit into the empty cluster or
    /// must not start there. It does not block other jobs.
    pub(crate) hopeless: bool,
    pub(crate) waits_for: WaitsFor,
    /// Resource version of the job after the last plan: the planned version, or the version of the
    /// status write.
    pub(crate) version: Option<String>,
    /// Whether a plan was due but skipped because the cache was behind.
    pub(crate) is_owed: bool,
}

/// The change that a job waits for.
#[derive(Debug)]
pub(crate) enum WaitsFor {
    /// Another fabric, which any change may provide.
    Anything,
    Nodes(Box<Nodes>),
}

/// A number of nodes with room for a pod.
#[derive(Debug)]
pub(crate) struct Nodes {
    demand: Demand,
    /// Number of nodes with room in the last plan.
    open: usize,
    /// Number of further nodes that the job needs.
    missing: usize,
    /// Nodes that have changed since and have room.
    changed: BTreeSet<String>,
    /// Whether `changed` may be incomplete, because further nodes had room or allocate GPUs
    /// differently.
    is_more: bool,
}

/// Number of nodes remembered beyond those missing, so that the count stays right when other jobs
/// take some.
const MOST_SPARE: usize = 16;

impl WaitsFor {
    /// For a job with this number of pods, whose last plan found `open` nodes with room for one.
    pub(crate) fn nodes(demand: Demand, pods: u32, open: u32) -> WaitsFor {
        let (open, missing) = (open as usize, pods.saturating_sub(open).max(1) as usize);
        WaitsFor::Nodes(Box::new(Nodes { demand, open, missing, changed: BTreeSet::new(), is_more: false }))
    }

    /// Resource requests of a pod, if the job waits for room.
    pub(crate) fn demand(&self) -> Option<&Demand> {
        match self {
            WaitsFor::Anything => None,
            WaitsFor::Nodes(nodes) => Some(&nodes.demand),
        }
    }
}

impl Nodes {
    /// Records a changed node. Returns whether enough nodes have room now.
    fn note(&mut self, node: &NodeView, has_room: impl Fn(&Demand, &str) -> bool) -> bool {
        if self.open == 0 && self.demand.is_given_otherwise(node) {
            self.is_more = true;
            return true;
        }
        if !self.demand.has_room(node) {
            self.changed.remove(&node.facts.name);
            return false;
        }
        if self.changed.len() < self.missing + MOST_SPARE {
            self.changed.insert(node.facts.name.clone());
        } else {
            self.is_more |= !self.changed.contains(&node.facts.name);
        }
        self.are_enough(has_room)
    }

    /// Upper bound on the number of nodes with room now; `None` if unknown.
    fn at_most(&self) -> Option<usize> {
        (!self.is_more).then_some(self.open + self.changed.len())
    }

    /// Whether enough of the changed nodes still have room, because other jobs may have taken some
    /// since.
    fn are_enough(&mut self, has_room: impl Fn(&Demand, &str) -> bool) -> bool {
        if self.changed.len() >= self.missing {
            self.changed.retain(|name| has_room(&self.demand, name));
        }
        self.is_more || self.changed.len() >= self.missing
    }
}

impl Reservation {
    /// Whether reserved nodes count as free for a queued job: it comes before the holder, or ends
    /// before the holder can start.
    fn is_behind(&self, turn: &Turn, job: Option<&Arc<TrainJob>>, predictor: Option<&Predictor>) -> bool {
        *turn <= self.turn || job.is_some_and(|job| self.is_begun_after(job, self.at, predictor).is_some())
    }
}

impl Index {
    /// Jobs that resources released on these nodes may help. Marks the reservation as stale.
    pub fn woken(&mut self, nodes: &BTreeSet<String>) -> BTreeSet<Key> {
        if let Some(held) = self.reservation.as_mut().filter(|_| !nodes.is_empty()) {
            held.is_stale = true;
        }
        self.helped(nodes)
    }

    /// Jobs that may use these nodes now.
    pub(crate) fn helped(&mut self, nodes: &BTreeSet<String>) -> BTreeSet<Key> {
        if nodes.is_empty() || self.waiting.is_empty() {
            return BTreeSet::new();
        }
        let mut woken: BTreeSet<Key> = self.head().into_iter().collect();
        let seen = Seen { usage: &self.usage };
        let views: Vec<[NodeView; 2]> =
            nodes.iter().filter_map(|name| Some([seen.node(name, false)?, seen.node(name, true)?])).collect();
        let (held, predictor) = (self.reservation.as_ref(), self.predictor.as_ref());
        for (key, waiting) in &mut self.waiting {
            // This matters even if none of these nodes is reserved, because nodes that changed
            // earlier may be.
            let is_ahead = held.is_some_and(|held| held.is_behind(&waiting.turn, self.jobs.get(key), predictor));
            let is_woken = match &mut waiting.waits_for {
                WaitsFor::Anything => true,
                WaitsFor::Nodes(nodes) => {
                    let has_room = |demand: &Demand, name: &str| seen.has_room(demand, name, is_ahead);
                    // Record every view: `any` would stop at the first that is enough.
                    views.iter().filter(|view| nodes.note(&view[usize::from(is_ahead)], has_room)).count() > 0
                }
            };
            if is_woken {
                woken.insert(key.clone());
            }
        }
        woken
    }

    /// Whether a new plan for a job could find a placement that the last one did not. It cannot if
    /// the job is queued behind others and unchanged, and the released resources are taken again.
    pub fn is_worth_a_plan(&mut self, key: &Key) -> bool {
        if self.unreadable.contains_key(key) || self.lack(key).is_some() {
            return true;
        }
        let Some(waiting) = self.waiting.get_mut(key) else { return true };
        let WaitsFor::Nodes(nodes) = &mut waiting.waits_for else { return true };
        let job = self.jobs.get(key);
        if waiting.is_owed || job.map(|job| &job.metadata.resource_version) != Some(&waiting.version) {
            return true;
        }
        let (held, predictor) = (self.reservation.as_ref(), self.predictor.as_ref());
        let is_ahead = held.is_some_and(|held| held.is_behind(&waiting.turn, job, predictor));
        let seen = Seen { usage: &self.usage };
        nodes.are_enough(|demand, name| seen.has_room(demand, name, is_ahead)) || self.head().as_ref() == Some(key)
    }

    /// Whether a job that is queued according to its status, and that this process has not planned
    /// yet, certainly finds no placement now: a job ahead of it with the same resource requests
    /// found too few nodes with room. The job enters the queue, and a plan is owed because its
    /// status message may have changed.
    ///
    /// After a failover this applies to most of the queue, and plans that find no placement are the
    /// most expensive ones.
    pub fn waits_like_another(&mut self, key: &Key, rules: PlacementRules<'_>) -> bool {
        if self.waiting.contains_key(key) {
            return false;
        }
        let Some(job) = self.jobs.get(key).filter(|job| is_queued(job)).cloned() else { return false };
        let turn = self.turn(&job);
        let found = self.asked(&job, rules, |index, question| {
            let (held, predictor) = (index.reservation.as_ref(), index.predictor.as_ref());
            let may_use_held =
                |turn: &Turn, job| held.is_some_and(|held: &Reservation| held.is_behind(turn, job, predictor));
            let (demand, pods) = (Demand::of(question), question.valid.request.nodes);
            let more = may_use_held(&turn, Some(&job));
            let like_it = |(other, waiting): (&Key, &Waiting)| {
                let WaitsFor::Nodes(nodes) = &waiting.waits_for else { return None };
                let is_ahead = !waiting.hopeless && waiting.turn < turn;
                let sees_all = !more || may_use_held(&waiting.turn, index.jobs.get(other));
                let open = nodes.at_most().filter(|open| *open < pods as usize)?;
                (is_ahead && sees_all && nodes.demand == demand).then_some(open as u32)
            };
            let open = index.waiting.iter().find_map(like_it)?;
            Some(WaitsFor::nodes(demand, pods, open))
        });
        let Some(waits_for) = found.flatten() else { return false };
        self.waiting.insert(key.clone(), Waiting { turn, hopeless: false, waits_for, version: None, is_owed: true });
        true
    }

    /// Records the resource version of a status write.
    pub fn wrote_status(&mut self, key: &Key, version: &str) {
        if let Some(waiting) = self.waiting.get_mut(key) {
            waiting.version = Some(version.to_string());
        }
    }

    /// Records that a job was not planned although it may have been worthwhile.
    pub fn owes_a_plan(&mut self, key: &Key) {
        if let Some(waiting) = self.waiting.get_mut(key) {
            waiting.is_owed = true;
        }
    }
}

/// The nodes as seen by a queued job.
struct Seen<'a> {
    usage: &'a Usage,
}

impl Seen<'_> {
    /// A node on which the GPUs held for restarting gangs count as free and, for a job ahead of the
    /// head of the queue, so do reserved ones.
    fn node(&self, name: &str, is_ahead: bool) -> Option<NodeView> {
        self.usage.node_without(name, |taker| taker.starts_with(HOLE) || is_ahead && taker.starts_with(HELD))
    }

    fn has_room(&self, demand: &Demand, name: &str, is_ahead: bool) -> bool {
        self.node(name, is_ahead).is_some_and(|node| demand.has_room(&node))
    }
}

#[cfg(test)]
mod tests;
