//! The state of a replay: waiting and running jobs, their speeds, and free GPUs.

mod teams;

use super::{Done, Idle, Job, Limits, Played, Setting, Start};
use crate::chance::mixed;
use crate::fabric::pods;
use crate::failures::Hosts;
use crate::speed::{self, Model};
use crate::trace::Row;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;
use teams::Teams;

const LADDER: [f64; 8] = [3600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0, 1_209_600.0, 7_776_000.0];

/// A job that is stopped this often makes no progress.
const MOST_RESTARTS: u32 = 10_000;

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
struct Begun {
    job: Job,
    at: f64,
    forecast: Option<[f64; 2]>,
    restarts: u32,
    /// Work in the last checkpoint, and work lost after checkpoints; seconds at the best placement.
    kept: f64,
    lost: f64,
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

pub(super) struct Player<'a> {
    setting: Setting<'a>,
    rows: &'a [Row],
    jobs: Vec<Option<Done>>,
    waiting: BTreeMap<usize, Job>,
    /// Number of waiting jobs by GPUs needed.
    needs: BTreeMap<u32, usize>,
    running: BTreeMap<usize, Running>,
    begun: BTreeMap<usize, Begun>,
    ends: BinaryHeap<End>,
    pub(super) hosts: Hosts,
    free: Vec<u32>,
    idle: u32,
    teams: Teams,
    now: f64,
    changed: bool,
    played: Played,
}

impl<'a> Player<'a> {
    pub(super) fn new(rows: &'a [Row], setting: Setting<'a>) -> Player<'a> {
        let fabric = setting.fabric;
        Player {
            setting,
            rows,
            jobs: vec![None; rows.len()],
            waiting: BTreeMap::new(),
            needs: BTreeMap::new(),
            running: BTreeMap::new(),
            begun: BTreeMap::new(),
            ends: BinaryHeap::new(),
            hosts: Hosts::new(fabric.hosts.len(), setting.failures),
            free: vec![fabric.gpus_per_host; fabric.hosts.len()],
            idle: fabric.gpus(),
            teams: Teams::of(rows),
            now: 0.0,
            changed: false,
            played: Played {
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
    pub(super) fn pass_time(&mut self, to: f64) -> f64 {
        let now = to.max(self.now);
        let least = self.needs.keys().next().copied();
        if now > self.now && least.is_some_and(|least| least <= self.idle) {
            let oldest = self.waiting.values().next().map(Job::all_gpus);
            let is_fragmented = oldest.is_some_and(|oldest| oldest <= self.idle);
            self.played.idle.push(Idle { at: self.now, time: now - self.now, gpus: self.idle, is_fragmented });
        }
        self.teams.pass_time(now - self.now, self.setting.fabric.gpus());
        self.now = now;
        now
    }

    /// Takes a job whose end is due by `now`.
    pub(super) fn end_at(&mut self, now: f64) -> Option<usize> {
        self.next_end().filter(|at| *at <= now)?;
        let number = self.ends.pop()?.job;
        self.stop(number)?;
        let Begun { job, at: start, forecast, restarts, lost, waited_again, .. } = self.begun.remove(&number)?;
        let Row { submit, duration, gpus, .. } = self.rows[number];
        let is_urgent = job.is_urgent;
        self.jobs[number] =
            Some(Done { submit, start, end: now, duration, gpus, is_urgent, restarts, lost, waited_again, forecast });
        Some(number)
    }

    /// Stops a gang. Returns the remaining work, seconds at the best placement.
    fn stop(&mut self, number: usize) -> Option<f64> {
        let gang = self.running.remove(&number)?;
        let job = &self.begun.get(&number)?.job;
        gang.hosts.iter().for_each(|host| self.free[*host] += job.gpus);
        self.idle += job.all_gpus();
        self.teams.give_back(job);
        self.changed |= !gang.crossings.is_empty();
        self.played.busy.push((gang.started, self.now, job.all_gpus()));
        Some((gang.left - (self.now - gang.since) * gang.speed).max(0.0))
    }

    /// Fails a host. Returns the jobs that this stops, in trace order.
    pub(super) fn failed(&mut self, host: usize) -> Result<Vec<usize>, String> {
        let there = self.running.iter().filter(|(_, gang)| gang.hosts.contains(&host));
        let stopped: Vec<usize> = there.map(|(number, _)| *number).collect();
        for number in &stopped {
            self.waits_again(*number, |hosts, _, done| hosts.kept(done))?;
        }
        self.idle -= std::mem::take(&mut self.free[host]);
        Ok(stopped)
    }

    /// Preempts a job.
    pub(super) fn gives_way(&mut self, number: usize) -> Result<(), String> {
        if !self.running.contains_key(&number) {
            return Err(format!("job {number} gives way and does not run"));
        }
        let every = self.setting.urgent.map_or(f64::INFINITY, |urgent| urgent.checkpoint);
        self.waits_again(number, |_, job, done| if job.saves { done } else { (done / every).floor() * every })
    }

    /// Stops a running job and queues it again. `kept` returns how much of the work done is in a
    /// checkpoint.
    fn waits_again(&mut self, number: usize, kept: impl Fn(&Hosts, &Job, f64) -> f64) -> Result<(), String> {
        let left = self.stop(number).unwrap_or(0.0);
        let done = self.rows[number].duration - left;
        let Some(begun) = self.begun.get_mut(&number) else { return Ok(()) };
        // Work never leaves a checkpoint again.
        begun.kept = kept(&self.hosts, &begun.job, done).max(begun.kept);
        begun.lost += (done - begun.kept).max(0.0);
        (begun.stopped, begun.restarts) = (Some(self.now), begun.restarts + 1);
        if begun.restarts == MOST_RESTARTS {
            return Err(format!("job {number} was stopped {MOST_RESTARTS} times and makes no progress"));
        }
        let job = begun.job.clone();
        self.waits(job);
        Ok(())
    }

    pub(super) fn repaired(&mut self, host: usize) {
        self.free[host] = self.setting.fabric.gpus_per_host;
        self.idle += self.free[host];
    }

    pub(super) fn submit(&mut self, number: usize, row: &Row) -> Job {
        let (pods, gpus) = pods(row.gpus, self.setting.fabric.gpus_per_host);
        let rung = || LADDER.into_iter().find(|rung| *rung >= row.duration).unwrap_or(row.duration);
        let limit = match self.setting.limits {
            Limits::None => None,
            Limits::Coarse => Some(rung()),
            Limits::Half => mixed(row.line ^ 0x5eed).is_multiple_of(2).then(rung),
            Limits::Exact => Some(row.duration),
            Limits::Trace => row.limit.map(|limit| limit.max(row.duration)),
        };
        let team = self.teams.of_job[number];
        let is_urgent =
            self.setting.urgent.is_some_and(|urgent| mixed(row.line ^ 0x9a57).is_multiple_of(urgent.one_in));
        let saves = mixed(row.line ^ 0x5a4e).is_multiple_of(2);
        let job = Job { number, submit: row.submit, pods, gpus, limit, team, is_urgent, saves };
        self.waits(job.clone());
        job
    }

    fn waits(&mut self, job: Job) {
        *self.needs.entry(job.all_gpus()).or_default() += 1;
        self.teams.ask(&job);
        self.waiting.insert(job.number, job);
    }

    pub(super) fn start(&mut self, start: Start) -> Result<(), String> {
        let Start { job: number, hosts, forecast } = start;
        let job = self.waiting.remove(&number).ok_or_else(|| format!("job {number} is started and does not wait"))?;
        self.take(&job, &hosts)?;
        let begun = self.begun.entry(number).or_insert_with(|| Begun {
            job,
            at: self.now,
            forecast,
            restarts: 0,
            kept: 0.0,
            lost: 0.0,
            waited_again: 0.0,
            stopped: None,
            versions: 0,
        });
        begun.waited_again += begun.stopped.take().map_or(0.0, |stopped| self.now - stopped);
        begun.versions += 1;
        let (left, version) = (self.rows[number].duration - begun.kept, begun.versions);
        let gang = self.gang(number, hosts, left, version);
        self.changed |= !gang.crossings.is_empty();
        self.ends.push(End { at: self.now + left / gang.speed, job: number, version });
        self.running.insert(number, gang);
        Ok(())
    }

    /// Allocates a job's GPUs.
    fn take(&mut self, job: &Job, hosts: &[usize]) -> Result<(), String> {
        let (number, places) = (job.number, hosts.len());
        if job.all_gpus() > self.idle || (places != 0 && places != job.pods as usize) {
            return Err(format!("job {number}: {} pods on {places} hosts, {} GPUs idle", job.pods, self.idle));
        }
        if places == 0 && self.setting.failures.is_some() {
            return Err("where hosts fail, a rule must say on which ones jobs run".into());
        }
        for host in hosts {
            let free = self.free.get_mut(*host).filter(|free| **free >= job.gpus);
            *free.ok_or_else(|| format!("job {number}: host {host} has not {} GPUs free", job.gpus))? -= job.gpus;
        }
        self.idle -= job.all_gpus();
        self.teams.take(job);
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
        let Setting { fabric, model, .. } = self.setting;
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
    pub(super) fn speeds(&mut self) {
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let gangs: Vec<&[(usize, f64)]> =
            self.running.values().map(|gang| gang.crossings.as_slice()).filter(|links| !links.is_empty()).collect();
        let shares = speed::fair(self.setting.fabric, &gangs);
        let crossing = self.running.iter_mut().filter(|(_, gang)| !gang.crossings.is_empty());
        for ((number, gang), share) in crossing.zip(shares) {
            let speed = speed::speed(gang.communication, share / gang.best);
            if speed != gang.speed {
                gang.left = (gang.left - (self.now - gang.since) * gang.speed).max(0.0);
                (gang.speed, gang.since) = (speed, self.now);
                if let Some(begun) = self.begun.get_mut(number) {
                    begun.versions += 1;
                    gang.version = begun.versions;
                }
                self.ends.push(End { at: self.now + gang.left / speed, job: *number, version: gang.version });
            }
        }
    }

    pub(super) fn answered(&mut self, took: Duration) {
        self.played.longest = self.played.longest.max(took);
    }

    pub(super) fn finish(mut self) -> Result<Played, String> {
        if let Some(job) = self.waiting.values().next() {
            return Err(format!(
                "{} jobs wait for ever, the first of them for {} pods of {} GPUs in the empty cluster",
                self.waiting.len(),
                job.pods,
                job.gpus
            ));
        }
        self.played.jobs = self.jobs.into_iter().flatten().collect();
        self.played.teams = self.teams.had;
        Ok(self.played)
    }
}
