//! Queue policies: which running jobs make way for the head of the queue although they have its
//! priority.
//!
//! No policy knows how long a job will run. Preempting is cheap for a job that can be saved: it
//! repeats the work since its last checkpoint, is saved, and starts again elsewhere. A job may be
//! preempted once three conditions hold:
//!
//! 1. Its position is behind the head's. Under [`QueuePolicy::LeastAttainedService`] it falls
//!    behind when it has run longer than a threshold (Tiresias: Gu et al., NSDI 2019).
//! 2. It has run for a quantum since its last start, and was not preempted too often.
//! 3. The gain exceeds the cost, both in GPU seconds. Cost: the GPUs of the job × (repeated work +
//!    overhead). Gain: the GPUs of the head × the time that the job has run, because run times are
//!    heavy-tailed and the median job runs for as long again (see [`super::forecast`]).
//!
//! The latest start comes first among the victims. `docs/dev/queue.md` compares other orders.

use super::queue_order::{QueuePosition, gpus_held, placed_since, recent_preemptions, seconds_lost};
use jiff::{SignedDuration, Timestamp};
use switchyard_crds::{Preemptible, TrainJob};

/// Which jobs of equal priority come first, and whether they preempt others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum QueuePolicy {
    /// In order of submission. The head waits until others end, and jobs behind it never delay it.
    #[default]
    FirstComeFirstServed,
    /// In order of submission. Preemptible jobs use nodes that the head cannot use yet, and make
    /// way for it.
    Opportunistic,
    /// Jobs that have run least come first, by levels; in order of submission within a level.
    /// Preemptible jobs make way for jobs that come before them.
    LeastAttainedService,
}

/// A policy and its parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicySettings {
    pub policy: QueuePolicy,
    /// Run times that separate the levels, ascending. One threshold of four hours: in a prototype,
    /// one hour gave the same mean on the lingjun trace with more than twice the preemptions.
    pub thresholds: Vec<SignedDuration>,
    /// Shortest time that a job runs before it is preempted. One hour: with checkpoints every ten
    /// minutes, a preemption costs at most a fifth of the job's work since its start.
    pub quantum: SignedDuration,
    /// How often a job is preempted at most. Four: on the lingjun trace at load 0.71, eight shorten
    /// the p99 wait by 18 %, leave the mean completion as it is, and lose two thirds more GPU time
    /// (`docs/dev/experiments.md`).
    pub max_preemptions: i32,
    /// The same within a day.
    pub max_preemptions_per_day: i32,
    /// Time to save a job and to start it again.
    pub overhead: SignedDuration,
}

impl Default for PolicySettings {
    fn default() -> PolicySettings {
        PolicySettings {
            policy: QueuePolicy::default(),
            thresholds: vec![SignedDuration::from_hours(4)],
            quantum: SignedDuration::from_hours(1),
            max_preemptions: 4,
            max_preemptions_per_day: 4,
            overhead: SignedDuration::from_secs(120),
        }
    }
}

/// Time for which a job has held its placements so far.
pub fn attained(job: &TrainJob, now: Timestamp) -> SignedDuration {
    let current = placed_since(job).map_or(SignedDuration::ZERO, |since| now.duration_since(since));
    ran_before(job).saturating_add(current.max(SignedDuration::ZERO))
}

/// The same for its earlier attempts.
fn ran_before(job: &TrainJob) -> SignedDuration {
    SignedDuration::from_secs(job.status.as_ref().and_then(|status| status.ran_seconds).unwrap_or(0).max(0))
}

impl PolicySettings {
    /// Whether jobs make way for others of their priority.
    pub fn preempts(&self) -> bool {
        self.policy != QueuePolicy::FirstComeFirstServed
    }

    /// The level of a job: 0 for the jobs that come first.
    pub fn level(&self, job: &TrainJob, now: Timestamp) -> usize {
        if self.policy != QueuePolicy::LeastAttainedService {
            return 0;
        }
        let attained = attained(job, now);
        self.thresholds.iter().filter(|threshold| **threshold <= attained).count()
    }

    /// Whether a job agrees to be preempted, and was not preempted too often. Its failure policy's
    /// `maxPreemptionRestarts` counts too, because a job that used up that budget would fail.
    pub fn is_preemptible(&self, job: &TrainJob, now: Timestamp) -> bool {
        let restarts = job.status.as_ref().and_then(|status| status.restarts.as_ref());
        self.preempts()
            && job.spec.preemptible() == Preemptible::Always
            && restarts.map_or(0, |restarts| restarts.preemption) < self.max_preemptions
            && recent_preemptions(job, now)
                < self.max_preemptions_per_day.min(job.spec.failure_policy.max_preemption_restarts)
    }

    /// From when a running job at position `theirs` may be preempted for a head of the queue at
    /// position `head` with this number of GPUs. `None` if never.
    pub fn preemptible_from(
        &self,
        job: &TrainJob,
        theirs: &QueuePosition,
        head: &QueuePosition,
        head_gpus: i64,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let since = placed_since(job).filter(|_| self.is_preemptible(job, now))?;
        let behind = self.behind_from(job, theirs, head, now)?;
        let protected = self.quantum.max(self.worth_after(job, head_gpus)? - ran_before(job));
        Some(behind.max(since.checked_add(protected).ok()?))
    }

    /// From when a running job is behind the head. Positions keep the level from when the queue was
    /// last ordered, and the job may have passed a threshold since.
    fn behind_from(
        &self,
        job: &TrainJob,
        theirs: &QueuePosition,
        head: &QueuePosition,
        now: Timestamp,
    ) -> Option<Timestamp> {
        let level = self.level(job, now);
        let is_behind = |level: usize| theirs.clone().at_level(level) > *head;
        if is_behind(level) {
            return Some(now);
        }
        let next_levels = (1..).zip(&self.thresholds).skip(level);
        let mut next_levels = next_levels.filter(|_| self.policy == QueuePolicy::LeastAttainedService);
        let (_, threshold) = next_levels.find(|(level, _)| is_behind(*level))?;
        now.checked_add(*threshold - attained(job, now)).ok()
    }

    /// The run time after which the gain of preempting the job for a head with this number of GPUs
    /// exceeds the cost. `None` if never.
    fn worth_after(&self, job: &TrainJob, head_gpus: i64) -> Option<SignedDuration> {
        let (head, theirs) = (head_gpus.max(1), gpus_held(job));
        match most_seconds_lost(job) {
            Some(lost) => {
                Some(((self.overhead + lost).saturating_mul(i32::try_from(theirs).ok()?)) / i32::try_from(head).ok()?)
            }
            // All work may be repeated: the gain must outgrow it.
            None if head > theirs => {
                Some(self.overhead.saturating_mul(i32::try_from(theirs).ok()?) / i32::try_from(head - theirs).ok()?)
            }
            None => None,
        }
    }

    /// GPU seconds lost if the job were preempted now.
    pub fn cost(&self, job: &TrainJob, now: Timestamp) -> i64 {
        (seconds_lost(job, now) + self.overhead.as_secs()).saturating_mul(gpus_held(job))
    }

    /// GPU seconds gained by preempting these jobs now for a head with this number of GPUs: they
    /// would be expected to run on for as long as they have run.
    pub fn gain<'a>(&self, jobs: impl Iterator<Item = &'a TrainJob>, head_gpus: i64, now: Timestamp) -> i64 {
        let ran = jobs.map(|job| attained(job, now).as_secs());
        ran.max().unwrap_or(0).saturating_mul(head_gpus.max(1))
    }
}

/// Upper bound on the work repeated after a preemption; `None` if the job is not saved by time, or
/// writes its own checkpoints.
fn most_seconds_lost(job: &TrainJob) -> Option<SignedDuration> {
    let checkpoint = job.spec.checkpoint.as_ref()?;
    match checkpoint.on_suspend {
        switchyard_crds::OnSuspend::Save => Some(SignedDuration::ZERO),
        switchyard_crds::OnSuspend::Discard if checkpoint.period_seconds > 0 => {
            Some(SignedDuration::from_secs(checkpoint.period_seconds))
        }
        switchyard_crds::OnSuspend::Discard => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::queue_order::Slowdown;
    use super::*;
    use serde_json::{Value, json};

    fn at(minutes: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + 60 * minutes).unwrap()
    }

    /// A job with eight GPUs that was created and placed at these minutes.
    fn job(created: i64, placed: i64, spec: Value, status: Value) -> TrainJob {
        let mut job = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
            "metadata": {"name": "j", "namespace": "t", "creationTimestamp": at(created)},
            "spec": {"trainer": {"framework": "Plain", "image": "i"}, "checkpoint": {"path": "/c", "onSuspend": "Discard"}},
            "status": {
                "conditions": [{"type": "Placed", "status": "True", "reason": "Placed", "message": "", "lastTransitionTime": at(placed)}],
                "placement": {"reason": "", "nodes": [{"firstRank": 0, "nodeName": "n", "gpus": vec!["GPU"; 8]}]},
            },
        });
        for (part, fields) in [("spec", spec), ("status", status)] {
            job[part].as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        }
        serde_json::from_value(job).unwrap()
    }

    fn settings(policy: QueuePolicy) -> PolicySettings {
        PolicySettings { policy, ..PolicySettings::default() }
    }

    /// The minute from which a head created at minute 50, with this number of GPUs, can preempt the
    /// job.
    fn from(policy: QueuePolicy, job: &TrainJob, head_gpus: i64) -> Option<i64> {
        let (settings, now) = (settings(policy), at(100));
        let slowdown = Slowdown { at: now, ..Slowdown::default() };
        let position = |job: &TrainJob| QueuePosition::of(job, 0, 0, slowdown).at_level(settings.level(job, now));
        let head = position(&job_created(50));
        let from = settings.preemptible_from(job, &position(job), &head, head_gpus, now)?;
        Some(from.duration_since(at(0)).as_secs() / 60)
    }

    fn job_created(minute: i64) -> TrainJob {
        job(minute, minute, json!({}), json!({"conditions": []}))
    }

    #[test]
    fn jobs_make_way_once_they_are_behind_and_their_quantum_is_over() {
        use QueuePolicy::{FirstComeFirstServed, LeastAttainedService, Opportunistic};
        let none = || json!({});
        let (older, newer) = (job(10, 90, none(), none()), job(60, 90, none(), none()));
        assert_eq!(from(FirstComeFirstServed, &newer, 8), None);
        assert_eq!(from(Opportunistic, &newer, 8), Some(150));
        assert_eq!(from(Opportunistic, &older, 8), None);
        // It reaches the threshold of 240 minutes.
        assert_eq!(from(LeastAttainedService, &older, 8), Some(330));
        let ran = job(10, 90, none(), json!({"ranSeconds": 200 * 60}));
        assert_eq!(from(LeastAttainedService, &ran, 8), Some(150), "after 200 minutes in earlier attempts");
    }

    #[test]
    fn a_job_is_behind_from_its_threshold_although_the_queue_was_ordered_before() {
        let (settings, ordered, now) = (settings(QueuePolicy::LeastAttainedService), at(240), at(241));
        let slowdown = Slowdown { at: ordered, ..Slowdown::default() };
        let position = |job: &TrainJob| QueuePosition::of(job, 0, 0, slowdown).at_level(settings.level(job, ordered));
        let (older, head) = (job(0, 1, json!({}), json!({})), job_created(50));
        assert!(position(&older) < position(&head));
        let from = settings.preemptible_from(&older, &position(&older), &position(&head), 8, now);
        assert_eq!(from, Some(now));
    }

    #[test]
    fn the_gain_must_exceed_the_cost() {
        // At most 720 s are lost, so a head with an eighth of the GPUs needs 5760 s.
        let newer = |checkpoint: Value| job(60, 90, json!({"checkpoint": checkpoint}), json!({}));
        let by_time = json!({"path": "/c", "onSuspend": "Discard"});
        assert_eq!(from(QueuePolicy::Opportunistic, &newer(by_time), 1), Some(90 + 96));
        let ran = job(60, 90, json!({}), json!({"ranSeconds": 30 * 60}));
        assert_eq!(from(QueuePolicy::Opportunistic, &ran, 1), Some(90 + 66), "earlier attempts count");
        let saved = json!({"path": "/c"});
        assert_eq!(from(QueuePolicy::Opportunistic, &newer(saved), 1), Some(150));
        // Everything since the start is lost, as fast as the head gains.
        let unsaved = json!({"path": "/c", "onSuspend": "Discard", "periodSeconds": 0});
        assert_eq!(from(QueuePolicy::Opportunistic, &newer(unsaved.clone()), 8), None);
        assert_eq!(from(QueuePolicy::Opportunistic, &newer(unsaved), 9), Some(150));
    }

    #[test]
    fn checkpoints_the_spec_and_the_budgets_decide_who_is_preemptible() {
        let is_preemptible = |spec: Value, status: Value| {
            settings(QueuePolicy::Opportunistic).is_preemptible(&job(0, 0, spec, status), at(100))
        };
        let preempted = |total: i32, today: i32| {
            let recent = [json!({"since": at(0), "infrastructure": 0, "preemption": today})];
            json!({"restarts": {"total": total, "application": 0, "infrastructure": 0, "preemption": total, "recent": recent}})
        };
        let none = || json!({});
        assert!(is_preemptible(none(), none()) && is_preemptible(none(), preempted(3, 3)));
        assert!(!is_preemptible(none(), preempted(4, 1)), "four times in its life");
        // (checkpoint, queue.preemptible): the second decides if it is set.
        let saved = || json!({"path": "/c"});
        for (checkpoint, preemptible, expected) in [
            (saved(), json!(null), true),
            (json!(null), json!(null), false),
            (saved(), json!("Never"), false),
            (json!(null), json!("Always"), true),
        ] {
            let spec = json!({"checkpoint": checkpoint, "queue": {"preemptible": preemptible}});
            assert_eq!(is_preemptible(spec.clone(), none()), expected, "{spec}");
        }
        for (budget, expected) in [(0, false), (1, false), (2, true)] {
            let spec = json!({"failurePolicy": {"maxPreemptionRestarts": budget}});
            assert_eq!(is_preemptible(spec, preempted(1, 1)), expected, "{budget}");
        }
    }
}
