//! Builds the desired status from the known facts, and compares statuses. Pure.

use crate::consistent::{OtherSources, contradictions};
use crate::pod_resources::Resources;
use crate::ports;
use crate::scan::{Scan, ScanFault};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use std::sync::Arc;
use switchyard_crds::conditions::topology::{CONSISTENT, FRESH, REPORTED};
use switchyard_crds::gpu_topology::{FactSource, Facts, GPUTopologyStatus, SourceState};
use switchyard_node_agent::Notes;

/// The latest state of the machine.
#[derive(Debug, Clone, Default)]
pub(crate) struct MachineState {
    /// The last successful scan.
    pub last: Option<Arc<Scan>>,
    /// Why the last scan failed.
    pub fault: Option<ScanFault>,
}

/// The latest state of the kubelet.
#[derive(Debug, Clone)]
pub(crate) enum Kubelet {
    /// The kubelet is not queried.
    Disabled,
    /// Its response.
    Known(Arc<Resources>),
    /// It did not respond, for this reason.
    Unknown(String),
}

/// The desired status without transition times, which depend on the current status.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Draft {
    /// `None` if nothing is known yet; the object on the server then stays unchanged.
    facts: Option<GPUTopologyStatus>,
    verdicts: [Verdict; 3],
}

#[derive(Debug, Clone, PartialEq)]
struct Verdict {
    kind: &'static str,
    status: &'static str,
    reason: &'static str,
    message: String,
}

pub(crate) fn draft(machine: &MachineState, kubelet: &Kubelet) -> Draft {
    let Some(scan) = &machine.last else {
        let unknown = Verdict {
            kind: CONSISTENT,
            status: "Unknown",
            reason: "NotReported",
            message: "this agent has not read the facts yet".into(),
        };
        return Draft { facts: None, verdicts: [reported(machine, &[]), unknown, fresh(machine)] };
    };
    let mut facts = scan.facts.clone();
    let mut allocatable = None;
    let source = |state, message| FactSource { facts: Facts::InUse, source: "PodResources v1".into(), state, message };
    match kubelet {
        Kubelet::Disabled => {}
        Kubelet::Known(resources) => {
            facts.in_use = resources.in_use.clone();
            allocatable = Some(&resources.allocatable);
            let state = if resources.note.is_none() { SourceState::Complete } else { SourceState::Partial };
            facts.sources.push(source(state, resources.note.clone()));
        }
        Kubelet::Unknown(why) => {
            let mut notes = Notes::default();
            notes.add(why.as_str());
            facts.sources.push(source(SourceState::Unavailable, notes.message()));
        }
    }
    let others = OtherSources { pci_gpus: scan.pci_gpus, counters: &scan.counters, allocatable };
    let mut notes = Notes::default();
    contradictions(&facts, others).iter().for_each(|found| notes.add(found.to_string()));
    let consistent = match notes.message() {
        Some(message) => Verdict { kind: CONSISTENT, status: "False", reason: "Contradiction", message },
        None => Verdict { kind: CONSISTENT, status: "True", reason: "NoContradiction", message: String::new() },
    };
    let verdicts = [reported(machine, &facts.sources), consistent, fresh(machine)];
    Draft { facts: Some(facts), verdicts }
}

/// Reason and message of a failed scan.
fn fault_of(machine: &MachineState) -> Option<(&'static str, String)> {
    Some(match machine.fault.as_ref()? {
        ScanFault::Failed(why) => ("ScanFailed", why.clone()),
        ScanFault::Hangs(timeout) => {
            ("ScanHangs", format!("a file or the driver has not answered for more than {} s", timeout.as_secs()))
        }
        ScanFault::Gone => ("ScanFailed", "the scanning thread ended".into()),
    })
}

fn reported(machine: &MachineState, sources: &[FactSource]) -> Verdict {
    let verdict = |status, reason, message| Verdict { kind: REPORTED, status, reason, message };
    if let Some((reason, message)) = fault_of(machine) {
        return verdict("False", reason, message);
    }
    // Facts about the machine are complete even without the kubelet's response.
    let of_machine = sources.iter().filter(|source| source.facts != Facts::InUse);
    let messages_of = |state| {
        let mut notes = Notes::default();
        for source in of_machine.clone().filter(|source| source.state == state) {
            let message = source.message.as_deref().unwrap_or("nothing could be read");
            notes.add(format!("{:?}: {message}", source.facts));
        }
        notes.message()
    };
    if let Some(message) = messages_of(SourceState::Unavailable) {
        return verdict("False", "SourceUnavailable", message);
    }
    match messages_of(SourceState::Partial) {
        Some(message) => verdict("True", "Partial", message),
        None => verdict("True", "Complete", String::new()),
    }
}

fn fresh(machine: &MachineState) -> Verdict {
    let verdict = |status, reason, message| Verdict { kind: FRESH, status, reason, message };
    match (fault_of(machine), &machine.last) {
        (Some((reason, message)), _) => verdict("False", reason, format!("the facts are of observedTime: {message}")),
        (None, Some(_)) => verdict("True", "Current", String::new()),
        (None, None) => verdict("Unknown", "NotReported", "this agent has not read the facts yet".into()),
    }
}

impl Draft {
    /// The status that replaces `before`.
    pub fn status(&self, before: Option<&GPUTopologyStatus>, now: Timestamp) -> GPUTopologyStatus {
        let mut status = self.facts.as_ref().or(before).cloned().unwrap_or_default();
        if let Some(before) = before {
            ports::keep(&mut status, before);
        }
        let conditions_before = before.map(|before| before.conditions.as_slice()).unwrap_or_default();
        status.conditions = self.verdicts.iter().map(|verdict| verdict.condition(conditions_before, now)).collect();
        status
    }
}

impl Verdict {
    fn condition(&self, before: &[Condition], now: Timestamp) -> Condition {
        let same = before.iter().find(|condition| condition.type_ == self.kind && condition.status == self.status);
        Condition {
            type_: self.kind.into(),
            status: self.status.into(),
            reason: self.reason.into(),
            message: self.message.clone(),
            last_transition_time: same.map_or(Time(now), |condition| condition.last_transition_time.clone()),
            observed_generation: None,
        }
    }
}

/// A status without anything that can differ between equal reports: times, and the order of keyed
/// lists.
fn canonical(status: &GPUTopologyStatus) -> GPUTopologyStatus {
    let mut status = status.clone();
    status.observed_time = None;
    status.numa_nodes.sort_by_key(|node| node.id);
    status.gpus.sort_by(|a, b| a.uuid.cmp(&b.uuid));
    status.links.sort_by(|a, b| (&a.a, &a.b, a.kind).cmp(&(&b.a, &b.b, b.kind)));
    status.nics.sort_by(|a, b| a.name.cmp(&b.name));
    status.nics.iter_mut().filter_map(|nic| nic.port_watch.as_mut()).for_each(|watch| watch.since = None);
    status.sources.sort_by_key(|source| source.facts);
    status.in_use.sort();
    status.conditions.sort_by(|a, b| a.type_.cmp(&b.type_));
    for condition in &mut status.conditions {
        condition.last_transition_time = Time(Timestamp::UNIX_EPOCH);
    }
    status
}

/// The top-level fields in which two statuses differ, ignoring times; empty if they are equal.
pub(crate) fn differing(a: &GPUTopologyStatus, b: &GPUTopologyStatus) -> Vec<String> {
    let fields = |status: &GPUTopologyStatus| match serde_json::to_value(canonical(status)) {
        Ok(serde_json::Value::Object(fields)) => fields,
        _ => serde_json::Map::new(),
    };
    let (a, b) = (fields(a), fields(b));
    let changed = a.iter().filter(|(name, value)| b.get(*name) != Some(value)).map(|(name, _)| name);
    let gone = b.keys().filter(|name| !a.contains_key(*name));
    changed.chain(gone).cloned().collect()
}

#[cfg(test)]
mod tests;
