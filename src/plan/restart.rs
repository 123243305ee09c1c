//! Decides what follows a failure, on one machine and in a cluster. Pure.
//!
//! ```text
//! failure ─> the job's rules ─> would it happen again? ─> budget of its class ─> restart, or give up
//! ```

use crate::status::time;
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::conditions;
use switchyard_crds::{ExitCodeOperator, FailureAction, FailurePolicy, FailureRule, RecentRestarts, Restarts};
use switchyard_worker_contract::exit::Exit;

/// An attempt that lasted this long resets the backoff between attempts.
const STABLE_AFTER: SignedDuration = SignedDuration::from_secs(600);
/// Backoff in seconds before the second consecutive restart. The first has none, and each further
/// one doubles it.
const FIRST_PAUSE: i64 = 10;
pub const MAX_PAUSE: SignedDuration = SignedDuration::from_secs(300);
/// Time after which a restart no longer counts against the infrastructure or preemption budget: of
/// thousands of GPUs some fail each day, for as long as the job runs.
const WINDOW: SignedDuration = SignedDuration::from_hours(24);
/// Time for the cause of a failure to become visible: the failure of the peer that a rank reports,
/// or the end of the awaited role.
pub const ROOT_CAUSE_GRACE: SignedDuration = SignedDuration::from_secs(3);
/// Restarts within this time share one entry.
const BUCKET: SignedDuration = SignedDuration::from_hours(1);

/// The budget that a failure counts against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The job's processes failed.
    Application,
    /// The node was lost, or the pod was evicted or deleted, ran out of memory, or could not pull
    /// its image.
    Infrastructure,
    /// The job was preempted, by priority or by its queue's quotas.
    Preemption,
}

impl Class {
    /// Field of `spec.failurePolicy` with its budget, and the budget.
    fn budget(self, policy: &FailurePolicy) -> (&'static str, i32) {
        match self {
            Class::Application => ("maxRestarts", policy.max_restarts),
            Class::Infrastructure => ("maxInfrastructureRestarts", policy.max_infrastructure_restarts),
            Class::Preemption => ("maxPreemptionRestarts", policy.max_preemption_restarts),
        }
    }

    fn used(self, restarts: &mut Restarts) -> &mut i32 {
        match self {
            Class::Application => &mut restarts.application,
            Class::Infrastructure => &mut restarts.infrastructure,
            Class::Preemption => &mut restarts.preemption,
        }
    }

    /// The period of its budget.
    fn window(self) -> &'static str {
        match self {
            Class::Application => "",
            Class::Infrastructure | Class::Preemption => " within 24 h",
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Class::Application => conditions::APPLICATION_FAILURE,
            Class::Infrastructure => conditions::INFRASTRUCTURE_FAILURE,
            Class::Preemption => conditions::PREEMPTED,
        }
    }
}

/// The properties of a failure that matter for the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub class: Class,
    /// A retry would fail the same way.
    pub permanent: bool,
    /// Exit code of the process that failed first.
    pub code: Option<i32>,
    /// True conditions of its pod, for the rules.
    pub conditions: Vec<String>,
}

/// What follows a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// Restart the whole group, with these counts.
    Restart(Restarts),
    GiveUp(GiveUp),
}

/// Why a job is not retried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GiveUp {
    #[error("failurePolicy.rules[{0}] has action FailTrainJob")]
    Rule(u32),
    /// Wrong data, a wrong command line or manifest, or a diverging training.
    #[error("it would fail the same way again")]
    Permanent,
    #[error("{used} of {most} restarts{} used (failurePolicy.{field})", class.window())]
    Budget { class: Class, field: &'static str, used: i32, most: i32 },
    /// On one machine only: in a cluster the kubelet ends the pods.
    #[error("its processes are still there, so it is not restarted")]
    Unkillable,
}

impl GiveUp {
    /// Reason of the condition `Failed`.
    pub fn reason(&self) -> &'static str {
        match self {
            GiveUp::Rule(_) => conditions::FAILURE_POLICY,
            GiveUp::Permanent => conditions::PERMANENT_FAILURE,
            GiveUp::Budget { class, .. } => class.reason(),
            GiveUp::Unkillable => conditions::INFRASTRUCTURE_FAILURE,
        }
    }
}

/// Whether a process with this exit code would fail the same way again.
pub fn is_permanent(exit: Exit) -> bool {
    matches!(
        exit,
        Exit::Usage
            | Exit::Data
            | Exit::CheckpointRefused
            | Exit::PreflightRefused
            | Exit::NotPlaceable
            | Exit::Diverged
    )
}

/// Decides by the rules first, then by whether the failure is permanent, then by the budget of its
/// class.
pub fn decide(failure: &Failure, policy: &FailurePolicy, restarts: &Restarts) -> Decision {
    let rule = (0_u32..).zip(&policy.rules).find(|(_, rule)| matches(rule, failure));
    let action = rule.map(|(_, rule)| rule.action);
    if let (Some((number, _)), Some(FailureAction::FailTrainJob)) = (rule, action) {
        return Decision::GiveUp(GiveUp::Rule(number));
    }
    if failure.permanent && action.is_none() {
        return Decision::GiveUp(GiveUp::Permanent);
    }
    let mut next = restarts.clone();
    if action != Some(FailureAction::RestartTrainJobAndIgnoreMaxRestarts) {
        let (class, (field, most)) = (failure.class, failure.class.budget(policy));
        let used = class.used(&mut next);
        if *used >= most {
            return Decision::GiveUp(GiveUp::Budget { class, field, used: *used, most });
        }
        *used += 1;
    }
    next.total += 1;
    Decision::Restart(next)
}

/// Same as [`decide`], in a cluster, where the infrastructure and preemption budgets refill over
/// time.
pub fn decide_at(failure: &Failure, policy: &FailurePolicy, restarts: &Restarts, now: Timestamp) -> Decision {
    let age = |entry: &RecentRestarts| now.duration_since(entry.since.0);
    let mut recent = restarts.recent.clone();
    // Entries of a clock that was ahead must not count forever.
    recent.retain(|entry| (-BUCKET..WINDOW).contains(&age(entry)));
    let used = Restarts {
        infrastructure: recent.iter().map(|entry| entry.infrastructure).sum(),
        preemption: recent.iter().map(|entry| entry.preemption).sum(),
        ..restarts.clone()
    };
    let next = match decide(failure, policy, &used) {
        Decision::Restart(next) => next,
        given_up => return given_up,
    };
    let infrastructure = next.infrastructure - used.infrastructure;
    let preemption = next.preemption - used.preemption;
    if infrastructure + preemption > 0 {
        if recent.last().is_none_or(|last| age(last) >= BUCKET) {
            recent.push(RecentRestarts { since: time(now), infrastructure: 0, preemption: 0 });
        }
        if let Some(entry) = recent.last_mut() {
            entry.infrastructure += infrastructure;
            entry.preemption += preemption;
        }
    }
    Decision::Restart(Restarts {
        infrastructure: restarts.infrastructure + infrastructure,
        preemption: restarts.preemption + preemption,
        recent,
        ..next
    })
}

/// Backoff before the next attempt, after this many restarts and an attempt that lasted this long.
pub fn pause(restarts: i32, lasted: SignedDuration) -> SignedDuration {
    if restarts == 0 || lasted >= STABLE_AFTER {
        return SignedDuration::ZERO;
    }
    let doublings = (restarts - 1).clamp(0, 16) as u32;
    SignedDuration::from_secs(FIRST_PAUSE << doublings).min(MAX_PAUSE)
}

fn matches(rule: &FailureRule, failure: &Failure) -> bool {
    let by_code = rule.on_exit_codes.as_ref().is_some_and(|on| {
        failure.code.filter(|code| *code != 0).is_some_and(|code| match on.operator {
            ExitCodeOperator::In => on.values.contains(&code),
            ExitCodeOperator::NotIn => !on.values.contains(&code),
        })
    });
    by_code || rule.on_pod_condition.as_ref().is_some_and(|on| failure.conditions.contains(&on.kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_table() {
        let policy = |rules: serde_json::Value| -> FailurePolicy {
            serde_json::from_value(json!({
                "maxRestarts": 2, "maxInfrastructureRestarts": 1, "maxPreemptionRestarts": 0, "rules": rules,
            }))
            .unwrap()
        };
        let used = |application: i32, infrastructure: i32| Restarts {
            application,
            infrastructure,
            preemption: 0,
            total: application + infrastructure,
            recent: Vec::new(),
        };
        let failure =
            |class, permanent, code| Failure { class, permanent, code, conditions: vec!["DisruptionTarget".into()] };
        let budget = |class: Class, used, most| {
            let (field, _) = class.budget(&FailurePolicy::default());
            Decision::GiveUp(GiveUp::Budget { class, field, used, most })
        };
        let (app, infra) = (Class::Application, Class::Infrastructure);
        let fail_on_9 = json!([{"action": "FailTrainJob", "onExitCodes": {"operator": "In", "values": [9]}}]);
        let free_on_3 = json!([{"action": "RestartTrainJobAndIgnoreMaxRestarts", "onExitCodes": {"operator": "In", "values": [3]}}]);
        let not_in = json!([{"action": "FailTrainJob", "onExitCodes": {"operator": "NotIn", "values": [9]}}]);
        let on_condition = json!([{"action": "FailTrainJob", "onPodCondition": {"type": "DisruptionTarget"}}]);
        for (rules, failure, restarts, decision) in [
            (json!([]), failure(app, false, None), used(0, 0), Decision::Restart(used(1, 0))),
            (json!([]), failure(app, false, Some(5)), used(1, 1), Decision::Restart(used(2, 1))),
            (json!([]), failure(app, false, Some(5)), used(2, 0), budget(app, 2, 2)),
            (json!([]), failure(infra, false, None), used(2, 0), Decision::Restart(used(2, 1))),
            (json!([]), failure(infra, false, None), used(0, 1), budget(infra, 1, 1)),
            (json!([]), failure(Class::Preemption, false, None), used(0, 0), budget(Class::Preemption, 0, 0)),
            (json!([]), failure(app, true, Some(3)), used(0, 0), Decision::GiveUp(GiveUp::Permanent)),
            (fail_on_9.clone(), failure(app, false, Some(9)), used(0, 0), Decision::GiveUp(GiveUp::Rule(0))),
            (fail_on_9, failure(app, false, Some(8)), used(0, 0), Decision::Restart(used(1, 0))),
            (
                free_on_3,
                failure(app, true, Some(3)),
                used(2, 0),
                Decision::Restart(Restarts { total: 3, ..used(2, 0) }),
            ),
            (not_in.clone(), failure(app, false, Some(8)), used(0, 0), Decision::GiveUp(GiveUp::Rule(0))),
            (not_in, failure(app, false, Some(0)), used(0, 0), Decision::Restart(used(1, 0))),
            (on_condition, failure(infra, false, None), used(0, 0), Decision::GiveUp(GiveUp::Rule(0))),
        ] {
            let rules = policy(rules);
            assert_eq!(decide(&failure, &rules, &restarts), decision, "{failure:?} after {restarts:?}");
        }
    }

    /// Regression test: the budget was ten node failures for the whole job. 8,000 GPUs at published
    /// failure rates use that up in two days.
    #[test]
    fn the_infrastructure_budget_refills_and_the_application_budget_does_not() {
        let at = |minute: i64| Timestamp::from_second(1_000_000 + 60 * minute).unwrap();
        let policy = FailurePolicy { max_infrastructure_restarts: 2, max_restarts: 1, ..FailurePolicy::default() };
        let failure = |class| Failure { class, permanent: false, code: None, conditions: Vec::new() };
        let mut restarts = Restarts::default();
        let mut restarted = |class, minute| match decide_at(&failure(class), &policy, &restarts, at(minute)) {
            Decision::Restart(next) => {
                restarts = next;
                true
            }
            Decision::GiveUp(_) => false,
        };
        let day = 24 * 60;
        let lost = [0, 59, 70, day - 1, day, day + 1, 2 * day + 1];
        assert_eq!(
            lost.map(|minute| restarted(Class::Infrastructure, minute)),
            [true, true, false, false, true, true, true]
        );
        assert_eq!([2 * day + 2, 9 * day].map(|minute| restarted(Class::Application, minute)), [true, false]);
        assert_eq!((restarts.infrastructure, restarts.application, restarts.total), (5, 1, 6));
        assert_eq!(restarts.recent.len(), 1, "{:?}", restarts.recent);
        let used = Restarts {
            recent: vec![RecentRestarts { since: time(at(0)), infrastructure: 2, preemption: 0 }],
            ..Restarts::default()
        };
        let Decision::GiveUp(why) = decide_at(&failure(Class::Infrastructure), &policy, &used, at(9)) else {
            panic!("the budget is used up")
        };
        assert_eq!(why.to_string(), "2 of 2 restarts within 24 h used (failurePolicy.maxInfrastructureRestarts)");
        assert!(
            matches!(decide_at(&failure(Class::Infrastructure), &policy, &used, at(-9 * day)), Decision::Restart(_)),
            "the clock was ahead"
        );
    }

    #[test]
    fn faults_of_the_job_itself_are_permanent() {
        let permanent: Vec<u8> =
            Exit::ALL.iter().filter(|(exit, _)| is_permanent(*exit)).map(|(exit, _)| exit.code()).collect();
        assert_eq!(permanent, [2, 3, 6, 7, 8, 9]);
    }
}
