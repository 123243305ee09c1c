//! The state of a replay: waiting and running jobs, their speeds, and free GPUs.

mod teams;

use super::{Idle, Job, JobOutcome, Limits, ReplayOutcome, Scenario, Start};
use crate::fabric::pods;
use crate::failures::Hosts;
use crate::rng::mix;
use crate::speed::{self, Model};
use crate::trace::Row;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;
use teams::Teams;

const LIMITS: [f64; 8] = [3600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0, 1_209_600.0, 7_776_000.0];

/// A job that is stopped this often makes no progress.
const MAX_RESTARTS: u32 = 10_000;

/// A running gang.
struct Running {
    hosts: Vec<usize>,
    /// Share of communication in a step; 0 on one host.
    communication: f64,
    /// Bandwidth of the best placement.
    best: f64,
    crossings: Vec<(usize, f64)>,
    /// Remaining work, seconds at the best placement.
    left: f64,
    speed: f64,
    since: f64,
    started: f64,
    /// Version of its current entry in `ends`.
    version: u32,
}

/// A job from its first start to its end.
struct StartedJob {
    job: Job,
    at: f64,
    forecast: Option<[f64; 2]>,
    restarts: u32,
    /// Work in the last checkpoint, work lost after checkpoints, and work before the job resumes;
    /// seconds at the best placement.
    kept: f64,
    lost: f64,
    overhead: f64,
    waited_again: f64,
    /// When it was stopped, until it restarts.
    stopped: Option<f64>,
    /// Number of entries in `ends` so far.
    versions: u32,
}

/// An expected end. The earliest compares as the greatest.
#[derive(PartialEq)]
struct End {
    at: f64,
    job: usize,
    version: u32,
}

impl Eq for End {}
impl PartialOrd for End {
    fn partial_cmp(&self, other: &End) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for End {
    fn cmp(&self, other: &End) -> std::cmp::Ordering {
        let key = |end: &End| Reverse(end.job);
        other.at.total_cmp(&self.at).then(key(self).cmp(&key(other)))
    }
}

pub(super) struct Simulation<'a> {
    scenario: Scenario<'a>,
    rows: &'a [Row],
    jobs: Vec<Option<JobOutcome>>,
    waiting: BTreeMap<usize, Job>,
    /// Number of waiting jobs by GPUs needed.
    needs: BTreeMap<u32, usize>,
    running: BTreeMap<usize, Running>,
    started: BTreeMap<usize, StartedJob>,
    ends: BinaryHeap<End>,
    pub(super) hosts: Hosts,
    free: Vec<u32>,
    idle: u32,
    teams: Teams,
    now: f64,
    changed: bool,
    outcome: ReplayOutcome,
}

impl<'a> Simulation<'a> {
    pub(super) fn new(rows: &'a [Row], scenario: Scenario<'a>) -> Simulation<'a> {
        let fabric = scenario.fabric;
        Simulation {
            scenario,
            rows,
            jobs: vec![None; rows.len()],
            waiting: BTreeMap::new(),
            needs: BTreeMap::new(),
            running: BTreeMap::new(),
            started: BTreeMap::new(),
            ends: BinaryHeap::new(),
            hosts: Hosts::new(fabric.hosts.len(), scenario.failures),
            free: vec![fabric.gpus_per_host; fabric.hosts.len()],
            idle: fabric.gpus(),
            teams: Teams::of(rows),
            now: 0.0,
            changed: false,
            outcome: ReplayOutcome {
                jobs: Vec::new(),
                busy: Vec::new(),
                idle: Vec::new(),
                teams: Vec::new(),
                longest: Duration::ZERO,
            },
        }
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn next_end(&mut self) -> Option<f64> {
        while let Some(end) = self.ends.peek() {
            if self.running.get(&end.job).is_some_and(|gang| gang.version == end.version) {
                return Some(end.at);
            }
            self.ends.pop();
        }
        None
    }

    /// Advances to `to`, or stays if that is in the past. Returns the time.
    pub(super) fn advance(&mut self, to: f64) -> f64 {
        let now = to.max(self.now);
        let least = self.needs.keys().next().copied();
        if now > self.now && least.is_some_and(|least| least <= self.idle) {
            let oldest = self.waiting.values().next().map(Job::all_gpus);
            let is_fragmented = oldest.is_some_and(|oldest| oldest <= self.idle);
            self.outcome.idle.push(Idle { at: self.now, time: now - self.now, gpus: self.idle, is_fragmented });
        }
        self.teams.advance(now - self.now, self.scenario.fabric.gpus());
        self.now = now;
        now
    }

    /// Takes a job whose end is due by `now`.
    pub(super) fn end_at(&mut self, now: f64) -> Option<usize> {
        self.next_end().filter(|at| *at <= now)?;
        let number = self.ends.pop()?.job;
        self.stop(number)?;
        let StartedJob { job, at: start, forecast, restarts, lost, waited_again, .. } = self.started.remove(&number)?;
        let Row { submit, duration, gpus, .. } = self.rows[number];
        let is_urgent = job.is_urgent;
        self.jobs[number] = Some(JobOutcome {
            submit,
            start,
            end: now,
            duration,
            gpus,
            is_urgent,
            restarts,
            lost,
            waited_again,
            forecast,
        });
        Some(number)
    }

    /// Stops a gang. Returns the remaining work, seconds at the best placement.
    fn stop(&mut self, number: usize) -> Option<f64> {
        let gang = self.running.remove(&number)?;
        let job = &self.started.get(&number)?.job;
        gang.hosts.iter().for_each(|host| self.free[*host] += job.gpus);
        self.idle += job.all_gpus();
        self.teams.release(job);
        self.changed |= !gang.crossings.is_empty();
        self.outcome.busy.push((gang.started, self.now, job.all_gpus()));
        Some((gang.left - (self.now - gang.since) * gang.speed).max(0.0))
    }

    /// Fails a host. Returns the jobs that this stops, in trace order.
    pub(super) fn failed(&mut self, host: usize) -> Result<Vec<usize>, String> {
        let there = self.running.iter().filter(|(_, gang)| gang.hosts.contains(&host));
        let stopped: Vec<usize> = there.map(|(number, _)| *number).collect();
        for number in &stopped {
            self.requeue(*number, |hosts, _, done| hosts.checkpointed(done))?;
        }
        self.idle -= std::mem::take(&mut self.free[host]);
        Ok(stopped)
    }

    /// Preempts a job.
    pub(super) fn preempt(&mut self, number: usize) -> Result<(), String> {
        if !self.running.contains_key(&number) {
            return Err(format!("job {number} is preempted but does not run"));
        }
        let urgent = self.scenario.urgent.map(|urgent| urgent.checkpoint);
        let last = |done: f64, every: Option<f64>| every.map_or(0.0, |every| (done / every).floor() * every);
        self.requeue(number, |_, job, done| if job.saves { done } else { last(done, job.checkpoint.or(urgent)) })?;
        let overhead = self.scenario.preemptible.map_or(0.0, |preemptible| preemptible.overhead);
        if let Some(started) = self.started.get_mut(&number) {
            started.overhead = overhead;
            started.lost += overhead;
        }
        Ok(())
    }

    /// Stops a running job and queues it again. `kept` returns how much of the work done is in a
    /// checkpoint.
    fn requeue(&mut self, number: usize, kept: impl Fn(&Hosts, &Job, f64) -> f64) -> Result<(), String> {
        let left = self.stop(number).unwrap_or(0.0);
        let done = self.rows[number].duration - left;
        let Some(started) = self.started.get_mut(&number) else { return Ok(()) };
        // Work never leaves a checkpoint again.
        started.kept = kept(&self.hosts, &started.job, done).max(started.kept);
        started.lost += (done - started.kept).max(0.0);
        (started.stopped, started.restarts) = (Some(self.now), started.restarts + 1);
        if started.restarts == MAX_RESTARTS {
            return Err(format!("job {number} was stopped {MAX_RESTARTS} times and makes no progress"));
        }
        let job = started.job.clone();
        self.enqueue(job);
        Ok(())
    }

    pub(super) fn repaired(&mut self, host: usize) {
        self.free[host] = self.scenario.fabric.gpus_per_host;
        self.idle += self.free[host];
    }

    pub(super) fn submit(&mut self, number: usize, row: &Row) -> Job {
        let (pods, gpus) = pods(row.gpus, self.scenario.fabric.gpus_per_host);
        let rounded = || LIMITS.into_iter().find(|limit| *limit >= row.duration).unwrap_or(row.duration);
        let limit = match self.scenario.limits {
            Limits::None => None,
            Limits::Coarse => Some(rounded()),
            Limits::Half => mix(row.line ^ 0x5eed).is_multiple_of(2).then(rounded),
            Limits::Exact => Some(row.duration),
            Limits::Trace => row.limit.map(|limit| limit.max(row.duration)),
        };
        let team = self.teams.of_job[number];
        let is_urgent = self.scenario.urgent.is_some_and(|urgent| mix(row.line ^ 0x9a57).is_multiple_of(urgent.one_in));
        let saves = self.scenario.urgent.is_some() && mix(row.line ^ 0x5a4e).is_multiple_of(2);
        let preemptible = self.scenario.preemptible.filter(|jobs| match jobs.percent {
            Some(percent) => mix(row.line ^ 0x9e37) % 100 < percent,
            None => row.preemptible.unwrap_or(true),
        });
        let checkpoint = preemptible.map(|jobs| jobs.checkpoint);
        let job = Job { number, submit: row.submit, pods, gpus, limit, team, is_urgent, saves, checkpoint };
        self.enqueue(job.clone());
        job
    }

    fn enqueue(&mut self, job: Job) {
        *self.needs.entry(job.all_gpus()).or_default() += 1;
        self.teams.request(&job);
        self.waiting.insert(job.number, job);
    }

    pub(super) fn start(&mut self, start: Start) -> Result<(), String> {
        let Start { job: number, hosts, forecast } = start;
        let job = self.waiting.remove(&number).ok_or_else(|| format!("job {number} is started but does not wait"))?;
        self.allocate(&job, &hosts)?;
        let started = self.started.entry(number).or_insert_with(|| StartedJob {
            job,
            at: self.now,
            forecast,
            restarts: 0,
            kept: 0.0,
            lost: 0.0,
            overhead: 0.0,
            waited_again: 0.0,
            stopped: None,
            versions: 0,
        });
        started.waited_again += started.stopped.take().map_or(0.0, |stopped| self.now - stopped);
        started.versions += 1;
        let left = self.rows[number].duration - started.kept + std::mem::take(&mut started.overhead);
        let version = started.versions;
        let gang = self.gang(number, hosts, left, version);
        self.changed |= !gang.crossings.is_empty();
        self.ends.push(End { at: self.now + left / gang.speed, job: number, version });
        self.running.insert(number, gang);
        Ok(())
    }

    /// Allocates a job's GPUs.
    fn allocate(&mut self, job: &Job, hosts: &[usize]) -> Result<(), String> {
        let (number, places) = (job.number, hosts.len());
        if job.all_gpus() > self.idle || (places != 0 && places != job.pods as usize) {
            return Err(format!("job {number}: {} pods on {places} hosts, {} GPUs idle", job.pods, self.idle));
        }
        if places == 0 && self.scenario.failures.is_some() {
            return Err("with host failures, a rule must place jobs on hosts".into());
        }
        for host in hosts {
            let free = self.free.get_mut(*host).filter(|free| **free >= job.gpus);
            *free.ok_or_else(|| format!("job {number}: host {host} does not have {} GPUs free", job.gpus))? -= job.gpus;
        }
        self.idle -= job.all_gpus();
        self.teams.allocate(job);
        if let Some(count) = self.needs.get_mut(&job.all_gpus()) {
            *count -= 1;
            if *count == 0 {
                self.needs.remove(&job.all_gpus());
            }
        }
        Ok(())
    }

    /// The running state of a gang that starts now.
    fn gang(&self, number: usize, hosts: Vec<usize>, left: f64, version: u32) -> Running {
        let Scenario { fabric, model, .. } = self.scenario;
        let (pods, gpus) = pods(self.rows[number].gpus, fabric.gpus_per_host);
        let is_alone = hosts.windows(2).all(|two| two[0] == two[1]);
        let communication = if is_alone { 0.0 } else { speed::communication(self.rows[number].line) };
        let best = match model {
            Model::Levels => speed::best_level_share(fabric, pods, gpus),
            Model::Flows => 1.0,
        };
        let crossings = match model {
            Model::Flows if !is_alone => speed::crossings(fabric, &hosts),
            _ => Vec::new(),
        };
        let share = match model {
            Model::Levels if !is_alone => speed::level_share(fabric, &hosts) / best,
            _ => 1.0,
        };
        let (speed, since, started) = (speed::speed(communication, share), self.now, self.now);
        Running { hosts, communication, best, crossings, left, speed, since, started, version }
    }

    /// Recomputes the speeds of gangs that share links after one of them started or ended.
    pub(super) fn update_speeds(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let gangs: Vec<&[(usize, f64)]> =
            self.running.values().map(|gang| gang.crossings.as_slice()).filter(|links| !links.is_empty()).collect();
        let shares = speed::fair(self.scenario.fabric, &gangs);
        let crossing = self.running.iter_mut().filter(|(_, gang)| !gang.crossings.is_empty());
        for ((number, gang), share) in crossing.zip(shares) {
            let speed = speed::speed(gang.communication, share / gang.best);
            if speed != gang.speed {
                gang.left = (gang.left - (self.now - gang.since) * gang.speed).max(0.0);
                (gang.speed, gang.since) = (speed, self.now);
                if let Some(started) = self.started.get_mut(number) {
                    started.versions += 1;
                    gang.version = started.versions;
                }
                self.ends.push(End { at: self.now + gang.left / speed, job: *number, version: gang.version });
            }
        }
    }

    pub(super) fn record_decision_time(&mut self, took: Duration) {
        self.outcome.longest = self.outcome.longest.max(took);
    }

    pub(super) fn finish(mut self) -> Result<ReplayOutcome, String> {
        if let Some(job) = self.waiting.values().next() {
            return Err(format!(
                "{} jobs wait forever, the first of them for {} pods of {} GPUs in the empty cluster",
                self.waiting.len(),
                job.pods,
                job.gpus
            ));
        }
        self.outcome.jobs = self.jobs.into_iter().flatten().collect();
        self.outcome.teams = self.teams.usage;
        Ok(self.outcome)
    }
}
