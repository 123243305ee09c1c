//! Metrics for Prometheus. No names of jobs or namespaces: their number has no bound.

use crate::apply::Cause;
use jiff::Timestamp;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use switchyard_crds::conditions::{self, Stage};
use switchyard_crds::{TrainJob, TrainJobStatus};

type Labels = [(&'static str, String); 1];

/// Everything that is counted.
pub(super) struct Metrics {
    registry: Registry,
    /// From creation to: placed, running, first step; and from a failure to running again.
    placed: Histogram,
    running: Histogram,
    first_step: Histogram,
    recovered: Histogram,
    reconcile: Histogram,
    reconciles: Family<Labels, Counter>,
    refused: Family<Labels, Counter>,
    restarts: Family<Labels, Counter>,
    requests: Family<[(&'static str, String); 2], Counter>,
    watch_failures: Family<Labels, Counter>,
    rescues: Counter,
    jobs: Family<Labels, Gauge>,
    queue_depth: Gauge,
    queue_age: Gauge<f64, AtomicU64>,
    leader: Gauge,
}

impl Metrics {
    pub fn new() -> Metrics {
        // From 10 ms to 3 hours.
        let long = || Histogram::new(exponential_buckets(0.01, 2.0, 20));
        let short = || Histogram::new(exponential_buckets(0.0001, 4.0, 10));
        let mut metrics = Metrics {
            registry: Registry::with_prefix("switchyard"),
            placed: long(),
            running: long(),
            first_step: long(),
            recovered: long(),
            reconcile: short(),
            reconciles: Family::default(),
            refused: Family::default(),
            restarts: Family::default(),
            requests: Family::default(),
            watch_failures: Family::default(),
            rescues: Counter::default(),
            jobs: Family::default(),
            queue_depth: Gauge::default(),
            queue_age: Gauge::default(),
            leader: Gauge::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        let times = [
            ("time_to_placed", "From creation of a job to the place of its gang", &self.placed),
            ("time_to_running", "From creation of a job to all its pods running", &self.running),
            ("time_to_first_step", "From creation of a job to the first report of the engine", &self.first_step),
            ("time_to_recovered", "From the decision to start again to all pods running", &self.recovered),
            ("reconcile", "One look at one job, calls included", &self.reconcile),
        ];
        for (name, help, histogram) in times {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        registry.register("reconciles", "Looks at a job by outcome", self.reconciles.clone());
        registry.register("refused_writes", "Writes that the API server refused, by cause", self.refused.clone());
        registry.register("restarts", "Restarts of a group by the class of the failure", self.restarts.clone());
        registry.register(
            "api_requests",
            "Requests to the API server by method and status code",
            self.requests.clone(),
        );
        registry.register("watch_failures", "Watches that ended with an error, by kind", self.watch_failures.clone());
        registry.register("rescues", "Times the cache did not show a write in time", self.rescues.clone());
        registry.register("jobs", "Jobs by stage", self.jobs.clone());
        registry.register("queue_depth", "Jobs that are due", self.queue_depth.clone());
        registry.register_with_unit(
            "queue_age",
            "Age of the oldest job that is due",
            Unit::Seconds,
            self.queue_age.clone(),
        );
        registry.register("leader", "1 while this controller leads", self.leader.clone());
    }

    /// One look at a job has ended.
    pub fn reconciled(&self, outcome: &'static str, took: Duration) {
        self.reconciles.get_or_create(&[("outcome", outcome.to_string())]).inc();
        self.reconcile.observe(took.as_secs_f64());
    }

    /// A write was refused.
    pub fn refused(&self, cause: Cause) {
        self.refused.get_or_create(&[("cause", cause.word().to_string())]).inc();
    }

    /// A request was answered; no status: it was not.
    pub fn request(&self, method: &str, status: Option<u16>) {
        let status = status.map_or_else(|| "none".to_string(), |status| status.to_string());
        self.requests.get_or_create(&[("method", method.to_string()), ("status", status)]).inc();
    }

    /// A watch ended with an error.
    pub fn watch_failed(&self, kind: &'static str) {
        self.watch_failures.get_or_create(&[("kind", kind.to_string())]).inc();
    }

    /// The cache was given up on.
    pub fn rescued(&self) {
        self.rescues.inc();
    }

    /// The gauges, before they are read.
    pub fn gauges(&self, stages: &BTreeMap<String, usize>, depth: (usize, Duration), leads: bool) {
        self.jobs.clear();
        for (stage, jobs) in stages {
            self.jobs.get_or_create(&[("stage", stage.clone())]).set(*jobs as i64);
        }
        self.queue_depth.set(depth.0 as i64);
        self.queue_age.set(depth.1.as_secs_f64());
        self.leader.set(leads.into());
    }

    /// A status was written.
    pub fn status_changed(
        &self,
        job: &TrainJob,
        previous: Option<&TrainJobStatus>,
        next: &TrainJobStatus,
        now: Timestamp,
    ) {
        let seconds = |since: Timestamp| now.duration_since(since).as_secs_f64().max(0.0);
        let created = job.metadata.creation_timestamp.as_ref().map(|time| seconds(time.0));
        let is_placed = |status: &TrainJobStatus| {
            status.conditions.iter().any(|c| c.type_ == conditions::PLACED && c.status == "True")
        };
        let is_running = |status: &TrainJobStatus| super::reconcile::stage_of(status) == Some(Stage::Running.reason());
        let became = |is: &dyn Fn(&TrainJobStatus) -> bool| is(next) && !previous.is_some_and(is);
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
        for (class, grown) in [
            ("application", after.application - before.application),
            ("infrastructure", after.infrastructure - before.infrastructure),
            ("preemption", after.preemption - before.preemption),
        ] {
            if grown > 0 {
                self.restarts.get_or_create(&[("class", class.to_string())]).inc_by(grown.unsigned_abs().into());
            }
        }
    }

    /// All metrics in Prometheus' text format.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
