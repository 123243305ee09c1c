//! Status fields that are only written in a cluster, pod counts and log figures, and the rules for
//! when a status write is due.

use super::events::EventDraft;
use super::view::PodView;
use super::{FIGURES_PERIOD, JobSnapshot, Reconciliation, clock, waiting_period};
use crate::job::role_ranks;
use crate::status::{Draft, reason_of, time};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{NodeCounts, RoleCounts, TrainJobStatus};

impl Draft<'_> {
    /// Counts the pods of the current attempt.
    pub(super) fn count(&mut self, pods: &[&PodView], desired: i32) {
        self.counts(counts(pods.iter().copied(), desired));
        let mut roles = Vec::new();
        for (name, ranks) in role_ranks(self.job) {
            let own = pods.iter().copied().filter(|pod| ranks.contains(&pod.node_rank));
            roles.push(RoleCounts { name, counts: counts(own, ranks.len() as i32) });
        }
        self.next.roles = roles;
    }

    /// Copies the latest figures from the worker's termination message, else from the log that was
    /// read last.
    pub(super) fn newest_figures(&mut self, snapshot: &JobSnapshot<'_>, pods: &[&PodView]) {
        let ended = pods.iter().find(|pod| pod.node_rank == 0).and_then(|pod| pod.ended.as_ref());
        let worker_report =
            ended.and_then(|ended| ended.worker_report()).and_then(|worker_report| worker_report.summary);
        let at = ended.and_then(|ended| ended.at).unwrap_or(snapshot.rules.now);
        if let Some(summary) = worker_report.as_ref().or(snapshot.summary) {
            self.figures(summary, time(at).0);
        }
    }

    /// Resets the progress figures: the next attempt resumes from a checkpoint, or starts at step 0
    /// if there is none.
    pub(super) fn start_over(&mut self) {
        if self.job.spec.checkpoint.is_none() {
            self.next.trainer_status = None;
        }
        if let Some(figures) = &mut self.next.trainer_status {
            figures.estimated_remaining_seconds = None;
        }
    }

    /// Returns a decision, which writes only the status.
    pub(super) fn decide(self, events: Vec<EventDraft>) -> Reconciliation {
        Reconciliation { status: Some(self.next), events, ..Reconciliation::default() }
    }

    /// Returns actions instead of a decision. The status is written when it says something new.
    /// Changed figures are written at most every 10 s. Changed waiting messages of queued jobs are
    /// written at most once a minute for each job and once a second over all jobs.
    pub(super) fn act(self, snapshot: &JobSnapshot<'_>) -> Reconciliation {
        let mut result = Reconciliation::default();
        let previous = self.job.status.as_ref();
        if previous == Some(&self.next) {
            return result;
        }
        // A message from whatever else gates the pods is news about the job itself, not about room.
        let waits_for_room = reason_of(&self.next, conditions::SUCCEEDED) == Some(Stage::Queued.reason())
            && reason_of(&self.next, conditions::PLACED) != Some(conditions::GATED);
        let period = if waits_for_room { waiting_period(snapshot.queue_length) } else { FIGURES_PERIOD };
        let due = snapshot.status_written.map(|written| written.saturating_add(period).unwrap_or(Timestamp::MAX));
        match due {
            Some(due) if !clock::is_over(due, period, snapshot.rules.now) && !is_major_change(previous, &self.next) => {
                result.wake_at(due)
            }
            _ => result.status = Some(self.next),
        }
        result
    }
}

/// Counts pods by state.
fn counts<'a>(pods: impl Iterator<Item = &'a PodView> + Clone, desired: i32) -> NodeCounts {
    let count = |is: fn(&PodView) -> bool| pods.clone().filter(|pod| is(pod)).count() as i32;
    NodeCounts {
        // Negative in a job that was never validated. The server rejects a negative count.
        desired: desired.max(0),
        ready: count(|pod| pod.ready && !pod.is_done()),
        active: count(|pod| !pod.is_done()),
        succeeded: count(PodView::has_succeeded),
        failed: count(PodView::has_failed),
    }
}

/// True if more than figures changed: the stage, a condition, the attempt, the placement, the
/// restarts, or the last pod is gone and its resources are free.
pub fn is_major_change(previous: Option<&TrainJobStatus>, next: &TrainJobStatus) -> bool {
    let Some(previous) = previous else { return true };
    let is_empty = |status: &TrainJobStatus| status.nodes.as_ref().is_none_or(|nodes| nodes.active == 0);
    let verdicts = |status: &TrainJobStatus| {
        let verdict = |c: &Condition| (c.type_.clone(), c.status.clone(), c.reason.clone());
        // Progress in steps is already covered by the figures.
        let news = status.conditions.iter().filter(|c| c.reason != conditions::STEPS_MADE);
        news.map(verdict).collect::<Vec<_>>()
    };
    verdicts(previous) != verdicts(next)
        || previous.attempt != next.attempt
        || previous.restarts != next.restarts
        || previous.placement != next.placement
        || previous.completion_time != next.completion_time
        || previous.observed_generation != next.observed_generation
        || (is_empty(next) && !is_empty(previous))
}
