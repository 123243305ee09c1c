//! Do all ranks do the same work in the same time?

use super::{Advice, Basis, Change, Chart, Finding, Rule, ms};
use crate::report::sample::Part;
use switchyard_worker_contract::CpuList;

/// A rank is a straggler if it is slow in at least this share of the windows.
const HALF: f64 = 0.5;
/// Minimum mean excess of the slowest rank over the median, percent of the step.
const LEAST: f64 = 1.0;

pub(super) const STRAGGLER: Rule = Rule {
    id: "straggler",
    question: 9,
    threshold: "A rank computes > 5 % longer than the median of the ranks in at least half of the windows.",
    gain: "Its mean time over the median, measured: all others wait that long.",
    source: "ours",
    check: |facts| {
        // Stages of a pipeline do different work.
        if facts.world < 2 || facts.engine.as_ref().is_some_and(|engine| engine.pipeline.is_some()) {
            return Finding::NotApplicable;
        }
        if facts.ranks.len() < 2 {
            return Finding::Unknown("the steps of at least two ranks");
        }
        let slow =
            facts.ranks.iter().filter(|rank| rank.slow_share >= HALF && facts.percent(rank.over_median_ms) >= LEAST);
        let mut slow: Vec<_> = slow.collect();
        slow.sort_by(|a, b| b.over_median_ms.total_cmp(&a.over_median_ms).then(a.rank.cmp(&b.rank)));
        let Some(worst) = slow.first() else {
            return Finding::Fine("no rank is slower than the others for long".into());
        };
        // Once the worst rank is fixed, the next slowest determines the speed.
        let next = facts.ranks.iter().filter(|rank| rank.rank != worst.rank).map(|rank| rank.over_median_ms);
        let saved = worst.over_median_ms - next.fold(0.0, f64::max);
        let cpus = worst.cpus.as_ref();
        let place = [worst.node.clone(), cpus.map(|cpus: &CpuList| format!("CPUs {cpus}"))];
        let place: Vec<String> = place.into_iter().flatten().collect();
        let mut evidence = format!(
            "Rank {}{} computes {} ms longer than the median rank, and is > 5 % slower in {:.0} % of the windows.",
            worst.rank,
            if place.is_empty() { String::new() } else { format!(" ({})", place.join(", ")) },
            ms(worst.over_median_ms),
            100.0 * worst.slow_share
        );
        if slow.len() > 1 {
            evidence.push_str(&format!(" {} ranks are slow in all.", slow.len()));
        }
        let share = cpus.and_then(|cpus| {
            let shares = |rank: &&crate::report::facts::RankFacts| {
                rank.rank != worst.rank
                    && rank.node == worst.node
                    && rank.cpus.as_ref().is_some_and(|other| !other.intersection(cpus).is_empty())
            };
            facts.ranks.iter().find(shares)
        });
        let what = match share {
            Some(other) => format!("give ranks {} and {} CPUs of their own: they share some", worst.rank, other.rank),
            None => {
                "free its CPUs of other programs, look at their clock and temperature, or exclude the node".to_owned()
            }
        };
        Finding::Advice(Advice {
            evidence,
            changes: vec![Change::outside_manifest(what, saved.max(0.0), Basis::Measured)],
            urgent: false,
            parts: &[Part::Forward, Part::Backward, Part::Optimizer],
            chart: Chart::Skew,
        })
    },
};
