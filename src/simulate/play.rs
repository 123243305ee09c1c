//! Plays a trace: jobs arrive and end, hosts may fail, and a rule says who starts where.

mod player;

use crate::fabric::Fabric;
use crate::failures::Failures;
use crate::speed::Model;
use crate::trace::Row;
use player::Player;
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
    /// Its team: a number for each name of a queue in the trace, in the order in which they appear.
    pub team: usize,
    /// Of the higher class: it starts before the others, and may stop them.
    pub is_urgent: bool,
    /// It writes a checkpoint when it is stopped. Another one has its last checkpoint by the clock, of which a rule knows nothing.
    pub saves: bool,
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

/// What a rule does with a job.
#[derive(Debug, Clone, PartialEq)]
pub enum Decision {
    Starts(Start),
    /// It gives way to another job, and waits again.
    Stops(usize),
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
    /// A host fails. These jobs ran there, and wait again; nothing starts there before it is repaired.
    fn failed(&mut self, host: usize, jobs: &[usize], now: f64);
    /// A host that failed can be used again.
    fn repaired(&mut self, host: usize, now: f64);
    /// What happens now, in this order.
    ///
    /// # Errors
    /// The rule contradicts itself.
    fn decide(&mut self, now: f64) -> Result<Vec<Decision>, String>;
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

/// A trace, and how it is played.
#[derive(Debug, Clone, Copy)]
pub struct Setting<'a> {
    pub fabric: &'a Fabric,
    pub model: Model,
    pub limits: Limits,
    /// `None`: no host fails.
    pub failures: Option<Failures>,
    /// `None`: all jobs are of one class.
    pub urgent: Option<Urgent>,
}

/// Jobs of a higher class, which may stop the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Urgent {
    /// One in so many, by a hash.
    pub one_in: u64,
    /// A job that is stopped starts again from its last checkpoint, one for so much work: seconds at the best place. Half of the jobs, by a
    /// hash, write one when they are stopped.
    pub checkpoint: f64,
}

/// What became of a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Done {
    pub submit: f64,
    /// The first one.
    pub start: f64,
    pub end: f64,
    /// Seconds at the best place.
    pub duration: f64,
    pub gpus: u32,
    pub is_urgent: bool,
    /// How often it was stopped, because a host failed or for a job of a higher class.
    pub restarts: u32,
    /// Seconds of work at the best place that were done twice.
    pub lost: f64,
    /// Seconds from these stops to the starts behind them.
    pub waited_again: f64,
    /// When it was to begin, at the earliest and at the latest, as it was told when it found no place.
    pub forecast: Option<[f64; 2]>,
}

impl Done {
    /// Seconds from submission to start.
    pub fn wait(&self) -> f64 {
        self.start - self.submit
    }

    /// Seconds on its GPUs.
    pub fn ran(&self) -> f64 {
        self.end - self.start - self.waited_again
    }
}

/// What became of a trace.
#[derive(Debug, Clone, PartialEq)]
pub struct Played {
    /// By position in the trace.
    pub jobs: Vec<Done>,
    /// When GPUs were busy: from, to, and how many.
    pub busy: Vec<(f64, f64, u32)>,
    /// When GPUs were idle while a job waited that needed no more than were idle.
    pub idle: Vec<Idle>,
    /// By number.
    pub teams: Vec<Team>,
    /// The longest time that the rule took for an answer.
    pub longest: Duration,
}

/// GPUs that are idle from one event to the next, while a job waits that needs no more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Idle {
    pub at: f64,
    /// Seconds.
    pub time: f64,
    pub gpus: u32,
    /// The job that has waited longest needs no more either: not its turn keeps it from them, but where they are.
    pub is_fragmented: bool,
}

/// What a team had. All count alike.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Team {
    /// Queue; empty: not known.
    pub name: String,
    /// GPU-seconds.
    pub had: f64,
    /// GPU-seconds that it asked for, at most its part of all GPUs at each moment, which is the same for all teams that ask for some.
    pub owed: f64,
}

/// Plays a trace to the end of its last job.
///
/// # Errors
/// The rule starts a job that does not wait, or on GPUs that are not free, or stops one that does not run; or jobs wait for ever.
pub fn play(rows: &[Row], setting: Setting<'_>, rule: &mut dyn Rule) -> Result<Played, String> {
    let mut player = Player::new(rows, setting);
    let mut next = 0;
    loop {
        let (end, submit) = (player.next_end(), rows.get(next).map(|row| row.submit));
        // Those that wait when nothing runs and nothing comes wait for a repair, if for anything.
        let goes_on = end.is_some() || submit.is_some();
        let change = player.hosts.next(goes_on).filter(|_| goes_on || player.has_waiting());
        let Some(next_event) = [end, submit, change].into_iter().flatten().reduce(f64::min) else { break };
        let now = player.pass_time(next_event);
        while let Some(job) = player.end_at(now) {
            rule.ended(job, now);
        }
        while let Some(host) = player.hosts.repaired_by(now) {
            player.repaired(host);
            rule.repaired(host, now);
        }
        while goes_on && let Some(host) = player.hosts.failed_by(now) {
            rule.failed(host, &player.failed(host)?, now);
        }
        while let Some(row) = rows.get(next).filter(|row| row.submit <= now) {
            rule.submitted(&player.submit(next, row))?;
            next += 1;
        }
        let begin = Instant::now();
        let decisions = rule.decide(now)?;
        player.answered(begin.elapsed());
        for decision in decisions {
            match decision {
                Decision::Starts(start) => player.start(start)?,
                Decision::Stops(job) => player.gives_way(job)?,
            }
        }
        player.speeds();
    }
    player.finish()
}
