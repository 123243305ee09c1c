//! The computation of a rank: threads, warm-up, noise.

use super::{Advice, Basis, Change, Chart, Field, Finding, Rule, ms};
use crate::report::facts::{Facts, RankFacts};
use crate::report::sample::Part;
use std::collections::BTreeMap;
use switchyard_core::units::{counted, three_digits};
use switchyard_worker_contract::CpuList;

/// Warm-up is reported if the first steps take this many times a later one.
const WARM_UP_FACTOR: f64 = 2.0;
/// Step times are noisy if the 99th percentile exceeds the median by this factor.
const NOISE_FACTOR: f64 = 1.5;
/// Share of the linear speed-up expected from more threads.
const THREAD_EFFICIENCY: f64 = 0.5;
/// Upper bound of `trainer.cpuThreads`.
const MAX_THREADS: u64 = 1024;

const COMPUTE: &[Part] = &[Part::Forward, Part::Backward, Part::Optimizer];

pub(super) const TOO_MANY_THREADS: Rule = Rule {
    id: "too-many-threads",
    question: 1,
    threshold: "The compute threads of the ranks of a node are more than the CPUs that they may run on.",
    gain: "Not known: threads that wait for a CPU hold the others up at every barrier.",
    source: "PaddlePaddle's guide (threads per process: too many cost scheduling); the count is ours",
    check: |facts| {
        let Some(nodes) = nodes(facts) else { return Finding::Unknown("threads and CPUs of the ranks") };
        let over = nodes.iter().filter(|(_, (threads, cpus))| *threads > cpus.len() as u32);
        let Some((node, (threads, cpus))) = over.max_by_key(|(_, (threads, cpus))| threads / cpus.len().max(1) as u32)
        else {
            return Finding::Fine("no more threads than CPUs".into());
        };
        let ranks = facts.ranks.iter().filter(|rank| name(rank) == *node).count().max(1) as u32;
        let each = (cpus.len() as u32 / ranks).max(1);
        let mut evidence = format!(
            "{} of {} on {node} share {} ({cpus}).",
            counted(u64::from(*threads), "compute thread"),
            counted(u64::from(ranks), "rank"),
            counted(cpus.len() as u64, "CPU")
        );
        if let Some((p50, p99)) = facts.work_quantiles.filter(|(p50, _)| *p50 > 0.0) {
            evidence.push_str(&format!(" The work of a step takes {} ms, in 1 of 100 more than {}.", ms(p50), ms(p99)));
        }
        let own = threads / ranks;
        let fewer = Field::number("trainer.cpuThreads", own, each, MAX_THREADS);
        let changes = [fewer.map(|fewer| Change::set([fewer], None, Basis::Guess))];
        Advice::about(COMPUTE, Chart::Placement, evidence, changes)
    },
};

pub(super) const TOO_FEW_THREADS: Rule = Rule {
    id: "too-few-threads",
    question: 1,
    threshold: "A rank has at most half as many compute threads as cores of its own, within the CPU limit of its pod.",
    gain: "Half of the time that as many threads as cores would save if the computation divided evenly.",
    source: "PaddlePaddle's guide (threads per process: try 1 and 4, then step by step); the bound is ours",
    check: |facts| {
        if facts.on_gpu == Some(true) {
            return Finding::NotApplicable;
        }
        let Some(nodes) = nodes(facts) else { return Finding::Unknown("threads and CPUs of the ranks") };
        let slowest = &facts.ranks[facts.critical];
        let (Some(threads), Some((_, cpus))) = (slowest.threads, nodes.get(name(slowest))) else {
            return Finding::Unknown("threads and CPUs of the ranks");
        };
        let ranks = facts.ranks.iter().filter(|rank| name(rank) == name(slowest)).count().max(1);
        // The rank's own CPUs, or an equal part of shared ones. A second thread on a core adds
        // hardly any compute.
        let own = (cpus.len() / ranks) as f64 * facts.cores_per_cpu.unwrap_or(1.0);
        // Threads beyond the pod's limit would only be throttled.
        let own = facts.cpu_limit.map_or(own, |limit| own.min(limit / ranks as f64));
        if threads == 0 || f64::from(threads) > own / 2.0 {
            let own = three_digits(own);
            return Finding::Fine(format!("{} for {own} cores of a rank", counted(u64::from(threads), "thread")));
        }
        let compute = slowest.step.compute();
        let gain = compute * (1.0 - f64::from(threads) / own) * THREAD_EFFICIENCY;
        let more = Field::number("trainer.cpuThreads", threads, own as u64, MAX_THREADS);
        Advice::about(
            COMPUTE,
            Chart::Placement,
            format!(
                "Rank {} computes {} ms of each step with {} and has {own:.0} cores.",
                slowest.rank,
                ms(compute),
                counted(u64::from(threads), "thread")
            ),
            [more.map(|more| Change::set([more], gain, Basis::Guess))],
        )
    },
};

pub(super) const WARM_UP: Rule = Rule {
    id: "warm-up",
    question: 1,
    threshold: "The first 10 steps of an attempt take ≥ 2 times as long as the others.",
    gain: "None: a note.",
    source: "ours",
    check: |facts| match facts.warm_ms {
        None => Finding::Unknown("more than 10 steps"),
        Some(warm) if facts.step_ms() > 0.0 && warm >= WARM_UP_FACTOR * facts.step_ms() => Finding::Note(
            format!(
                "the first steps took {} ms each, later ones {}: they are not in the figures",
                ms(warm),
                ms(facts.step_ms())
            ),
            Chart::StepTime,
        ),
        Some(warm) => Finding::Fine(format!("first steps {} ms", ms(warm))),
    },
};

pub(super) const NOISE: Rule = Rule {
    id: "noise",
    question: 1,
    threshold: "Without checkpoints and what lies between steps, the 99th percentile of the step time is ≥ 1.5 times the median.",
    gain: "None: a note. Gains below the noise cannot be seen in one run.",
    source: "ours",
    check: |facts| match facts.work_quantiles.filter(|(p50, _)| *p50 > 0.0) {
        None => Finding::Unknown("the record of single steps"),
        Some((p50, p99)) if p99 >= NOISE_FACTOR * p50 => Finding::Note(
            format!(
                "times are noisy: the work of a step takes {} ms, in 1 of 100 more than {}: other programs on these CPUs, or changing clocks",
                ms(p50),
                ms(p99)
            ),
            Chart::StepTime,
        ),
        Some((p50, p99)) => Finding::Fine(format!("p99 is {:.2} times p50", p99 / p50)),
    },
};

fn name(rank: &RankFacts) -> &str {
    rank.node.as_deref().unwrap_or("the node")
}

/// Threads of all ranks on each node, and all their CPUs; `None` unless all ranks are known.
fn nodes(facts: &Facts) -> Option<BTreeMap<&str, (u32, CpuList)>> {
    let mut nodes: BTreeMap<&str, (u32, Vec<u32>)> = BTreeMap::new();
    for rank in &facts.ranks {
        let (threads, cpus) = nodes.entry(name(rank)).or_default();
        *threads = threads.saturating_add(rank.threads?);
        cpus.extend(rank.cpus.as_ref()?.iter());
    }
    let lists = nodes.into_iter().map(|(node, (threads, cpus))| (node, (threads, CpuList::new(cpus))));
    Some(lists.collect()).filter(|nodes: &BTreeMap<_, _>| !nodes.is_empty())
}
