//! Peers' rules, implemented from their documentation. Quotas, cohorts and plugins are not
//! modelled, hence the names "…-like".

use crate::fabric::Fabric;
use crate::replay::{Decision, Job, Rule, Start};
use crate::rng::Rng;
use std::collections::BTreeMap;

/// How jobs behind one that does not fit are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The job blocks the queue: Kueue's `StrictFIFO`.
    Strict,
    /// The job is skipped until another one ends: Kueue's `BestEffortFIFO`, Volcano, the default
    /// scheduler.
    Skip,
    /// The same, but a job that does not fit preempts newer jobs if it fits then: Kueue's
    /// `LowerOrNewerEqualPriority`. Kueue does not know of checkpoints.
    PreemptNewer,
    /// Others start if they end before it can start or leave enough GPUs for it: EASY backfill
    /// (Lifka, JSSPP 1995), using the manifests' limits.
    Easy,
}

/// Where the pods of a gang go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostOrder {
    /// Kueue's topology-aware scheduling (KEP-2724): the leaf with the least sufficient free
    /// capacity; otherwise the block with the least, filling its roomiest leaves first and the last
    /// one by best fit; otherwise the roomiest blocks first. Ranks follow the domains.
    Domains,
    /// Most used hosts first, ties at random, ranks in random order: Volcano's binpack.
    MostUsed,
    /// Least used hosts first, ties at random, ranks in random order: the default scheduler.
    LeastUsed,
}

#[derive(Debug)]
struct Running {
    job: Job,
    hosts: Vec<usize>,
    started: f64,
    /// Latest end.
    end: f64,
}

/// A rule in the style of a peer.
#[derive(Debug)]
pub struct Peer {
    fabric: Fabric,
    order: Order,
    places: HostOrder,
    free: Vec<u32>,
    waiting: Vec<Job>,
    running: BTreeMap<usize, Running>,
    rng: Rng,
    /// Whether a job ended or a host was repaired since the last decision.
    has_room: bool,
    /// Number of waiting jobs that arrived since the last decision.
    fresh: usize,
}

impl Peer {
    pub fn new(fabric: &Fabric, order: Order, places: HostOrder) -> Peer {
        Peer {
            fabric: fabric.clone(),
            order,
            places,
            free: vec![fabric.gpus_per_host; fabric.hosts.len()],
            waiting: Vec::new(),
            running: BTreeMap::new(),
            rng: Rng::new(1),
            has_room: false,
            fresh: 0,
        }
    }

    fn place(&mut self, job: &Job, free: &[u32]) -> Option<Vec<usize>> {
        let (pods, gpus) = (job.pods as usize, job.gpus);
        let slots = |host: usize| (free[host] / gpus) as usize;
        match self.places {
            HostOrder::Domains => domains(&self.fabric, pods, &slots),
            HostOrder::MostUsed | HostOrder::LeastUsed => {
                let mut hosts: Vec<usize> = (0..free.len()).filter(|host| slots(*host) > 0).collect();
                if hosts.iter().map(|host| slots(*host)).sum::<usize>() < pods {
                    return None;
                }
                self.rng.shuffle(&mut hosts);
                let mut taken = spread(self.places, pods, gpus, free, hosts);
                self.rng.shuffle(&mut taken);
                Some(taken)
            }
        }
    }

    fn start(&mut self, job: &Job, hosts: Vec<usize>, now: f64) -> Start {
        hosts.iter().for_each(|host| self.free[*host] -= job.gpus);
        let end = now + job.limit.unwrap_or(f64::INFINITY);
        self.running.insert(job.number, Running { job: job.clone(), hosts: hosts.clone(), started: now, end });
        Start { job: job.number, hosts, forecast: None }
    }

    /// Stops a running job.
    fn stop(&mut self, job: usize) -> Option<Running> {
        let run = self.running.remove(&job)?;
        run.hosts.iter().for_each(|host| self.free[*host] += run.job.gpus);
        self.has_room = true;
        Some(run)
    }

    /// The newer jobs to preempt for a job that does not fit: the last started ones, until it fits,
    /// without those that need not stop after all (Kueue's `minimalPreemptions`). Empty if it does
    /// not fit without all of them either.
    fn newer_victims(&mut self, job: &Job) -> Vec<usize> {
        let newer = self.running.iter().filter(|(number, _)| **number > job.number);
        let mut newer: Vec<(f64, usize)> = newer.map(|(number, run)| (run.started, *number)).collect();
        newer.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
        let mut free = self.free.clone();
        let mut victims = Vec::new();
        for (_, number) in newer {
            change(&mut free, &self.running[&number], true);
            victims.push(number);
            if self.place(job, &free).is_some() {
                let mut kept = victims.clone();
                for number in victims.into_iter().rev().skip(1) {
                    change(&mut free, &self.running[&number], false);
                    if self.place(job, &free).is_some() {
                        kept.retain(|victim| *victim != number);
                    } else {
                        change(&mut free, &self.running[&number], true);
                    }
                }
                return kept;
            }
        }
        Vec::new()
    }

    /// The head's earliest start if all jobs run up to their limits, and the GPUs that are free
    /// besides the head then; `None` if unknown.
    fn head_start(&mut self, head: &Job) -> Option<(f64, Vec<u32>)> {
        let mut ends: Vec<(f64, usize)> = self.running.iter().map(|(job, run)| (run.end, *job)).collect();
        ends.retain(|(end, _)| end.is_finite());
        ends.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let after = |peer: &Peer, count: usize| {
            let mut free = peer.free.clone();
            for (_, job) in &ends[..count] {
                let Running { job, hosts, .. } = &peer.running[job];
                hosts.iter().for_each(|host| free[*host] += job.gpus);
            }
            free
        };
        let (mut few, mut enough) = (0, ends.len());
        let all = after(self, enough);
        self.place(head, &all)?;
        while enough - few > 1 {
            let middle = few.midpoint(enough);
            let free = after(self, middle);
            if self.place(head, &free).is_some() { enough = middle } else { few = middle }
        }
        let mut free = after(self, enough);
        let hosts = self.place(head, &free)?;
        hosts.iter().for_each(|host| free[*host] -= head.gpus);
        Some((ends.get(enough.checked_sub(1)?)?.0, free))
    }
}

/// Adds the GPUs of a running job to the free ones, or takes them away again.
fn change(free: &mut [u32], run: &Running, add: bool) {
    for host in &run.hosts {
        if add { free[*host] += run.job.gpus } else { free[*host] -= run.job.gpus }
    }
}

/// Spreads pods over hosts one by one, as a pod-level scheduler does.
fn spread(places: HostOrder, pods: usize, gpus: u32, free: &[u32], hosts: Vec<usize>) -> Vec<usize> {
    let mut taken = Vec::with_capacity(pods);
    let mut left: BTreeMap<(u32, usize), usize> =
        hosts.into_iter().enumerate().map(|(tie, host)| ((free[host], tie), host)).collect();
    while taken.len() < pods {
        let next = match places {
            HostOrder::LeastUsed => left.pop_last(),
            _ => left.pop_first(),
        };
        let Some(((free, tie), host)) = next else { break };
        taken.push(host);
        if free - gpus >= gpus {
            left.insert((free - gpus, tie), host);
        }
    }
    taken
}

/// Fills these hosts, the roomiest first and the last one by best fit.
fn fill(hosts: impl Iterator<Item = usize>, pods: usize, slots: &dyn Fn(usize) -> usize) -> Vec<usize> {
    let mut hosts: Vec<(usize, usize)> = hosts.map(|host| (slots(host), host)).filter(|(room, _)| *room > 0).collect();
    hosts.sort_by_key(|(room, host)| (std::cmp::Reverse(*room), *host));
    let mut taken = Vec::with_capacity(pods);
    while taken.len() < pods && !hosts.is_empty() {
        let rest = pods - taken.len();
        // Sorted by room, so the last host that is large enough is the best fit.
        let at = hosts.iter().rposition(|(room, _)| *room >= rest).unwrap_or(0);
        let (room, host) = hosts.remove(at);
        taken.extend(std::iter::repeat_n(host, room.min(rest)));
    }
    taken
}

fn domains(fabric: &Fabric, pods: usize, slots: &dyn Fn(usize) -> usize) -> Option<Vec<usize>> {
    let room: Vec<usize> =
        fabric.leaves.iter().map(|leaf| leaf.iter().map(|host| slots(*host)).sum::<usize>()).collect();
    let least =
        |list: &mut dyn Iterator<Item = (usize, usize)>| list.filter(|(room, _)| *room >= pods).min().map(|(_, at)| at);
    if let Some(leaf) = least(&mut room.iter().copied().enumerate().map(|(leaf, room)| (room, leaf))) {
        return Some(fill(fabric.leaves[leaf].iter().copied(), pods, slots));
    }
    let of_block = |block: usize| fabric.blocks[block].iter().map(|leaf| room[*leaf]).sum::<usize>();
    let blocks: Vec<(usize, usize)> = (0..fabric.blocks.len()).map(|block| (of_block(block), block)).collect();
    if let Some(block) = least(&mut blocks.iter().copied()) {
        return Some(by_leaves(fabric, &fabric.blocks[block], pods, &room, slots));
    }
    if room.iter().sum::<usize>() < pods {
        return None;
    }
    let mut blocks = blocks;
    blocks.sort_by_key(|(room, block)| (std::cmp::Reverse(*room), *block));
    let mut taken = Vec::with_capacity(pods);
    while taken.len() < pods {
        let rest = pods - taken.len();
        let at = blocks.iter().rposition(|(room, _)| *room >= rest).unwrap_or(0);
        let (room_of_block, block) = blocks.remove(at);
        taken.extend(by_leaves(fabric, &fabric.blocks[block], rest.min(room_of_block), &room, slots));
    }
    Some(taken)
}

/// The same over the leaves of a block.
fn by_leaves(
    fabric: &Fabric,
    leaves: &[usize],
    pods: usize,
    room: &[usize],
    slots: &dyn Fn(usize) -> usize,
) -> Vec<usize> {
    let leaves = fill(leaves.iter().copied(), pods, &|leaf| room[leaf]);
    let mut counts: Vec<(usize, usize)> = Vec::new();
    for leaf in leaves {
        match counts.last_mut() {
            Some((last, count)) if *last == leaf => *count += 1,
            _ => counts.push((leaf, 1)),
        }
    }
    counts.into_iter().flat_map(|(leaf, pods)| fill(fabric.leaves[leaf].iter().copied(), pods, slots)).collect()
}

impl Rule for Peer {
    fn submitted(&mut self, job: &Job) -> Result<(), String> {
        self.waiting.push(job.clone());
        self.fresh += 1;
        Ok(())
    }

    fn ended(&mut self, job: usize, _now: f64) {
        self.stop(job);
    }

    fn failed(&mut self, host: usize, jobs: &[usize], now: f64) {
        for number in jobs {
            let Some(Running { job, end, .. }) = self.stop(*number) else { continue };
            // The limit counts from the first start; the queue position is that of the submission.
            let limit = job.limit.map(|_| (end - now).max(0.0));
            let at = self.waiting.partition_point(|other| other.number < job.number);
            self.waiting.insert(at, Job { limit, ..job });
        }
        self.free[host] = 0;
    }

    fn repaired(&mut self, host: usize, _now: f64) {
        self.free[host] = self.fabric.gpus_per_host;
        self.has_room = true;
    }

    fn decide(&mut self, now: f64) -> Result<Vec<Decision>, String> {
        let mut waiting = std::mem::take(&mut self.waiting);
        // If nothing was freed, jobs that already waited still do not fit.
        let has_room = std::mem::take(&mut self.has_room) || self.order == Order::PreemptNewer;
        let known = if has_room { 0 } else { waiting.len() - self.fresh };
        self.fresh = 0;
        let mut starts = Vec::new();
        let mut refused: Vec<(u32, u32)> = Vec::new();
        // Once the head is known not to fit: its earliest start, and the GPUs free besides it then.
        let mut head: Option<Option<(f64, Vec<u32>)>> = None;
        let mut next = 0;
        while let Some(job) = waiting.get(next).cloned() {
            let (at, job) = (next, &job);
            next += 1;
            let is_behind = !self.waiting.is_empty();
            let is_known = at < known && (is_behind || self.order != Order::Easy);
            let is_like = |(pods, gpus): &(u32, u32)| job.pods >= *pods && job.gpus >= *gpus;
            if (is_behind && self.order == Order::Strict) || is_known || refused.iter().any(is_like) {
                self.waiting.push(job.clone());
                continue;
            }
            let free = self.free.clone();
            let mut hosts = self.place(job, &free);
            if hosts.is_none() && self.order == Order::PreemptNewer {
                for victim in self.newer_victims(job) {
                    let Some(Running { job, .. }) = self.stop(victim) else { continue };
                    starts.push(Decision::Preempt(victim));
                    let at = waiting.partition_point(|other| other.number < job.number);
                    waiting.insert(at, job);
                }
                let free = self.free.clone();
                hosts = self.place(job, &free);
            }
            let Some(hosts) = hosts else {
                refused.push((job.pods, job.gpus));
                if self.order == Order::Easy && head.is_none() {
                    head = Some(self.head_start(job));
                }
                self.waiting.push(job.clone());
                continue;
            };
            if let Some(head) = &mut head {
                let Some((start, left)) = head else {
                    self.waiting.push(job.clone());
                    continue;
                };
                let is_in_time = job.limit.is_some_and(|limit| now + limit <= *start);
                let leaves_enough = count(&hosts).iter().all(|(host, pods)| left[*host] >= pods * job.gpus);
                if !is_in_time && !leaves_enough {
                    self.waiting.push(job.clone());
                    continue;
                }
                if !is_in_time {
                    hosts.iter().for_each(|host| left[*host] -= job.gpus);
                }
            }
            starts.push(Decision::Start(self.start(job, hosts, now)));
        }
        Ok(starts)
    }
}

fn count(hosts: &[usize]) -> BTreeMap<usize, u32> {
    let mut counts = BTreeMap::new();
    hosts.iter().for_each(|host| *counts.entry(*host).or_default() += 1);
    counts
}
