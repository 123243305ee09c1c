//! Failure detection: which pod failed first, and the class of the failure. [`crate::restart`]
//! decides what follows.

use super::attempt::Attempt;
use super::avoidance::{GONE, LOST, NOT_STARTED, NodeFault, OUT_OF_SERVICE};
use super::blocker::{self, Limit, START_GRACE, STUCK_GRACE};
use super::containers::{OUT_OF_MEMORY, last_line};
use super::view::{NodeView, PodView};
use super::{JobSnapshot, Premise, Silence, clock};
use crate::restart::{self, Class, Failure, ROOT_CAUSE_GRACE};
use jiff::{SignedDuration, Timestamp};
use switchyard_core::units::plural;
use switchyard_crds::Framework;
use switchyard_worker_contract::exit::Exit;

/// Disruption reason of the taint eviction controller (`DeletionByTaintManager` in Kubernetes).
const TAINT_EVICTION: &str = "DeletionByTaintManager";

/// Delay before checking again whether a log has been read.
const READ_RETRY: SignedDuration = SignedDuration::from_secs(5);

/// Grace period for a deleted Node to register again, the same as in the Kubernetes pod garbage
/// collector.
const MISSING_NODE_GRACE: SignedDuration = SignedDuration::from_secs(40);

/// Grace period for deleted nodes: never longer than the administrator's setting for silent nodes.
fn missing_node_grace(attempt: &Attempt<'_>) -> SignedDuration {
    MISSING_NODE_GRACE.min(attempt.snapshot.silence.grace)
}

/// Maximum number of nodes that are named in addition to the first.
const MAX_NAMED: usize = 3;

/// The failure of a pod.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PodFailure {
    pub failure: Failure,
    pub pod: String,
    pub node: Option<String>,
    pub cause: String,
    /// The rank that failed, with its node, if another pod reported it.
    pub origin: Option<String>,
    pub at: Option<Timestamp>,
    /// Reason under which the node's fault is recorded. `None` if the node is not to blame.
    pub blame: Option<String>,
    /// The queue preempted the job, which therefore leaves its nodes.
    pub is_eviction: bool,
    /// Faults of other nodes.
    pub others: Vec<NodeFault>,
}

impl PodFailure {
    /// Failure of a pod whose state is unknown.
    pub fn unknown_state(class: Class, pod: String, cause: String) -> PodFailure {
        let failure = Failure { class, permanent: false, code: None, conditions: Vec::new() };
        let (node, origin, at, blame) = (None, None, None, None);
        PodFailure { failure, pod, node, cause, origin, at, blame, is_eviction: false, others: Vec::new() }
    }

    /// Premise about the node that the server must confirm.
    pub fn premise(&self) -> Option<Premise> {
        let node = self.node.clone()?;
        match self.blame.as_deref()? {
            GONE => Some(Premise::NodeGone(node)),
            LOST => Some(Premise::NodeSilent(node)),
            _ => None,
        }
    }

    /// Attributes the failure to the node.
    fn blame_node(mut self, reason: &str) -> PodFailure {
        self.blame = Some(reason.to_string());
        self
    }

    /// Attributes the failure to the queue.
    fn blame_queue(mut self) -> PodFailure {
        self.is_eviction = true;
        self
    }

    /// Sets whether a retry would fail the same way.
    fn with_permanent(mut self, permanent: bool) -> PodFailure {
        self.failure.permanent = permanent;
        self
    }

    /// The failure in one sentence.
    pub fn sentence(&self) -> String {
        let on = self.node.as_ref().map_or_else(String::new, |node| format!(" on node {node}"));
        let mut text = match &self.origin {
            Some(origin) => format!("{origin}: {} (reported by pod {}{on})", self.cause, self.pod),
            None => format!("pod {}{on}: {}", self.pod, self.cause),
        };
        for fault in self.others.iter().take(MAX_NAMED) {
            text.push_str(&format!("; node {}: {}", fault.node, fault.message));
        }
        let more = self.others.len().saturating_sub(MAX_NAMED);
        if more > 0 {
            text.push_str(&format!("; and {more} more node{}", plural(more as u64)));
        }
        text
    }

    /// Fault of the pod's own node, if it is to blame.
    fn node_fault(&self) -> Option<NodeFault> {
        Some(NodeFault { node: self.node.clone()?, reason: self.blame.clone()?, message: self.cause.clone() })
    }

    /// Faults of all nodes that are to blame.
    pub fn node_faults(&self) -> impl Iterator<Item = NodeFault> {
        self.node_fault().into_iter().chain(self.others.iter().cloned())
    }
}

/// State of an attempt, judged from its pods.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Assessment {
    Healthy,
    /// Undecided: check again at this time.
    Recheck(Timestamp),
    /// The first failure.
    Failed(PodFailure),
}

/// Finds the first failure among the pods of an attempt.
pub(super) fn assess(attempt: &Attempt<'_>) -> Assessment {
    let mut failures = Vec::new();
    let mut recheck_at: Option<Timestamp> = None;
    for (rank, pod) in (0_u32..).zip(&attempt.pods) {
        match pod {
            // Before placement, a gang lacks this pod like any other.
            _ if attempt.placed && attempt.valid.ignores_failure(rank) => {}
            Some(pod) => match assess_pod(pod, attempt) {
                Assessment::Healthy => {}
                Assessment::Recheck(at) => recheck_at = Some(recheck_at.map_or(at, |recheck_at| recheck_at.min(at))),
                Assessment::Failed(failure) => failures.push(failure),
            },
            // Before the gates are lifted, a missing pod has done nothing and is simply recreated.
            None if attempt.placed && !attempt.is_unlabelled(rank) => failures.push(missing_pod(attempt, rank)),
            None => {}
        }
    }
    // When a node is lost, ranks on other nodes fail as a consequence.
    if let Some(first) =
        failures.iter().filter(|f| f.failure.class != Class::Application).min_by_key(|f| f.at.unwrap_or(Timestamp::MIN))
    {
        return Assessment::Failed(with_other_faults(first, &failures));
    }
    let is_peer_failure = |failed: &PodFailure| failed.failure.code == Some(Exit::PeerFailure.code().into());
    let earliest = |peer_failure: bool| {
        failures.iter().filter(|f| is_peer_failure(f) == peer_failure).min_by_key(|f| f.at.unwrap_or(Timestamp::MAX))
    };
    // Something else may become visible: the failure of the peer, or the end of the awaited role,
    // after which pods of other roles can fail.
    let unless_explained = |failed: &PodFailure| {
        let until = failed.at.unwrap_or(attempt.now()).saturating_add(ROOT_CAUSE_GRACE).unwrap_or(attempt.now());
        let others_run = attempt.existing().iter().any(|pod| !pod.is_done());
        let must_wait = others_run && !clock::is_over(until, ROOT_CAUSE_GRACE, attempt.now());
        if must_wait { Assessment::Recheck(until) } else { Assessment::Failed(failed.clone()) }
    };
    let is_dependent = |failed: &PodFailure| {
        attempt.existing().iter().any(|pod| pod.name == failed.pod && !attempt.valid.awaits(pod.node_rank))
    };
    match (earliest(false), earliest(true)) {
        (Some(first), _) if is_dependent(first) => unless_explained(first),
        (Some(first), _) => Assessment::Failed(first.clone()),
        (None, Some(peer_failure)) => unless_explained(peer_failure),
        (None, None) => recheck_at.map_or(Assessment::Healthy, Assessment::Recheck),
    }
}

/// The first failure together with the faults of other nodes. Otherwise the next attempts would run
/// into them one after the other.
fn with_other_faults(first: &PodFailure, failures: &[PodFailure]) -> PodFailure {
    let others = failures.iter().filter(|failed| failed.node != first.node).filter_map(PodFailure::node_fault);
    PodFailure { others: others.collect(), ..first.clone() }
}

fn missing_pod(attempt: &Attempt<'_>, rank: u32) -> PodFailure {
    let pod = attempt.valid.pod_name(attempt.number, rank);
    PodFailure::unknown_state(Class::Infrastructure, pod, "the pod was deleted".into())
}

/// Failure of a gang that is preempted by a job of higher priority.
pub(super) fn preempted(pod: String, by: &str) -> PodFailure {
    PodFailure::unknown_state(Class::Preemption, pod, format!("preempted by {by}"))
}

fn assess_pod(pod: &PodView, attempt: &Attempt<'_>) -> Assessment {
    let is_waiting_to_start = pod.gated && pod.node.is_none() && !attempt.placed;
    if pod.has_succeeded() || (is_waiting_to_start && !pod.is_held_by_group()) {
        return Assessment::Healthy;
    }
    let failure = |class: Class, cause: String| PodFailure {
        failure: Failure {
            class,
            permanent: false,
            code: pod.end().map(|(_, ended)| ended.code),
            conditions: pod.true_conditions.clone(),
        },
        node: pod.node.clone(),
        at: pod.end().and_then(|(_, ended)| ended.at),
        ..PodFailure::unknown_state(class, pod.name.clone(), cause)
    };
    if pod.deleting || pod.has_failed() {
        if let Some(why) = &pod.stopped_by_queue {
            return Assessment::Failed(failure(Class::Preemption, format!("stopped by Kueue: {why}")).blame_queue());
        }
        if let Some((reason, message)) = pod.disruption.as_ref().filter(|_| !is_evicted_from_silent_node(pod, attempt))
        {
            let class = if reason == "PreemptionByScheduler" { Class::Preemption } else { Class::Infrastructure };
            return Assessment::Failed(failure(class, format!("{reason}: {message}")));
        }
        if let Some((reason, message)) = pod.reason.as_ref().filter(|(reason, _)| !reason.is_empty()) {
            let failed = failure(Class::Infrastructure, format!("{reason}: {message}"));
            // The trainer never ran because the node refused the pod, and it would refuse the next
            // one too.
            let is_refused = pod.has_failed() && pod.ended.is_none();
            return Assessment::Failed(if is_refused { failed.blame_node(reason) } else { failed });
        }
    }
    if pod.has_failed() {
        return Assessment::Failed(exited(pod, attempt, failure));
    }
    if pod.deleting && !is_evicted_from_silent_node(pod, attempt) {
        return Assessment::Failed(failure(Class::Infrastructure, "the pod was deleted".into()));
    }
    if let Some(name) = &pod.node {
        match attempt.snapshot.nodes.get(name) {
            None => {
                let since = attempt.snapshot.missing.get(name).copied().unwrap_or(attempt.now());
                return fail_after(attempt, since, missing_node_grace(attempt), || {
                    failure(Class::Infrastructure, "the node is gone".into()).blame_node(GONE)
                });
            }
            Some(node) if node.out_of_service => {
                let cause = "the node is lost: an administrator took it out of service".into();
                return Assessment::Failed(failure(Class::Infrastructure, cause).blame_node(OUT_OF_SERVICE));
            }
            Some(node) => {
                let Silence { grace, mass_outage, progress_unread, .. } = attempt.snapshot.silence;
                let recheck_in =
                    |pause| Assessment::Recheck(attempt.now().saturating_add(pause).unwrap_or(Timestamp::MAX));
                match (grace_start(attempt, node), mass_outage) {
                    (None, _) => {}
                    (Some(_), Some(_)) => return recheck_in(grace),
                    (Some(_), None) if progress_unread => return recheck_in(READ_RETRY),
                    (Some(since), None) => {
                        return fail_after(attempt, since, grace, || {
                            let cause = "the node is lost: it stopped reporting to the cluster";
                            failure(Class::Infrastructure, cause.into()).blame_node(LOST)
                        });
                    }
                }
            }
        }
    }
    starting(pod, attempt, failure)
}

/// Whether a pod was evicted because its node went silent. Its kubelet cannot know, so the
/// containers may still be training, and the node's grace period decides. Pods normally tolerate
/// the taint. This one was created without the toleration, or its template limits it.
fn is_evicted_from_silent_node(pod: &PodView, attempt: &Attempt<'_>) -> bool {
    let node = pod.node.as_ref().and_then(|name| attempt.snapshot.nodes.get(name));
    let is_silent = node.is_some_and(|node| node.silent_since.is_some() && !node.out_of_service);
    is_silent && !pod.is_done() && pod.disruption.as_ref().is_some_and(|(reason, _)| reason == TAINT_EVICTION)
}

/// When the grace period of a silent node starts: when it stopped reporting, when the ranks last
/// made progress, or when the last mass outage ended, whichever is latest. Progress of ranks
/// elsewhere counts because they depend on the ranks on this node.
fn grace_start(attempt: &Attempt<'_>, node: &NodeView) -> Option<Timestamp> {
    let Silence { outage_ended, progress, .. } = attempt.snapshot.silence;
    let since = node.silent_since?;
    [outage_ended, progress].into_iter().flatten().chain([since]).max()
}

/// Describes the first node of the attempt that is gone or silent, and the consequence. `None` if
/// all nodes report.
pub(super) fn silent_node(attempt: &Attempt<'_>) -> Option<String> {
    let JobSnapshot { nodes, missing, .. } = attempt.snapshot;
    let used = || attempt.existing().into_iter().filter(|pod| !pod.is_done()).filter_map(|pod| pod.node.as_ref());
    if let Some((name, since)) =
        used().find_map(|name| missing.get_key_value(name).filter(|_| !nodes.contains_key(name)))
    {
        let seconds = missing_node_grace(attempt).as_secs();
        return Some(format!(
            "node {name} has been missing since {since}: after {seconds} s the job restarts without it"
        ));
    }
    let mut used = used();
    let (name, since) = used.find_map(|name| Some((name, nodes.get(name)?.silent_since?)))?;
    let Silence { grace, mass_outage, progress, .. } = attempt.snapshot.silence;
    let consequence = match mass_outage {
        Some(mass_outage) => mass_outage.to_string(),
        None if progress.is_some_and(|progress| progress > since) => {
            "but the ranks make progress, so the job is not restarted".into()
        }
        None => format!("after {} s the job restarts without it", grace.as_secs()),
    };
    Some(format!("node {name} has not reported since {since}: {consequence}"))
}

/// Fails once the state has lasted for `grace`.
fn fail_after(
    attempt: &Attempt<'_>,
    since: Timestamp,
    grace: SignedDuration,
    failure: impl FnOnce() -> PodFailure,
) -> Assessment {
    let due = since.saturating_add(grace).unwrap_or(Timestamp::MAX);
    if clock::is_over(due, grace, attempt.now()) { Assessment::Failed(failure()) } else { Assessment::Recheck(due) }
}

/// Judges a pod that has not started.
fn starting(pod: &PodView, attempt: &Attempt<'_>, failure: impl Fn(Class, String) -> PodFailure) -> Assessment {
    let Some(waiting) = pod.blocker() else {
        let minutes = STUCK_GRACE.as_mins();
        let cause = format!("it has not started, and its kubelet has reported nothing about it for {minutes} minutes");
        let failed = || failure(Class::Infrastructure, cause).blame_node(NOT_STARTED);
        return if pod.is_silent() { stuck(pod, attempt, failed) } else { Assessment::Healthy };
    };
    let remedy = blocker::start_remedy(waiting);
    let failed = || failure(Class::Infrastructure, remedy.sentence(&waiting.sentence()));
    let since = pod.started.unwrap_or(attempt.now());
    match remedy.limit {
        Limit::None => Assessment::Failed(failed().with_permanent(true)),
        Limit::Grace => fail_after(attempt, since, START_GRACE, || failed().with_permanent(true)),
        Limit::Attempt => fail_after(attempt, since, START_GRACE, || failed().blame_node(&waiting.reason)),
        // Messages about containers may be the template's fault rather than the node's.
        Limit::Stuck if waiting.container.is_empty() => stuck(pod, attempt, || failed().blame_node(&waiting.reason)),
        Limit::Stuck => stuck(pod, attempt, failed),
        Limit::Unlimited => Assessment::Healthy,
    }
}

/// Fails a bound pod that has not started, for no reason that is known to be temporary. Slow
/// kubelet work does not count: pulling an image, and containers that run before the trainer.
fn stuck(pod: &PodView, attempt: &Attempt<'_>, failed: impl FnOnce() -> PodFailure) -> Assessment {
    let since = match (pod.started, &pod.progress) {
        _ if pod.init.as_ref().is_some_and(|init| init.failure().is_none()) => None,
        (Some(_), Some(progress)) if progress.is_pulling => None,
        (Some(started), Some(progress)) => Some(progress.at.map_or(started, |at| at.max(started))),
        // Without the pod's events, a long pull looks the same as an idle kubelet.
        (Some(started), None) => Some(started).filter(|_| !pod.is_silent()),
        (None, _) => pod.bound,
    };
    let Some(since) = since else { return Assessment::Healthy };
    // These timestamps come from the kubelet and the scheduler, whose clocks may be an hour off.
    // The limit therefore counts from the placement at the earliest, which this controller timed,
    // and a slow clock does not shorten it.
    let since = attempt.placed_at().map_or(since, |placed| placed.max(since));
    let [due, latest] = [since, attempt.now()].map(|time| time.saturating_add(STUCK_GRACE).unwrap_or(Timestamp::MAX));
    if due <= attempt.now() { Assessment::Failed(failed()) } else { Assessment::Recheck(due.min(latest)) }
}

/// Failure of a trainer container that exited or was killed.
fn exited(pod: &PodView, attempt: &Attempt<'_>, failure: impl Fn(Class, String) -> PodFailure) -> PodFailure {
    let Some(ended) = &pod.ended else {
        let Some((init, ended)) = pod.init.as_ref().and_then(|init| Some((init, init.failure()?))) else {
            return failure(Class::Infrastructure, "the pod failed before its container ended".into());
        };
        // An init container runs the user's program, as the trainer does.
        let is_killed = ended.reason == OUT_OF_MEMORY;
        return failure(if is_killed { Class::Infrastructure } else { Class::Application }, init.sentence());
    };
    if ended.reason == OUT_OF_MEMORY {
        return failure(Class::Infrastructure, "the container ran out of memory (OOMKilled)".into());
    }
    let is_ours = attempt.snapshot.job.spec.trainer.framework == Framework::Switchyard;
    let exit = Exit::from_code(ended.code).filter(|_| is_ours);
    let worker_report = ended.worker_report().and_then(|worker_report| worker_report.failure);
    let origin =
        worker_report.as_ref().and_then(|worker_report| origin_on_other_pod(worker_report.origin_rank, pod, attempt));
    let cause = match (worker_report, exit) {
        (Some(worker_report), _) if origin.is_some() => worker_report.cause,
        (Some(worker_report), _) => format!("rank {}: {}", worker_report.origin_rank, worker_report.cause),
        (None, Some(exit)) => format!("exit code {} ({})", ended.code, exit.meaning()),
        (None, None) => format!("exit code {}{}", ended.code, last_line(&ended.message)),
    };
    let failed = failure(Class::Application, cause).with_permanent(exit.is_some_and(restart::is_permanent));
    PodFailure { origin, ..failed }
}

/// The other pod's rank with its node, `None` if the rank belongs to this pod.
fn origin_on_other_pod(rank: u32, pod: &PodView, attempt: &Attempt<'_>) -> Option<String> {
    let node_rank = rank / attempt.valid.request.processes_per_node.max(1);
    let other = attempt.pods.get(node_rank as usize).filter(|_| node_rank != pod.node_rank)?;
    let node = other.and_then(|other| other.node.as_deref());
    Some(node.map_or_else(|| format!("rank {rank}"), |node| format!("rank {rank} on node {node}")))
}
