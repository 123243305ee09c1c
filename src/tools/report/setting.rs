//! Properties that do not change over the steps: result, memory, placement, events, configuration.

use super::documents::shown;
use super::events::ReportedFailure;
use super::facts::Facts;
use super::markup::shortened;
use super::model::{Amount, EventEntry, GpuSummary, Memory, PlacementSection, RankPlace, Setting, Variable, round4};
use super::record::Record;
use jiff::Timestamp;
use std::collections::BTreeMap;
use switchyard_core::units::rank_list;
use switchyard_core::units::{binary, counted, grouped};
use switchyard_worker_contract::event::{GpuReport, Item};

/// Most ranks listed.
const MAX_RANKS: u32 = 256;
/// Most events listed.
const MAX_EVENTS: usize = 200;
/// Most variables listed.
const MAX_VARIABLES: usize = 100;
/// Most causes of low clocks listed, which is all there are.
const MAX_CAUSES: usize = 4;
/// The condition with a job's stage, and its reason while the job trains.
const SUCCEEDED: &str = "Succeeded";
const RUNNING: &str = "Running";
/// Most bytes of a foreign text.
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

/// The outcome of the run, with its reason.
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
        (None, Some(reported)) => ("failed", shortened(&cause(reported), TEXT)),
        (None, None) => unfinished(record),
    }
}

/// The outcome of a run that has not ended. A job in a cluster is still running, and its status has
/// its progress. The status of a killed local run also says "Running", but its directory has a
/// plan.
fn unfinished(record: &Record) -> (&'static str, String) {
    let conditions = record.documents.job.iter().flat_map(|job| &job.conditions);
    let stage = conditions.filter(|_| record.documents.plan.is_none()).find(|condition| condition.kind == SUCCEEDED);
    match stage {
        Some(stage) if stage.reason == RUNNING => ("running", shortened(&stage.message, TEXT)),
        Some(stage) => ("unfinished", shortened(&format!("{}: {}", stage.reason, stage.message), TEXT)),
        None => ("unfinished", "the run directory does not record how it ended".into()),
    }
}

fn cause(reported: &ReportedFailure) -> String {
    let failure = &reported.failure;
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
        kept_activation_bytes: inspection.kept_activation_bytes,
        gpu_bytes: inspection.gpu_memory.map(|memory| memory.total()),
        gpu_fp32_bytes: inspection.gpu_fp32_memory_bytes,
        ranks_per_node: bound.map(|bound| bound.ranks),
        bound: bound.map(|bound| bound.bound.into()),
        capacity_bytes: bound.map(|bound| bound.capacity),
    })
}

pub(super) fn placement(record: &Record, facts: Option<&Facts>) -> Option<PlacementSection> {
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
            compute_ms: known.get(&rank).copied().map(round4),
        }
    };
    Some(PlacementSection {
        reason: shortened(&reason.or(status.map(|status| status.reason.clone())).unwrap_or_default(), 4 * TEXT),
        warnings: plan
            .map(|plan| plan.warnings.iter().take(20).map(|text| shortened(text, TEXT)).collect())
            .unwrap_or_default(),
        limited_by: status.and_then(|status| status.limited_by.clone()),
        ranks: (0..world.min(MAX_RANKS)).map(rank).collect(),
        more_ranks: world.saturating_sub(MAX_RANKS),
        gpus: record.events.gpus.values().filter(|gpu| gpu.rank < MAX_RANKS).map(gpu_summary).collect(),
    })
}

fn gpu_summary(gpu: &GpuReport) -> GpuSummary {
    let slowed = gpu.slowed.iter().take(MAX_CAUSES);
    GpuSummary {
        rank: gpu.rank,
        bus: shortened(&gpu.bus, TEXT),
        seconds: round4(gpu.seconds),
        highest_celsius: gpu.highest_celsius,
        busy_percent: gpu.busy_percent().map(round4),
        slowed: slowed.map(|one| format!("{} {:.0} %", one.by.label(), gpu.slowed_percent(one.by))).collect(),
        pcie_lanes: gpu.pcie.map(|width| (width.lanes, width.most)),
        corrected_errors: gpu.corrected_errors,
        uncorrected_errors: gpu.uncorrected_errors,
        xids: gpu.xids.iter().copied().take(GpuReport::MAX_XIDS).collect(),
    }
}

/// The events in order; the same event from several ranks is one line.
pub(super) fn events(record: &Record) -> Vec<EventEntry> {
    let text = |time: Option<Timestamp>| time.map(|time| time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string());
    let mut list: Vec<(u32, Option<Timestamp>, EventEntry)> = Vec::new();
    let mut push = |attempt: u32, time: Option<Timestamp>, what: String, bad: bool| {
        list.push((attempt, time, EventEntry { time: text(time), attempt, text: what, bad }));
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
    for reported in &record.events.failures {
        let (time, ranks) = failures.entry((reported.attempt, cause(reported))).or_insert((reported.time, Vec::new()));
        *time = (*time).min(reported.time).or(*time);
        ranks.push(reported.failure.rank);
    }
    for ((attempt, cause), (time, mut ranks)) in failures {
        ranks.sort_unstable();
        let by = format!("{} (reported by ranks {})", shortened(&cause, TEXT), shortened(&rank_list(ranks), TEXT));
        push(attempt, time, by, true);
    }
    let lead = record.ranks().values().find_map(|fold| fold.curves.as_ref());
    for attempt in lead.iter().flat_map(|curves| &curves.attempts).skip(1) {
        let text = format!(
            "attempt {} resumes at step {}; {} repeated",
            attempt.number,
            grouped(attempt.first_step),
            counted(attempt.repeated, "step")
        );
        push(attempt.number, None, text, false);
    }
    list.sort_by_key(|(attempt, time, _)| (*attempt, time.is_none(), *time));
    let left_out = list.len().saturating_sub(MAX_EVENTS) as u64 + record.events.more_failures;
    let mut events: Vec<EventEntry> = list.into_iter().map(|(_, _, event)| event).take(MAX_EVENTS).collect();
    if left_out > 0 {
        let text = format!("{} more events are in events.jsonl", grouped(left_out));
        events.push(EventEntry { text, ..EventEntry::default() });
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
            .take(MAX_VARIABLES)
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

    /// Regression: the report of a running job called it unfinished, with "the run directory does
    /// not record how it ended".
    #[test]
    fn a_training_job_in_a_cluster_is_running() {
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
