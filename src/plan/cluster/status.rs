//! The next status of a job, as changes to the one before. Only what changes is touched: transition times stay, counters stay.

use super::events::EventDraft;
use super::view::{Phase, PodView};
use super::{FIGURES_PERIOD, Reconciliation, Snapshot, clock};
use crate::status::{Figures, trainer_status};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{NodeCounts, TrainJob, TrainJobStatus, TrainerStatus};

/// Longest message of a condition, characters: enough for one sentence with a cause in it.
const MESSAGE: usize = 1024;

/// A status in the making.
pub(super) struct Draft<'a> {
    job: &'a TrainJob,
    now: Timestamp,
    pub next: TrainJobStatus,
}

/// The API's times have whole seconds.
pub(super) fn time(at: Timestamp) -> Time {
    Time(Timestamp::from_second(at.as_second()).unwrap_or(at))
}

/// The reason of a condition.
pub(super) fn reason_of<'a>(status: &'a TrainJobStatus, kind: &str) -> Option<&'a str> {
    status.condition(kind).map(|condition| condition.reason.as_str())
}

impl<'a> Draft<'a> {
    pub fn new(job: &'a TrainJob, now: Timestamp) -> Draft<'a> {
        let mut next = job.status.clone().unwrap_or_default();
        next.observed_generation = job.metadata.generation;
        Draft { job, now, next }
    }

    /// Sets a condition; the time changes only with its status.
    pub fn condition(&mut self, kind: &str, state: &str, reason: &str, message: String) {
        let message: String = message.chars().take(MESSAGE).collect();
        let generation = self.job.metadata.generation;
        let position = self.next.conditions.iter().position(|condition| condition.type_ == kind);
        let position = position.unwrap_or_else(|| {
            self.next.conditions.push(Condition {
                type_: kind.to_string(),
                status: String::new(),
                reason: String::new(),
                message: String::new(),
                last_transition_time: time(self.now),
                observed_generation: generation,
            });
            self.next.conditions.len() - 1
        });
        let condition = &mut self.next.conditions[position];
        if condition.status != state {
            condition.last_transition_time = time(self.now);
        }
        condition.status = state.to_string();
        condition.reason = reason.to_string();
        condition.message = message;
        condition.observed_generation = generation;
    }

    /// Sets the summary condition.
    pub fn stage(&mut self, stage: Stage, message: String) {
        let state = match stage {
            Stage::Complete => "True",
            Stage::Failed => "False",
            _ => "Unknown",
        };
        self.condition(conditions::SUCCEEDED, state, stage.reason(), message);
    }

    /// Counts the pods of the current attempt.
    pub fn counts(&mut self, pods: &[&PodView], desired: i32) {
        // Negative in a job that nothing checked: the server takes no such count.
        let desired = desired.max(0);
        let count = |is: fn(&PodView) -> bool| pods.iter().filter(|pod| is(pod)).count() as i32;
        let counts = NodeCounts {
            desired,
            ready: count(|pod| pod.ready && !pod.is_over()),
            active: count(|pod| !pod.is_over()),
            succeeded: count(|pod| pod.phase == Phase::Succeeded),
            failed: count(|pod| pod.phase == Phase::Failed),
        };
        self.next.ready = Some(format!("{}/{desired}", counts.ready));
        self.next.nodes = Some(counts);
    }

    /// Nothing runs from here on.
    pub fn rest(&mut self) {
        if let Some(counts) = &mut self.next.nodes {
            (counts.ready, counts.active) = (0, 0);
            self.next.ready = Some(format!("0/{}", counts.desired));
        }
    }

    /// Takes over the newest figures: of a worker's termination message, else of the log that was read last.
    pub fn figures(&mut self, snapshot: &Snapshot<'_>, pods: &[&PodView]) {
        let ended = pods.iter().find(|pod| pod.node_rank == 0).and_then(|pod| pod.ended.as_ref());
        let account = ended.and_then(|ended| ended.account()).and_then(|account| account.summary);
        let at = ended.and_then(|ended| ended.at);
        let Some(summary) = account.as_ref().or(snapshot.summary) else { return };
        let previous = self.next.trainer_status.as_ref();
        let next = trainer_status(&Figures::of(summary, time(at.unwrap_or(self.now)).0));
        // The time alone is no news.
        if previous.is_none_or(|previous| {
            TrainerStatus { last_updated_time: None, ..previous.clone() }
                != TrainerStatus { last_updated_time: None, ..next.clone() }
        }) {
            self.next.trainer_status = Some(next);
        }
    }

    /// A decision: the status is all that is written.
    pub fn decide(self, events: Vec<EventDraft>) -> Reconciliation {
        Reconciliation { status: Some(self.next), events, ..Reconciliation::default() }
    }

    /// No decision: the status is written when it says something new, figures not more often than every 10 s.
    pub fn act(self, snapshot: &Snapshot<'_>, now: Timestamp) -> Reconciliation {
        let mut result = Reconciliation::default();
        let previous = self.job.status.as_ref();
        if previous == Some(&self.next) {
            return result;
        }
        let due =
            snapshot.status_written.map(|written| written.saturating_add(FIGURES_PERIOD).unwrap_or(Timestamp::MAX));
        match due {
            Some(due) if !clock::is_over(due, FIGURES_PERIOD, now) && !major(previous, &self.next) => {
                result.wake_at(due)
            }
            _ => result.status = Some(self.next),
        }
        result
    }
}

/// Whether a status says more than other figures: another stage, condition, attempt, place or count of restarts, or that the last
/// pod is gone and its resources are free.
pub fn major(previous: Option<&TrainJobStatus>, next: &TrainJobStatus) -> bool {
    let Some(previous) = previous else { return true };
    let is_empty = |status: &TrainJobStatus| status.nodes.as_ref().is_none_or(|nodes| nodes.active == 0);
    let verdicts = |status: &TrainJobStatus| {
        let verdict = |c: &Condition| (c.type_.clone(), c.status.clone(), c.reason.clone());
        status.conditions.iter().map(verdict).collect::<Vec<_>>()
    };
    verdicts(previous) != verdicts(next)
        || previous.attempt != next.attempt
        || previous.restarts != next.restarts
        || previous.placement != next.placement
        || previous.completion_time != next.completion_time
        || previous.observed_generation != next.observed_generation
        || (is_empty(next) && !is_empty(previous))
}
