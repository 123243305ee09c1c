//! Which job comes first when there is no room for all.
//!
//! 1. **Order**: a job whose objects the API server refused within the last hour comes after all others, and so do all jobs of a namespace where
//!    that happened to three. Then by priority; where the administrator gives namespaces weights, then by what the namespace had of the GPUs
//!    lately; then by how late a job is: the time it has waited ÷ the time it may run (`activeDeadlineSeconds`), at least five minutes and a day at most, which also
//!    counts for jobs without a limit; then by age. The first job that waits and could be placed at all is the head of the queue, and stays it until it has a place or
//!    one of higher priority or smaller share comes. Batch schedulers know the quotient as the expansion factor (Maui: Jackson, Snell, Clement,
//!    JSSPP 2001): an hour is long for a job of an hour, and short for one of a week.
//! 2. **Reservation**: the head holds the nodes on which it can begin first, once enough of the jobs that run have ended by their limits
//!    (`activeDeadlineSeconds`). Where jobs without a limit would have to end too, it waits for as few busy nodes as possible. It floats: the
//!    nodes are chosen again whenever something ends.
//! 3. **Backfill**: a job behind the head takes nodes that are not held, or, if its own limit passes before the head can begin, any node. So
//!    no job behind the head delays it, and no node is idle that a short job could use.
//!    Where the administrator allows it (`queue.predictor`), run times stand in for limits that are missing: a job that runs may run for as long
//!    again, and one that waits as long as the longest of the last 20 like it. Such a job goes before the head only
//!    where the beginning of the head is a guess too, and only until the one that was found first: no guess puts off what limits promise, and one
//!    that ran longer than the others is not followed by another.
//! 4. **Preemption**: only the head preempts, only jobs of lower priority, only if its policy says so, and only if it fits then. Of equal
//!    priority, those give way first that have not done so within a day, and of these the ones that lose least work.
//!    A job whose limit was raised after it was placed gives way to a head of at least its priority once the limit that it was placed with
//!    (`status.placedLimitSeconds`) has passed: others were told that it ends then.
//! 5. **Holes**: a gang that starts again after a failure keeps the GPUs of the nodes that it still has, unless it finds no place: gangs
//!    that hold parts of what they need and wait for each other would wait forever.
//!
//! Gangs are placed as a whole or not at all, so nothing else is ever reserved.

use jiff::{SignedDuration, Timestamp};
use std::cmp::Reverse;
use switchyard_crds::{OnSuspend, PlacedNode, PlacementStatus, TrainJob, conditions};

/// Place in the queue; the smallest comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    /// The API server refused what its pods need a short time ago: it would hold nodes and not start.
    is_set_back: bool,
    priority: Reverse<i32>,
    /// What its namespace had of the GPUs lately, against its weight; 0 where that does not count.
    share: u64,
    late: Reverse<i64>,
    created: Option<Timestamp>,
    /// Namespace and name, so that no two are equal.
    name: String,
}

impl Turn {
    /// The turn of a job whose pods have this priority, and whose namespace had so much.
    pub fn of(job: &TrainJob, priority: i32, share: u64, lateness: Lateness) -> Turn {
        let created = created(job);
        let late = Reverse(lateness.of(job));
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let name = format!("{}/{}", part(&job.metadata.namespace), part(&job.metadata.name));
        Turn {
            is_set_back: refused_at(job).is_some_and(|at| is_recent(at, lateness.at)),
            priority: Reverse(priority),
            share,
            late,
            created,
            name,
        }
    }

    /// The same where it comes before all of its priority and share: it holds nodes.
    #[must_use]
    pub fn held(self) -> Turn {
        Turn { late: Reverse(i64::MAX), ..self }
    }

    /// The same for a job of a namespace whose jobs were refused again and again.
    #[must_use]
    pub fn set_back(self) -> Turn {
        Turn { is_set_back: true, ..self }
    }

    pub fn priority(&self) -> i32 {
        self.priority.0
    }

    /// It comes after all jobs that may be able to start.
    pub fn is_set_back(&self) -> bool {
        self.is_set_back
    }

    /// Namespace and name of the job.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// How long a job comes after all others once the API server has refused what its pods need.
const SET_BACK: SignedDuration = SignedDuration::from_hours(1);

/// When the API server last refused what the pods of a job need; `None`: it never has, or accepted it later.
pub fn refused_at(job: &TrainJob) -> Option<Timestamp> {
    let refused = job.status.as_ref().and_then(|status| status.condition(conditions::OBJECTS_REFUSED));
    refused.filter(|refused| refused.status == "True").map(|refused| refused.last_transition_time.0)
}

/// Whether a refusal of that time still counts.
pub fn is_recent(refused: Timestamp, now: Timestamp) -> bool {
    now.duration_since(refused) < SET_BACK
}

fn created(job: &TrainJob) -> Option<Timestamp> {
    job.metadata.creation_timestamp.as_ref().map(|time| time.0)
}

/// How late jobs are at a moment. All turns that are compared are of the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lateness {
    pub at: Timestamp,
    /// Longer limits count as so much. A job that waits for a day is late, however long it runs; and without a bound, one of two weeks would
    /// wait for as many weeks as hours a job of an hour does.
    pub longest: SignedDuration,
}

/// Shorter limits count as so much. Whoever asks for a minute would be late after a minute, and may raise the limit later.
const SHORTEST: SignedDuration = SignedDuration::from_mins(5);

impl Default for Lateness {
    /// Nobody has waited yet.
    fn default() -> Lateness {
        Lateness { at: Timestamp::MIN, longest: SignedDuration::from_hours(24) }
    }
}

impl Lateness {
    /// Thousandths of the time that the job may run.
    fn of(self, job: &TrainJob) -> i64 {
        let longest = self.longest.as_secs().max(1);
        let limit = job.spec.active_deadline_seconds.unwrap_or(longest).clamp(SHORTEST.as_secs().min(longest), longest);
        let waited = created(job).map_or(0, |created| self.at.duration_since(created).as_secs().max(0));
        waited.saturating_mul(1000) / limit
    }
}

/// Which jobs give way to one of higher priority; the smallest first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GivesWay {
    priority: i32,
    /// How often it gave way within the last day: nobody does again and again while others could.
    lately: i32,
    /// Work that would be done again: GPU-seconds, or node-seconds of a job without GPUs.
    lost: i64,
    /// The youngest first.
    age: Reverse<(Option<Timestamp>, String)>,
}

impl GivesWay {
    /// The place of a job that has this turn in the queue.
    pub fn of(job: &TrainJob, turn: &Turn, now: Timestamp) -> GivesWay {
        let recent =
            job.status.iter().filter_map(|status| status.restarts.as_ref()).flat_map(|restarts| &restarts.recent);
        let recent = recent.filter(|hour| now.duration_since(hour.since.0) < SignedDuration::from_hours(24));
        let lately = recent.map(|hour| hour.preemption).sum();
        let age = Reverse((turn.created, turn.name.clone()));
        GivesWay { priority: turn.priority(), lately, lost: work_lost(job, now), age }
    }
}

/// What a job would compute again if it were stopped now. One that saves a checkpoint when it is stopped loses nothing, another one what it has
/// done since its last checkpoint by the clock. Of checkpoints by steps, or of programs of others, the time is not known: they count as none.
fn work_lost(job: &TrainJob, now: Timestamp) -> i64 {
    let Some(status) = &job.status else { return 0 };
    let placed = status.condition(conditions::PLACED).filter(|placed| placed.status == "True");
    let ran = placed.map_or(0, |placed| now.duration_since(placed.last_transition_time.0).as_secs().max(0));
    let seconds = match &job.spec.checkpoint {
        Some(checkpoint) if checkpoint.on_suspend == OnSuspend::Save => 0,
        Some(checkpoint) if checkpoint.period_seconds > 0 => ran % checkpoint.period_seconds,
        _ => ran,
    };
    let nodes = status.placement.iter().flat_map(|placement| &placement.nodes);
    nodes.map(|node| node.gpus.len().max(1) as i64).sum::<i64>().saturating_mul(seconds)
}

/// What a moment in the future rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Basis {
    /// Limits (`activeDeadlineSeconds`).
    Limits,
    /// How long jobs ran until now: a guess.
    RunTimes,
}

/// A job ahead of another one in the queue, which holds nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct Ahead {
    /// Namespace and name; without them, that it is of another namespace.
    pub name: String,
    /// The nodes that it holds.
    pub nodes: Vec<String>,
    /// When it can begin there at the latest; `None`: nobody knows.
    pub start: Option<(Timestamp, Basis)>,
    /// The other job ends before that, by its limit or by run times.
    pub ends_before: Option<Basis>,
}

impl Ahead {
    /// When it begins, and what that means for a job behind it with this limit, in words.
    pub fn forecast(&self, limit: Option<i64>) -> Option<String> {
        let begins = match self.start? {
            (start, Basis::Limits) => format!("{} can begin by {start}", self.name),
            (start, Basis::RunTimes) => format!("{} is expected to begin by {start}", self.name),
        };
        Some(match limit {
            _ if self.ends_before == Some(Basis::Limits) => {
                format!("{begins}: this job ends before that and may use them until then")
            }
            _ if self.ends_before == Some(Basis::RunTimes) => {
                format!("{begins}: jobs like this one ran for less, so it may use them until then")
            }
            Some(limit) => format!("{begins}: this job may still run then (activeDeadlineSeconds: {limit})"),
            None => format!(
                "{begins}: with an activeDeadlineSeconds that ends before that, this job may use them until then"
            ),
        })
    }

    /// That a job behind it starts first on nodes that it holds, in words.
    pub fn overtaken(&self, place: &PlacementStatus) -> Option<String> {
        let is_held = |placed: &PlacedNode| self.nodes.contains(&placed.node_name);
        let (start, of_start) = self.start.filter(|_| place.nodes.iter().any(is_held))?;
        let ends = if self.ends_before? == Basis::Limits { "ends" } else { "is expected to end" };
        let begins = if of_start == Basis::Limits { "can begin" } else { "is expected to begin" };
        Some(format!("{ends} before {}, which is ahead in the queue, {begins} by {start}", self.name))
    }
}

impl std::fmt::Display for Ahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = self.nodes.len();
        let verb = if count == 1 { "node is" } else { "nodes are" };
        write!(f, "{count} {verb} held for {}, which is ahead in the queue", self.name)
    }
}

/// The fewest candidates without which something fits, in the order given: none of them can be left out. `None`: it does not fit without
/// all of them either.
pub fn fewest(candidates: usize, mut fits_without: impl FnMut(&[usize]) -> bool) -> Option<Vec<usize>> {
    let all: Vec<usize> = (0..candidates).collect();
    if !fits_without(&all) {
        return None;
    }
    let (mut few, mut enough) = (0, candidates);
    if fits_without(&[]) {
        return Some(Vec::new());
    }
    while enough - few > 1 {
        let middle = few.midpoint(enough);
        if fits_without(&all[..middle]) { enough = middle } else { few = middle }
    }
    let mut chosen = all[..enough].to_vec();
    // The last ones first: they are the ones of the highest priority.
    for candidate in (0..enough).rev() {
        let rest: Vec<usize> = chosen.iter().copied().filter(|other| *other != candidate).collect();
        if fits_without(&rest) {
            chosen = rest;
        }
    }
    Some(chosen)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_victim_can_be_left_out(sizes in prop::collection::vec(0_u32..9, 0..10), need in 0_u32..30) {
            let freed = |chosen: &[usize]| chosen.iter().map(|index| sizes[*index]).sum::<u32>();
            match fewest(sizes.len(), |chosen| freed(chosen) >= need) {
                None => prop_assert!(sizes.iter().sum::<u32>() < need),
                Some(chosen) => {
                    prop_assert!(freed(&chosen) >= need);
                    for left_out in &chosen {
                        let rest: Vec<usize> = chosen.iter().copied().filter(|other| other != left_out).collect();
                        prop_assert!(freed(&rest) < need);
                    }
                }
            }
        }
    }

    #[test]
    fn of_equal_priority_those_give_way_first_that_did_not_lately_and_lose_least() {
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
            // Two hours and a third: the last checkpoint is 1,400 s old.
            (0, job("period", "2026-01-02T09:40:00Z", 1, period("Discard"))),
            (0, job("saves", "2026-01-01T11:00:00Z", 8, period("Save"))),
            (0, twice),
            (0, yesterday),
            (1, job("higher", "2026-01-02T12:00:00Z", 1, none())),
        ];
        let turn = |job: &TrainJob, priority| Turn::of(job, priority, 0, Lateness::default());
        let mut order: Vec<GivesWay> =
            jobs.iter().map(|(priority, job)| GivesWay::of(job, &turn(job, *priority), now)).collect();
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
    }

    #[test]
    fn priority_comes_before_the_share_and_the_share_before_lateness_age_and_the_name() {
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
            let lateness = Lateness { at: Timestamp::from_second(at).unwrap(), ..Lateness::default() };
            let turn = |job: &TrainJob, priority, share| Turn::of(job, priority, share, lateness);
            let mut turns = [
                turn(&job("young", 9000), 0, 0),
                turn(&job("b", 3000), 0, 0),
                turn(&job("a", 3000), 0, 0),
                turn(&limited("week", 3500, Some(604_800)), 0, 0),
                turn(&limited("hour", 8000, Some(3600)), 0, 0),
                turn(&limited("day", 4000, Some(86_400)), 0, 0),
                turn(&job("holds", 9999), 0, 0).held(),
                turn(&job("had", 1000), 0, 7),
                turn(&job("high", 10_000), 5, 9),
                turn(&job("low", 1000), -1, 0),
            ];
            turns.sort();
            turns.map(|turn| turn.name().trim_start_matches('/').to_owned()).join(" ")
        };
        assert_eq!(
            sorted(10_000),
            "high holds hour a b week day young had low",
            "2000 of 3600 s are more than 7000 of 86,400"
        );
        assert_eq!(sorted(8100), "high holds a b week day hour young had low", "nobody is late by less than nothing");
    }

    #[test]
    fn a_limit_of_a_minute_makes_a_job_no_later_than_one_of_five_minutes() {
        let late = |limit: i64, longest: i64| {
            let spec =
                serde_json::json!({"trainer": {"framework": "Plain", "image": "i"}, "activeDeadlineSeconds": limit});
            let mut job = TrainJob::new("a", serde_json::from_value(spec).unwrap());
            let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::UNIX_EPOCH);
            job.metadata.creation_timestamp = Some(time);
            Lateness { at: Timestamp::from_second(600).unwrap(), longest: SignedDuration::from_secs(longest) }.of(&job)
        };
        assert_eq!([1, 60, 300, 600].map(|limit| late(limit, 86_400)), [2000, 2000, 2000, 1000]);
        assert_eq!(late(1, 60), 10_000, "where no limit counts as more than a minute");
    }
}
