//! Queue order: which job comes first when there is not enough room for all.
//!
//! 1. **Order**: a job whose objects the API server refused within the last hour comes last, and so
//!    do all jobs of a namespace in which that happened to three jobs. Then by priority. Then, if
//!    the administrator gives weights to namespaces, by the namespace's recent GPU usage. Then by
//!    slowdown: time waited ÷ time the job may run (`activeDeadlineSeconds`), which counts as at
//!    least five minutes and at most a day, the value for jobs without a limit. Then by age. The
//!    first queued job that could be placed at all is the head of the queue. It stays the head
//!    until it is placed or a job of higher priority or smaller share arrives. Batch schedulers
//!    call the quotient the expansion factor (Maui: Jackson, Snell, Clement, JSSPP 2001): an hour
//!    is long for a one-hour job, and short for a one-week job.
//! 2. **Reservation**: the head holds the nodes on which it can start first, once enough running
//!    jobs have ended by their limits (`activeDeadlineSeconds`). If jobs without a limit would have
//!    to end too, it waits for as few busy nodes as possible. The nodes are chosen again whenever
//!    something ends.
//! 3. **Backfill**: a job behind the head takes nodes that are not reserved, or, if its own limit
//!    expires before the head can start, any node. So no job behind the head delays it, and no node
//!    is idle that a short job could use. If the administrator allows it (`queue.predictor`), run
//!    times replace missing limits: a running job is expected to run for as long again, and a
//!    queued one as long as the longest of the last 20 similar jobs. Such a job overtakes the head
//!    only if the start of the head is an estimate too, and only until the start that was estimated
//!    first: no estimate delays what limits guarantee, and once a job has run longer than
//!    estimated, no other one overtakes.
//! 4. **Preemption**: only the head preempts, only jobs of lower priority, only if its policy
//!    allows it, and only if it fits then. At equal priority, jobs that have not been preempted
//!    within a day are preempted first, and of these the ones that lose least work. A job whose
//!    limit was raised after it was placed yields to a head of at least its priority once the limit
//!    it was placed with (`status.placedLimitSeconds`) has passed, because forecasts relied on that
//!    limit. Under other queue policies, the head also preempts jobs of its priority, the latest
//!    start first (see [`super::queue_policy`]).
//! 5. **Kept nodes**: a gang that restarts after a failure keeps the GPUs of its remaining nodes,
//!    unless it finds no placement: gangs that each hold part of their nodes and wait for each
//!    other would deadlock.
//!
//! Gangs are placed as a whole or not at all, so nothing else is ever reserved.

use jiff::{SignedDuration, Timestamp};
use std::cmp::Reverse;
use switchyard_crds::{OnSuspend, PlacedNode, PlacementStatus, TrainJob, conditions};

/// Position in the queue. The smallest comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePosition {
    /// The API server recently refused an object that its pods need: the job would hold nodes
    /// without starting.
    is_demoted: bool,
    priority: Reverse<i32>,
    /// The namespace's recent GPU usage relative to its weight, 0 if fair share is off.
    share: u64,
    /// See [`super::queue_policy::PolicySettings::level`].
    level: usize,
    slowdown: Reverse<i64>,
    created: Option<Timestamp>,
    /// Namespace and name, as a unique tie-break.
    name: String,
}

impl QueuePosition {
    /// Position of a job with this pod priority and this usage share of its namespace.
    pub fn of(job: &TrainJob, priority: i32, share: u64, slowdown: Slowdown) -> QueuePosition {
        let created = created(job);
        let thousandths = slowdown.of(job);
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let name = format!("{}/{}", part(&job.metadata.namespace), part(&job.metadata.name));
        QueuePosition {
            is_demoted: refused_at(job).is_some_and(|at| is_recent(at, slowdown.at)),
            priority: Reverse(priority),
            share,
            level: 0,
            slowdown: Reverse(thousandths),
            created,
            name,
        }
    }

    /// Moves it ahead of all jobs of its priority and share, because it holds nodes.
    #[must_use]
    pub fn with_reservation(self) -> QueuePosition {
        QueuePosition { slowdown: Reverse(i64::MAX), ..self }
    }

    /// Moves it behind all jobs of lower levels.
    #[must_use]
    pub fn at_level(self, level: usize) -> QueuePosition {
        QueuePosition { level, ..self }
    }

    /// Moves a job to the end because its namespace's jobs were refused repeatedly.
    #[must_use]
    pub fn demoted(self) -> QueuePosition {
        QueuePosition { is_demoted: true, ..self }
    }

    pub fn priority(&self) -> i32 {
        self.priority.0
    }

    /// Whether it comes after all jobs that may be able to start.
    pub fn is_demoted(&self) -> bool {
        self.is_demoted
    }

    /// Namespace and name of the job.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// How long a job comes last after the API server has refused an object that its pods need.
const DEMOTED_FOR: SignedDuration = SignedDuration::from_hours(1);

/// When the API server last refused an object that the job's pods need. `None` if never, or if it
/// accepted it later.
pub fn refused_at(job: &TrainJob) -> Option<Timestamp> {
    let refused = job.status.as_ref().and_then(|status| status.condition(conditions::OBJECTS_REFUSED));
    refused.filter(|refused| refused.status == "True").map(|refused| refused.last_transition_time.0)
}

/// Whether a refusal at that time still counts.
pub fn is_recent(refused: Timestamp, now: Timestamp) -> bool {
    now.duration_since(refused) < DEMOTED_FOR
}

fn created(job: &TrainJob) -> Option<Timestamp> {
    job.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// Slowdown of jobs at one moment. Positions can only be compared if they were computed for the
/// same moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slowdown {
    pub at: Timestamp,
    /// Longer limits count as this. A job that has waited for a day is late, however long it runs.
    /// Without this bound, a two-week job would wait weeks where a one-hour job waits hours.
    pub longest: SignedDuration,
}

/// Shorter limits count as this. Otherwise a job with a limit of one minute would be late after a
/// minute, and the limit can be raised later.
const SHORTEST: SignedDuration = SignedDuration::from_mins(5);

impl Default for Slowdown {
    /// No waiting time.
    fn default() -> Slowdown {
        Slowdown { at: Timestamp::MIN, longest: SignedDuration::from_hours(24) }
    }
}

impl Slowdown {
    /// Waiting time in thousandths of the time that the job may run.
    fn of(self, job: &TrainJob) -> i64 {
        let longest = self.longest.as_secs().max(1);
        let limit = job.spec.active_deadline_seconds.unwrap_or(longest).clamp(SHORTEST.as_secs().min(longest), longest);
        let waited = created(job).map_or(0, |created| self.at.duration_since(created).as_secs().max(0));
        waited.saturating_mul(1000) / limit
    }
}

/// When a job was last placed; `None` if it is not placed now.
pub(super) fn placed_since(job: &TrainJob) -> Option<Timestamp> {
    let placed = job.status.as_ref()?.condition(conditions::PLACED)?;
    (placed.status == "True").then_some(placed.last_transition_time.0)
}

/// Preemption order. The smallest is preempted first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct PreemptionOrder {
    priority: i32,
    /// Under a queue policy that preempts: the latest start first.
    started: Reverse<Option<Timestamp>>,
    /// Preemptions within the last day: a job is not preempted repeatedly while others could be.
    recent_preemptions: i32,
    /// Work that would be repeated, in GPU-seconds, or node-seconds for a job without GPUs.
    lost: i64,
    /// Youngest first.
    age: Reverse<(Option<Timestamp>, String)>,
}

impl PreemptionOrder {
    /// Priority of the job.
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// Preemption rank of a job with this position in the queue.
    pub fn of(job: &TrainJob, position: &QueuePosition, now: Timestamp) -> PreemptionOrder {
        let recent_preemptions = recent_preemptions(job, now);
        let age = Reverse((position.created, position.name.clone()));
        let (priority, lost) = (position.priority(), work_lost(job, now));
        PreemptionOrder { priority, started: Reverse(None), recent_preemptions, lost, age }
    }

    /// The same for a job that a queue policy preempts for one of its priority: only the start
    /// counts. The policy bounds the preemptions of a job and the work lost, so the order need not.
    #[must_use]
    pub fn by_start(self, job: &TrainJob) -> PreemptionOrder {
        PreemptionOrder { started: Reverse(placed_since(job)), recent_preemptions: 0, lost: 0, ..self }
    }
}

/// How often the job was preempted within the last 24 hours.
pub fn recent_preemptions(job: &TrainJob, now: Timestamp) -> i32 {
    let restarts = job.status.as_ref().and_then(|status| status.restarts.as_ref());
    let recent = restarts.into_iter().flat_map(|restarts| &restarts.recent);
    let recent = recent.filter(|hour| now.duration_since(hour.since.0) < SignedDuration::from_hours(24));
    recent.map(|hour| hour.preemption).sum()
}

/// Work lost if the job were preempted now, in GPU seconds. A node without GPUs counts as one.
pub fn work_lost(job: &TrainJob, now: Timestamp) -> i64 {
    gpus_held(job).saturating_mul(seconds_lost(job, now))
}

/// Seconds of work lost if the job were preempted now. A job that saves a checkpoint when it is
/// stopped loses nothing. Others lose the work since their last time-based checkpoint. Step-based
/// checkpoints, and those of other programs, have no known time and do not count.
pub(super) fn seconds_lost(job: &TrainJob, now: Timestamp) -> i64 {
    let placed = job.status.as_ref().and_then(|status| status.condition(conditions::PLACED));
    let placed = placed.filter(|placed| placed.status == "True");
    let ran = placed.map_or(0, |placed| now.duration_since(placed.last_transition_time.0).as_secs().max(0));
    match &job.spec.checkpoint {
        Some(checkpoint) if checkpoint.on_suspend == OnSuspend::Save => 0,
        Some(checkpoint) if checkpoint.period_seconds > 0 => ran % checkpoint.period_seconds,
        _ => ran,
    }
}

/// GPUs of a placed job; a node without GPUs counts as one.
pub(super) fn gpus_held(job: &TrainJob) -> i64 {
    let placement = job.status.as_ref().and_then(|status| status.placement.as_ref());
    let nodes = placement.into_iter().flat_map(|placement| &placement.nodes);
    nodes.map(|node| node.gpus.len().max(1) as i64).sum()
}

/// Basis of a predicted time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Basis {
    /// Limits (`activeDeadlineSeconds`).
    Limits,
    /// Run times so far: an estimate.
    RunTimes,
}

/// A job ahead in the queue that holds a reservation.
#[derive(Debug, Clone, PartialEq)]
pub struct JobAhead {
    /// Namespace and name, or only that it is in another namespace.
    pub name: String,
    /// The nodes that it reserves.
    pub nodes: Vec<String>,
    /// When it can start there at the latest, `None` if unknown.
    pub start: Option<(Timestamp, Basis)>,
    /// The other job ends before that, by its limit or by run times.
    pub ends_before: Option<Basis>,
}

impl JobAhead {
    /// Says when it starts, and the consequence for a job behind it with this limit.
    pub fn forecast(&self, limit: Option<i64>) -> Option<String> {
        let starts = match self.start? {
            (start, Basis::Limits) => format!("{} can start by {start}", self.name),
            (start, Basis::RunTimes) => format!("{} is expected to start by {start}", self.name),
        };
        Some(match limit {
            _ if self.ends_before == Some(Basis::Limits) => {
                format!("{starts}: this job ends before that and can use them until then")
            }
            _ if self.ends_before == Some(Basis::RunTimes) => {
                format!("{starts}: jobs like this one ran for less, so it can use them until then")
            }
            Some(limit) => format!("{starts}: this job may still be running then (activeDeadlineSeconds: {limit})"),
            None => format!(
                "{starts}: with an activeDeadlineSeconds that ends before that, this job can use them until then"
            ),
        })
    }

    /// Says that a job behind it starts first on nodes that it reserves.
    pub fn describe_overtaking(&self, placement: &PlacementStatus) -> Option<String> {
        let is_held = |placed: &PlacedNode| self.nodes.contains(&placed.node_name);
        let (start, start_basis) = self.start.filter(|_| placement.nodes.iter().any(is_held))?;
        let ends = if self.ends_before? == Basis::Limits { "ends" } else { "is expected to end" };
        let starts = if start_basis == Basis::Limits { "can start" } else { "is expected to start" };
        Some(format!("{ends} before {}, which is ahead in the queue, {starts} by {start}", self.name))
    }
}

impl std::fmt::Display for JobAhead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = self.nodes.len();
        let verb = if count == 1 { "node is" } else { "nodes are" };
        write!(f, "{count} {verb} reserved for {}, which is ahead in the queue", self.name)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn at_equal_priority_jobs_not_recently_preempted_with_least_lost_work_go_first() {
        let now: Timestamp = "2026-01-02T12:00:00Z".parse().unwrap();
        let job = |name: &str, placed: &str, gpus: usize, spec: serde_json::Value| {
            let mut object = serde_json::json!({
                "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
                "spec": {"trainer": {"framework": "Plain", "image": "i"}},
                "status": {
                    "conditions": [{
                        "type": "Placed", "status": "True", "reason": "Placed", "message": "", "lastTransitionTime": placed,
                    }],
                    "placement": {"reason": "", "nodes": [{
                        "firstRank": 0, "nodeName": "n", "cpus": [], "gpus": vec!["GPU"; gpus], "nics": [], "numaNodes": [],
                    }]},
                },
            });
            object["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
            serde_json::from_value::<TrainJob>(object).unwrap()
        };
        let none = || serde_json::json!({});
        let period = |on_suspend: &str| serde_json::json!({"checkpoint": {"path": "/c", "periodSeconds": 7000, "onSuspend": on_suspend}});
        let mut twice = job("twice", "2026-01-02T11:59:59Z", 1, none());
        let hour = |since: &str| serde_json::json!({"since": since, "preemption": 1});
        let restarts = |recent: &[serde_json::Value]| serde_json::json!({"application": 0, "recent": recent});
        let with = |job: &mut TrainJob, recent: &[serde_json::Value]| {
            job.status.as_mut().unwrap().restarts = serde_json::from_value(restarts(recent)).unwrap();
        };
        with(&mut twice, &[hour("2026-01-02T01:00:00Z"), hour("2026-01-02T11:00:00Z")]);
        let mut yesterday = job("yesterday", "2026-01-02T11:59:58Z", 1, none());
        with(&mut yesterday, &[hour("2026-01-01T12:00:00Z")]);
        let jobs = [
            (0, job("wide", "2026-01-02T11:00:00Z", 8, none())),
            (0, job("narrow", "2026-01-02T11:00:00Z", 1, none())),
            // Two hours and twenty minutes: the last checkpoint is 1,400 s old.
            (0, job("period", "2026-01-02T09:40:00Z", 1, period("Discard"))),
            (0, job("saves", "2026-01-01T11:00:00Z", 8, period("Save"))),
            (0, twice),
            (0, yesterday),
            (1, job("higher", "2026-01-02T12:00:00Z", 1, none())),
        ];
        let position = |job: &TrainJob, priority| QueuePosition::of(job, priority, 0, Slowdown::default());
        let mut order: Vec<PreemptionOrder> =
            jobs.iter().map(|(priority, job)| PreemptionOrder::of(job, &position(job, *priority), now)).collect();
        order.sort();
        let lost: Vec<(&str, i64)> = order.iter().map(|job| (job.age.0.1.as_str(), job.lost)).collect();
        assert_eq!(
            lost,
            [
                ("/saves", 0),
                ("/yesterday", 2),
                ("/period", 1400),
                ("/narrow", 3600),
                ("/wide", 28_800),
                ("/twice", 1),
                ("/higher", 0)
            ]
        );

        let mut order: Vec<PreemptionOrder> = jobs
            .iter()
            .map(|(priority, job)| PreemptionOrder::of(job, &position(job, *priority), now).by_start(job))
            .collect();
        order.sort();
        let by_start: Vec<&str> = order.iter().map(|job| job.age.0.1.as_str()).collect();
        assert_eq!(by_start, ["/twice", "/yesterday", "/wide", "/narrow", "/period", "/saves", "/higher"]);
    }

    #[test]
    fn queue_order_is_priority_share_slowdown_age_name() {
        let limited = |name: &str, created: i64, limit: Option<i64>| {
            let spec = serde_json::json!({
                "trainer": {"framework": "Plain", "image": "i"}, "activeDeadlineSeconds": limit,
            });
            let mut job = TrainJob::new(name, serde_json::from_value(spec).unwrap());
            let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::from_second(created).unwrap());
            job.metadata.creation_timestamp = Some(time);
            job
        };
        let job = |name: &str, created: i64| limited(name, created, None);
        let sorted = |at: i64| {
            let slowdown = Slowdown { at: Timestamp::from_second(at).unwrap(), ..Slowdown::default() };
            let position = |job: &TrainJob, priority, share| QueuePosition::of(job, priority, share, slowdown);
            let mut positions = [
                position(&job("young", 9000), 0, 0),
                position(&job("b", 3000), 0, 0),
                position(&job("a", 3000), 0, 0),
                position(&limited("week", 3500, Some(604_800)), 0, 0),
                position(&limited("hour", 8000, Some(3600)), 0, 0),
                position(&limited("day", 4000, Some(86_400)), 0, 0),
                position(&job("holds", 9999), 0, 0).with_reservation(),
                position(&job("had", 1000), 0, 7),
                position(&job("high", 10_000), 5, 9),
                position(&job("low", 1000), -1, 0),
            ];
            positions.sort();
            positions.map(|position| position.name().trim_start_matches('/').to_owned()).join(" ")
        };
        assert_eq!(
            sorted(10_000),
            "high holds hour a b week day young had low",
            "2000 of 3600 s are more than 7000 of 86,400"
        );
        assert_eq!(sorted(8100), "high holds a b week day hour young had low", "slowdown is never negative");
    }

    #[test]
    fn limits_below_five_minutes_do_not_raise_the_slowdown() {
        let slowdown = |limit: i64, longest: i64| {
            let spec =
                serde_json::json!({"trainer": {"framework": "Plain", "image": "i"}, "activeDeadlineSeconds": limit});
            let mut job = TrainJob::new("a", serde_json::from_value(spec).unwrap());
            let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::UNIX_EPOCH);
            job.metadata.creation_timestamp = Some(time);
            Slowdown { at: Timestamp::from_second(600).unwrap(), longest: SignedDuration::from_secs(longest) }.of(&job)
        };
        assert_eq!([1, 60, 300, 600].map(|limit| slowdown(limit, 86_400)), [2000, 2000, 2000, 1000]);
        assert_eq!(slowdown(1, 60), 10_000, "limits are capped at a minute");
    }
}
