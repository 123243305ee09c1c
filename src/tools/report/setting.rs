//! What does not change over the steps: result, memory, places, events, configuration.

use super::documents::shown;
use super::events::Told;
use super::facts::Facts;
use super::markup::shortened;
use super::model::{Amount, GpuSeen, Happened, Memory, Placed, RankPlace, Setting, Variable, tidy};
use super::record::Record;
use jiff::Timestamp;
use std::collections::BTreeMap;
use switchyard_core::units::rank_list;
use switchyard_core::units::{binary, counted, grouped};
use switchyard_worker_contract::event::{GpuReport, Item};

/// Ranks that are listed.
const MOST_RANKS: u32 = 256;
/// Events that are listed.
const MOST_EVENTS: usize = 200;
/// Variables that are listed.
const MOST_VARIABLES: usize = 100;
/// Causes of slow clocks that are listed: as many as there are.
const MOST_CAUSES: usize = 4;
/// The condition with the stage of a job, and its reason while it trains.
const SUCCEEDED: &str = "Succeeded";
const RUNNING: &str = "Running";
/// Bytes of a text of somebody else.
const TEXT: usize = 500;

pub(super) fn job(record: &Record) -> String {
    let name = record.documents.plan.as_ref().map(|plan| plan.job.clone()).filter(|name| !name.is_empty());
    let manifest = || {
        let manifest = record.documents.manifest.as_ref()?;
        Some(manifest.get("metadata")?.get("name")?.as_str()?.to_owned())
    };
    shortened(&name.or_else(manifest).unwrap_or_else(|| "(unknown job)".into()), TEXT)
}

pub(super) fn item(record: &Record) -> Option<Item> {
    record.documents.inspection.as_ref().map(|inspection| inspection.item).or(record.events.item)
}

/// How the run ended, and why.
pub(super) fn result(record: &Record) -> (&'static str, String) {
    let conditions = record.documents.job.iter().flat_map(|job| &job.conditions);
    let holds = |kind: &str| {
        let held = |condition: &&super::documents::Condition| condition.status == "True" && condition.kind == kind;
        conditions.clone().find(held).map(|condition| {
            shortened(if condition.message.is_empty() { &condition.reason } else { &condition.message }, TEXT)
        })
    };
    if let Some(message) = holds("Complete") {
        return ("complete", message);
    }
    if let Some(message) = holds("Failed") {
        return ("failed", message);
    }
    if let Some(message) = holds("Suspended") {
        return ("stopped", message);
    }
    match (&record.events.finished, record.events.failures.last()) {
        (Some(finished), _) => ("complete", format!("{} steps done", grouped(finished.step))),
        (None, Some(told)) => ("failed", shortened(&cause(told), TEXT)),
        (None, None) => unfinished(record),
    }
}

/// A run without an end. A job in a cluster goes on, and its status says how far it is; the directory of a run that was killed says "Running", too,
/// but has a plan.
fn unfinished(record: &Record) -> (&'static str, String) {
    let conditions = record.documents.job.iter().flat_map(|job| &job.conditions);
    let stage = conditions.filter(|_| record.documents.plan.is_none()).find(|condition| condition.kind == SUCCEEDED);
    match stage {
        Some(stage) if stage.reason == RUNNING => ("running", shortened(&stage.message, TEXT)),
        Some(stage) => ("unfinished", shortened(&format!("{}: {}", stage.reason, stage.message), TEXT)),
        None => ("unfinished", "the run directory does not record how it ended".into()),
    }
}

fn cause(told: &Told) -> String {
    let failure = &told.failure;
    let during = if failure.during.is_empty() { String::new() } else { format!(" during {}", failure.during) };
    format!("rank {}: {}{during}", failure.origin_rank, failure.cause)
}

pub(super) fn memory(record: &Record, facts: Option<&Facts>) -> Option<Memory> {
    let inspection = record.documents.inspection.as_ref()?;
    let memory = inspection.memory;
    let kinds = [
        ("weights", memory.weights),
        ("gradients", memory.gradients),
        ("optimizer", memory.optimizer),
        ("activations", memory.activations),
        ("input", memory.input),
    ];
    let total = kinds.iter().fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let bound = facts.and_then(|facts| facts.memory.as_ref());
    Some(Memory {
        kinds: kinds.map(|(kind, bytes)| Amount { kind: kind.into(), bytes }).to_vec(),
        total_bytes: total,
        fp32_bytes: inspection.fp32_memory_bytes,
        gpu_bytes: inspection.gpu_memory.map(|memory| memory.total()),
        gpu_fp32_bytes: inspection.gpu_fp32_memory_bytes,
        ranks_per_node: bound.map(|bound| bound.ranks),
        bound: bound.map(|bound| bound.bound.into()),
        capacity_bytes: bound.map(|bound| bound.capacity),
    })
}

pub(super) fn placement(record: &Record, facts: Option<&Facts>) -> Option<Placed> {
    let plan = record.documents.plan.as_ref();
    let world = record.world();
    if plan.is_none() && record.events.ready.is_empty() {
        return None;
    }
    let status = record.documents.job.as_ref().and_then(|job| job.placement.as_ref());
    let reason = plan.map(|plan| plan.reason.clone()).filter(|reason| !reason.is_empty());
    let known: BTreeMap<u32, f64> =
        facts.iter().flat_map(|facts| &facts.ranks).map(|rank| (rank.rank, rank.step.compute())).collect();
    let rank = |rank: u32| {
        let ready = record.events.ready.get(&rank);
        let planned = record.planned(rank);
        let devices = planned.map(|(_, process)| process.devices.join(",")).filter(|devices| !devices.is_empty());
        let kernel = ready.map(|ready| ready.kernel.clone());
        let device: Vec<String> = [devices, kernel].into_iter().flatten().collect();
        RankPlace {
            rank,
            node: planned.map(|(node, _)| node.node_name.clone()).or(ready.map(|ready| ready.host.clone())),
            cpus: ready.map(|ready| ready.cpus.clone()).or(planned.and_then(|(_, process)| process.cpus.clone())),
            numa_nodes: planned.map(|(_, process)| process.numa_nodes.clone()).unwrap_or_default(),
            threads: ready.map(|ready| ready.threads).or(planned.and_then(|(_, process)| process.threads)),
            device: (!device.is_empty()).then(|| device.join(", ")),
            compute_ms: known.get(&rank).copied().map(tidy),
        }
    };
    Some(Placed {
        reason: shortened(&reason.or(status.map(|status| status.reason.clone())).unwrap_or_default(), 4 * TEXT),
        warnings: plan
            .map(|plan| plan.warnings.iter().take(20).map(|text| shortened(text, TEXT)).collect())
            .unwrap_or_default(),
        limited_by: status.and_then(|status| status.limited_by.clone()),
        ranks: (0..world.min(MOST_RANKS)).map(rank).collect(),
        more_ranks: world.saturating_sub(MOST_RANKS),
        gpus: record.events.gpus.values().filter(|gpu| gpu.rank < MOST_RANKS).map(gpu_seen).collect(),
    })
}

fn gpu_seen(gpu: &GpuReport) -> GpuSeen {
    let slowed = gpu.slowed.iter().take(MOST_CAUSES);
    GpuSeen {
        rank: gpu.rank,
        bus: shortened(&gpu.bus, TEXT),
        seconds: tidy(gpu.seconds),
        highest_celsius: gpu.highest_celsius,
        slowed: slowed.map(|one| format!("{} {:.0} %", one.by.label(), gpu.slowed_percent(one.by))).collect(),
        pcie_lanes: gpu.pcie.map(|width| (width.lanes, width.most)),
        corrected_errors: gpu.corrected_errors,
        uncorrected_errors: gpu.uncorrected_errors,
        xids: gpu.xids.iter().copied().take(GpuReport::MAX_XIDS).collect(),
    }
}

/// What happened, in order; the same from several ranks is one line.
pub(super) fn events(record: &Record) -> Vec<Happened> {
    let text = |time: Option<Timestamp>| time.map(|time| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    let mut list: Vec<(u32, Option<Timestamp>, Happened)> = Vec::new();
    let mut push = |attempt: u32, time: Option<Timestamp>, what: String, bad: bool| {
        list.push((attempt, time, Happened { time: text(time), attempt, text: what, bad }));
    };
    for (attempt, group) in &record.events.groups {
        if !group.ready.is_empty() {
            let ranks = shortened(&rank_list(group.ready.iter().copied()), TEXT);
            push(*attempt, group.ready_time, format!("ranks {ranks} are ready"), false);
        }
        if group.saved > 0 {
            let text =
                format!("{} saved, the last of step {}", counted(group.saved, "checkpoint"), grouped(group.last_saved));
            push(*attempt, group.checkpoint_time, text, false);
        }
        if group.unsaved > 0 {
            let cause = shortened(&group.unsaved_cause, TEXT);
            push(
                *attempt,
                group.checkpoint_time,
                format!("{} not saved: {cause}", counted(group.unsaved, "checkpoint")),
                true,
            );
        }
        if !group.finished.is_empty() {
            let ranks = shortened(&rank_list(group.finished.iter().copied()), TEXT);
            push(*attempt, group.finished_time, format!("ranks {ranks} have finished"), false);
        }
    }
    let mut failures: BTreeMap<(u32, String), (Option<Timestamp>, Vec<u32>)> = BTreeMap::new();
    for told in &record.events.failures {
        let (time, ranks) = failures.entry((told.attempt, cause(told))).or_insert((told.time, Vec::new()));
        *time = (*time).min(told.time).or(*time);
        ranks.push(told.failure.rank);
    }
    for ((attempt, cause), (time, mut ranks)) in failures {
        ranks.sort_unstable();
        let by = format!("{} (reported by ranks {})", shortened(&cause, TEXT), shortened(&rank_list(ranks), TEXT));
        push(attempt, time, by, true);
    }
    let lead = record.ranks().values().find_map(|fold| fold.curves.as_ref());
    for attempt in lead.iter().flat_map(|curves| &curves.attempts).skip(1) {
        let text = format!(
            "attempt {} goes on at step {}; {} done again",
            attempt.number,
            grouped(attempt.first_step),
            counted(attempt.repeated, "step")
        );
        push(attempt.number, None, text, false);
    }
    list.sort_by_key(|(attempt, time, _)| (*attempt, time.is_none(), *time));
    let left_out = list.len().saturating_sub(MOST_EVENTS) as u64 + record.events.more_failures;
    let mut events: Vec<Happened> = list.into_iter().map(|(_, _, event)| event).take(MOST_EVENTS).collect();
    if left_out > 0 {
        let text = format!("{} more events are in events.jsonl", grouped(left_out));
        events.push(Happened { text, ..Happened::default() });
    }
    events
}

pub(super) fn setting(record: &Record) -> Setting {
    let process = record.documents.plan.iter().flat_map(|plan| &plan.nodes).flat_map(|node| &node.processes).next();
    let machine = record.documents.machine.as_ref().map(|machine| {
        let cores = machine.cpus.cores.map(|cores| counted(u64::from(cores), "core"));
        let parts = [machine.cpus.model.clone(), cores, machine.memory_bytes.map(binary)];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    });
    Setting {
        manifest: record.documents.manifest.clone(),
        engine: record.documents.engine.as_ref().and_then(|engine| serde_json::to_value(engine).ok()),
        environment: process
            .iter()
            .flat_map(|process| &process.env)
            .take(MOST_VARIABLES)
            .map(|entry| Variable {
                name: shortened(&entry.name, TEXT),
                value: shortened(&shown(&entry.name, &entry.value), TEXT),
                reason: shortened(&entry.reason, TEXT),
            })
            .collect(),
        machine: machine.filter(|machine| !machine.is_empty()),
        data: record.documents.inspection.as_ref().map(|inspection| {
            format!(
                "{}, {}; {} steps in an epoch; {} {} for validation",
                counted(inspection.files, "file"),
                binary(inspection.bytes),
                grouped(inspection.steps_per_epoch),
                grouped(inspection.validation_items),
                inspection.item.word()
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Document;

    /// The report of a job that trained called it unfinished: "the run directory does not record how it ended".
    #[test]
    fn a_job_in_a_cluster_that_trains_is_running() {
        let status = |stage: &str| {
            format!(
                "status: {{conditions: [{{type: Succeeded, status: Unknown, reason: {stage}, message: 2 of 2 nodes train}}]}}\n"
            )
        };
        let of = |stage: &str, plan: Option<&str>| {
            let mut record = Record::new();
            record.document(Document::Status, &status(stage));
            plan.into_iter().for_each(|plan| record.document(Document::Plan, plan));
            result(&record)
        };
        assert_eq!(of("Running", None), ("running", "2 of 2 nodes train".into()));
        assert_eq!(of("Queued", None), ("unfinished", "Queued: 2 of 2 nodes train".into()));
        assert_eq!(of("Running", Some("job: a\n")).0, "unfinished", "a local run that was killed");
    }
}
