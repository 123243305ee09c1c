//! Decides what follows an attempt on one machine, and derives the status.

use crate::restart::{self, Class, Decision, Failure, GiveUp};
use crate::status::{Draft, Ending, time};
use jiff::Timestamp;
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{FailurePolicy, NodeCounts, PlacementStatus, Restarts, RoleCounts, TrainJob, TrainJobStatus};
use switchyard_worker_contract::event::Summary;
use switchyard_worker_contract::exit::Exit;

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptEnd {
    /// All ranks have completed all steps.
    Done,
    /// The user requested a stop.
    Stopped(Exit),
    /// A rank failed. Holds the exit code of the rank that failed first, `None` if a signal killed
    /// it.
    Failed(Option<i32>),
    /// A rank failed, and SIGKILL did not end all processes. They keep their memory and GPUs, so
    /// another attempt would compete with them.
    Unkillable,
}

/// The next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Restart the whole group, with these counts.
    Restart(Restarts),
    /// No further attempt.
    End(RunEnd),
}

/// End of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunEnd {
    Complete,
    /// It was stopped on request.
    Stopped(Exit),
    /// It failed for good, with this exit code.
    GivenUp(Exit, GiveUp),
}

/// Decides what follows an attempt. On one machine every failure is an application failure, and
/// rules have no effect.
pub fn next(end: AttemptEnd, policy: &FailurePolicy, restarts: &Restarts) -> Next {
    let code = match end {
        AttemptEnd::Done => return Next::End(RunEnd::Complete),
        AttemptEnd::Stopped(exit) => return Next::End(RunEnd::Stopped(exit)),
        AttemptEnd::Unkillable => return Next::End(RunEnd::GivenUp(Exit::OwnFailure, GiveUp::Unkillable)),
        AttemptEnd::Failed(code) => code,
    };
    let exit = code.and_then(Exit::from_code);
    let permanent = exit.is_some_and(restart::is_permanent);
    let failure = Failure { class: Class::Application, permanent, code, conditions: Vec::new() };
    let policy = FailurePolicy { rules: Vec::new(), ..policy.clone() };
    match restart::decide(&failure, &policy, restarts) {
        Decision::Restart(restarts) => Next::Restart(restarts),
        Decision::GiveUp(why) => {
            let reported_exit = exit.filter(|exit| permanent || *exit == Exit::Hung);
            Next::End(RunEnd::GivenUp(reported_exit.unwrap_or(Exit::OwnFailure), why))
        }
    }
}

/// State of a run.
#[derive(Debug, Clone)]
pub enum Progress {
    /// It is still running.
    Stage(Stage, String),
    /// The user stopped it.
    Stopped(String),
    Ended(Ending),
}

/// A plan of an attempt, as far as the status shows it.
pub trait Planned {
    /// Attempt number, from 1.
    fn attempt(&self) -> u32;
    /// The nodes of the job, with the reason for them.
    fn placement(&self) -> PlacementStatus;
}

/// Observed state of a run at one moment.
#[derive(Clone)]
pub struct Observed<'a> {
    pub progress: Progress,
    /// The plan of the current attempt.
    pub plan: &'a dyn Planned,
    /// Pods of the current attempt by state, of the job and of each role. `None` with framework
    /// Switchyard, whose ranks end together.
    pub pods: Option<(NodeCounts, Vec<RoleCounts>)>,
    /// Restarts so far.
    pub restarts: &'a Restarts,
    /// Start of the first attempt.
    pub start: Timestamp,
    /// The latest figures, and when they were reported.
    pub figures: Option<(Summary, Timestamp)>,
}

/// The next status of the job.
pub fn status(job: &TrainJob, observed: Observed<'_>, now: Timestamp) -> TrainJobStatus {
    let Observed { progress, plan, pods, restarts, start, figures } = observed;
    let placement = plan.placement();
    let reason = placement.reason.clone();
    let mut draft = Draft::new(job, now);
    draft.next.start_time = Some(time(start));
    draft.next.attempt = Some(plan.attempt() as i32);
    draft.next.restarts = Some(restarts.clone());
    draft.next.placement = Some(placement);
    if let Some((of_job, of_roles)) = pods {
        draft.counts(of_job);
        draft.next.roles = of_roles;
    }
    if let Some((figures, at)) = &figures {
        draft.figures(figures, *at);
    }
    match progress {
        Progress::Stage(stage, message) => draft.stage(stage, message),
        Progress::Stopped(message) => {
            draft.stage(Stage::Suspended, message);
            draft.stop();
        }
        Progress::Ended(ending) => draft.end(ending),
    }
    draft.condition(conditions::PLACED, "True", "Placed", reason);
    draft.next
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        let used = |count: i32| Restarts { application: count, total: count, ..Restarts::default() };
        let budget = |used| GiveUp::Budget { class: Class::Application, field: "maxRestarts", used, most: used };
        let failed = AttemptEnd::Failed;
        for (end, restarts, most, next_is) in [
            (AttemptEnd::Done, 0, 0, Next::End(RunEnd::Complete)),
            (AttemptEnd::Stopped(Exit::Interrupted), 0, 3, Next::End(RunEnd::Stopped(Exit::Interrupted))),
            (AttemptEnd::Unkillable, 0, 9, Next::End(RunEnd::GivenUp(Exit::OwnFailure, GiveUp::Unkillable))),
            (failed(None), 0, 1, Next::Restart(used(1))),
            (failed(Some(5)), 0, 1, Next::Restart(used(1))),
            (failed(Some(4)), 0, 1, Next::Restart(used(1))),
            (failed(Some(101)), 2, 3, Next::Restart(used(3))),
            (failed(Some(10)), 0, 1, Next::Restart(used(1))),
            (failed(None), 1, 1, Next::End(RunEnd::GivenUp(Exit::OwnFailure, budget(1)))),
            (failed(Some(10)), 1, 1, Next::End(RunEnd::GivenUp(Exit::Hung, budget(1)))),
            (failed(Some(3)), 0, 9, Next::End(RunEnd::GivenUp(Exit::Data, GiveUp::Permanent))),
            (failed(Some(2)), 0, 9, Next::End(RunEnd::GivenUp(Exit::Usage, GiveUp::Permanent))),
            (failed(Some(9)), 0, 9, Next::End(RunEnd::GivenUp(Exit::Diverged, GiveUp::Permanent))),
        ] {
            let rules =
                serde_json::json!([{"action": "FailTrainJob", "onExitCodes": {"operator": "NotIn", "values": [99]}}]);
            let policy = serde_json::json!({"maxRestarts": most, "rules": rules});
            let policy: FailurePolicy = serde_json::from_value(policy).unwrap();
            assert_eq!(next(end, &policy, &used(restarts)), next_is, "{end:?} after {restarts} of {most}");
        }
    }
}
