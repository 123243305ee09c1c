//! Plays a trace: jobs arrive and end, and a rule says who starts where.

use crate::chance::mixed;
use crate::fabric::{Fabric, pods};
use crate::speed::{self, Model};
use crate::trace::Row;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
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
    /// Seconds after its start when it is stopped: `activeDeadlineSeconds` of the manifest.
    pub limit: Option<f64>,
}

impl Job {
    /// GPUs of all pods.
    pub fn all_gpus(&self) -> u32 {
        self.pods * self.gpus
    }
}

/// A job that starts: the host of each pod, in the order of ranks. A rule without places leaves the list empty.
#[derive(Debug, Clone, PartialEq)]
pub struct Start {
    pub job: usize,
    pub hosts: Vec<usize>,
    /// When the rule first told that the job would begin: at the earliest, at the latest.
    pub forecast: Option<[f64; 2]>,
}

/// Who starts when, and where.
pub trait Rule {
    /// A job arrives.
    ///
    /// # Errors
    /// The rule cannot take such a job.
    fn submitted(&mut self, job: &Job) -> Result<(), String>;
    /// A job that ran has ended, and its GPUs are free.
    fn ended(&mut self, job: usize, now: f64);
    /// Jobs that start now, in this order.
    ///
    /// # Errors
    /// The rule contradicts itself.
    fn starts(&mut self, now: f64) -> Result<Vec<Start>, String>;
}

/// What limits the manifests of a trace have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limits {
    None,
    /// The least of an hour, 4 h, 12 h, 1, 3, 7, 14 and 90 days that the job needs: what people write.
    Coarse,
    /// The same for half of the jobs, by a hash; none for the others.
    Half,
    /// Exactly the duration: what a rule could do that knows the future.
    Exact,
    /// Those of the trace. A job that ran for longer than its limit had that time as its limit.
    Trace,
}

const LADDER: [f64; 8] = [3600.0, 14_400.0, 43_200.0, 86_400.0, 259_200.0, 604_800.0, 1_209_600.0, 7_776_000.0];

/// A trace, and how it is played.
#[derive(Debug, Clone, Copy)]
pub struct Setting<'a> {
    pub fabric: &'a Fabric,
    pub model: Model,
    pub limits: Limits,
}

/// What became of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Done {
    pub submit: f64,
    pub start: f64,
    pub end: f64,
    /// Seconds at the best place.
    pub duration: f64,
    pub gpus: u32,
    /// When it was to begin, at the earliest and at the latest, as it was told when it found no place.
    pub forecast: Option<[f64; 2]>,
}

impl Done {
    /// Seconds from submission to start.
    pub fn wait(&self) -> f64 {
        self.start - self.submit
    }
}

/// What became of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Played {
    /// By position in the trace.
    pub jobs: Vec<Done>,
    /// GPU-seconds that were idle while a job waited that needed no more GPUs than were idle, from each moment to the next: the moment, how long,
    /// and how many GPUs.
    pub idle_beside_waiting: Vec<(f64, f64, u32)>,
    /// The longest time that the rule took for an answer.
    pub longest: Duration,
}

/// A gang that runs.
struct Running {
    hosts: Vec<usize>,
    /// Part of communication; 0 on one host.
    communication: f64,
    /// Bandwidth of the best place.
    best: f64,
    crossings: Vec<(usize, f64)>,
    /// Seconds of work that are left, at the best place.
    left: f64,
    speed: f64,
    since: f64,
    /// Number of its last entry among the ends.
    version: u32,
}

/// How a job that runs began.
struct Started {
    at: f64,
    /// GPUs of each pod.
    gpus: u32,
    forecast: Option<[f64; 2]>,
}

/// An end that is expected, the earliest being the greatest.
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

/// Plays a trace to the end of its last job.
///
/// # Errors
/// The rule starts a job that does not wait, or on GPUs that are not free; or jobs wait for ever.
pub fn play(rows: &[Row], setting: Setting<'_>, rule: &mut dyn Rule) -> Result<Played, String> {
    let mut player = Player::new(rows, setting);
    let mut next = 0;
    loop {
        let end = player.next_end();
        let submit = rows.get(next).map(|row| row.submit);
        let now = match (end, submit) {
            (None, None) => break,
            (Some(end), Some(submit)) => end.min(submit),
            (Some(at), None) | (None, Some(at)) => at,
        };
        player.pass_time(now);
        while let Some(job) = player.end_at(now) {
            rule.ended(job, now);
        }
        while let Some(row) = rows.get(next).filter(|row| row.submit <= now) {
            rule.submitted(&player.submit(next, row))?;
            next += 1;
        }
        let begin = Instant::now();
        let starts = rule.starts(now)?;
        player.answered(begin.elapsed());
        for start in starts {
            player.start(start, now)?;
        }
        player.speeds(now);
    }
    player.finish()
}

struct Player<'a> {
    setting: Setting<'a>,
    rows: &'a [Row],
    jobs: Vec<Option<Done>>,
    waiting: BTreeMap<usize, Job>,
    /// Jobs that wait, by how many GPUs they need.
    needs: BTreeMap<u32, usize>,
    running: BTreeMap<usize, Running>,
    started: BTreeMap<usize, Started>,
    ends: BinaryHeap<End>,
    free: Vec<u32>,
    idle: u32,
    now: f64,
    changed: bool,
    played: Played,
}

impl<'a> Player<'a> {
    fn new(rows: &'a [Row], setting: Setting<'a>) -> Player<'a> {
        let fabric = setting.fabric;
        Player {
            setting,
            rows,
            jobs: vec![None; rows.len()],
            waiting: BTreeMap::new(),
            needs: BTreeMap::new(),
            running: BTreeMap::new(),
            started: BTreeMap::new(),
            ends: BinaryHeap::new(),
            free: vec![fabric.gpus_per_host; fabric.hosts.len()],
            idle: fabric.gpus(),
            now: 0.0,
            changed: false,
            played: Played { jobs: Vec::new(), idle_beside_waiting: Vec::new(), longest: Duration::ZERO },
        }
    }

    fn next_end(&mut self) -> Option<f64> {
        while let Some(end) = self.ends.peek() {
            if self.running.get(&end.job).is_some_and(|gang| gang.version == end.version) {
                return Some(end.at);
            }
            self.ends.pop();
        }
        None
    }

    fn pass_time(&mut self, now: f64) {
        let least = self.needs.keys().next().copied();
        if now > self.now && least.is_some_and(|least| least <= self.idle) {
            self.played.idle_beside_waiting.push((self.now, now - self.now, self.idle));
        }
        self.now = now;
    }

    /// A job that ends by now, if there is one.
    fn end_at(&mut self, now: f64) -> Option<usize> {
        self.next_end().filter(|at| *at <= now)?;
        let job = self.ends.pop()?.job;
        let gang = self.running.remove(&job)?;
        let Started { at: start, gpus, forecast } = self.started.remove(&job)?;
        let row = &self.rows[job];
        gang.hosts.iter().for_each(|host| self.free[*host] += gpus);
        self.idle += row.gpus;
        self.changed |= !gang.crossings.is_empty();
        self.jobs[job] =
            Some(Done { submit: row.submit, start, end: now, duration: row.duration, gpus: row.gpus, forecast });
        Some(job)
    }

    fn submit(&mut self, number: usize, row: &Row) -> Job {
        let (pods, gpus) = pods(row.gpus, self.setting.fabric.gpus_per_host);
        let rung = || LADDER.into_iter().find(|rung| *rung >= row.duration).unwrap_or(row.duration);
        let limit = match self.setting.limits {
            Limits::None => None,
            Limits::Coarse => Some(rung()),
            Limits::Half => mixed(row.line ^ 0x5eed).is_multiple_of(2).then(rung),
            Limits::Exact => Some(row.duration),
            Limits::Trace => row.limit.map(|limit| limit.max(row.duration)),
        };
        let job = Job { number, submit: row.submit, pods, gpus, limit };
        *self.needs.entry(row.gpus).or_default() += 1;
        self.waiting.insert(number, job.clone());
        job
    }

    fn start(&mut self, start: Start, now: f64) -> Result<(), String> {
        let Start { job: number, hosts, forecast } = start;
        let job = self.waiting.remove(&number).ok_or_else(|| format!("job {number} is started and does not wait"))?;
        if job.all_gpus() > self.idle || (!hosts.is_empty() && hosts.len() != job.pods as usize) {
            return Err(format!("job {number}: {} pods on {} hosts, {} GPUs idle", job.pods, hosts.len(), self.idle));
        }
        for host in &hosts {
            let free = self.free.get_mut(*host).filter(|free| **free >= job.gpus);
            *free.ok_or_else(|| format!("job {number}: host {host} has not {} GPUs free", job.gpus))? -= job.gpus;
        }
        self.idle -= job.all_gpus();
        let waiting = self.needs.get_mut(&job.all_gpus()).map(|count| {
            *count -= 1;
            *count
        });
        if waiting == Some(0) {
            self.needs.remove(&job.all_gpus());
        }
        let row = &self.rows[number];
        let fabric = self.setting.fabric;
        let is_alone = hosts.windows(2).all(|two| two[0] == two[1]);
        let communication = if is_alone { 0.0 } else { speed::communication(row.line) };
        let best = match self.setting.model {
            Model::Levels => speed::best_level_share(fabric, job.pods, job.gpus),
            Model::Flows => 1.0,
        };
        let crossings = match self.setting.model {
            Model::Flows if !is_alone => speed::crossings(fabric, &hosts),
            _ => Vec::new(),
        };
        let share = match self.setting.model {
            Model::Levels if !is_alone => speed::level_share(fabric, &hosts) / best,
            _ => 1.0,
        };
        self.changed |= !crossings.is_empty();
        let speed = speed::speed(communication, share);
        let gang = Running { hosts, communication, best, crossings, left: row.duration, speed, since: now, version: 0 };
        self.ends.push(End { at: now + gang.left / speed, job: number, version: 0 });
        self.running.insert(number, gang);
        self.started.insert(number, Started { at: now, gpus: job.gpus, forecast });
        Ok(())
    }

    /// Gangs that share links have other speeds when one of them starts or ends.
    fn speeds(&mut self, now: f64) {
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
                gang.left = (gang.left - (now - gang.since) * gang.speed).max(0.0);
                (gang.speed, gang.since, gang.version) = (speed, now, gang.version + 1);
                self.ends.push(End { at: now + gang.left / speed, job: *number, version: gang.version });
            }
        }
    }

    fn answered(&mut self, took: Duration) {
        self.played.longest = self.played.longest.max(took);
    }

    fn finish(mut self) -> Result<Played, String> {
        if let Some(job) = self.waiting.values().next() {
            return Err(format!(
                "{} jobs wait for ever, the first of them for {} pods of {} GPUs in the empty cluster",
                self.waiting.len(),
                job.pods,
                job.gpus
            ));
        }
        self.played.jobs = self.jobs.into_iter().flatten().collect();
        Ok(self.played)
    }
}
