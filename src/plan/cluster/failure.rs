//! What went wrong: which pod failed first, and of which class the failure is. What follows is decided in [`crate::restart`].

use super::attempt::Attempt;
use super::avoidance::{GONE, LOST, NOT_STARTED, NodeFault, OUT_OF_SERVICE};
use super::containers::{OUT_OF_MEMORY, last_words};
use super::hindrance::{self, Limit, START_GRACE, STUCK_GRACE};
use super::view::{NodeView, PodView};
use super::{JobSnapshot, Premise, Silence, clock};
use crate::restart::{self, Class, Failure};
use jiff::{SignedDuration, Timestamp};
use switchyard_core::units::plural;
use switchyard_crds::Framework;
use switchyard_worker_contract::exit::Exit;

/// After a rank reports a failed peer, that peer has this long to show up.
const ROOT_CAUSE_GRACE: SignedDuration = SignedDuration::from_secs(3);

/// Why the taint eviction controller disrupts a pod (`DeletionByTaintManager` in Kubernetes).
const BY_TAINT: &str = "DeletionByTaintManager";

/// Until it is seen again whether a log has been read.
const READ_PAUSE: SignedDuration = SignedDuration::from_secs(5);

/// A Node that was deleted has this long to be registered again, as in the pod garbage collector of Kubernetes.
const GONE_FOR: SignedDuration = SignedDuration::from_secs(40);

/// An administrator who gives silent nodes less time gives deleted ones no more.
fn gone_for(attempt: &Attempt<'_>) -> SignedDuration {
    GONE_FOR.min(attempt.snapshot.silence.grace)
}

/// Nodes that are named beside the first.
const NAMED: usize = 3;

/// The failure of a pod.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PodFailure {
    pub failure: Failure,
    pub pod: String,
    pub node: Option<String>,
    pub cause: String,
    /// The rank that failed, with its node, where another pod reported it.
    pub origin: Option<String>,
    pub at: Option<Timestamp>,
    /// What the node did, in the word by which it is remembered; `None`: it is not to blame.
    pub blame: Option<String>,
    /// The queue took the room back: the job leaves its nodes.
    pub is_eviction: bool,
    /// Other nodes that are to blame.
    pub others: Vec<NodeFault>,
}

impl PodFailure {
    /// Of a pod whose state is unknown.
    pub fn unseen(class: Class, pod: String, cause: String) -> PodFailure {
        let failure = Failure { class, permanent: false, code: None, conditions: Vec::new() };
        let (node, origin, at, blame) = (None, None, None, None);
        PodFailure { failure, pod, node, cause, origin, at, blame, is_eviction: false, others: Vec::new() }
    }

    /// What the server has to confirm of the node.
    pub fn premise(&self) -> Option<Premise> {
        let node = self.node.clone()?;
        match self.blame.as_deref()? {
            GONE => Some(Premise::NodeGone(node)),
            LOST => Some(Premise::NodeSilent(node)),
            _ => None,
        }
    }

    /// Blames the node.
    fn of_node(mut self, reason: &str) -> PodFailure {
        self.blame = Some(reason.to_string());
        self
    }

    /// Sets that the queue did it.
    fn of_queue(mut self) -> PodFailure {
        self.is_eviction = true;
        self
    }

    /// Sets whether it would happen again the same way.
    fn permanently(mut self, permanent: bool) -> PodFailure {
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
        for fault in self.others.iter().take(NAMED) {
            text.push_str(&format!("; node {}: {}", fault.node, fault.message));
        }
        let more = self.others.len().saturating_sub(NAMED);
        if more > 0 {
            text.push_str(&format!("; and {more} more node{}", plural(more as u64)));
        }
        text
    }

    /// Its own node, if that is to blame.
    fn node_fault(&self) -> Option<NodeFault> {
        Some(NodeFault { node: self.node.clone()?, reason: self.blame.clone()?, message: self.cause.clone() })
    }

    /// All nodes that are to blame.
    pub fn node_faults(&self) -> impl Iterator<Item = NodeFault> {
        self.node_fault().into_iter().chain(self.others.iter().cloned())
    }
}

/// What the pods of an attempt say.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verdict {
    Well,
    /// Undecided; check again at this time.
    Look(Timestamp),
    /// The first failure.
    Failed(PodFailure),
}

/// Finds the failure that came first among the pods of an attempt.
pub(super) fn judge(attempt: &Attempt<'_>) -> Verdict {
    let mut failures = Vec::new();
    let mut look: Option<Timestamp> = None;
    for (rank, pod) in (0_u32..).zip(&attempt.pods) {
        match pod {
            Some(pod) => match of_pod(pod, attempt) {
                Verdict::Well => {}
                Verdict::Look(at) => look = Some(look.map_or(at, |look| look.min(at))),
                Verdict::Failed(failure) => failures.push(failure),
            },
            // Before the gates are lifted a missing pod has done nothing, and is simply created again.
            None if attempt.placed && !attempt.is_unlabelled(rank) => failures.push(gone(attempt, rank)),
            None => {}
        }
    }
    // When a node is lost, ranks elsewhere fail as a consequence.
    if let Some(first) =
        failures.iter().filter(|f| f.failure.class != Class::Application).min_by_key(|f| f.at.unwrap_or(Timestamp::MIN))
    {
        return Verdict::Failed(with_others(first, &failures));
    }
    let is_echo = |failed: &PodFailure| failed.failure.code == Some(Exit::PeerFailure.code().into());
    let earliest =
        |echo: bool| failures.iter().filter(|f| is_echo(f) == echo).min_by_key(|f| f.at.unwrap_or(Timestamp::MAX));
    if let Some(first) = earliest(false) {
        return Verdict::Failed(first.clone());
    }
    match earliest(true) {
        Some(echo) => {
            let until = echo.at.unwrap_or(attempt.now()).saturating_add(ROOT_CAUSE_GRACE).unwrap_or(attempt.now());
            let others_run = attempt.existing().iter().any(|pod| !pod.is_done());
            let waits = others_run && !clock::is_over(until, ROOT_CAUSE_GRACE, attempt.now());
            if waits { Verdict::Look(until) } else { Verdict::Failed(echo.clone()) }
        }
        None => look.map_or(Verdict::Well, Verdict::Look),
    }
}

/// The first failure, with the other nodes that are at fault: the next attempt would meet them one after the other.
fn with_others(first: &PodFailure, failures: &[PodFailure]) -> PodFailure {
    let others = failures.iter().filter(|failed| failed.node != first.node).filter_map(PodFailure::node_fault);
    PodFailure { others: others.collect(), ..first.clone() }
}

fn gone(attempt: &Attempt<'_>, rank: u32) -> PodFailure {
    let pod = attempt.valid.pod_name(attempt.number, rank);
    PodFailure::unseen(Class::Infrastructure, pod, "the pod was deleted".into())
}

/// A gang that is stopped for a job of higher priority.
pub(super) fn preempted(pod: String, by: &str) -> PodFailure {
    PodFailure::unseen(Class::Preemption, pod, format!("preempted by {by}"))
}

fn of_pod(pod: &PodView, attempt: &Attempt<'_>) -> Verdict {
    let has_not_begun = pod.gated && pod.node.is_none() && !attempt.placed;
    if pod.has_succeeded() || (has_not_begun && !pod.is_lost_to_its_group()) {
        return Verdict::Well;
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
        ..PodFailure::unseen(class, pod.name.clone(), cause)
    };
    if pod.deleting || pod.has_failed() {
        if let Some(why) = &pod.stopped_by_queue {
            return Verdict::Failed(failure(Class::Preemption, format!("stopped by Kueue: {why}")).of_queue());
        }
        if let Some((reason, message)) = pod.disruption.as_ref().filter(|_| !is_evicted_in_silence(pod, attempt)) {
            let class = if reason == "PreemptionByScheduler" { Class::Preemption } else { Class::Infrastructure };
            return Verdict::Failed(failure(class, format!("{reason}: {message}")));
        }
        if let Some((reason, message)) = pod.reason.as_ref().filter(|(reason, _)| !reason.is_empty()) {
            let failed = failure(Class::Infrastructure, format!("{reason}: {message}"));
            // Its trainer never ran: the node refused the pod, and would refuse the next one.
            let is_refused = pod.has_failed() && pod.ended.is_none();
            return Verdict::Failed(if is_refused { failed.of_node(reason) } else { failed });
        }
    }
    if pod.has_failed() {
        return Verdict::Failed(exited(pod, attempt, failure));
    }
    if pod.deleting && !is_evicted_in_silence(pod, attempt) {
        return Verdict::Failed(failure(Class::Infrastructure, "the pod was deleted".into()));
    }
    if let Some(name) = &pod.node {
        match attempt.snapshot.nodes.get(name) {
            None => {
                let since = attempt.snapshot.missing.get(name).copied().unwrap_or(attempt.now());
                return after(attempt, since, gone_for(attempt), || {
                    failure(Class::Infrastructure, "the node is gone".into()).of_node(GONE)
                });
            }
            Some(node) if node.out_of_service => {
                let cause = "the node is lost: an administrator took it out of service".into();
                return Verdict::Failed(failure(Class::Infrastructure, cause).of_node(OUT_OF_SERVICE));
            }
            Some(node) => {
                let Silence { grace, brake, is_awaited, .. } = attempt.snapshot.silence;
                let later = |pause| Verdict::Look(attempt.now().saturating_add(pause).unwrap_or(Timestamp::MAX));
                match (unheard_since(attempt, node), brake) {
                    (None, _) => {}
                    (Some(_), Some(_)) => return later(grace),
                    (Some(_), None) if is_awaited => return later(READ_PAUSE),
                    (Some(since), None) => {
                        return after(attempt, since, grace, || {
                            let cause = "the node is lost: it does not report to the cluster";
                            failure(Class::Infrastructure, cause.into()).of_node(LOST)
                        });
                    }
                }
            }
        }
    }
    starting(pod, attempt, failure)
}

/// Evicted because its node does not report. Its kubelet cannot know that, so its containers may train on: the silence of the node decides. Pods
/// that tolerate it are not evicted; this one was made without the toleration, or its template limits it.
fn is_evicted_in_silence(pod: &PodView, attempt: &Attempt<'_>) -> bool {
    let node = pod.node.as_ref().and_then(|name| attempt.snapshot.nodes.get(name));
    let is_silent = node.is_some_and(|node| node.silent_since.is_some() && !node.out_of_service);
    is_silent && !pod.is_done() && pod.disruption.as_ref().is_some_and(|(reason, _)| reason == BY_TAINT)
}

/// Since when nothing is heard of a node that does not report, be it that ranks elsewhere go on as they only can with those there.
fn unheard_since(attempt: &Attempt<'_>, node: &NodeView) -> Option<Timestamp> {
    let Silence { released, progress, .. } = attempt.snapshot.silence;
    let since = node.silent_since?;
    [released, progress].into_iter().flatten().chain([since]).max()
}

/// The first node of the attempt that is gone or does not report, and what follows from that; `None`: all do.
pub(super) fn silent_node(attempt: &Attempt<'_>) -> Option<String> {
    let JobSnapshot { nodes, missing, .. } = attempt.snapshot;
    let used = || attempt.existing().into_iter().filter(|pod| !pod.is_done()).filter_map(|pod| pod.node.as_ref());
    if let Some((name, since)) =
        used().find_map(|name| missing.get_key_value(name).filter(|_| !nodes.contains_key(name)))
    {
        let seconds = gone_for(attempt).as_secs();
        return Some(format!(
            "node {name} has not been registered since {since}: after {seconds} s the job starts again without it"
        ));
    }
    let mut used = used();
    let (name, since) = used.find_map(|name| Some((name, nodes.get(name)?.silent_since?)))?;
    let Silence { grace, brake, progress, .. } = attempt.snapshot.silence;
    let follows = match brake {
        Some(brake) => brake.to_string(),
        None if progress.is_some_and(|progress| progress > since) => {
            "but the ranks make progress, so nothing is started again".into()
        }
        None => format!("after {} s the job starts again without it", grace.as_secs()),
    };
    Some(format!("node {name} has not reported since {since}: {follows}"))
}

/// Failed once it lasts longer than `grace`.
fn after(
    attempt: &Attempt<'_>,
    since: Timestamp,
    grace: SignedDuration,
    failure: impl FnOnce() -> PodFailure,
) -> Verdict {
    let due = since.saturating_add(grace).unwrap_or(Timestamp::MAX);
    if clock::is_over(due, grace, attempt.now()) { Verdict::Failed(failure()) } else { Verdict::Look(due) }
}

/// A pod that cannot start.
fn starting(pod: &PodView, attempt: &Attempt<'_>, failure: impl Fn(Class, String) -> PodFailure) -> Verdict {
    let Some(waiting) = pod.hindrance() else {
        let minutes = STUCK_GRACE.as_mins();
        let cause = format!("it has not started, and its kubelet has reported nothing of it for {minutes} minutes");
        let failed = || failure(Class::Infrastructure, cause).of_node(NOT_STARTED);
        return if pod.is_silent() { stuck(pod, attempt, failed) } else { Verdict::Well };
    };
    let remedy = hindrance::of_start(waiting);
    let failed = || failure(Class::Infrastructure, remedy.sentence(&waiting.sentence()));
    let since = pod.started.unwrap_or(attempt.now());
    match remedy.limit {
        Limit::None => Verdict::Failed(failed().permanently(true)),
        Limit::Grace => after(attempt, since, START_GRACE, || failed().permanently(true)),
        Limit::Attempt => after(attempt, since, START_GRACE, || failed().of_node(&waiting.reason)),
        // What its containers say may be the template's fault.
        Limit::Stuck if waiting.container.is_empty() => stuck(pod, attempt, || failed().of_node(&waiting.reason)),
        Limit::Stuck => stuck(pod, attempt, failed),
        Limit::Unlimited => Verdict::Well,
    }
}

/// A pod on a node that has not started, for no reason that is known to pass by itself. What a kubelet takes long for is waited for: pulling an
/// image, and containers that run before the trainer.
fn stuck(pod: &PodView, attempt: &Attempt<'_>, failed: impl FnOnce() -> PodFailure) -> Verdict {
    let since = match (pod.started, &pod.progress) {
        _ if pod.init.as_ref().is_some_and(|init| init.failure().is_none()) => None,
        (Some(_), Some(progress)) if progress.is_pulling => None,
        (Some(started), Some(progress)) => Some(progress.at.map_or(started, |at| at.max(started))),
        // Without its events, a long pull looks like a kubelet that does nothing.
        (Some(started), None) => Some(started).filter(|_| !pod.is_silent()),
        (None, _) => pod.bound,
    };
    let Some(since) = since else { return Verdict::Well };
    // These times are the kubelet's and the scheduler's, whose clocks may be an hour off: the limit counts from the placement at the earliest,
    // which this controller timed, and a clock that is behind makes it no shorter.
    let since = attempt.placed_at().map_or(since, |placed| placed.max(since));
    let [due, latest] = [since, attempt.now()].map(|time| time.saturating_add(STUCK_GRACE).unwrap_or(Timestamp::MAX));
    if due <= attempt.now() { Verdict::Failed(failed()) } else { Verdict::Look(due.min(latest)) }
}

/// The trainer container ended by itself, or was killed.
fn exited(pod: &PodView, attempt: &Attempt<'_>, failure: impl Fn(Class, String) -> PodFailure) -> PodFailure {
    let Some(ended) = &pod.ended else {
        let Some((init, ended)) = pod.init.as_ref().and_then(|init| Some((init, init.failure()?))) else {
            return failure(Class::Infrastructure, "the pod failed before its container ended".into());
        };
        // The program of an init container is the user's, like the trainer.
        let is_killed = ended.reason == OUT_OF_MEMORY;
        return failure(if is_killed { Class::Infrastructure } else { Class::Application }, init.sentence());
    };
    if ended.reason == OUT_OF_MEMORY {
        return failure(Class::Infrastructure, "the container ran out of memory (OOMKilled)".into());
    }
    let is_ours = attempt.snapshot.job.spec.trainer.framework == Framework::Switchyard;
    let exit = Exit::from_code(ended.code).filter(|_| is_ours);
    let account = ended.account().and_then(|account| account.failure);
    let origin = account.as_ref().and_then(|account| elsewhere(account.origin_rank, pod, attempt));
    let cause = match (account, exit) {
        (Some(account), _) if origin.is_some() => account.cause,
        (Some(account), _) => format!("rank {}: {}", account.origin_rank, account.cause),
        (None, Some(exit)) => format!("exit code {} ({})", ended.code, exit.meaning()),
        (None, None) => format!("exit code {}{}", ended.code, last_words(&ended.message)),
    };
    let failed = failure(Class::Application, cause).permanently(exit.is_some_and(restart::is_permanent));
    PodFailure { origin, ..failed }
}

/// A rank of another pod than this one, with its node; `None`: it is one of this pod.
fn elsewhere(rank: u32, pod: &PodView, attempt: &Attempt<'_>) -> Option<String> {
    let node_rank = rank / attempt.valid.request.processes_per_node.max(1);
    let other = attempt.pods.get(node_rank as usize).filter(|_| node_rank != pod.node_rank)?;
    let node = other.and_then(|other| other.node.as_deref());
    Some(node.map_or_else(|| format!("rank {rank}"), |node| format!("rank {rank} on node {node}")))
}
