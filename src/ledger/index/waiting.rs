//! Jobs that wait for a place, and when a change is worth another plan for one of them: with hundreds that wait, not whenever something
//! becomes free anywhere.
//!
//! A gang is placed on nodes with room for a pod each. So a plan that found too few of them finds no place either before as many others as
//! were missing have changed, and have room. Only the head of the queue looks at every change: jobs may have to give way to it.

use super::{Index, Reservation};
use crate::job::Key;
use crate::usage::{HELD, HOLE};
use std::collections::BTreeSet;
use switchyard_plan::cluster::turn::Turn;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{Demand, Question};

/// A job that waits, as its last plan left it.
#[derive(Debug)]
pub struct Waiting {
    /// Its place in the queue. Kept, because every plan compares it with that of all others.
    pub(crate) turn: Turn,
    /// Room alone would not help: it would not fit into the empty cluster, or must not start there. It does not come before others.
    pub(crate) hopeless: bool,
    pub(crate) waits_for: WaitsFor,
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
    /// The last plan found none at all.
    none_open: bool,
    /// So many more than the last plan found.
    missing: usize,
    /// Nodes that have changed since and have room; not more than are missing.
    changed: BTreeSet<String>,
}

impl WaitsFor {
    /// A job with this question found so many nodes with room for a pod.
    pub(crate) fn nodes(question: &Question<'_>, open: u32) -> WaitsFor {
        let missing = question.valid.request.nodes.saturating_sub(open).max(1) as usize;
        let demand = Demand::of(question);
        WaitsFor::Nodes(Box::new(Nodes { demand, none_open: open == 0, missing, changed: BTreeSet::new() }))
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
        if self.none_open && self.demand.is_given_otherwise(node) {
            return true;
        }
        if !self.demand.has_room(node) {
            self.changed.remove(&node.facts.name);
            return false;
        }
        if self.changed.len() < self.missing {
            self.changed.insert(node.facts.name.clone());
        }
        if self.changed.len() >= self.missing {
            // Others may have taken them since.
            self.changed.retain(|name| has_room(&self.demand, name));
        }
        self.changed.len() >= self.missing
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
        let is_hole = |taker: &str| taker.starts_with(HOLE);
        // Also where none of these nodes is held: those that changed before may be.
        let held = self.reservation.as_ref();
        // As a job sees a node: what is held for it, for a gang behind it, or for one that begins after its end, does not count as taken.
        let usage = &self.usage;
        let seen = |name: &str, is_ahead: bool| {
            usage.node_without(name, |taker| is_hole(taker) || is_ahead && taker.starts_with(HELD))
        };
        let views: Vec<[NodeView; 2]> =
            nodes.iter().filter_map(|name| Some([seen(name, false)?, seen(name, true)?])).collect();
        for (key, waiting) in &mut self.waiting {
            let ends_before = |held: &Reservation| {
                let job = self.jobs.get(key);
                job.is_some_and(|job| held.is_begun_after(job, held.at, self.predictor.as_ref()).is_some())
            };
            let is_ahead = held.is_some_and(|held| waiting.turn <= held.turn || ends_before(held));
            let has_room =
                |demand: &Demand, name: &str| seen(name, is_ahead).is_some_and(|node| demand.has_room(&node));
            let is_woken = match &mut waiting.waits_for {
                WaitsFor::Anything => true,
                WaitsFor::Nodes(nodes) => {
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
}

#[cfg(test)]
mod tests;
