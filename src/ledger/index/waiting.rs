//! Jobs that wait for a place, and when a change is worth another plan for one of them: with hundreds that wait, not whenever something
//! becomes free anywhere.
//!
//! A gang is placed on nodes with room for a pod each. So a plan that found too few of them finds no place either before as many others as
//! were missing have changed, and have room. Only the head of the queue looks at every change: jobs may have to give way to it.
//!
//! Of those whom a change may help, the first one that is planned often takes what became free. For the others it is not worth a plan any more.

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

/// A job that waits, as its last plan left it.
#[derive(Debug)]
pub struct Waiting {
    /// Its place in the queue. Kept, because every plan compares it with that of all others.
    pub(crate) turn: Turn,
    /// Room alone would not help: it would not fit into the empty cluster, or must not start there. It does not come before others.
    pub(crate) hopeless: bool,
    pub(crate) waits_for: WaitsFor,
    /// Resource version of the job as the last plan left it: the one that was planned, or the one that its status was written with.
    pub(crate) version: Option<String>,
    /// A plan was wanted and not made, since the cache was behind.
    pub(crate) is_owed: bool,
}

/// What a job waits for.
#[derive(Debug)]
pub(crate) enum WaitsFor {
    /// Another fabric: any change may bring it.
    Anything,
    Nodes(Box<Nodes>),
}

/// Nodes with room for a pod.
#[derive(Debug)]
pub(crate) struct Nodes {
    demand: Demand,
    /// The last plan found so many.
    open: usize,
    /// The job needs so many more.
    missing: usize,
    /// Nodes that have changed since and have room.
    changed: BTreeSet<String>,
    /// What has changed may be more than that: other nodes had room too, or give GPUs in another way.
    is_more: bool,
}

/// More nodes than are missing are remembered, so that those that others take are known not to be enough.
const MOST_SPARE: usize = 16;

impl WaitsFor {
    /// A job of so many pods, which ask this of a node, found so many nodes with room for one.
    pub(crate) fn nodes(demand: Demand, pods: u32, open: u32) -> WaitsFor {
        let (open, missing) = (open as usize, pods.saturating_sub(open).max(1) as usize);
        WaitsFor::Nodes(Box::new(Nodes { demand, open, missing, changed: BTreeSet::new(), is_more: false }))
    }

    /// What a pod asks of a node, where the job waits for room.
    pub(crate) fn demand(&self) -> Option<&Demand> {
        match self {
            WaitsFor::Anything => None,
            WaitsFor::Nodes(nodes) => Some(&nodes.demand),
        }
    }
}

impl Nodes {
    /// A node changed, which may have room now. Returns whether enough have.
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

    /// At most so many nodes have room now; `None`: that is not known.
    fn at_most(&self) -> Option<usize> {
        (!self.is_more).then_some(self.open + self.changed.len())
    }

    /// Whether enough of the nodes that have changed have room; others may have taken some since.
    fn are_enough(&mut self, has_room: impl Fn(&Demand, &str) -> bool) -> bool {
        if self.changed.len() >= self.missing {
            self.changed.retain(|name| has_room(&self.demand, name));
        }
        self.is_more || self.changed.len() >= self.missing
    }
}

impl Reservation {
    /// Whether what is held does not count as taken for a job that waits: it comes before the holder, or ends before that can begin.
    fn is_behind(&self, turn: &Turn, job: Option<&Arc<TrainJob>>, predictor: Option<&Predictor>) -> bool {
        *turn <= self.turn || job.is_some_and(|job| self.is_begun_after(job, self.at, predictor).is_some())
    }
}

impl Index {
    /// Jobs that something that became free on these nodes may help.
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
            // Also where none of these nodes is held: those that changed before may be.
            let is_ahead = held.is_some_and(|held| held.is_behind(&waiting.turn, self.jobs.get(key), predictor));
            let is_woken = match &mut waiting.waits_for {
                WaitsFor::Anything => true,
                WaitsFor::Nodes(nodes) => {
                    let has_room = |demand: &Demand, name: &str| seen.has_room(demand, name, is_ahead);
                    // All of them are noted, also after one that is enough.
                    views.iter().filter(|view| nodes.note(&view[usize::from(is_ahead)], has_room)).count() > 0
                }
            };
            if is_woken {
                woken.insert(key.clone());
            }
        }
        woken
    }

    /// Whether a plan may find for a job what the last one did not: not if it waits for room behind others, nobody has changed it, and what became
    /// free is taken again.
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

    /// Whether a job that stands in the queue by its status, and was not planned by this process yet, finds no place now: another one ahead of it
    /// asks the same of each node, and too few have room. It takes its place in the queue, and a plan is owed: what it is told may have changed.
    ///
    /// After a failover that is nearly all of the queue, and the plan of a job that finds no place is the most expensive one.
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

    /// The status of a job was written with this resource version.
    pub fn wrote_status(&mut self, key: &Key, version: &str) {
        if let Some(waiting) = self.waiting.get_mut(key) {
            waiting.version = Some(version.to_string());
        }
    }

    /// A job is not planned now, although that may be worth it.
    pub fn owes_a_plan(&mut self, key: &Key) {
        if let Some(waiting) = self.waiting.get_mut(key) {
            waiting.is_owed = true;
        }
    }
}

/// The nodes as a job that waits sees them.
struct Seen<'a> {
    usage: &'a Usage,
}

impl Seen<'_> {
    /// What is held for gangs that start again does not count as taken, nor, for a job that is ahead of the head, what the head holds.
    fn node(&self, name: &str, is_ahead: bool) -> Option<NodeView> {
        self.usage.node_without(name, |taker| taker.starts_with(HOLE) || is_ahead && taker.starts_with(HELD))
    }

    fn has_room(&self, demand: &Demand, name: &str, is_ahead: bool) -> bool {
        self.node(name, is_ahead).is_some_and(|node| demand.has_room(&node))
    }
}

#[cfg(test)]
mod tests;
