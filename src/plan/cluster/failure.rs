//! What went wrong: which pod failed first, of which class the failure is, and what follows.
//!
//! The class decides who pays. `infrastructure`: the node was lost, the pod was evicted or deleted, ran out of memory, or its
//! image could not be had. `preemption`: it gave way to a pod of higher priority. `application`: everything else.

use super::attempt::Attempt;
use super::clock;
use super::view::{Phase, PodView};
use crate::restart;
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::conditions;
use switchyard_crds::{ExitCodeOperator, FailureAction, FailureRule, Framework, Restarts, TrainJobSpec};
use switchyard_worker_contract::exit::Exit;

/// A node that does not answer for this long is lost. The node's own controller has waited for 40 s before it says so.
pub(super) const NODE_GRACE: SignedDuration = SignedDuration::from_secs(5);
/// A container that cannot be started for this long has failed.
const START_GRACE: SignedDuration = SignedDuration::from_secs(300);
/// Ranks that report a failed peer are given this long to show which one it was.
const ROOT_CAUSE_GRACE: SignedDuration = SignedDuration::from_secs(3);
/// An attempt that lasted this long starts the pauses between attempts from none again.
const LASTED: SignedDuration = SignedDuration::from_secs(600);
/// Pause before the second restart in a row; the first has none, each further one twice the one before.
const FIRST_PAUSE: i64 = 10;
/// Longest pause.
pub(super) const LONGEST_PAUSE: SignedDuration = SignedDuration::from_secs(300);

/// Who pays for a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Class {
    Application,
    Infrastructure,
    Preemption,
}

/// The failure that started it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Failure {
    pub class: Class,
    pub pod: String,
    pub node: Option<String>,
    /// Exit code of the trainer container.
    pub code: Option<i32>,
    pub cause: String,
    /// Conditions of the pod that are true, for the rules.
    pub conditions: Vec<String>,
    pub at: Option<Timestamp>,
    /// Would happen again the same way.
    pub permanent: bool,
}

impl Failure {
    /// The failure in one sentence.
    pub fn sentence(&self) -> String {
        let on = self.node.as_ref().map_or_else(String::new, |node| format!(" on node {node}"));
        format!("pod {}{on}: {}", self.pod, self.cause)
    }
}

/// What the pods of an attempt say.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verdict {
    /// Nothing failed.
    Well,
    /// Perhaps; it is known then.
    Look(Timestamp),
    /// This failed first.
    Failed(Failure),
}

/// Looks at all pods of an attempt.
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
            // Before the gates are lifted a pod that is gone has done nothing, and is simply created again.
            None if attempt.placed => failures.push(gone(attempt, rank)),
            None => {}
        }
    }
    // Where a node went, the ranks elsewhere fail as a consequence.
    if let Some(first) =
        failures.iter().filter(|f| f.class != Class::Application).min_by_key(|f| f.at.unwrap_or(Timestamp::MIN))
    {
        return Verdict::Failed(first.clone());
    }
    let is_echo = |failure: &Failure| failure.code == Some(Exit::PeerFailure.code().into());
    let earliest =
        |echo: bool| failures.iter().filter(|f| is_echo(f) == echo).min_by_key(|f| f.at.unwrap_or(Timestamp::MAX));
    if let Some(first) = earliest(false) {
        return Verdict::Failed(first.clone());
    }
    match earliest(true) {
        Some(echo) => {
            let until = echo.at.unwrap_or(attempt.now).saturating_add(ROOT_CAUSE_GRACE).unwrap_or(attempt.now);
            let others_run = attempt.existing().iter().any(|pod| !pod.is_over());
            let waits = others_run && !clock::is_over(until, ROOT_CAUSE_GRACE, attempt.now);
            if waits { Verdict::Look(until) } else { Verdict::Failed(echo.clone()) }
        }
        None => look.map_or(Verdict::Well, Verdict::Look),
    }
}

fn gone(attempt: &Attempt<'_>, rank: u32) -> Failure {
    Failure {
        class: Class::Infrastructure,
        pod: attempt.valid.pod_name(attempt.number, rank),
        node: None,
        code: None,
        cause: "the pod was deleted".into(),
        conditions: Vec::new(),
        at: None,
        permanent: false,
    }
}

/// A gang that is stopped for a job of higher priority.
pub(super) fn preempted(pod: String, by: &str) -> Failure {
    Failure {
        class: Class::Preemption,
        pod,
        node: None,
        code: None,
        cause: format!("preempted by {by}"),
        conditions: Vec::new(),
        at: None,
        permanent: false,
    }
}

fn of_pod(pod: &PodView, attempt: &Attempt<'_>) -> Verdict {
    if pod.phase == Phase::Succeeded || (pod.gated && pod.node.is_none() && !attempt.placed) {
        return Verdict::Well;
    }
    let failure = |class: Class, cause: String| Failure {
        class,
        pod: pod.name.clone(),
        node: pod.node.clone(),
        code: pod.ended.as_ref().map(|ended| ended.code),
        cause,
        conditions: pod.true_conditions.clone(),
        at: pod.ended.as_ref().and_then(|ended| ended.at),
        permanent: false,
    };
    if pod.deleting || pod.phase == Phase::Failed {
        if let Some((reason, message)) = &pod.disruption {
            let class = if reason == "PreemptionByScheduler" { Class::Preemption } else { Class::Infrastructure };
            return Verdict::Failed(failure(class, format!("{reason}: {message}")));
        }
        if let Some((reason, message)) = pod.reason.as_ref().filter(|(reason, _)| !reason.is_empty()) {
            return Verdict::Failed(failure(Class::Infrastructure, format!("{reason}: {message}")));
        }
    }
    if pod.phase == Phase::Failed {
        return Verdict::Failed(exited(pod, attempt, failure));
    }
    if pod.deleting {
        return Verdict::Failed(failure(Class::Infrastructure, "the pod was deleted".into()));
    }
    if let Some(name) = &pod.node {
        match attempt.snapshot.nodes.get(name) {
            None => return Verdict::Failed(failure(Class::Infrastructure, "the node is gone".into())),
            Some(node) => {
                if let Some(since) = node.not_ready_since {
                    return after(attempt, since, NODE_GRACE, || {
                        failure(Class::Infrastructure, "the node is lost: it does not report to the cluster".into())
                    });
                }
            }
        }
    }
    starting(pod, attempt, failure)
}

/// Failed once it lasts longer than `grace`.
fn after(attempt: &Attempt<'_>, since: Timestamp, grace: SignedDuration, failure: impl FnOnce() -> Failure) -> Verdict {
    let due = since.saturating_add(grace).unwrap_or(Timestamp::MAX);
    if clock::is_over(due, grace, attempt.now) { Verdict::Failed(failure()) } else { Verdict::Look(due) }
}

/// A container that cannot be started.
fn starting(pod: &PodView, attempt: &Attempt<'_>, failure: impl Fn(Class, String) -> Failure) -> Verdict {
    let Some(waiting) = &pod.waiting else { return Verdict::Well };
    let text = || format!("{}: {}", waiting.reason, waiting.message);
    match waiting.reason.as_str() {
        "InvalidImageName" => Verdict::Failed(Failure { permanent: true, ..failure(Class::Infrastructure, text()) }),
        "ErrImagePull"
        | "ImagePullBackOff"
        | "ErrImageNeverPull"
        | "CreateContainerConfigError"
        | "CreateContainerError"
        | "RunContainerError" => {
            after(attempt, pod.started.unwrap_or(attempt.now), START_GRACE, || failure(Class::Infrastructure, text()))
        }
        _ => Verdict::Well,
    }
}

/// The trainer container ended by itself, or was killed.
fn exited(pod: &PodView, attempt: &Attempt<'_>, failure: impl Fn(Class, String) -> Failure) -> Failure {
    let Some(ended) = &pod.ended else {
        return failure(Class::Infrastructure, "the pod failed before its container ended".into());
    };
    if ended.reason == "OOMKilled" {
        return failure(Class::Infrastructure, "the container ran out of memory (OOMKilled)".into());
    }
    let is_ours = attempt.snapshot.job.spec.trainer.framework == Framework::Switchyard;
    let exit = Exit::from_code(ended.code).filter(|_| is_ours);
    let account = ended.account().and_then(|account| account.failure);
    let cause = match (account, exit) {
        (Some(account), _) => format!("rank {}: {}", account.origin_rank, account.cause),
        (None, Some(exit)) => format!("exit code {} ({})", ended.code, exit.meaning()),
        (None, None) => {
            let last = ended.message.trim().lines().last().unwrap_or_default().trim();
            let last: String = last.chars().take(200).collect();
            let says = if last.is_empty() { String::new() } else { format!(": {last}") };
            format!("exit code {}{says}", ended.code)
        }
    };
    let ending = restart::decide(restart::Ending::Failed(exit.map(|exit| exit.code().into())), 0, 1);
    let permanent = matches!(ending, restart::Decision::End(restart::End::GiveUp(_, restart::Cause::Permanent)));
    Failure { permanent, ..failure(Class::Application, cause) }
}

/// What follows a failure.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Decision {
    /// The whole group starts again after a pause, with these counts.
    Restart { restarts: Restarts, pause: SignedDuration },
    /// The job fails.
    GiveUp { reason: &'static str, message: String },
}

/// Decides by the rules, then by what cannot get better, then by the budget of the class.
pub(super) fn decide(failed: &Failure, spec: &TrainJobSpec, restarts: &Restarts, lasted: SignedDuration) -> Decision {
    let policy = &spec.failure_policy;
    let rule = (0_u32..).zip(&policy.rules).find(|(_, rule)| matches(rule, failed));
    let action = rule.map(|(_, rule)| rule.action);
    if let (Some((number, _)), Some(FailureAction::FailTrainJob)) = (rule, action) {
        let message = format!("{}; failurePolicy.rules[{number}] says FailTrainJob", failed.sentence());
        return Decision::GiveUp { reason: conditions::FAILURE_POLICY, message };
    }
    if failed.permanent && action.is_none() {
        let message = format!("{}; it would fail the same way again", failed.sentence());
        return Decision::GiveUp { reason: conditions::PERMANENT_FAILURE, message };
    }
    let mut next = restarts.clone();
    let free = action == Some(FailureAction::RestartTrainJobAndIgnoreMaxRestarts);
    let (used, most, field, reason) = match failed.class {
        Class::Application => {
            (&mut next.application, policy.max_restarts, "maxRestarts", conditions::APPLICATION_FAILURE)
        }
        Class::Infrastructure => (
            &mut next.infrastructure,
            policy.max_infrastructure_restarts,
            "maxInfrastructureRestarts",
            conditions::INFRASTRUCTURE_FAILURE,
        ),
        Class::Preemption => {
            (&mut next.preemption, policy.max_preemption_restarts, "maxPreemptionRestarts", conditions::PREEMPTED)
        }
    };
    if !free {
        if *used >= most {
            let message = format!("{}; {used} of {most} restarts used (failurePolicy.{field})", failed.sentence());
            return Decision::GiveUp { reason, message };
        }
        *used += 1;
    }
    next.total += 1;
    Decision::Restart { pause: pause(restarts.total, lasted), restarts: next }
}

fn pause(before: i32, lasted: SignedDuration) -> SignedDuration {
    if before == 0 || lasted >= LASTED {
        return SignedDuration::ZERO;
    }
    let doublings = (before - 1).clamp(0, 16) as u32;
    SignedDuration::from_secs(FIRST_PAUSE << doublings).min(LONGEST_PAUSE)
}

fn matches(rule: &FailureRule, failed: &Failure) -> bool {
    let by_code = rule.on_exit_codes.as_ref().is_some_and(|on| {
        failed.code.filter(|code| *code != 0).is_some_and(|code| match on.operator {
            ExitCodeOperator::In => on.values.contains(&code),
            ExitCodeOperator::NotIn => !on.values.contains(&code),
        })
    });
    by_code || rule.on_pod_condition.as_ref().is_some_and(|on| failed.conditions.contains(&on.kind))
}
