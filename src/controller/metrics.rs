//! Prometheus metrics. They have no job or namespace names as labels, because the number of these
//! is unbounded.

use crate::apply::Cause;
use jiff::{SignedDuration, Timestamp};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{TrainJob, TrainJobStatus};
use switchyard_ledger::index::Index;
use switchyard_ledger::job::{is_live, stage_of};
use switchyard_plan::cluster::queue_order::work_lost;
use switchyard_plan::resources::bytes_per_second;

type Labels<const N: usize = 1> = [(&'static str, Cow<'static, str>); N];

/// Failure classes, each with a restart budget.
const FAILURE_CLASSES: [&str; 3] = ["application", "infrastructure", "preemption"];

/// All metrics.
pub(super) struct Metrics {
    registry: Registry,
    /// Times from creation to placement, to running and to the first step; and from a failure to
    /// running again.
    placed: Histogram,
    running: Histogram,
    first_step: Histogram,
    recovered: Histogram,
    reconcile: Histogram,
    plan: Histogram,
    reconciles: Family<Labels, Counter>,
    refused: Family<Labels, Counter>,
    restarts: Family<Labels, Counter>,
    preemption_loss: Counter,
    preemption_gain: Counter,
    requests: Family<Labels<3>, Counter>,
    events: Family<Labels, Counter>,
    watch_failures: Family<Labels, Counter>,
    rescues: Counter,
    jobs: Family<Labels, Gauge>,
    queue_depth: Gauge,
    queue_age: Gauge<f64, AtomicU64>,
    leader: Gauge,
    /// Predicted bandwidth of a placement relative to the best possible one.
    quality: Histogram,
    degraded: Gauge,
    nodes: Family<Labels, Gauge>,
    policies_missing: Family<Labels, Gauge>,
    policies_rejecting: Family<Labels, Gauge>,
    clock_skew: Gauge<f64, AtomicU64>,
}

/// Values that are counted when the metrics are scraped.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Jobs by stage.
    pub stages: BTreeMap<String, usize>,
    /// Jobs with a pod that has other GPUs than planned.
    pub degraded: usize,
    /// Nodes by state of their GPUTopology reports.
    pub nodes: BTreeMap<&'static str, usize>,
}

impl Metrics {
    pub fn new() -> Metrics {
        // From 10 ms to 3 hours.
        let long = || Histogram::new(exponential_buckets(0.01, 2.0, 21));
        let short = || Histogram::new(exponential_buckets(0.0001, 4.0, 10));
        let mut metrics = Metrics {
            registry: Registry::with_prefix("switchyard"),
            placed: long(),
            running: long(),
            first_step: long(),
            recovered: long(),
            reconcile: short(),
            plan: short(),
            reconciles: Family::default(),
            refused: Family::default(),
            restarts: Family::default(),
            preemption_loss: Counter::default(),
            preemption_gain: Counter::default(),
            requests: Family::default(),
            events: Family::default(),
            watch_failures: Family::default(),
            rescues: Counter::default(),
            jobs: Family::default(),
            queue_depth: Gauge::default(),
            queue_age: Gauge::default(),
            leader: Gauge::default(),
            quality: Histogram::new([0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0]),
            degraded: Gauge::default(),
            nodes: Family::default(),
            policies_missing: Family::default(),
            policies_rejecting: Family::default(),
            clock_skew: Gauge::default(),
        };
        metrics.register();
        metrics.init_counters();
        metrics
    }

    /// Initializes the counters used in alerts to zero, because Prometheus sees no increase in a
    /// counter that appears with its first event.
    fn init_counters(&self) {
        for cause in Cause::ALL {
            self.refused.get_or_create(&[("cause", cause.label().into())]).inc_by(0);
        }
        for kind in super::watch::KINDS {
            self.watch_failures.get_or_create(&[("kind", kind.into())]).inc_by(0);
        }
        for class in FAILURE_CLASSES {
            self.restarts.get_or_create(&[("class", class.into())]).inc_by(0);
        }
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        let times = [
            ("time_to_placed", "From creation of a job to its placement", &self.placed),
            ("time_to_running", "From creation of a job until all its pods run", &self.running),
            ("time_to_first_step", "From creation of a job to the engine's first progress report", &self.first_step),
            ("time_to_recovered", "From the decision to restart until all pods run", &self.recovered),
            ("reconcile", "Duration of a reconcile, including API calls", &self.reconcile),
            ("plan", "Duration of planning one job, excluding API calls", &self.plan),
        ];
        for (name, help, histogram) in times {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        registry.register("reconciles", "Reconciles by outcome", self.reconciles.clone());
        registry.register("refused_writes", "Writes rejected by the API server, by cause", self.refused.clone());
        registry.register("restarts", "Job restarts by failure class", self.restarts.clone());
        let help = "GPU seconds of work since the last checkpoints of preempted jobs";
        registry.register("preemption_lost_gpu_seconds", help, self.preemption_loss.clone());
        let help = "GPU seconds that preemptions by the queue policy were expected to gain for the preempting jobs";
        registry.register("preemption_gained_gpu_seconds", help, self.preemption_gain.clone());
        registry.register(
            "api_requests",
            "Requests to the API server by verb, resource and status code; the code is `none` without a response",
            self.requests.clone(),
        );
        registry.register("events", "Events by reason", self.events.clone());
        registry.register("watch_failures", "Watches that failed, by kind", self.watch_failures.clone());
        registry.register("rescues", "Writes that the cache did not show in time", self.rescues.clone());
        registry.register("jobs", "Jobs by stage", self.jobs.clone());
        registry.register("queue_depth", "Jobs due for a reconcile", self.queue_depth.clone());
        registry.register_with_unit("queue_age", "Age of the oldest due job", Unit::Seconds, self.queue_age.clone());
        let help = "Predicted bandwidth of a placement, as a share of the best possible one";
        registry.register("placement_quality", help, self.quality.clone());
        let help = "Jobs with a pod on GPUs that are slower than the planned ones";
        registry.register("placements_degraded", help, self.degraded.clone());
        let help = "Nodes by GPUTopology: usable, unusable, none (missing despite GPUs) or notNeeded";
        registry.register("nodes", help, self.nodes.clone());
        let help = "1 while an admission policy is not in force";
        registry.register("policy_missing", help, self.policies_missing.clone());
        let help = "1 while an admission policy rejects pods that do not belong to TrainJobs; set by the leader";
        registry.register("policy_refuses_foreign", help, self.policies_rejecting.clone());
        let help = "How far this machine's clock is ahead of the API server's";
        registry.register_with_unit("clock_skew", help, Unit::Seconds, self.clock_skew.clone());
        registry.register("leader", "1 while this controller leads", self.leader.clone());
    }

    /// Counts a finished reconcile.
    pub fn reconciled(&self, outcome: &'static str, took: Duration) {
        self.reconciles.get_or_create(&[("outcome", outcome.into())]).inc();
        self.reconcile.observe(took.as_secs_f64());
    }

    /// Counts a refused write.
    pub fn refused(&self, cause: Cause) {
        self.refused.get_or_create(&[("cause", cause.label().into())]).inc();
    }

    /// Counts a request; `status` is `None` if it got no response.
    pub fn request(&self, verb: &'static str, resource: String, status: Option<u16>) {
        let code = status.map_or(Cow::Borrowed("none"), |status| status.to_string().into());
        self.requests.get_or_create(&[("verb", verb.into()), ("resource", resource.into()), ("code", code)]).inc();
    }

    /// Counts an event that was sent.
    pub fn event(&self, reason: &'static str) {
        self.events.get_or_create(&[("reason", reason.into())]).inc();
    }

    /// Records the duration of a plan.
    pub fn planned(&self, took: Duration) {
        self.plan.observe(took.as_secs_f64());
    }

    /// Counts a watch that ended with an error.
    pub fn watch_failed(&self, kind: &'static str) {
        self.watch_failures.get_or_create(&[("kind", kind.into())]).inc();
    }

    /// Counts a write that the cache did not show in time.
    pub fn cache_timed_out(&self) {
        self.rescues.inc();
    }

    /// Records the state of an admission policy.
    pub fn policy(&self, name: &str, is_missing: bool, rejects_foreign: bool) {
        let child =
            |gauge: &Family<Labels<1>, Gauge>| gauge.get_or_create(&[("policy", name.to_string().into())]).clone();
        child(&self.policies_missing).set(is_missing.into());
        child(&self.policies_rejecting).set(rejects_foreign.into());
    }

    /// Sets the gauges before the metrics are scraped.
    pub fn set_gauges(&self, counts: &Counts, depth: (usize, Duration), is_leader: bool) {
        self.jobs.clear();
        self.degraded.set(counts.degraded as i64);
        for (report, nodes) in &counts.nodes {
            self.nodes.get_or_create(&[("report", (*report).into())]).set(*nodes as i64);
        }
        for (stage, jobs) in &counts.stages {
            self.jobs.get_or_create(&[("stage", stage.clone().into())]).set(*jobs as i64);
        }
        self.queue_depth.set(depth.0 as i64);
        self.queue_age.set(depth.1.as_secs_f64());
        self.leader.set(is_leader.into());
    }

    /// Records by how much the clock of this machine is ahead of the API server's.
    pub fn clock_skew(&self, ahead: SignedDuration) {
        self.clock_skew.set(ahead.as_secs_f64());
    }

    /// Records the changes between two statuses of a job. `preemption_gain` is the expected gain of
    /// its preemption in GPU seconds, if it is being preempted.
    pub fn status_changed(
        &self,
        job: &TrainJob,
        previous: Option<&TrainJobStatus>,
        next: &TrainJobStatus,
        preemption_gain: i64,
        now: Timestamp,
    ) {
        let seconds = |since: Timestamp| now.duration_since(since).as_secs_f64().max(0.0);
        let created = job.metadata.creation_timestamp.as_ref().map(|time| seconds(time.0));
        let is_placed = |status: &TrainJobStatus| status.is(conditions::PLACED);
        let is_running = |status: &TrainJobStatus| stage_of(status) == Some(Stage::Running.reason());
        let became = |is: &dyn Fn(&TrainJobStatus) -> bool| is(next) && !previous.is_some_and(is);
        if let Some(placement) = next.placement.as_ref().filter(|_| became(&is_placed)) {
            let rate = |quantity: &Option<_>| quantity.as_ref().and_then(bytes_per_second);
            let rates = rate(&placement.predicted_bus_bandwidth).zip(rate(&placement.best_possible));
            if let Some((predicted, best)) = rates.filter(|(_, best)| *best > 0.0) {
                self.quality.observe(predicted / best);
            }
        }
        let first_attempt = next.restarts.as_ref().is_none_or(|restarts| restarts.total == 0);
        if let Some(created) = created.filter(|_| first_attempt) {
            if became(&is_placed) {
                self.placed.observe(created);
            }
            if became(&is_running) {
                self.running.observe(created);
            }
            if became(&|status| status.trainer_status.is_some()) {
                self.first_step.observe(created);
            }
        }
        if !first_attempt
            && became(&is_running)
            && let Some(since) = &next.attempt_time
        {
            self.recovered.observe(seconds(since.0));
        }
        let counts =
            |status: Option<&TrainJobStatus>| status.and_then(|status| status.restarts.clone()).unwrap_or_default();
        let (before, after) = (counts(previous), counts(Some(next)));
        let increases = [
            after.application - before.application,
            after.infrastructure - before.infrastructure,
            after.preemption - before.preemption,
        ];
        for (class, increase) in FAILURE_CLASSES.into_iter().zip(increases) {
            if increase > 0 {
                self.restarts.get_or_create(&[("class", class.into())]).inc_by(increase.unsigned_abs().into());
            }
        }
        if let Some(running) = previous.filter(|_| after.preemption > before.preemption) {
            let running = TrainJob { status: Some(running.clone()), ..job.clone() };
            self.preemption_loss.inc_by(work_lost(&running, now).unsigned_abs());
            self.preemption_gain.inc_by(preemption_gain.unsigned_abs());
        }
    }

    /// All metrics in the OpenMetrics text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

impl Counts {
    /// Counts the jobs and nodes of an index.
    pub fn of(index: &Index) -> Counts {
        let mut counts = Counts::default();
        for job in index.jobs.values() {
            let stage = job.status.as_ref().and_then(stage_of).unwrap_or("New");
            *counts.stages.entry(stage.to_string()).or_default() += 1;
            let is_degraded = job.status.as_ref().is_some_and(|status| status.is(conditions::PLACEMENT_DEGRADED));
            counts.degraded += usize::from(is_live(job) && is_degraded);
        }
        counts.nodes = index.usage.reports();
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// The lines of a metric, without its buckets.
    fn lines(metrics: &Metrics, name: &str) -> Vec<String> {
        let text = metrics.text();
        let wanted = |line: &&str| line.starts_with(&format!("switchyard_{name}")) && !line.contains("_bucket{");
        text.lines().filter(wanted).map(str::to_string).collect()
    }

    fn status(stage: &str, placed: &str, restarts: Value, attempt_time: &str, step: Option<u64>) -> TrainJobStatus {
        let condition = |kind: &str, status: &str, reason: &str| json!({"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        let mut status = json!({
            "conditions": [condition("Succeeded", "Unknown", stage), condition("Placed", placed, "x")],
            "restarts": restarts, "attemptTime": attempt_time,
        });
        if let Some(step) = step {
            status["trainerStatus"] =
                json!({"step": step, "totalSteps": 10, "progressPercentage": 10, "lastUpdatedTime": attempt_time});
        }
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn each_stage_of_a_job_is_measured_once() {
        let metrics = Metrics::new();
        let job: TrainJob = serde_json::from_value(json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob",
            "metadata": {"name": "secret-name", "namespace": "secret-namespace", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {"trainer": {}},
        }))
        .unwrap();
        let at = |second: u8| format!("2026-01-01T00:00:{second:02}Z");
        let none = json!({"application": 0, "total": 0});
        let one = json!({"application": 0, "infrastructure": 1, "total": 1});
        let life = [
            (2, status("Placing", "False", none.clone(), &at(1), None)),
            (3, status("Starting", "True", none.clone(), &at(1), None)),
            (4, status("Running", "True", none.clone(), &at(1), None)),
            (5, status("Running", "True", none, &at(1), Some(1))),
            (20, status("Restarting", "False", one.clone(), &at(20), Some(1))),
            (27, status("Running", "True", one.clone(), &at(20), Some(1))),
            (30, status("Running", "True", one, &at(20), Some(2))),
        ];
        let mut previous = None;
        for (second, next) in &life {
            metrics.status_changed(&job, previous, next, 0, at(*second).parse().unwrap());
            previous = Some(next);
        }
        for (name, seconds) in [
            ("time_to_placed", "3.0"),
            ("time_to_running", "4.0"),
            ("time_to_first_step", "5.0"),
            ("time_to_recovered", "7.0"),
        ] {
            let name = format!("{name}_seconds");
            let expected = [format!("switchyard_{name}_sum {seconds}"), format!("switchyard_{name}_count 1")];
            assert_eq!(lines(&metrics, &name), expected, "{name}");
        }
        let restarts = lines(&metrics, "restarts");
        for (class, count) in [("application", 0), ("infrastructure", 1), ("preemption", 0)] {
            let line = format!("switchyard_restarts_total{{class=\"{class}\"}} {count}");
            assert!(restarts.contains(&line), "{line}: {restarts:?}");
        }
        assert!(!metrics.text().contains("secret"), "{}", metrics.text());
    }

    /// Eight GPUs ran for 25 minutes, with a checkpoint every ten.
    #[test]
    fn the_cost_and_the_gain_of_preemptions_are_counted() {
        let metrics = Metrics::new();
        let job = |on_suspend: &str| -> TrainJob {
            serde_json::from_value(json!({
                "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
                "spec": {"trainer": {}, "checkpoint": {"path": "/c", "onSuspend": on_suspend}},
            }))
            .unwrap()
        };
        let none = json!({"application": 0, "total": 0});
        let mut running = status("Running", "True", none, "2026-01-01T00:00:00Z", Some(1));
        let placement = json!({"reason": "", "nodes": [{"firstRank": 0, "nodeName": "n", "gpus": vec!["GPU"; 8]}]});
        running.placement = serde_json::from_value(placement).unwrap();
        let one = json!({"application": 0, "preemption": 1, "total": 1});
        let preempted = status("Restarting", "False", one, "2026-01-01T00:25:00Z", Some(1));
        for (on_suspend, lost) in [("Save", 0), ("Discard", 8 * 5 * 60)] {
            metrics.status_changed(
                &job(on_suspend),
                Some(&running),
                &preempted,
                24_000,
                "2026-01-01T00:25:00Z".parse().unwrap(),
            );
            let expected = [format!("switchyard_preemption_lost_gpu_seconds_total {lost}")];
            assert_eq!(lines(&metrics, "preemption_lost_gpu_seconds"), expected, "{on_suspend}");
        }
        // A job that is about to be preempted fails by itself.
        let failed =
            status("Restarting", "False", json!({"application": 1, "total": 1}), "2026-01-01T00:25:00Z", Some(1));
        metrics.status_changed(&job("Save"), Some(&running), &failed, 24_000, "2026-01-01T00:25:00Z".parse().unwrap());
        let expected = ["switchyard_preemption_gained_gpu_seconds_total 48000".to_string()];
        assert_eq!(lines(&metrics, "preemption_gained_gpu_seconds"), expected);
    }

    #[test]
    fn counters_and_gauges_have_their_labels() {
        let metrics = Metrics::new();
        metrics.request("create", "pods".into(), Some(201));
        metrics.request("create", "pods".into(), None);
        metrics.event("Placed");
        metrics.planned(Duration::from_millis(1));
        metrics.reconciled("wrote", Duration::from_millis(3));
        let stages = BTreeMap::from([("Running".to_string(), 2)]);
        let counts = Counts { stages, degraded: 1, nodes: [("none", 5)].into() };
        metrics.set_gauges(&counts, (3, Duration::from_secs(4)), true);
        assert_eq!(lines(&metrics, "placements_degraded"), ["switchyard_placements_degraded 1"]);
        assert_eq!(lines(&metrics, "nodes"), ["switchyard_nodes{report=\"none\"} 5"]);
        let text = metrics.text();
        for line in [
            "switchyard_api_requests_total{verb=\"create\",resource=\"pods\",code=\"201\"} 1",
            "switchyard_api_requests_total{verb=\"create\",resource=\"pods\",code=\"none\"} 1",
            "switchyard_events_total{reason=\"Placed\"} 1",
            "switchyard_plan_seconds_count 1",
            "switchyard_reconciles_total{outcome=\"wrote\"} 1",
            "switchyard_jobs{stage=\"Running\"} 2",
            "switchyard_queue_depth 3",
            "switchyard_queue_age_seconds 4.0",
            "switchyard_leader 1",
            "switchyard_rescues_total 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing:\n{text}");
        }
        // A stage without jobs is no longer exported.
        metrics.set_gauges(&Counts::default(), (0, Duration::ZERO), false);
        assert!(!metrics.text().contains("switchyard_jobs{"));
    }
}
