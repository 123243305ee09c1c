//! Times single passes over a long queue on a full cluster.

use crate::parts::{Entry, Part};
use crate::results::Results;
use crate::{Args, Input};
use serde_json::json;
use std::collections::BTreeSet;
use std::error::Error;
use std::time::Instant;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_simulate::fabric::pods;
use switchyard_simulate::replay::{Decision, Job, Rule};

/// Jobs that run and wait when the first pass is timed.
const RUNNING: u32 = 1000;
const WAITING: usize = 500;
/// Passes for each seed. In each, one job has ended and one arrives.
const PASSES: usize = 40;
/// Seconds between two passes: the period after which the order of the queue is renewed.
const PERIOD: f64 = 60.0;
/// Seconds between the starts of the running jobs: they have run for up to ten hours.
const APART: f64 = 36.0;

/// Times the passes of the part's rules.
pub(crate) fn measure(
    args: &Args,
    part: Part,
    input: &Input,
    machine: &GPUTopology,
    results: &mut Results,
) -> Result<(), Box<dyn Error>> {
    let (hosts, seeds) = (input.fabric.hosts.len(), args.seeds);
    println!("\n{part:?}: {WAITING} waiting jobs on {hosts} hosts, {PASSES} passes, {seeds} inputs");
    for entry in args.entries(part) {
        let mut times = Vec::new();
        let mut running = 0;
        for seed in 0..seeds as usize {
            let mut queue = LongQueue::fill(entry, input, machine, seed)?;
            running = queue.running.len();
            times.extend((0..PASSES).map(|_| queue.pass()).collect::<Result<Vec<f64>, _>>()?);
        }
        times.sort_by(f64::total_cmp);
        let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
        println!("{:32} {running} running, median {median:.1} ms, longest {longest:.1} ms", entry.name);
        results.put(json!({
            "part": part.name(), "trace": input.trace.name(), "rule": entry.name, "hosts": hosts,
            "running": running, "waiting": WAITING, "passes": times.len(), "seeds": seeds,
            "medianPassMilliseconds": median, "longestPassMilliseconds": longest,
        }))?;
    }
    Ok(())
}

/// A full cluster and its queue.
struct LongQueue<'a> {
    rule: Box<dyn Rule>,
    input: &'a Input,
    /// Row of the next job that arrives.
    row: usize,
    submitted: usize,
    running: BTreeSet<usize>,
    now: f64,
}

impl LongQueue<'_> {
    fn fill<'a>(
        entry: &Entry,
        input: &'a Input,
        machine: &GPUTopology,
        seed: usize,
    ) -> Result<LongQueue<'a>, Box<dyn Error>> {
        let (rule, row) = ((entry.make)(&input.fabric, machine)?, seed * (WAITING + PASSES));
        let mut queue = LongQueue { rule, input, row, submitted: 0, running: BTreeSet::new(), now: 0.0 };
        let (mut gpus, mut jobs) = (input.fabric.gpus(), RUNNING);
        while jobs > 0 {
            // The largest job that leaves a GPU for each of the others.
            let size = (gpus - (jobs - 1)).min(input.fabric.gpus_per_host);
            queue.submit(size)?;
            queue.decide()?;
            (gpus, jobs, queue.now) = (gpus - size, jobs - 1, queue.now + APART);
        }
        while queue.submitted - queue.running.len() < WAITING {
            queue.arrive()?;
            queue.decide()?;
            queue.now += 1.0;
        }
        Ok(queue)
    }

    fn submit(&mut self, gpus: u32) -> Result<(), String> {
        let (pods, gpus) = pods(gpus, self.input.fabric.gpus_per_host);
        let (number, submit) = (self.submitted, self.now);
        self.submitted += 1;
        self.rule.submitted(&Job {
            number,
            submit,
            pods,
            gpus,
            limit: None,
            team: 0,
            is_urgent: false,
            saves: false,
            checkpoint: Some(600.0),
        })
    }

    /// The next job of the trace.
    fn arrive(&mut self) -> Result<(), String> {
        let rows = &self.input.rows;
        let gpus = rows[self.row % rows.len()].gpus;
        self.row += 1;
        self.submit(gpus)
    }

    fn decide(&mut self) -> Result<(), String> {
        for decision in self.rule.decide(self.now)? {
            match decision {
                Decision::Start(start) => self.running.insert(start.job),
                Decision::Preempt(job) => self.running.remove(&job),
            };
        }
        Ok(())
    }

    /// Milliseconds of one pass.
    fn pass(&mut self) -> Result<f64, String> {
        self.now += PERIOD;
        self.arrive()?;
        let begin = Instant::now();
        if let Some(ended) = self.running.pop_first() {
            self.rule.ended(ended, self.now);
        }
        self.decide()?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }
}
