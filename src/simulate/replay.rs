//! Replays a trace: jobs arrive and end, hosts fail, and a rule decides which jobs start where.

mod simulation;

use crate::fabric::Fabric;
use crate::failures::Failures;
use crate::speed::Model;
use crate::trace::Row;
use simulation::Simulation;
use std::time::{Duration, Instant};

/// A job as a rule sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Position in the trace.
    pub number: usize,
    /// Seconds.
    pub submit: f64,
    pub pods: u32,
    /// GPUs of each pod.
    pub gpus: u32,
    /// Seconds after its start when the job is stopped: the manifest's `activeDeadlineSeconds`.
    pub limit: Option<f64>,
    /// The job's team. Teams are the trace's queue names, numbered by first appearance.
    pub team: usize,
    /// Whether the job has the higher class: it starts before the others and can preempt them.
    pub is_urgent: bool,
    /// Whether the job writes a checkpoint when it is stopped. The other jobs write checkpoints by
    /// the clock, which rules do not see.
    pub saves: bool,
    /// Seconds between two checkpoints of a preemptible job; `None` if the job writes none.
    pub checkpoint: Option<f64>,
}

impl Job {
    pub fn all_gpus(&self) -> u32 {
        self.pods * self.gpus
    }
}

/// A job that starts, with the host of each pod in rank order. Rules without placement leave the
/// list empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Start {
    pub job: usize,
    pub hosts: Vec<usize>,
    /// The rule's first forecast of the start: earliest and latest time.
    pub forecast: Option<[f64; 2]>,
}

/// A decision of a rule about a job.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    Start(Start),
    /// The job is preempted and waits again.
    Preempt(usize),
}

/// Decides which jobs start when and where.
pub trait Rule {
    /// A job arrives.
    ///
    /// # Errors
    /// The rule cannot handle this job.
    fn submitted(&mut self, job: &Job) -> Result<(), String>;
    /// A job that ran has ended, and its GPUs are free.
    fn ended(&mut self, job: usize, now: f64);
    /// A host fails. These jobs ran there and wait again; nothing can start there until the repair.
    fn failed(&mut self, host: usize, jobs: &[usize], now: f64);
    /// A failed host is usable again.
    fn repaired(&mut self, host: usize, now: f64);
    /// Returns the decisions that take effect now, in this order.
    ///
    /// # Errors
    /// The rule contradicts itself.
    fn decide(&mut self, now: f64) -> Result<Vec<Decision>, String>;
    /// When the rule wants to decide again even if nothing happens until then.
    fn next_decision(&self) -> Option<f64> {
        None
    }
}

/// Where the limits of the manifests come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limits {
    None,
    /// The smallest of 1 h, 4 h, 12 h, 1, 3, 7, 14 and 90 days that covers the job, as users would
    /// write it.
    Coarse,
    /// The same for half of the jobs, chosen by a hash; none for the others.
    Half,
    /// Exactly the duration, as if the rule knew the future.
    Exact,
    /// From the trace. A job that exceeded its limit gets its run time as the limit.
    Trace,
}

/// A trace and how to replay it.
#[derive(Debug, Clone, Copy)]
pub struct Scenario<'a> {
    pub fabric: &'a Fabric,
    pub model: Model,
    pub limits: Limits,
    /// `None` if no host fails.
    pub failures: Option<Failures>,
    /// `None` if all jobs have one class.
    pub urgent: Option<UrgentJobs>,
    /// `None` if no job is preemptible, except for jobs of a higher class.
    pub preemptible: Option<PreemptibleJobs>,
}

impl<'a> Scenario<'a> {
    /// A scenario without failures, in which all jobs have one class and none is preemptible.
    pub fn new(fabric: &'a Fabric, model: Model, limits: Limits) -> Scenario<'a> {
        Scenario { fabric, model, limits, failures: None, urgent: None, preemptible: None }
    }
}

/// Jobs that resume from checkpoints after a preemption.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PreemptibleJobs {
    /// Percentage of the jobs, chosen by a hash. The others write no checkpoints. `None`: the rows
    /// say which; those that do not are preemptible.
    pub percent: Option<u64>,
    /// Work between two checkpoints; seconds at the best placement.
    pub checkpoint: f64,
    /// Seconds to save a job and to start it again, which every preemption costs.
    pub overhead: f64,
}

/// Jobs of a higher class, which can preempt the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UrgentJobs {
    /// One in this many jobs, chosen by a hash.
    pub one_in: u64,
    /// Work between two checkpoints, from which a stopped job resumes; seconds at the best
    /// placement. Half of the jobs, chosen by a hash, also write one when they are stopped.
    pub checkpoint: f64,
}

/// The outcome of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobOutcome {
    pub submit: f64,
    /// Time of the first start.
    pub start: f64,
    pub end: f64,
    /// Seconds at the best placement.
    pub duration: f64,
    pub gpus: u32,
    pub is_urgent: bool,
    /// How often it was stopped, by a host failure or preemption.
    pub restarts: u32,
    /// Repeated work and the overhead of preemptions, seconds at the best placement.
    pub lost: f64,
    /// Total seconds from each stop to the next start.
    pub waited_again: f64,
    /// The first forecast of the start: earliest and latest time.
    pub forecast: Option<[f64; 2]>,
}

impl JobOutcome {
    /// Seconds from submission to start.
    pub fn wait(&self) -> f64 {
        self.start - self.submit
    }

    /// Seconds that it ran.
    pub fn ran(&self) -> f64 {
        self.end - self.start - self.waited_again
    }
}

/// The outcome of a replay.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplayOutcome {
    /// By position in the trace.
    pub jobs: Vec<JobOutcome>,
    /// When GPUs were busy: start, end, and how many.
    pub busy: Vec<(f64, f64, u32)>,
    /// When GPUs were idle although a waiting job needed no more of them.
    pub idle: Vec<Idle>,
    /// By team number.
    pub teams: Vec<Team>,
    /// The longest decision of the rule.
    pub longest: Duration,
}

/// GPUs that are idle from one event to the next although a waiting job needs no more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Idle {
    pub at: f64,
    /// Seconds.
    pub time: f64,
    pub gpus: u32,
    /// Whether the longest-waiting job needs no more either, so that the location of the GPUs is
    /// the cause, not the queue order.
    pub is_fragmented: bool,
}

/// GPU time of a team. All teams have equal weights.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Team {
    /// Queue name; empty if unknown.
    pub name: String,
    /// GPU-seconds used.
    pub used: f64,
    /// The team's fair share of its demand, GPU-seconds: at each moment, demand up to an equal
    /// share of the GPUs among the teams with demand.
    pub fair_share: f64,
}

/// Replays a trace until its last job has ended.
///
/// # Errors
/// The rule starts a job that does not wait, uses GPUs that are not free, or stops a job that does
/// not run; or some jobs can never start.
pub fn replay(rows: &[Row], scenario: Scenario<'_>, rule: &mut dyn Rule) -> Result<ReplayOutcome, String> {
    let mut simulation = Simulation::new(rows, scenario);
    let mut next = 0;
    loop {
        let (end, submit) = (simulation.next_end(), rows.get(next).map(|row| row.submit));
        // Once nothing runs and nothing arrives, only a repair can help the waiting jobs.
        let is_active = end.is_some() || submit.is_some();
        let change = simulation.hosts.next(is_active).filter(|_| is_active || simulation.has_waiting());
        let decision = rule.next_decision().filter(|_| is_active);
        let next_event = [end, submit, change, decision].into_iter().flatten().reduce(f64::min);
        let Some(next_event) = next_event else { break };
        let now = simulation.advance(next_event);
        while let Some(job) = simulation.end_at(now) {
            rule.ended(job, now);
        }
        while let Some(host) = simulation.hosts.repaired_by(now) {
            simulation.repaired(host);
            rule.repaired(host, now);
        }
        while is_active && let Some(host) = simulation.hosts.failed_by(now) {
            rule.failed(host, &simulation.failed(host)?, now);
        }
        while let Some(row) = rows.get(next).filter(|row| row.submit <= now) {
            rule.submitted(&simulation.submit(next, row))?;
            next += 1;
        }
        let begin = Instant::now();
        let decisions = rule.decide(now)?;
        simulation.record_decision_time(begin.elapsed());
        for decision in decisions {
            match decision {
                Decision::Start(start) => simulation.start(start)?,
                Decision::Preempt(job) => simulation.preempt(job)?,
            }
        }
        simulation.update_speeds();
    }
    simulation.finish()
}
