//! Safety properties. Every oracle is a pure function of a history.

use super::replay::{Replay, waits};
use super::{Change, ChangeKind, Fact, History, JobFact, PodFact, World, double_gpus, partly_bound_gangs};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use switchyard_core::quantity::Resources;
use switchyard_crds::conditions::{COMPLETE, FAILED, PLACED, Stage};
use switchyard_plan::cluster::view::Phase;

/// A violated property.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Revision of the violating change.
    pub revision: u64,
    /// Name of the object.
    pub name: String,
    /// Description of the violation.
    pub text: String,
}

impl Violation {
    pub(super) fn at(change: &Change, text: String) -> Violation {
        Violation { revision: change.revision, name: change.name.clone(), text }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revision {}: {}: {}", self.revision, self.name, self.text)
    }
}

/// Finds violations of one property.
pub type Oracle = fn(&History) -> Vec<Violation>;

/// All oracles with their names.
pub const ORACLES: [(&str, Oracle); 10] = [
    ("over_allocated", over_allocated),
    ("over_promised", over_promised),
    ("partial_gangs", partial_gangs),
    ("double_runs", double_runs),
    ("unfounded_restarts", unfounded_restarts),
    ("monotone_attempts", monotone_attempts),
    ("too_many_status_writes", too_many_status_writes),
    ("waits_despite_room", waits_despite_room),
    ("double_gpus", double_gpus),
    ("partly_bound_gangs", partly_bound_gangs),
];

/// Total requests of a node's bound pods that have not ended.
fn taken(world: &World<'_>, node: &str) -> Resources {
    let pods = world.pods.values().filter(|pod| pod.holds() == Some(node));
    pods.fold(Resources::default(), |sum, pod| sum.plus(&pod.view.requests))
}

/// At no revision do the live, bound pods of a node request more than its allocatable resources.
pub fn over_allocated(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    history.walk(|_, world, change| {
        let name = match &change.fact {
            Fact::Pod(pod) => pod.holds(),
            Fact::Node(_) => Some(change.name.as_str()),
            _ => None,
        };
        let report = |name| Some((name, world.nodes.get(name)?.allocatable.as_ref()?));
        let Some((name, allocatable)) = name.and_then(report) else { return };
        let taken = taken(world, name);
        for resource in taken.names().filter(|resource| taken.get(resource) > allocatable.get(resource)) {
            let amount = |of: &Resources| Resources::amount(resource, of.get(resource));
            let text =
                format!("node {name}: {resource}: {} requested, {} allocatable", amount(&taken), amount(allocatable));
            found.push(Violation::at(change, text));
        }
    });
    found
}

/// A gang is placed only where it fits alongside all placed gangs, so that two jobs planned at the
/// same time do not share resources.
///
/// The scheduler binds nothing that does not fit, so without this oracle the bug would only show as
/// delay. Pods of finished attempts do not count: one whose gate was lifted can still be bound
/// after its resources were released, and is then deleted at once.
pub fn over_promised(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    history.walk(|before, world, change| {
        let (Some(Fact::Job(before)), Fact::Job(job)) = (before, &change.fact) else { return };
        if before.is(PLACED) || !job.is(PLACED) {
            return;
        }
        for planned in job.status.placement.iter().flat_map(|placement| &placement.nodes) {
            let node = planned.node_name.as_str();
            let Some(allocatable) = world.nodes.get(node).and_then(|node| node.allocatable.as_ref()) else { continue };
            let sum = promised(world, node, |_| true);
            for resource in sum.names().filter(|resource| sum.get(resource) > allocatable.get(resource)) {
                let amount = |of: &Resources| Resources::amount(resource, of.get(resource));
                let text =
                    format!("node {node}: {resource}: {} promised, {} allocatable", amount(&sum), amount(allocatable));
                found.push(Violation::at(change, text));
            }
        }
    });
    found
}

/// A pod's gate is lifted only if all pods of its attempt existed at some earlier revision. At the
/// end, when the cluster is quiet, a job holds resources for all of its pods or for none.
pub fn partial_gangs(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut sizes: BTreeMap<&str, usize> = BTreeMap::new();
    let mut complete: BTreeSet<(&str, u32)> = BTreeSet::new();
    let end = history.walk(|before, world, change| match &change.fact {
        Fact::Job(job) => drop(sizes.insert(&change.uid, job.nodes)),
        Fact::Pod(pod) if !pod.job.is_empty() => {
            let attempt = (pod.job.as_str(), pod.view.attempt);
            let size = sizes.get(pod.job.as_str()).copied();
            let of_attempt = world.pods_of(&pod.job).filter(|pod| pod.view.attempt == attempt.1 && !pod.view.deleting);
            if Some(of_attempt.count()) == size {
                complete.insert(attempt);
            }
            let was_gated = matches!(before, Some(Fact::Pod(before)) if before.view.gated);
            if was_gated && !pod.view.gated && change.what == ChangeKind::Modified && !complete.contains(&attempt) {
                found.push(Violation::at(change, "its gate was lifted before its attempt had all pods".into()));
            }
        }
        _ => {}
    });
    let revision = history.changes().last().map_or(0, |change| change.revision);
    for (uid, (name, job)) in &end.jobs {
        let current = || end.pods_of(uid).filter(|pod| pod.view.attempt == job.attempt());
        let holding = current().filter(|pod| pod.holds().is_some()).count();
        let done = current().filter(|pod| pod.view.phase == Phase::Succeeded).count();
        if holding > 0 && holding + done < job.nodes {
            let text = format!("holds resources for {holding} of {} pods at the end, {done} succeeded", job.nodes);
            found.push(Violation { revision, name: (*name).into(), text });
        }
    }
    found
}

/// No attempt is charged to the infrastructure while its pods are healthy and its nodes report. A
/// NotReady node does not end an attempt.
pub fn unfounded_restarts(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    // Attempts with a fault that can end them, by job UID and attempt number.
    let mut excused: BTreeSet<(String, u32)> = BTreeSet::new();
    let is_unavailable = |world: &World<'_>, node: &str| world.nodes.get(node).is_none_or(|node| node.silent);
    let is_placed_on = |job: &JobFact, node: &str| {
        job.status.placement.iter().flat_map(|placement| &placement.nodes).any(|placed| placed.node_name == node)
    };
    history.walk(|before, world, change| match &change.fact {
        Fact::Node(node) if node.silent || change.what == ChangeKind::Deleted => {
            let pods = world.pods.values().filter(|pod| pod.view.node.as_deref() == Some(&change.name));
            excused.extend(pods.map(|pod| (pod.job.clone(), pod.view.attempt)));
            let planned = world.jobs.iter().filter(|(_, (_, job))| is_placed_on(job, &change.name));
            excused.extend(planned.map(|(uid, (_, job))| ((*uid).to_string(), job.attempt())));
        }
        Fact::Pod(pod) => {
            let view = &pod.view;
            let is_healthy = !view.is_over() && !view.deleting && view.ended.is_none() && view.disruption.is_none();
            let is_stopped = view.waiting.is_some() || view.reason.is_some() || change.what == ChangeKind::Deleted;
            if !is_healthy || is_stopped || view.node.as_deref().is_some_and(|node| is_unavailable(world, node)) {
                excused.insert((pod.job.clone(), view.attempt));
            }
        }
        Fact::Job(job) => {
            let Some(Fact::Job(before)) = before else { return };
            let charged = |job: &JobFact| job.status.restarts.as_ref().map_or(0, |restarts| restarts.infrastructure);
            let places = before.status.placement.iter().flat_map(|placement| &placement.nodes);
            let is_lost = places.map(|placed| placed.node_name.as_str()).any(|node| is_unavailable(world, node));
            if charged(job) > charged(before) && !is_lost && !excused.contains(&(change.uid.clone(), before.attempt()))
            {
                let text = format!(
                    "attempt {} ended because of its nodes, but they and its pods are healthy",
                    before.attempt()
                );
                found.push(Violation::at(change, text));
            }
        }
        _ => {}
    });
    found
}

/// No rank of a job runs in two attempts, unless the older pod is being deleted or its node is
/// lost. Within an attempt, a pod is recreated only if the first one is gone and its gate was never
/// lifted.
pub fn double_runs(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    // Pods whose gates were lifted, by job, attempt and rank.
    let mut lifted: BTreeSet<(&str, u32, u32)> = BTreeSet::new();
    history.walk(|_, world, change| {
        let Fact::Pod(pod) = &change.fact else { return };
        if pod.job.is_empty() || change.what == ChangeKind::Deleted {
            return;
        }
        let view = &pod.view;
        let slot = (pod.job.as_str(), view.attempt, view.node_rank);
        if change.what == ChangeKind::Added {
            let is_twin = |other: &PodFact| (other.view.attempt, other.view.node_rank) == (slot.1, slot.2);
            if world.pods_of(&pod.job).filter(|other| is_twin(other)).count() > 1 {
                found.push(Violation::at(change, "two pods have this attempt and rank".into()));
            }
            if lifted.contains(&slot) {
                found.push(Violation::at(change, "created again after its gate was lifted".into()));
            }
        }
        if !view.gated {
            lifted.insert(slot);
        }
        let runs = |pod: &PodFact| pod.view.phase == Phase::Running;
        let is_lost = |pod: &PodFact| {
            let node = pod.view.node.as_deref().and_then(|name| world.nodes.get(name));
            pod.view.deleting || !node.is_some_and(|node| node.ready)
        };
        let same_rank = world.pods_of(&pod.job).filter(|other| other.view.node_rank == view.node_rank && runs(other));
        let mut running: Vec<&PodFact> = same_rank.collect();
        running.sort_by_key(|other| other.view.attempt);
        running.pop();
        if runs(pod)
            && let Some(other) = running.into_iter().find(|other| !is_lost(other))
        {
            found.push(Violation::at(change, format!("runs while {} runs", other.view.name)));
        }
    });
    found
}

/// How a job ended: complete, failed.
fn outcome(job: &JobFact) -> (bool, bool) {
    (job.is(COMPLETE), job.is(FAILED))
}

/// The attempt and restart counts never decrease, and no pod is created for a finished attempt.
/// After the end, nothing is created and the result does not change.
pub fn monotone_attempts(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    let counters = |job: &JobFact| {
        let restarts = job.status.restarts.clone().unwrap_or_default();
        let counts = [restarts.application, restarts.infrastructure, restarts.preemption, restarts.total];
        (job.status.attempt.unwrap_or(0), counts)
    };
    history.walk(|before, world, change| match (before, &change.fact) {
        (Some(Fact::Job(before)), Fact::Job(job)) => {
            let ((was, previous), (is, counts)) = (counters(before), counters(job));
            if is < was || counts.iter().zip(&previous).any(|(is, was)| is < was) {
                let text = format!("attempt and restarts went from {was} {previous:?} to {is} {counts:?}");
                found.push(Violation::at(change, text));
            }
            let (was, is) = (outcome(before), outcome(job));
            if is == (true, true) || (was != (false, false) && is != was) {
                found.push(Violation::at(change, format!("complete and failed went from {was:?} to {is:?}")));
            }
        }
        (None, Fact::Pod(pod)) => {
            let Some((_, job)) = world.jobs.get(pod.job.as_str()) else { return };
            if outcome(job) != (false, false) {
                found.push(Violation::at(change, "created after the end of its job".into()));
            }
            if pod.view.attempt < job.attempt() {
                found.push(Violation::at(change, format!("created while attempt {} is current", job.attempt())));
            }
        }
        _ => {}
    });
    found
}

/// Maximum consecutive status writes of a job without news for it: a decision, a decision from a
/// newer view, progress while acting on it, and a delayed update of figures.
///
/// A reconcile writes the status at most once, and only if it differs, so without news the second
/// reconcile writes nothing. News can be seen late, so each of the four writes can have a cause
/// before the first one. A loop or a fight between writers is unbounded. The measured maximum is 2.
const LONGEST_BURST: usize = 4;

/// Status writes of all jobs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StatusWrites {
    /// Total writes.
    pub writes: usize,
    /// Writes that change the stage, the attempt or the number of ready pods.
    pub informative: usize,
    /// Longest run of one job's writes without news for it.
    pub longest_burst: usize,
}

/// Counts status writes.
pub fn status_writes(history: &History) -> StatusWrites {
    bursts(history, |_, _| {})
}

/// No job's status is written more than `LONGEST_BURST` times in a row without news for it.
pub fn too_many_status_writes(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    bursts(history, |change, burst| {
        if burst == LONGEST_BURST + 1 {
            found.push(Violation::at(change, format!("{burst} status writes without a change that requires them")));
        }
    });
    found
}

/// News for a job is a change to its spec, its pods, any node, offer or report, and while it is
/// queued, to any other pod, claim or job.
fn bursts(history: &History, mut each: impl FnMut(&Change, usize)) -> StatusWrites {
    let mut bursts: BTreeMap<&str, usize> = BTreeMap::new();
    let mut sum = StatusWrites::default();
    history.walk(|before, world, change| {
        let status_write = match (before, &change.fact) {
            (Some(Fact::Job(before)), Fact::Job(job)) => (before.status != job.status).then_some((before, job)),
            _ => None,
        };
        let waits = |uid: &str| world.jobs.get(uid).is_some_and(|(_, job)| job.stage() == Stage::Queued.reason());
        match &change.fact {
            Fact::Node(_) | Fact::Offer(_) | Fact::Report(_) => bursts.clear(),
            Fact::Claim(claim) => bursts.retain(|uid, _| *uid != claim.job && !waits(uid)),
            Fact::Pod(pod) => bursts.retain(|uid, _| *uid != pod.job && !waits(uid)),
            Fact::Job(_) => {
                bursts.retain(|uid, _| if *uid == change.uid { status_write.is_some() } else { !waits(uid) })
            }
        }
        let Some((before, job)) = status_write else { return };
        let burst = bursts.entry(&change.uid).or_default();
        *burst += 1;
        let reported = |job: &JobFact| (job.stage().to_string(), job.status.attempt, job.status.ready.clone());
        sum.writes += 1;
        sum.informative += usize::from(reported(before) != reported(job));
        sum.longest_burst = sum.longest_burst.max(*burst);
        each(change, *burst);
    });
    sum
}

/// Returns, from change number `from` on, the status writes that change only the messages of a
/// queued job. The controller delays them by up to a minute, so they can arrive when nothing has
/// happened for a while. Each job is included only once, because a repeated write is not a delayed
/// one.
pub fn late_messages(history: &History, from: usize) -> Vec<&Change> {
    let mut found: Vec<&Change> = Vec::new();
    let mut number = 0;
    history.walk(|before, _, change| {
        if number >= from
            && let (Some(Fact::Job(before)), Fact::Job(job)) = (before, &change.fact)
            && without_messages(before) == without_messages(job)
            && job.stage() == Stage::Queued.reason()
            && !found.iter().any(|reported| reported.uid == change.uid)
        {
            found.push(change);
        }
        number += 1;
    });
    found
}

fn without_messages(job: &JobFact) -> JobFact {
    let mut job = JobFact { whole: None, ..job.clone() };
    job.status.conditions.iter_mut().for_each(|condition| condition.message.clear());
    job
}

/// At the end, when the cluster is quiet, the first queued job that could ever be placed does not
/// fit. Jobs behind it may be waiting for its reservation.
pub fn waits_despite_room(history: &History) -> Vec<Violation> {
    let end = history.walk(|_, _, _| {});
    let revision = history.changes().last().map_or(0, |change| change.revision);
    let mut found = Vec::new();
    for (uid, (name, job)) in end.jobs.iter().filter(|(_, (_, job))| waits(job)) {
        if end.pods_of(uid).all(|pod| pod.view.attempt != job.attempt()) {
            found.push(Violation { revision, name: (*name).into(), text: "waits for room without pods".into() });
        }
    }
    if let Some((name, placed)) = Replay::default().waits_despite_room(&end) {
        let text = format!("waits although it has room: {}", placed.status.reason);
        found.push(Violation { revision, name: name.into(), text });
    }
    found
}

/// Resources on a node that placements promise to live pods of current attempts, restricted to the
/// pods that `counts` selects.
fn promised(world: &World<'_>, node: &str, counts: impl Fn(&PodFact) -> bool) -> Resources {
    let mut sum = Resources::default();
    for (uid, (_, job)) in world.jobs.iter().filter(|(_, (_, job))| job.is(PLACED) && outcome(job) == (false, false)) {
        let Some(placement) = &job.status.placement else { continue };
        let is_current = |pod: &&PodFact| pod.view.attempt == job.attempt() && !pod.view.is_over() && counts(pod);
        if placement.nodes.iter().all(|planned| planned.node_name != node) {
            continue;
        }
        for pod in world.pods_of(uid).filter(is_current) {
            let planned = placement.nodes.get(pod.view.node_rank as usize);
            if planned.is_some_and(|planned| planned.node_name == node) {
                sum = sum.plus(&pod.view.requests);
            }
        }
    }
    sum
}

#[cfg(test)]
mod tests;
