//! Is the all-reduce the bottleneck of the step, and what would shorten or hide it?

use super::{Advice, Basis, Change, Chart, Field, Finding, LOSS_MAY_CHANGE, Rule, ms, of_step};
use crate::report::facts::Facts;
use crate::report::sample::Part;
use serde_json::{Value, json};
use switchyard_core::units::{binary, counted, three_digits};
use switchyard_worker_contract::config::{self, Device, EngineConfig, Sharding, SyncPolicy, Transport, WireType};

/// Exposed communication above this share of the step is the bottleneck, percent.
const BOUND_BY: f64 = 10.0;
/// Exposed communication above this share makes the buckets worth checking, percent.
const WORTH: f64 = 3.0;
/// Approximate number of all-reduces that overlap divides a single one into.
const SPLIT: u64 = 8;
/// Mean bucket size below which latency matters, bytes.
const SMALL: u64 = 1 << 20;
/// Share of the best bandwidth below which the placement is mentioned.
const POOR: f64 = 0.8;
/// Latency of an exchange between two ranks, ms: through shared memory (flag and wake-up) and over
/// TCP (round trip).
const EXCHANGE_MS: (f64, f64) = (0.013, 0.024);

/// Advised optimizer steps between two averages; ours. DiLoCo takes 500 with an outer optimizer
/// (arXiv:2311.08105).
const LOCAL_STEPS: u64 = 16;
/// Advised fraction of gradients to send (Aji and Heafield 2017, Sparse Communication for
/// Distributed Gradient Descent, arXiv:1704.05021).
const TOP_K: f64 = 0.01;

/// Upper bound of `batchMerge`.
pub(super) const MAX_MERGE: u64 = 4096;

const PARTS: &[Part] = &[Part::Communication, Part::Gather];

/// The exposed time, if there is anything to reduce.
fn exposed(facts: &Facts) -> Option<f64> {
    (facts.reducing_ranks() > 1).then_some(facts.step.exposed())
}

fn advice(evidence: String, changes: Vec<Change>) -> Finding {
    Advice::about(PARTS, Chart::AllReduce, evidence, changes.into_iter().map(Some))
}

pub(super) const BOUND: Rule = Rule {
    id: "communication-bound",
    question: 8,
    threshold: "The slowest rank waits ≥ 10 % of the step for reductions after backward.",
    gain: "Of each change by itself, from the measured time of one all-reduce: half of it with 16 bits on a network, half of the wait with twice the batchMerge, what backward can hide with overlap; on a network, all but a sixteenth of it with 16 local steps, all but its share of the bytes and the time of an optimizer step with top-k, nine tenths of the wait on a network ten times as fast.",
    source: "kineto (10 %); reachable = bytes / bandwidth: TensorFlow's GPU guide; busbw below 80 % of predicted: ours",
    check: |facts| {
        let Some(exposed) = exposed(facts) else { return Finding::NotApplicable };
        let predicted = facts
            .reduce_alone_ms
            .map_or_else(String::new, |alone| format!(", {} ms when nothing else runs", ms(alone)));
        if facts.percent(exposed) < BOUND_BY {
            return Finding::Fine(format!(
                "all-reduce wait {} ms ({:.1} %){predicted}",
                ms(exposed),
                facts.percent(exposed)
            ));
        }
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        let mut evidence = format!("{} are exposed all-reduce{predicted}.", of_step(facts, exposed));
        if let Some(reduce) = facts.reduce {
            evidence.push_str(&format!(" It reduces {}.", binary(reduce.bytes as u64)));
        }
        if let (Some(measured), Some((best, _))) = (bus_bandwidth(facts), facts.bus_bandwidth)
            && measured < POOR * best
        {
            let gigabytes = |rate: f64| three_digits(rate / 1e9);
            evidence.push_str(&format!(" {} GB/s, predicted {}.", gigabytes(measured), gigabytes(best)));
        }
        advice(evidence, changes(facts, engine, exposed))
    },
};

fn changes(facts: &Facts, engine: &EngineConfig, exposed: f64) -> Vec<Change> {
    let reach = facts.reachable_reduce_ms();
    let overlap = &engine.overlap;
    let merge = Field::number("engine.batchMerge", engine.batch_merge, engine.batch_merge.saturating_mul(2), MAX_MERGE);
    let merge = merge.map(|merge| {
        let fields = [merge].into_iter().chain(Field::steps_for_twice_the_batch(engine.length));
        Change::set(fields, exposed / 2.0, Basis::Modelled).with_remark(LOSS_MAY_CHANGE)
    });
    let mut changes: Vec<Change> = merge.into_iter().collect();
    // Two lanes keep a network busy while one of them waits; shared memory has no such gap.
    let has_servers = engine.parameter_server.is_some();
    if overlap.communicators == 1 && !has_servers && between_hosts(facts) {
        let two = Field::number("engine.overlap.communicators", overlap.communicators, 2_u32, 8);
        changes.extend(two.map(|two| Change::set([two], None, Basis::Guess)));
    }
    // Local steps, top-k and parameter servers refuse or do not need it.
    let is_whole = engine.sync == SyncPolicy::EveryStep && engine.compression.is_none() && !has_servers;
    if overlap.wire_type == WireType::Fp32 && is_whole {
        // Within a host, gradients always travel in f32.
        let saved = match facts.transport {
            Some(Transport::Tcp) => reach.map(|reach| (reach / 2.0, Basis::Modelled)),
            Some(Transport::Hierarchical) => reach.map(|reach| (reach / 4.0, Basis::Guess)),
            _ => None,
        };
        changes.extend(saved.map(|(saved, basis)| {
            Change::set([Field::word("engine.overlap.wireType", "FP16")], saved.min(exposed), basis)
        }));
    }
    let all: u64 = facts.bucket_bytes.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes));
    if let (Some(reach), [_, .., last]) = (reach, facts.bucket_bytes.as_slice()) {
        // The last bucket completes with the last gradient, so it is never hidden.
        let hidden = reach * (1.0 - *last as f64 / all.max(1) as f64);
        let hidden = hidden.min(facts.step[Part::Backward]).min(exposed);
        if !overlap.enabled {
            changes.push(Change::set([Field::word("engine.overlap.mode", "Enabled")], hidden, Basis::Modelled));
        } else if overlap.sync_all_reduce {
            let asynchronous = Field::word("engine.overlap.syncAllReduce", "Disabled");
            changes.push(Change::set([asynchronous], hidden, Basis::Modelled));
        }
    }
    changes.sort_by(|a, b| b.gain_ms.unwrap_or(-1.0).total_cmp(&a.gain_ms.unwrap_or(-1.0)));
    // More daring, whatever they gain.
    changes.extend(local_steps(facts, engine, exposed));
    changes.extend(top_k(facts, engine, exposed));
    if between_hosts(facts) {
        let faster = "a network with ten times the rate, or all ranks on one host";
        changes.push(Change::outside_manifest(faster, exposed * 0.9, Basis::Modelled));
    }
    changes
}

fn between_hosts(facts: &Facts) -> bool {
    matches!(facts.transport, Some(Transport::Tcp | Transport::Hierarchical))
}

/// Whether the engine can send less than every gradient of every step.
fn may_send_less(facts: &Facts, engine: &EngineConfig) -> bool {
    between_hosts(facts)
        && engine.device == Device::Cpu
        && engine.sync == SyncPolicy::EveryStep
        && engine.compression.is_none()
        && engine.sharding == Sharding::None
        && engine.parameter_server.is_none()
        && engine.pipeline.is_none()
}

/// Averages weights every few steps. Backward hides none of the average.
fn local_steps(facts: &Facts, engine: &EngineConfig, exposed: f64) -> Option<Change> {
    let reach = facts.reachable_reduce_ms()?;
    let saved = exposed - reach / LOCAL_STEPS as f64;
    let is_possible = may_send_less(facts, engine) && engine.overlap.wire_type != WireType::Fp16 && saved > 0.0;
    is_possible.then(|| {
        let fields =
            [Field::word("engine.sync.type", "Local"), Field::value("engine.sync.everySteps", 1, json!(LOCAL_STEPS))];
        Change::set(fields, saved, Basis::Modelled).with_remark(LOSS_MAY_CHANGE)
    })
}

/// Sends the largest gradients. An entry has 8 bytes and reaches every rank once; in an all-reduce,
/// 4 bytes of each gradient travel twice, divided among the ranks. The selection passes over all
/// gradients, as the optimizer does, so it is assumed to take as long. Adam's divisors are too
/// small for rarely sent gradients.
fn top_k(facts: &Facts, engine: &EngineConfig, exposed: f64) -> Option<Change> {
    let reach = facts.reachable_reduce_ms()?;
    let saved = exposed - reach * TOP_K * f64::from(facts.world) - facts.step[Part::Optimizer];
    let suits = engine.overlap.wire_type == WireType::Fp32 && matches!(engine.optimizer.rule, config::Rule::Sgd(_));
    let is_possible = may_send_less(facts, engine) && suits && saved > 0.0;
    is_possible.then(|| {
        let fields = [
            Field::word("engine.communication.compression.type", "TopK"),
            Field::word("engine.communication.compression.ratio", &TOP_K.to_string()),
        ];
        Change::set(fields, saved, Basis::Guess).with_remark(LOSS_MAY_CHANGE)
    })
}

/// Bus bandwidth of the all-reduce, bytes per second, as defined by nccl-tests (PERFORMANCE.md).
pub(in crate::report) fn bus_bandwidth(facts: &Facts) -> Option<f64> {
    let reduce = facts.reduce.filter(|reduce| reduce.busy_ms > 0.0 && facts.reducing_ranks() > 1)?;
    let ranks = f64::from(facts.reducing_ranks());
    Some(reduce.bytes * 2.0 * (ranks - 1.0) / ranks / (reduce.busy_ms / 1e3))
}

pub(super) const ONE_BIG: Rule = Rule {
    id: "one-big-all-reduce",
    question: 8,
    threshold: "All gradients are one all-reduce of ≥ 2 MiB because overlap is off, and ≥ 3 % of the step is exposed.",
    gain: "7/8 of the measured all-reduce, as far as backward can hide it: about an eighth is left when backward ends.",
    source: "PaddlePaddle's overlap guide; TensorFlow's GPU guide",
    check: |facts| {
        let Some(exposed) = exposed(facts) else { return Finding::NotApplicable };
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        let &[bytes] = facts.bucket_bytes.as_slice() else {
            return match facts.bucket_bytes.len() {
                0 => Finding::Unknown("the sizes of the all-reduces"),
                count => Finding::Fine(counted(count as u64, "all-reduce")),
            };
        };
        let off = !engine.overlap.enabled || engine.overlap.sync_all_reduce;
        if facts.percent(exposed) < WORTH || bytes < 2 * SMALL || !off {
            return Finding::Fine(format!("one all-reduce of {}, but little waits for it", binary(bytes)));
        }
        let Some(reach) = facts.reachable_reduce_ms() else { return Finding::Unknown("the time of an all-reduce") };
        let saved = (reach * (1.0 - 1.0 / SPLIT as f64)).min(facts.step[Part::Backward]).min(exposed);
        let fields =
            [Field::word("engine.overlap.mode", "Enabled"), Field::word("engine.overlap.syncAllReduce", "Disabled")];
        let evidence = format!(
            "All gradients are one all-reduce of {}, which starts when backward ends: {} are exposed.",
            binary(bytes),
            of_step(facts, exposed)
        );
        advice(evidence, vec![Change::set(fields, saved, Basis::Modelled)])
    },
};

pub(super) const MANY_SMALL: Rule = Rule {
    id: "many-small-all-reduces",
    question: 8,
    threshold: "`overlap.bucketSizeMiB` limits all-reduces to 1 MiB or less in the mean, and ≥ 3 % of the step is exposed.",
    gain: "The exchanges that fewer buckets save, times what one usually takes.",
    source: "TensorFlow's GPU guide (one all-reduce per step and group is the ideal); PaddlePaddle's overlap guide (161 -> 5); 1 MiB is ours",
    check: |facts| {
        let Some(exposed) = exposed(facts) else { return Finding::NotApplicable };
        let Some(engine) = &facts.engine else { return Finding::Unknown("the engine configuration") };
        let count = facts.bucket_bytes.len() as u64;
        let bytes = facts.bucket_bytes.iter().fold(0_u64, |sum, bytes| sum.saturating_add(*bytes));
        if count == 0 {
            return Finding::Unknown("the sizes of the all-reduces");
        }
        let limit = engine.overlap.bucket_size_mib.filter(|_| count > 1 && bytes / count <= SMALL);
        // Parameter servers have buckets of their own size.
        let limit = limit.filter(|_| engine.parameter_server.is_none());
        let Some(limit) = limit.filter(|_| facts.percent(exposed) >= WORTH) else {
            return Finding::Fine(format!("{} for {}", counted(count, "all-reduce"), binary(bytes)));
        };
        let fewer = (bytes / (4 * SMALL)).max(2).min(count);
        let exchange = if facts.transport == Some(Transport::Shm) { EXCHANGE_MS.0 } else { EXCHANGE_MS.1 };
        let each = exchange * 2.0 * f64::from(facts.reducing_ranks() - 1);
        let saved = ((count - fewer) as f64 * each).min(exposed);
        let evidence = format!(
            "{} of {} in the mean in each step; {} are exposed.",
            counted(count, "all-reduce"),
            binary(bytes / count),
            of_step(facts, exposed)
        );
        // Without a limit, the worker chooses the size itself.
        let free = Field::value("engine.overlap.bucketSizeMiB", limit, Value::Null);
        advice(evidence, vec![Change::set([free], saved, Basis::Guess)])
    },
};

pub(super) const PLACEMENT: Rule = Rule {
    id: "placement",
    question: 8,
    threshold: "≥ 10 % of the step is exposed, and the placement was predicted to have < 80 % of the best possible bus bandwidth.",
    gain: "The exposed time times the missing share of the bandwidth.",
    source: "ours",
    check: |facts| {
        let Some(exposed) = exposed(facts) else { return Finding::NotApplicable };
        let Some((predicted, best)) = facts.bus_bandwidth else {
            return Finding::Unknown("the predicted bandwidth of the placement");
        };
        if facts.percent(exposed) < BOUND_BY || predicted >= POOR * best {
            return Finding::Fine(format!("{:.0} % of the best possible bandwidth", 100.0 * predicted / best));
        }
        let saved = exposed * (1.0 - predicted / best);
        let evidence = format!(
            "{} are exposed; the nodes were predicted to give {} GB/s, the best ones would {}.",
            of_step(facts, exposed),
            three_digits(predicted / 1e9),
            three_digits(best / 1e9)
        );
        advice(
            evidence,
            vec![Change::outside_manifest(
                "wait for the better nodes: a domain with mode Required in `topologyPolicy.domains`",
                saved,
                Basis::Modelled,
            )],
        )
    },
};
