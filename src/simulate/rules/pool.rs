//! Ideal rules: all GPUs form one pool and every job runs at full speed. The difference to them is
//! the cost of placement and fragmentation.

use crate::fabric::Fabric;
use crate::replay::{Decision, Job, Rule, Start};
use std::collections::BTreeMap;

/// Which job starts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolOrder {
    /// The first job that does not fit blocks the queue.
    StrictFifo,
    /// Jobs that do not fit are skipped.
    BestEffort,
    /// Shortest job first, by exact limits; jobs that do not fit are skipped.
    Shortest,
}

#[derive(Debug)]
pub struct Pool {
    order: PoolOrder,
    free: u32,
    waiting: Vec<Job>,
    running: BTreeMap<usize, u32>,
}

impl Pool {
    pub fn new(fabric: &Fabric, order: PoolOrder) -> Pool {
        Pool { order, free: fabric.gpus(), waiting: Vec::new(), running: BTreeMap::new() }
    }
}

impl Rule for Pool {
    fn submitted(&mut self, job: &Job) -> Result<(), String> {
        let limit = |job: &Job| job.limit.unwrap_or(f64::INFINITY);
        let at = match self.order {
            PoolOrder::Shortest => self.waiting.partition_point(|other| limit(other) <= limit(job)),
            _ => self.waiting.len(),
        };
        self.waiting.insert(at, job.clone());
        Ok(())
    }

    fn ended(&mut self, job: usize, _now: f64) {
        self.free += self.running.remove(&job).unwrap_or(0);
    }

    fn failed(&mut self, _host: usize, _jobs: &[usize], _now: f64) {}

    fn repaired(&mut self, _host: usize, _now: f64) {}

    fn decide(&mut self, _now: f64) -> Result<Vec<Decision>, String> {
        let mut starts = Vec::new();
        let (mut free, is_strict, mut is_blocked) = (self.free, self.order == PoolOrder::StrictFifo, false);
        let running = &mut self.running;
        self.waiting.retain(|job| {
            if is_blocked || job.all_gpus() > free {
                is_blocked |= is_strict;
                return true;
            }
            free -= job.all_gpus();
            running.insert(job.number, job.all_gpus());
            starts.push(Decision::Start(Start { job: job.number, hosts: Vec::new(), forecast: None }));
            false
        });
        self.free = free;
        Ok(starts)
    }
}
