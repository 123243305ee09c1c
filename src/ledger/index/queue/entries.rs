//! Queued jobs, and which changes justify planning one of them again. With hundreds of queued jobs,
//! not every release of resources does.
//!
//! A gang needs nodes that each have room for a pod. A plan that found too few of them therefore
//! cannot succeed until as many other nodes as were missing have changed and have room. Only the
//! head of the queue reacts to every change, because it may preempt jobs.
//!
//! Of the jobs that a change may help, the first one planned often takes what was released. The
//! others need no new plan then.

use super::predictor::Predictor;
use super::reservation::Reservation;
use crate::index::Index;
use crate::job::{Key, is_queued};
use crate::usage::{RESERVED_PREFIX, RESTART_PREFIX, Usage};
use std::collections::BTreeSet;
use std::sync::Arc;
use switchyard_crds::TrainJob;
use switchyard_plan::cluster::queue_order::QueuePosition;
use switchyard_plan::cluster::queue_policy::PolicySettings;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{Demand, PlacementRules};

/// A queued job, as its last plan left it.
#[derive(Debug)]
pub(super) struct QueueEntry {
    /// Queue position. It is stored because every plan compares it with all others.
    pub(super) position: QueuePosition,
    /// Whether room alone would not help, because the job does not fit into the empty cluster or
    /// must not start there. It does not block other jobs.
    pub(super) hopeless: bool,
    pub(super) wake_condition: WakeCondition,
    /// Resource version of the job after the last plan: the planned version, or the version of the
    /// status write.
    pub(super) version: Option<String>,
    /// Whether a plan was due but skipped because the cache was behind.
    pub(super) plan_due: bool,
}

/// The change that a job waits for.
#[derive(Debug)]
pub(super) enum WakeCondition {
    /// Another fabric, or room for pods of several roles: any change may provide it.
    Anything,
    NodesWithRoom(Box<NodesWithRoom>),
}

/// A number of nodes with room for a pod.
#[derive(Debug)]
pub(super) struct NodesWithRoom {
    demand: Demand,
    /// Number of nodes with room in the last plan.
    open: usize,
    /// Number of further nodes that the job needs.
    missing: usize,
    /// Nodes that have changed since and have room.
    changed: BTreeSet<String>,
    /// Whether `changed` may be incomplete, because further nodes had room or allocate GPUs
    /// differently.
    is_incomplete: bool,
}

/// Number of nodes remembered beyond those missing, so that the count stays right when other jobs
/// take some.
const MAX_SPARE: usize = 16;

impl WakeCondition {
    /// For a job with this number of pods, whose last plan found `open` nodes with room for one.
    pub(super) fn nodes(demand: Demand, pods: u32, open: u32) -> WakeCondition {
        let (open, missing) = (open as usize, pods.saturating_sub(open).max(1) as usize);
        WakeCondition::NodesWithRoom(Box::new(NodesWithRoom {
            demand,
            open,
            missing,
            changed: BTreeSet::new(),
            is_incomplete: false,
        }))
    }

    /// Resource requests of a pod, if the job waits for room.
    pub(super) fn demand(&self) -> Option<&Demand> {
        match self {
            WakeCondition::Anything => None,
            WakeCondition::NodesWithRoom(nodes) => Some(&nodes.demand),
        }
    }
}

impl NodesWithRoom {
    /// Records a changed node. Returns whether enough nodes have room now.
    fn record(&mut self, node: &NodeView, has_room: impl Fn(&Demand, &str) -> bool) -> bool {
        if self.open == 0 && self.demand.provides_gpus_differently(node) {
            self.is_incomplete = true;
            return true;
        }
        if !self.demand.has_room(node) {
            self.changed.remove(&node.facts.name);
            return false;
        }
        if self.changed.len() < self.missing + MAX_SPARE {
            self.changed.insert(node.facts.name.clone());
        } else {
            self.is_incomplete |= !self.changed.contains(&node.facts.name);
        }
        self.is_enough(has_room)
    }

    /// Upper bound on the number of nodes with room now; `None` if unknown.
    fn at_most(&self) -> Option<usize> {
        (!self.is_incomplete).then_some(self.open + self.changed.len())
    }

    /// Whether enough of the changed nodes still have room, because other jobs may have taken some
    /// since.
    fn is_enough(&mut self, has_room: impl Fn(&Demand, &str) -> bool) -> bool {
        if self.changed.len() >= self.missing {
            self.changed.retain(|name| has_room(&self.demand, name));
        }
        self.is_incomplete || self.changed.len() >= self.missing
    }
}

impl Reservation {
    /// Whether reserved nodes count as free for a queued job: it comes before the holder, or ends
    /// or makes way before the holder can start.
    fn is_usable_by(
        &self,
        position: &QueuePosition,
        job: Option<&Arc<TrainJob>>,
        predictor: Option<&Predictor>,
        policy: &PolicySettings,
    ) -> bool {
        let by_end = |job: &TrainJob| self.backfill_basis(job, self.at, predictor).is_some();
        let makes_way = |job: &TrainJob| self.is_open_to_preemptible(job, self.at, policy);
        *position <= self.position || job.is_some_and(|job| by_end(job) || makes_way(job))
    }
}

impl Index {
    /// Jobs that resources released on these nodes may help. Marks the reservation as stale.
    pub fn wake(&mut self, nodes: &BTreeSet<String>) -> BTreeSet<Key> {
        if !nodes.is_empty() {
            self.queue.invalidate_reservation();
        }
        self.jobs_helped_by(nodes)
    }

    /// Jobs that may use these nodes now.
    pub(crate) fn jobs_helped_by(&mut self, nodes: &BTreeSet<String>) -> BTreeSet<Key> {
        if nodes.is_empty() || self.queue.entries.is_empty() {
            return BTreeSet::new();
        }
        let mut woken: BTreeSet<Key> = self.head().into_iter().collect();
        let nodes_now = NodeAvailability { usage: &self.usage };
        let views: Vec<[NodeView; 2]> =
            nodes.iter().filter_map(|name| Some([nodes_now.node(name, false)?, nodes_now.node(name, true)?])).collect();
        let (held, predictor, policy) =
            (self.queue.reservation.as_ref(), self.queue.predictor.as_ref(), &self.queue.settings.policy);
        for (key, entry) in &mut self.queue.entries {
            // This matters even if none of these nodes is reserved, because nodes that changed
            // earlier may be.
            let is_ahead =
                held.is_some_and(|held| held.is_usable_by(&entry.position, self.jobs.get(key), predictor, policy));
            let is_woken = match &mut entry.wake_condition {
                WakeCondition::Anything => true,
                WakeCondition::NodesWithRoom(nodes) => {
                    let has_room = |demand: &Demand, name: &str| nodes_now.has_room(demand, name, is_ahead);
                    // Record every view: `any` would stop at the first that is enough.
                    views.iter().filter(|view| nodes.record(&view[usize::from(is_ahead)], has_room)).count() > 0
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
    pub fn needs_planning(&mut self, key: &Key) -> bool {
        if self.unreadable.contains_key(key) || self.missing_slice(key).is_some() {
            return true;
        }
        let Some(entry) = self.queue.entries.get_mut(key) else { return true };
        let WakeCondition::NodesWithRoom(nodes) = &mut entry.wake_condition else { return true };
        let job = self.jobs.get(key);
        if entry.plan_due || job.map(|job| &job.metadata.resource_version) != Some(&entry.version) {
            return true;
        }
        let (held, predictor, policy) =
            (self.queue.reservation.as_ref(), self.queue.predictor.as_ref(), &self.queue.settings.policy);
        let is_ahead = held.is_some_and(|held| held.is_usable_by(&entry.position, job, predictor, policy));
        let nodes_now = NodeAvailability { usage: &self.usage };
        nodes.is_enough(|demand, name| nodes_now.has_room(demand, name, is_ahead)) || self.head().as_ref() == Some(key)
    }

    /// Whether a job that is queued according to its status, and that this process has not planned
    /// yet, certainly finds no placement now: a job ahead of it with the same resource requests
    /// found too few nodes with room. The job enters the queue, and a plan is owed because its
    /// status message may have changed.
    ///
    /// After a failover this applies to most of the queue, and plans that find no placement are the
    /// most expensive ones.
    pub fn enqueue_unplanned(&mut self, key: &Key, rules: PlacementRules<'_>) -> bool {
        if self.queue.entries.contains_key(key) {
            return false;
        }
        let Some(job) = self.jobs.get(key).filter(|job| is_queued(job)).cloned() else { return false };
        let position = self.queue_position(&job);
        let found = self.with_request(&job, rules, |index, request| {
            let (held, predictor, policy) =
                (index.queue.reservation.as_ref(), index.queue.predictor.as_ref(), &index.queue.settings.policy);
            let can_use_reserved = |position: &QueuePosition, job| {
                held.is_some_and(|held: &Reservation| held.is_usable_by(position, job, predictor, policy))
            };
            if !request.valid.roles.is_empty() {
                return None;
            }
            let (demand, pods) = (Demand::of(request), request.valid.request.nodes);
            let can_use_more = can_use_reserved(&position, Some(&job));
            let similar_entry = |(other, entry): (&Key, &QueueEntry)| {
                let WakeCondition::NodesWithRoom(nodes) = &entry.wake_condition else { return None };
                let is_ahead = !entry.hopeless && entry.position < position;
                let saw_same_nodes = !can_use_more || can_use_reserved(&entry.position, index.jobs.get(other));
                let open = nodes.at_most().filter(|open| *open < pods as usize)?;
                (is_ahead && saw_same_nodes && nodes.demand == demand).then_some(open as u32)
            };
            let open = index.queue.entries.iter().find_map(similar_entry)?;
            Some(WakeCondition::nodes(demand, pods, open))
        });
        let Some(wake_condition) = found.flatten() else { return false };
        self.queue.entries.insert(
            key.clone(),
            QueueEntry { position, hopeless: false, wake_condition, version: None, plan_due: true },
        );
        true
    }

    /// Records the resource version of a status write.
    pub fn record_status_version(&mut self, key: &Key, version: &str) {
        if let Some(entry) = self.queue.entries.get_mut(key) {
            entry.version = Some(version.to_string());
        }
    }

    /// Records that a job was not planned although it may have been worthwhile.
    pub fn mark_plan_due(&mut self, key: &Key) {
        if let Some(entry) = self.queue.entries.get_mut(key) {
            entry.plan_due = true;
        }
    }
}

/// The nodes as seen by a queued job.
struct NodeAvailability<'a> {
    usage: &'a Usage,
}

impl NodeAvailability<'_> {
    /// A node on which the GPUs held for restarting gangs count as free and, for a job ahead of the
    /// head of the queue, so do reserved ones.
    fn node(&self, name: &str, is_ahead: bool) -> Option<NodeView> {
        self.usage.node_without(name, |taker| {
            taker.starts_with(RESTART_PREFIX) || is_ahead && taker.starts_with(RESERVED_PREFIX)
        })
    }

    fn has_room(&self, demand: &Demand, name: &str, is_ahead: bool) -> bool {
        self.node(name, is_ahead).is_some_and(|node| demand.has_room(&node))
    }
}

#[cfg(test)]
mod tests;
