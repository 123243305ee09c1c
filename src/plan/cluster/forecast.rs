//! Forecasts when a queued job can start, as a time window, and puts it into words.
//!
//! - **Latest start:** the job starts in queue order. All running jobs and all jobs ahead in the
//!   queue run to their limits (`activeDeadlineSeconds`), and no job overtakes another.
//! - **Earliest start:** the job starts by backfill, on nodes that are not reserved for another
//!   job, and jobs end early. Run times have heavy tails: of the jobs that have run for a time t, a
//!   fraction t / x runs for longer than x (Harchol-Balter and Downey, Exploiting process lifetime
//!   distributions, 1997). So one in ten of the jobs that have run for nine hours ends within
//!   another hour, and this bound assumes that all of them do.
//!
//! Free resources are counted for each node, without levels and links: a forecast is cheap, and not
//! a guarantee. `cargo xtask bench queue` reports how often it holds.

use super::demand::Demand;
use super::view::NodeView;
use jiff::{SignedDuration, Timestamp};
use std::collections::BTreeMap;
use switchyard_core::quantity::Resources;
use switchyard_core::units::plural;

/// Number of queued jobs that get a forecast. Further back in the queue it would say little.
pub const MAX_AHEAD: usize = 64;

/// One in this many running jobs ends as early as the earliest case assumes for all of them.
pub const EARLY: i32 = 10;

/// Free resources of a node.
#[derive(Debug, Clone)]
struct FreeResources {
    free: Resources,
    gpus: u32,
}

/// Resources that a job holds on a node.
#[derive(Debug, Clone)]
pub struct HeldResources<'a> {
    /// Position of the node.
    pub node: usize,
    pub amount: &'a Resources,
    pub gpus: u32,
}

/// A running job.
#[derive(Debug, Clone)]
pub struct RunningJob<'a> {
    pub held: Vec<HeldResources<'a>>,
    /// Start time, `None` if it starts now.
    pub since: Option<Timestamp>,
    /// Latest end, `None` if unknown.
    pub end: Option<Timestamp>,
}

/// A queued job.
#[derive(Debug, Clone)]
pub struct QueuedJob<'a> {
    pub demand: &'a Demand,
    pub pods: usize,
    pub limit: Option<SignedDuration>,
}

/// When a queued job can start, and how many jobs' limits this depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    pub earliest: Timestamp,
    pub latest: Timestamp,
    /// Running jobs that end before.
    pub running: usize,
    /// Jobs ahead in the queue that end before.
    pub ahead: usize,
}

/// Forecast for a queued job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forecast {
    /// Jobs ahead in the queue.
    pub ahead: usize,
    pub window: Result<Window, Unknown>,
}

/// Why a start time cannot be forecast.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// Some running jobs have no limit.
    Running { without: usize, all: usize },
    /// Some jobs ahead in the queue have no limit.
    Ahead { without: usize, all: usize },
    /// Too many jobs are ahead.
    Far,
    /// Resources would have to become free that other workloads hold.
    Others,
}

impl std::fmt::Display for Unknown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let of = |f: &mut std::fmt::Formatter<'_>, (without, all): (usize, usize), who: [&str; 2]| {
            write!(f, "{without} of {all} {} no activeDeadlineSeconds", who[usize::from(all != 1)])
        };
        match *self {
            Unknown::Running { without, all } => of(f, (without, all), ["running job has", "running jobs have"]),
            Unknown::Ahead { without, all } => of(f, (without, all), ["job ahead has", "jobs ahead have"]),
            Unknown::Far => write!(f, "more than {MAX_AHEAD} jobs are ahead"),
            Unknown::Others => f.write_str("it needs more than the running and queued jobs will release"),
        }
    }
}

/// Cluster state that forecasts depend on.
#[derive(Debug)]
pub struct ForecastInput<'a> {
    pub now: Timestamp,
    pub nodes: Vec<&'a NodeView>,
    /// Nodes reserved for the head of the queue, as they would be without the reservation, by
    /// position.
    pub reserved: BTreeMap<usize, NodeView>,
    pub running_jobs: Vec<RunningJob<'a>>,
    /// The queue, in queue order.
    pub queue: Vec<QueuedJob<'a>>,
    /// [`EARLY`], or another value for comparisons.
    pub early: i32,
}

impl FreeResources {
    fn of(node: &NodeView, demand: &Demand) -> FreeResources {
        FreeResources { free: node.free.clone(), gpus: demand.gpus_free_on(node) }
    }

    fn fits(&self, demand: &Demand) -> bool {
        self.gpus >= demand.gpus && demand.amounts.names().all(|name| self.free.get(name) >= demand.amounts.get(name))
    }

    fn release(&mut self, held: &HeldResources<'_>) {
        (self.free, self.gpus) = (self.free.plus(held.amount), self.gpus + held.gpus);
    }
}

impl ForecastInput<'_> {
    /// Forecast for each job of the queue.
    pub fn forecasts(&self) -> Vec<Forecast> {
        let latest = self.starts_in_order();
        let mut ends: Vec<(Timestamp, &[HeldResources<'_>])> =
            self.running_jobs.iter().map(|run| (self.early_end(run), run.held.as_slice())).collect();
        ends.sort_by_key(|(end, _)| *end);
        let mut earliest_in_order = self.now;
        let forecast = |(ahead, queued): (usize, &QueuedJob<'_>)| {
            let Some((latest, running, ahead_of_it)) = latest.get(ahead).copied() else {
                return Forecast { ahead, window: Err(self.unknown(ahead)) };
            };
            // Jobs ahead also end early, which here means at once.
            earliest_in_order = earliest_in_order.max(self.start_alone(queued, &ends, true).unwrap_or(latest));
            let earliest =
                self.start_alone(queued, &ends, false).map_or(earliest_in_order, |alone| alone.min(earliest_in_order));
            let window = Window { earliest: earliest.min(latest), latest, running, ahead: ahead_of_it };
            Forecast { ahead, window: Ok(window) }
        };
        self.queue.iter().enumerate().map(forecast).collect()
    }

    fn early_end(&self, run: &RunningJob<'_>) -> Timestamp {
        let ran =
            run.since.map_or(SignedDuration::ZERO, |since| self.now.duration_since(since).max(SignedDuration::ZERO));
        let early = self.now.saturating_add(ran / (self.early - 1)).unwrap_or(Timestamp::MAX);
        run.end.map_or(early, |end| end.clamp(self.now, early.max(self.now)))
    }

    fn unknown(&self, ahead: usize) -> Unknown {
        let running = self.running_jobs.iter().filter(|run| run.end.is_none()).count();
        let queued = self.queue[..ahead].iter().filter(|queued| queued.limit.is_none()).count();
        match (running, queued) {
            (0, 0) => Unknown::Others,
            (0, without) => Unknown::Ahead { without, all: ahead },
            (without, _) => Unknown::Running { without, all: self.running_jobs.len() },
        }
    }

    /// When a single job would fit as jobs end in the given order, with or without the reserved
    /// nodes.
    fn start_alone(
        &self,
        queued: &QueuedJob<'_>,
        ends: &[(Timestamp, &[HeldResources<'_>])],
        with_reserved: bool,
    ) -> Option<Timestamp> {
        let mut free = FreeNodes::of(self, queued.demand, with_reserved);
        let can_use = |held: &&HeldResources<'_>| with_reserved || !self.reserved.contains_key(&held.node);
        let mut ends = ends.iter();
        let mut at = self.now;
        while free.fit < queued.pods {
            let (end, held) = ends.next()?;
            at = at.max(*end);
            held.iter().filter(can_use).for_each(|held| free.release(held, queued.demand));
        }
        Some(at)
    }

    /// For each job of the queue: its start if all jobs run to their limits and none overtakes
    /// another, and how many running jobs and jobs ahead have ended by then. The list ends at the
    /// first job whose start is unknown.
    fn starts_in_order(&self) -> Vec<(Timestamp, usize, usize)> {
        let Some(first) = self.queue.first() else { return Vec::new() };
        let mut free = FreeNodes::of(self, first.demand, true);
        let known = self.running_jobs.iter().enumerate().filter_map(|(run, job)| Some((job.end?.max(self.now), run)));
        // Keyed by end time. Jobs of the queue come after running jobs that end at the same time.
        let mut ends: BTreeMap<(Timestamp, usize), Vec<HeldResources<'_>>> =
            known.map(|key| (key, self.running_jobs[key.1].held.clone())).collect();
        let (mut at, mut running, mut ahead) = (self.now, 0, 0);
        let mut starts = Vec::new();
        for (number, QueuedJob { demand, pods, limit }) in self.queue.iter().enumerate() {
            free.recount(&self.nodes, demand);
            while free.fit < *pods {
                let Some(((end, run), held)) = ends.pop_first() else { return starts };
                at = at.max(end);
                *(if run < self.running_jobs.len() { &mut running } else { &mut ahead }) += 1;
                held.iter().for_each(|held| free.release(held, demand));
            }
            let taken = free.take(*pods, demand);
            if let Some(end) = limit.and_then(|limit| at.checked_add(limit).ok()) {
                ends.insert((end, self.running_jobs.len() + number), taken);
            }
            starts.push((at, running, ahead));
        }
        starts
    }
}

/// Free resources on all nodes, and the number of nodes with room for a pod.
struct FreeNodes {
    free: Vec<FreeResources>,
    can_use: Vec<bool>,
    fit: usize,
}

impl FreeNodes {
    fn of(input: &ForecastInput<'_>, demand: &Demand, with_reserved: bool) -> FreeNodes {
        let without = |node: usize| input.reserved.get(&node).filter(|_| with_reserved).unwrap_or(input.nodes[node]);
        let free = (0..input.nodes.len()).map(|node| FreeResources::of(without(node), demand)).collect();
        let mut free = FreeNodes { free, can_use: Vec::new(), fit: 0 };
        free.recount(&input.nodes, demand);
        free
    }

    /// Recounts the nodes for another job.
    fn recount(&mut self, nodes: &[&NodeView], demand: &Demand) {
        self.can_use = nodes.iter().map(|node| demand.can_use(node)).collect();
        self.fit = (0..nodes.len()).filter(|node| self.has_room(*node, demand)).count();
    }

    fn has_room(&self, node: usize, demand: &Demand) -> bool {
        self.can_use[node] && self.free[node].fits(demand)
    }

    fn release(&mut self, held: &HeldResources<'_>, demand: &Demand) {
        let before = self.has_room(held.node, demand);
        self.free[held.node].release(held);
        self.fit += usize::from(!before && self.has_room(held.node, demand));
    }

    /// Takes the nodes with room that have the fewest free GPUs.
    fn take<'a>(&mut self, pods: usize, demand: &'a Demand) -> Vec<HeldResources<'a>> {
        let mut nodes: Vec<usize> = (0..self.free.len()).filter(|node| self.has_room(*node, demand)).collect();
        nodes.sort_by_key(|node| self.free[*node].gpus);
        nodes.truncate(pods);
        let hold = |node: usize| {
            let room = &mut self.free[node];
            (room.free, room.gpus) = (room.free.less(&demand.amounts), room.gpus - demand.gpus);
            HeldResources { node, amount: &demand.amounts, gpus: demand.gpus }
        };
        nodes.into_iter().map(hold).collect()
    }
}

impl Forecast {
    /// Text for the reason why a job waits.
    pub fn message(&self, now: Timestamp) -> String {
        let rank_text = format!("{} in the queue", ordinal(self.ahead + 1));
        let Window { earliest, latest, running, ahead } = match &self.window {
            Ok(window) => *window,
            Err(why) => return format!("{rank_text}, no forecast: {why}"),
        };
        let seconds_until = |at: Timestamp| at.duration_since(now).as_secs().max(0).unsigned_abs();
        let (from, to) = (
            round_minutes(seconds_until(earliest), u64::div_euclid),
            round_minutes(seconds_until(latest), u64::div_ceil),
        );
        let when = match (from, to) {
            (_, 0) => "at any moment".to_string(),
            (0, to) => format!("within {}", duration_text(to)),
            (from, to) if from == to => format!("in {}", duration_text(to)),
            (from, to) => format!("in {} to {}", duration_text(from), duration_text(to)),
        };
        let limits = |count: usize| if count == 1 { "the limit" } else { "limits" };
        let limits_used = match (running, ahead) {
            (0, 0) => String::new(),
            (0, ahead) => format!(" (from {} of {ahead} job{} ahead)", limits(ahead), plural(ahead as u64)),
            (running, 0) => format!(" (from {} of {running} running job{})", limits(running), plural(running as u64)),
            (running, ahead) => {
                format!(" (from limits of {running} running job{} and {ahead} ahead)", plural(running as u64))
            }
        };
        format!("{rank_text}, expected {when}{limits_used}")
    }
}

/// `first`, `second`, `21st`.
fn ordinal(number: usize) -> String {
    const ORDINALS: [&str; 10] =
        ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"];
    let suffix = match (number % 10, number % 100) {
        (1, tens) if tens != 11 => "st",
        (2, tens) if tens != 12 => "nd",
        (3, tens) if tens != 13 => "rd",
        _ => "th",
    };
    ORDINALS.get(number - 1).map_or_else(|| format!("{number}{suffix}"), ToString::to_string)
}

/// Rounds minutes to the precision of a forecast: a text that changes every minute would cause a
/// status write every minute.
fn round_minutes(seconds: u64, divide: fn(u64, u64) -> u64) -> u64 {
    let step = match seconds {
        ..3600 => 5,
        3600..36_000 => 20,
        36_000..172_800 => 60,
        _ => 360,
    };
    divide(seconds, step * 60) * step
}

/// `3 h 40 min`.
fn duration_text(minutes: u64) -> String {
    let parts = [(minutes / 1440, "d"), (minutes / 60 % 24, "h"), (minutes % 60, "min")];
    let parts: Vec<String> =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, unit)| format!("{count} {unit}")).collect();
    parts.join(" ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_message_has_the_queue_position_the_window_and_its_limits() {
        let now: Timestamp = "2026-06-01T12:00:00Z".parse().unwrap();
        let window = |minutes: [i64; 2], running, ahead| {
            let [earliest, latest] = minutes.map(|minutes| now + SignedDuration::from_mins(minutes));
            Ok(Window { earliest, latest, running, ahead })
        };
        let message = |ahead, window| Forecast { ahead, window }.message(now);
        for (ahead, window, expected) in [
            (
                2,
                window([127, 201], 12, 0),
                "third in the queue, expected in 2 h to 3 h 40 min (from limits of 12 running jobs)",
            ),
            (
                0,
                window([0, 61], 1, 0),
                "first in the queue, expected within 1 h 20 min (from the limit of 1 running job)",
            ),
            (
                10,
                window([33, 34], 3, 2),
                "11th in the queue, expected in 30 min to 35 min (from limits of 3 running jobs and 2 ahead)",
            ),
            (20, window([35, 35], 0, 1), "21st in the queue, expected in 35 min (from the limit of 1 job ahead)"),
            (
                1,
                window([3000, 9000], 2, 0),
                "second in the queue, expected in 2 d to 6 d 6 h (from limits of 2 running jobs)",
            ),
            (1, window([-5, 0], 0, 0), "second in the queue, expected at any moment"),
            (
                3,
                Err(Unknown::Running { without: 4, all: 16 }),
                "fourth in the queue, no forecast: 4 of 16 running jobs have no activeDeadlineSeconds",
            ),
            (
                3,
                Err(Unknown::Ahead { without: 1, all: 1 }),
                "fourth in the queue, no forecast: 1 of 1 job ahead has no activeDeadlineSeconds",
            ),
            (64, Err(Unknown::Far), "65th in the queue, no forecast: more than 64 jobs are ahead"),
            (
                0,
                Err(Unknown::Others),
                "first in the queue, no forecast: it needs more than the running and queued jobs will release",
            ),
        ] {
            assert_eq!(message(ahead, window), expected);
        }
    }

    #[test]
    fn rounded_windows_change_rarely_and_contain_the_exact_one() {
        let mut before = (0, 0);
        for seconds in (0..400_000).step_by(7) {
            let (down, up) = (round_minutes(seconds, u64::div_euclid), round_minutes(seconds, u64::div_ceil));
            assert!(down * 60 <= seconds && seconds <= up * 60 && up - down <= 360, "{seconds}");
            assert!(down >= before.0 && up >= before.1, "{seconds}");
            before = (down, up);
        }
    }
}
