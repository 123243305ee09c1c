//! Reconstructs from a history what the controller saw when it decided, and plans again with the
//! product's planner.
//!
//! A watch cache is a few changes behind the server, and a placement may be written after a later
//! decision. Therefore a decision is compared to the snapshots around it. Reservations of the queue
//! head exist only in the controller's memory.

use super::{Change, Fact, History, JobFact, PodFact, World};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use switchyard_core::quantity::Resources;
use switchyard_crds::conditions::{PLACED, RESTARTING};
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::{PlacedNode, TrainJob};
use switchyard_plan::cluster::admitted::Admitted;
use switchyard_plan::cluster::gang::{self, Placed};
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::cluster::machine::{Machine, Shapes};
use switchyard_plan::cluster::ownership;
use switchyard_plan::cluster::reserve::reserve;
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{PlacementRequest, PlacementRules};
use switchyard_plan::objects::Defaults;
use switchyard_plan::{self as plan, cluster};

/// Changes before a decision that the cache may not have shown: on a loaded machine, the changes of
/// several gangs of five nodes.
const BEFORE: usize = 60;
/// Like [`BEFORE`], for reports and labels, which change rarely: three seconds on a machine that
/// also builds this repository and runs a virtual machine (186 changes to pods and claims were
/// seen).
pub(super) const BEFORE_OF_NODES: usize = 300;
/// Changes after a decision that may have been decided before it.
const AFTER: usize = 15;

/// Runs the product's planner on worlds of a history.
#[derive(Default)]
pub struct Replay<'a> {
    levels: Levels,
    shapes: Shapes,
    machines: Vec<(&'a GPUTopology, Result<Machine, String>)>,
}

/// Resources held on a node.
struct Usage<'a> {
    by: &'a str,
    node: &'a str,
    amount: Resources,
    gpus: Vec<&'a str>,
}

impl<'a> Replay<'a> {
    /// Creates a replay with the controller's topology levels.
    pub fn new(levels: Levels) -> Replay<'a> {
        Replay { levels, ..Replay::default() }
    }

    fn machine(&mut self, report: &'a GPUTopology) -> Result<Machine, String> {
        if let Some((_, machine)) = self.machines.iter().find(|(known, _)| std::ptr::eq(*known, report)) {
            return machine.clone();
        }
        let machine = self.shapes.machine(report);
        self.machines.push((report, machine.clone()));
        machine
    }

    /// The job's view of the nodes, without reservations of the queue head.
    fn nodes(&mut self, world: &World<'a>, uid: &str, job: &TrainJob) -> BTreeMap<String, NodeView> {
        let mut nodes: BTreeMap<String, NodeView> = BTreeMap::new();
        for (name, node) in &world.nodes {
            let allocatable = node.allocatable.clone().unwrap_or_default();
            let machine = world.reports.get(name).map(|report| self.machine(report));
            let mask = |uuids: &mut dyn Iterator<Item = &'a String>| {
                let machine = machine.as_ref().and_then(|machine| machine.as_ref().ok());
                machine.map_or(0, |machine| machine.mask(uuids.map(String::as_str)))
            };
            let mut offers = world.offers.values().filter(|offer| offer.node == *name).peekable();
            let offered = offers.peek().is_some().then_some(());
            let offered = offered.map(|()| mask(&mut offers.flat_map(|offer| offer.gpus.values())));
            let in_use = world.reports.get(name).and_then(|report| report.status.as_ref());
            let in_use = mask(&mut in_use.iter().flat_map(|status| &status.in_use).map(|used| &used.device));
            let (facts, free) = (node.facts.clone(), allocatable.clone());
            nodes.insert(
                (*name).into(),
                NodeView { facts, free, allocatable, offered, in_use, machine, ..NodeView::default() },
            );
        }
        for Usage { node, amount, gpus, .. } in usages(world, uid, job) {
            let Some(node) = nodes.get_mut(node) else { continue };
            node.free = node.free.less(&amount);
            node.taken |= node.described().map_or(0, |machine| machine.mask(gpus));
        }
        nodes
    }

    /// Returns the job's placement in this world, or `None` if it does not fit.
    pub fn place(&mut self, world: &World<'a>, uid: &str, job: &TrainJob) -> Option<Placed> {
        let nodes = self.nodes(world, uid, job);
        self.query(&nodes, job, |question, nodes| gang::place(question, nodes).ok())
    }

    /// Returns whether the job would not fit even in an empty cluster.
    fn never_fits(&mut self, world: &World<'a>, uid: &str, job: &TrainJob) -> bool {
        let nodes = self.nodes(world, uid, job);
        self.query(&nodes, job, |question, nodes| reserve(question, nodes, &[])).is_none()
    }

    fn query<T>(
        &self,
        nodes: &BTreeMap<String, NodeView>,
        job: &TrainJob,
        query: impl Fn(&PlacementRequest<'_>, &BTreeMap<String, NodeView>) -> Option<T>,
    ) -> Option<T> {
        let valid = plan::validate(job).ok()?;
        // Reports in a test never expire.
        let now = jiff::Timestamp::MIN;
        let rules = PlacementRules { defaults: &Defaults::default(), levels: &self.levels, now };
        let admitted = &Admitted::of_template(&valid, job.status.as_ref());
        query(&PlacementRequest { job, valid: &valid, rules, admitted, avoided_nodes: &BTreeMap::new() }, nodes)
    }

    /// Returns a job that waits although it fits, whichever job of its priority is the queue head:
    /// all placeable jobs of the highest priority fit. Which one is the head depends on when the
    /// controller looked.
    pub(super) fn waits_despite_room(&mut self, world: &World<'a>) -> Option<(&'a str, Placed)> {
        let waiting = world.jobs.iter().filter(|(_, (_, job))| waits(job));
        let mut waiting: Vec<_> = waiting
            .filter_map(|(uid, (name, job))| Some((priority_of(world, uid), *uid, *name, job.whole.as_ref()?)))
            .collect();
        waiting.sort_by_key(|(priority, ..)| Reverse(*priority));
        let (mut highest, mut found) = (None, None);
        for (priority, uid, name, job) in waiting {
            if highest.is_some_and(|highest| priority < highest) {
                break;
            }
            match self.place(world, uid, job) {
                Some(placed) => found = found.or(Some((name, placed))),
                None if self.never_fits(world, uid, job) => continue,
                None => return None,
            }
            highest = Some(priority);
        }
        found
    }
}

/// Returns whether the job waits for resources.
pub(super) fn waits(job: &JobFact) -> bool {
    let placed = job.status.conditions.iter().find(|condition| condition.type_ == PLACED);
    placed.is_some_and(|placed| placed.reason == "NoRoom") && is_live(job)
}

fn is_live(job: &JobFact) -> bool {
    !job.deleting && job.whole.as_ref().is_some_and(|job| !job.spec.suspend && !cluster::is_over(job))
}

fn priority_of(world: &World<'_>, uid: &str) -> i32 {
    world.pods_of(uid).map(|pod| pod.view.priority).max().unwrap_or(0)
}

/// Returns a pod's placement, once its gang is placed.
pub(super) fn promised<'a>(world: &World<'a>, pod: &PodFact) -> Option<&'a PlacedNode> {
    let (_, job) = world.jobs.get(pod.job.as_str())?;
    let is_current = job.is(PLACED) && !job.is("Complete") && !job.is("Failed") && job.attempt() == pod.view.attempt;
    job.status.placement.as_ref().filter(|_| is_current)?.nodes.get(pod.view.node_rank as usize)
}

/// Returns resources held by others, and by the job itself unless it is about to release them.
fn usages<'a>(world: &World<'a>, uid: &str, job: &TrainJob) -> Vec<Usage<'a>> {
    let status = job.status.as_ref();
    let attempt = status.and_then(|status| status.attempt).unwrap_or(0).unsigned_abs();
    let repairs = status.is_some_and(|status| status.placement.is_some());
    // The job holds nothing for this attempt yet, even if a later world shows it.
    let releases = |owner: &str, of: u32| owner == uid && (repairs || of == attempt) && of <= attempt;
    let mut usages = Vec::new();
    for pod in world.pods.values().filter(|pod| !pod.view.is_over() && !releases(&pod.job, pod.view.attempt)) {
        let place = promised(world, pod);
        let Some(node) = pod.view.node.as_deref().or(place.map(|place| place.node_name.as_str())) else { continue };
        let gpus = place.filter(|place| place.node_name == node).map(|place| place.gpus.iter().map(String::as_str));
        usages.push(Usage {
            by: &pod.view.name,
            node,
            amount: pod.view.requests.clone(),
            gpus: gpus.into_iter().flatten().collect(),
        });
    }
    let claims = world
        .claims
        .values()
        .filter(|(name, claim)| ownership::position(name).is_none_or(|(attempt, _)| !releases(&claim.job, attempt)));
    for (by, claim) in claims {
        let pools: BTreeSet<&str> = claim.devices.iter().map(|(pool, _)| pool.as_str()).collect();
        for offer in world.offers.values() {
            if offer.gpus.keys().any(|(pool, _)| pools.contains(pool.as_str())) {
                let gpus = world.gpus_of(claim).collect();
                usages.push(Usage { by, node: &offer.node, amount: Resources::default(), gpus });
            }
        }
    }
    // Restarting gangs keep reservations on their GPUs, except against jobs of higher priority.
    let priority = priority_of(world, uid);
    for (other, (name, fact)) in world.jobs.iter().filter(|(other, (_, fact))| **other != uid && is_live(fact)) {
        let placed = fact.status.conditions.iter().find(|condition| condition.type_ == PLACED);
        let restarts = placed.is_some_and(|placed| placed.status == "False" && placed.reason == RESTARTING);
        let is_lower = priority_of(world, other) < priority;
        let reservations =
            fact.status.placement.iter().filter(|_| restarts && !is_lower).flat_map(|place| &place.nodes);
        let gpus = |place: &'a PlacedNode| place.gpus.iter().map(String::as_str).collect();
        usages.extend(reservations.map(|place| Usage {
            by: name,
            node: &place.node_name,
            amount: Resources::default(),
            gpus: gpus(place),
        }));
    }
    usages
}

/// A placement decision: the job before and after, and the surrounding worlds, first backwards from
/// the one before the decision, then forwards.
pub(super) struct Decision<'b, 'a> {
    pub change: &'a Change,
    pub before: &'a JobFact,
    pub after: &'a JobFact,
    pub worlds: Vec<&'b World<'a>>,
}

/// Visits every placement decision of a history, with up to `max` worlds before it.
pub(super) fn decisions<'a>(history: &'a History, max: usize, mut visit: impl FnMut(&Decision<'_, 'a>)) {
    // Worlds after each of the last changes, and open decisions by change number.
    let mut worlds: VecDeque<World<'a>> = VecDeque::new();
    let mut open: VecDeque<(usize, &'a Change, &'a JobFact, &'a JobFact)> = VecDeque::new();
    let mut jobs: BTreeMap<&str, &'a JobFact> = BTreeMap::new();
    let mut number = 0;
    let mut show = |worlds: &VecDeque<World<'a>>, last: usize, (at, change, before, after): (usize, _, _, _)| {
        let first = last + 1 - worlds.len();
        let (earlier, later) = (first.max(at.saturating_sub(max))..at, at..=last.min(at + AFTER));
        let worlds = earlier.rev().chain(later).map(|number| &worlds[number - first]).collect();
        visit(&Decision { change, before, after, worlds });
    };
    history.walk(|_, world, change| {
        if let Fact::Job(after) = &change.fact
            && let Some(before) = jobs.insert(&change.uid, after)
            && !before.is(PLACED)
            && after.is(PLACED)
        {
            open.push_back((number, change, before, after));
        }
        worlds.push_back(world.clone());
        if worlds.len() > max + 1 + AFTER {
            worlds.pop_front();
        }
        while let Some(next) = open.pop_front_if(|(at, ..)| *at + AFTER <= number) {
            show(&worlds, number, next);
        }
        number += 1;
    });
    open.into_iter().for_each(|next| show(&worlds, number - 1, next));
}

/// Counts of decisions that the product's planner reproduces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Placement decisions.
    pub decisions: usize,
    /// Reproduced exactly, node by node and GPU by GPU, from the world immediately before.
    pub exact: usize,
    /// Reproduced from a world some changes earlier or later.
    pub around: usize,
    /// Not reproduced, but jobs ahead may have held reservations that the history does not show.
    pub behind: usize,
    /// Descriptions of all other decisions.
    pub unexplained: Vec<String>,
}

/// Plans every placed gang again.
pub fn replay(history: &History, levels: Levels) -> Replayed {
    let mut replay = Replay::new(levels);
    let mut sum = Replayed::default();
    decisions(history, BEFORE, |decision| {
        let Decision { change, before, after, worlds } = decision;
        let (Some(job), Some(place)) = (&before.whole, &after.status.placement) else { return };
        sum.decisions += 1;
        let (mut known, mut first) = (None, None);
        let found = worlds.iter().position(|world| {
            let nodes = replay.nodes(world, &change.uid, job);
            if known.as_ref() == Some(&nodes) {
                return false;
            }
            let placed = replay.query(&nodes, job, |question, nodes| gang::place(question, nodes).ok());
            known = Some(nodes);
            let is_same = placed.as_ref().is_some_and(|placed| placed.status.nodes == place.nodes);
            first.get_or_insert(placed);
            is_same
        });
        match found {
            Some(0) => sum.exact += 1,
            Some(_) => sum.around += 1,
            None if worlds.iter().any(|world| is_behind_in_queue(world, &change.uid)) => sum.behind += 1,
            None => {
                let again = first.flatten().map(|placed| placed.status.reason);
                let (revision, name, reason) = (change.revision, &change.name, &place.reason);
                let others = worlds.first().map(|world| conflicting_users(world, &change.uid, job, &place.nodes));
                let others = others.unwrap_or_default().join(", ");
                sum.unexplained.push(format!(
                    "revision {revision}: {name}: {reason}; replanned: {again:?}; other users of its GPUs: {others}"
                ));
            }
        }
    });
    sum
}

/// Returns the holders of these placements' GPUs in this world.
fn conflicting_users(world: &World<'_>, uid: &str, job: &TrainJob, places: &[PlacedNode]) -> Vec<String> {
    let has = |usage: &Usage<'_>| {
        places.iter().any(|place| usage.gpus.iter().any(|gpu| place.gpus.iter().any(|own| own == gpu)))
    };
    usages(world, uid, job)
        .iter()
        .filter(|usage| has(usage))
        .map(|usage| format!("{} on {}", usage.by, usage.node))
        .collect()
}

/// Returns whether a queued job may be ahead of this one, and may hold reservations.
fn is_behind_in_queue(world: &World<'_>, uid: &str) -> bool {
    let mut others = world.jobs.iter().filter(|(other, (_, fact))| **other != uid && waits(fact));
    others.any(|(other, _)| priority_of(world, other) >= priority_of(world, uid))
}
