//! Curves over the steps (loss, throughput, parts, ranks), the all-reduce, and the stages of a
//! pipeline.

use super::advice::bus_bandwidth;
use super::facts::Facts;
use super::fold::{Attempt, Fold, Spread};
use super::model::{
    AllReduce, Loss, LossWindow, Pipeline, Point, RankSkew, Restart, SkewRow, StageWait, StepTime, StepWindow,
    Throughput, part_times, round4,
};
use super::record::Record;
use super::sample::{Part, Parts, plausible};
use super::setting;
use super::skew::Skew;
use std::collections::BTreeMap;
use switchyard_worker_contract::config::{Precision, Sharding, Transport, WireType, idle_share};

/// Most rows in the skew chart. More ranks are grouped by node, and more nodes into groups of
/// several.
const MAX_ROWS: usize = 64;
/// Share of the windows over which curves are smoothed.
const SMOOTHED_SHARE: f64 = 1.0 / 20.0;
/// Most marks in a chart.
const MAX_MARKS: usize = 60;

/// The rank whose curves were kept.
fn lead(record: &Record) -> Option<(u32, &Fold)> {
    record.ranks().iter().find(|(_, fold)| fold.curves.is_some()).map(|(rank, fold)| (*rank, fold))
}

pub(super) fn loss(record: &Record) -> Option<Loss> {
    let curves = lead(record)?.1.curves.as_ref()?;
    let known: Vec<(u64, &Spread, f64)> =
        curves.loss.iter().filter_map(|(step, spread)| Some((step, spread, spread.mean()?))).collect();
    let means: Vec<f64> = known.iter().map(|(_, _, mean)| *mean).collect();
    let window = |((step, spread, mean), smoothed): (&(u64, &Spread, f64), f64)| LossWindow {
        step: *step,
        least: round4(spread.least),
        most: round4(spread.most),
        mean: round4(*mean),
        smoothed: round4(smoothed),
    };
    let windows: Vec<LossWindow> = known.iter().zip(smoothed(&means)).map(window).collect();
    let validation = record.events.evaluations.iter();
    let point = |(step, spread): (u64, &Spread)| {
        // Place the loss at the end of its window, after most of the training that it reflects.
        Some(Point { step: step + record.events.evaluations.width() - 1, value: round4(spread.mean()?) })
    };
    let validation: Vec<Point> = validation.filter_map(point).collect();
    let checkpoints: Vec<u64> =
        curves.checkpoints.iter().filter(|(_, count)| count.0 > 0).map(|(step, _)| step).collect();
    let every = checkpoints.len().div_ceil(MAX_MARKS).max(1);
    let restart = |attempt: &Attempt| Restart {
        attempt: attempt.number,
        step: attempt.first_step,
        repeated_steps: attempt.repeated,
    };
    (!windows.is_empty() || !validation.is_empty()).then(|| Loss {
        window_steps: curves.loss.width(),
        windows,
        validation,
        checkpoints: checkpoints.into_iter().step_by(every).collect(),
        restarts: curves.attempts.iter().skip(1).take(MAX_MARKS).map(restart).collect(),
        bigram: record
            .documents
            .inspection
            .as_ref()
            .and_then(|inspection| plausible(inspection.bigram_nats?))
            .map(round4),
    })
}

/// Mean of a forward and a backward exponential average, because a forward one alone lags behind a
/// falling loss.
fn smoothed(means: &[f64]) -> Vec<f64> {
    let weight = (2.0 / (means.len() as f64 * SMOOTHED_SHARE + 1.0)).min(1.0);
    let mean = |state: &mut Option<f64>, next: &f64| {
        let before = state.unwrap_or(*next);
        *state = Some(before + weight * (next - before));
        *state
    };
    let forward = means.iter().scan(None, mean);
    let mut backward: Vec<f64> = means.iter().rev().scan(None, mean).collect();
    backward.reverse();
    forward.zip(backward).map(|(a, b)| (a + b) / 2.0).collect()
}

pub(super) fn throughput(record: &Record) -> Option<Throughput> {
    let (_, fold) = lead(record)?;
    let items = record.documents.inspection.as_ref().map(|inspection| inspection.items_per_step as f64);
    let items = items.filter(|items| *items > 0.0);
    let word = items.and_then(|_| setting::item(record)).map_or("steps", |item| item.word());
    let windows = fold.windows.iter().filter_map(|(step, sums)| {
        let ms = sums.parts.total();
        let rate = items.unwrap_or(1.0) * sums.steps as f64 * 1e3 / ms;
        (ms > 0.0).then(|| Point { step, value: round4(rate) })
    });
    let windows: Vec<Point> = windows.collect();
    (!windows.is_empty()).then(|| Throughput { unit: format!("{word}/s"), windows })
}

pub(super) fn step_time(record: &Record, facts: Option<&Facts>) -> Option<StepTime> {
    let (lead_rank, lead) = lead(record)?;
    // Show the parts of the critical rank.
    let rank = facts.map_or(lead_rank, |facts| facts.ranks[facts.critical].rank);
    let fold = record.ranks().get(&rank)?;
    let mut times = lead.curves.as_ref()?.step_times.clone();
    let mut windows = fold.windows.clone();
    let width = times.width().max(windows.width());
    times.widen_to(width);
    windows.widen_to(width);
    let times: Vec<_> =
        times.iter().map(|(_, histogram)| (histogram.quantile(0.5), histogram.quantile(0.99))).collect();
    let exact = record.has_steps();
    let windows = windows.iter().enumerate().filter_map(|(index, (step, sums))| {
        let (p50, p99) = times.get(index).copied().filter(|_| exact).unwrap_or_default();
        Some(StepWindow { step, parts: part_times(&sums.mean()?), p50_ms: p50.map(round4), p99_ms: p99.map(round4) })
    });
    Some(StepTime { rank, window_steps: width, windows: windows.collect() })
}

pub(super) fn skew(record: &Record, skew: &Skew) -> Option<RankSkew> {
    if skew.ranks.len() < 2 {
        return None;
    }
    let by_node = skew.ranks.len() > MAX_ROWS;
    let mut groups: Vec<(String, Vec<usize>)> = Vec::new();
    for (index, rank) in skew.ranks.iter().enumerate() {
        let node = record.planned(*rank).map(|(node, _)| node.node_name.clone());
        let label =
            if by_node { node.unwrap_or_else(|| format!("ranks {}", rank / 8 * 8)) } else { format!("rank {rank}") };
        match groups.last_mut().filter(|(last, _)| *last == label) {
            Some((_, members)) => members.push(index),
            None => groups.push((label, vec![index])),
        }
    }
    let each = groups.len().div_ceil(MAX_ROWS).max(1);
    let rows = groups.chunks(each).map(|groups| {
        let label = match groups {
            [(only, _)] => only.clone(),
            several => format!("{} … {}", several[0].0, several[several.len() - 1].0),
        };
        let members = || groups.iter().flat_map(|(_, members)| members).copied();
        let of = |index: usize| skew.of(skew.ranks[index]).unwrap_or_default();
        let over_ms = (0..skew.steps.len()).map(|window| {
            let worst = members().filter_map(|rank| skew.cells[rank][window]).map(|(over, _)| over).reduce(f64::max);
            worst.map(round4)
        });
        SkewRow {
            label,
            slow_percent: round4(100.0 * members().map(|rank| of(rank).0).fold(0.0, f64::max)),
            mean_over_ms: round4(members().map(|rank| of(rank).1).reduce(f64::max).unwrap_or_default()),
            over_ms: over_ms.collect(),
        }
    });
    let mut compute: Vec<f64> =
        record.ranks().values().filter_map(|fold| fold.typical().mean()).map(|mean| mean.compute()).collect();
    compute.sort_by(f64::total_cmp);
    Some(RankSkew {
        by: if by_node { "node" } else { "rank" }.into(),
        window_steps: skew.width,
        steps: skew.steps.clone(),
        median_ms: round4(compute.get(compute.len().saturating_sub(1) / 2).copied().unwrap_or_default()),
        rows: rows.collect(),
    })
}

/// Bytes that a 32-bit value has on the wire, divided by 4.
fn wire_share(facts: &Facts) -> f64 {
    let Some(engine) = &facts.engine else { return 1.0 };
    let share = |is_narrow: bool| if is_narrow { 0.5 } else { 1.0 };
    // Within a host, gradients always travel in 32 bits.
    let is_narrow = engine.overlap.wire_type != WireType::Fp32 && facts.transport != Some(Transport::Shm);
    let gradients = share(is_narrow);
    if engine.sharding == Sharding::None {
        return gradients;
    }
    // Weights travel back, with mixed precision in 16 bits, except for the few of norms and biases.
    let weights = share(matches!(engine.precision, Precision::Amp(_)));
    (gradients + weights) / 2.0
}

/// Time of steps without checkpoints and what happens between steps, ms.
fn within_steps(step: &Parts) -> f64 {
    step.total() - step[Part::Checkpoint] - step[Part::Other]
}

pub(super) fn pipeline(facts: &Facts) -> Option<Pipeline> {
    let engine = facts.engine.as_ref()?;
    let pipeline = engine.pipeline?;
    let mean = |ranks: &[&Parts], of: fn(&Parts) -> f64| {
        ranks.iter().map(|step| of(step)).sum::<f64>() / ranks.len().max(1) as f64
    };
    let idle_percent = |ranks: &[&Parts]| {
        let time = mean(ranks, within_steps);
        if time > 0.0 { round4(100.0 * mean(ranks, |step| step[Part::Pipeline]) / time) } else { 0.0 }
    };
    let mut by_stage: BTreeMap<u32, Vec<&Parts>> = BTreeMap::new();
    for rank in &facts.ranks {
        by_stage.entry(pipeline.place(rank.rank, facts.world).stage).or_default().push(&rank.step);
    }
    let wait = |(stage, ranks): (u32, Vec<&Parts>)| StageWait {
        stage,
        compute_ms: round4(mean(&ranks, Parts::compute)),
        wait_ms: round4(mean(&ranks, |step| step[Part::Pipeline])),
        idle_percent: idle_percent(&ranks),
    };
    Some(Pipeline {
        stages: pipeline.stages,
        pipelines: facts.reducing_ranks(),
        micro_batches: engine.batch_merge,
        idle_percent: idle_percent(&facts.ranks.iter().map(|rank| &rank.step).collect::<Vec<_>>()),
        least_idle_percent: round4(100.0 * idle_share(pipeline.stages, engine.batch_merge)),
        waits: by_stage.into_iter().map(wait).collect(),
    })
}

pub(super) fn all_reduce(facts: &Facts) -> Option<AllReduce> {
    if facts.reducing_ranks() < 2 {
        return None;
    }
    let exposed = facts.step.exposed();
    let reduce = facts.reduce.filter(|reduce| reduce.busy_ms > 0.0);
    let hidden = reduce.map(|reduce| (reduce.busy_ms - exposed).max(0.0));
    let buckets = &facts.bucket_bytes;
    let gradients = buckets.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes)) as f64;
    let bytes =
        reduce.map(|reduce| reduce.bytes).filter(|bytes| *bytes > 0.0).or((gradients > 0.0).then_some(gradients));
    // The ranks of a stage reduce its gradients.
    let stages = f64::from(facts.engine.as_ref().map_or(1, |engine| engine.stages()));
    let ranks = f64::from(facts.reducing_ranks());
    let alone = facts.reduce_alone_ms.zip(bytes).map(|(ms, bytes)| bytes * 2.0 * (ranks - 1.0) / ranks / (ms * 1e6));
    // A rank pushes every gradient once; the weights come back.
    let servers = facts.engine.as_ref().and_then(|engine| engine.parameter_server);
    let on_ring = if servers.is_some() { 1.0 } else { 2.0 * (ranks - 1.0) / ranks };
    let parameters = facts.inspection.as_ref().map(|inspection| inspection.parameters as f64 / stages);
    Some(AllReduce {
        transport: facts.transport.map(|transport| match servers {
            Some(servers) => format!("{}, to {servers}", transport.word()),
            None => transport.word().into(),
        }),
        channels: facts.channels.clone(),
        algorithms: facts.algorithms.clone(),
        bucket_bytes: buckets.iter().copied().take(1024).collect(),
        bytes: bytes.map(round4),
        sent_bytes: bytes.map(|bytes| round4(bytes * on_ring * wire_share(facts))),
        sent_bytes_in_full: parameters.map(|parameters| round4(4.0 * parameters * on_ring)),
        left_bytes: reduce.and_then(|reduce| reduce.left_bytes).map(round4),
        alone_ms: facts.reduce_alone_ms.map(round4),
        under_way_ms: reduce.map(|reduce| round4(reduce.busy_ms)),
        exposed_ms: round4(exposed),
        hidden_ms: hidden.map(round4),
        overlap_percent: reduce.zip(hidden).map(|(reduce, hidden)| round4(100.0 * hidden / reduce.busy_ms)),
        bus_gigabytes_per_second: bus_bandwidth(facts).map(|rate| round4(rate / 1e9)),
        alone_gigabytes_per_second: alone.map(round4),
        predicted_gigabytes_per_second: facts.bus_bandwidth.map(|(predicted, _)| round4(predicted / 1e9)),
    })
}
