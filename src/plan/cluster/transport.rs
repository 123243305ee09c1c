//! Compares the links that ranks report after the start with the prediction.
//!
//! The verdict is written to the status with the ranks' log text. Whether it ends the job depends
//! on the status alone, so a controller that takes over decides the same without reading a log.

use super::JobSnapshot;
use super::events::{self, EventDraft};
use crate::job::{ValidJob, gpus};
use crate::resources::gigabytes_per_second;
use crate::status::Draft;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use switchyard_crds::{
    FabricMeasurement, FabricMode, FabricObservation, FallbackAction, Framework, MeasuredVerdict, ObservedVerdict,
    PlacedNode, PreflightMode, TrainJob, Transport, conditions,
};
pub use switchyard_fabric::LogObservation;
use switchyard_fabric::{Prediction, compare};

/// Maximum number of slow links named. Further ones are counted.
const MAX_SLOW_NAMED: usize = 4;

/// True if the log heads of this job's pods have not been compared with the prediction yet.
pub fn wants_logs(job: &TrainJob, ranks: u32) -> bool {
    observed(job).is_none() && prediction(job, ranks).is_some()
}

fn observed(job: &TrainJob) -> Option<&FabricObservation> {
    job.status.as_ref()?.fabric.as_ref()?.observed.as_ref()
}

/// Predicted transport of a placed job without roles. `None` if there is no prediction or only one
/// possible transport. `per_node` is the number of ranks per node.
fn prediction(job: &TrainJob, per_node: u32) -> Option<Prediction> {
    if !job.spec.roles.is_empty() {
        return None;
    }
    let several_nodes = job.spec.trainer.num_nodes > 1;
    if job.spec.trainer.framework == Framework::Switchyard && gpus(job) == 0 {
        // Without GPUs the engine has one transport between hosts and one within a host.
        let shares_memory = per_node > 1;
        let transport = if several_nodes { Transport::TCP } else { Transport::SharedMemory };
        let own = Prediction { transport, gpu_direct: None, several_nodes, is_own: true, shares_memory };
        return (several_nodes || shares_memory).then_some(own);
    }
    let fabric = job.status.as_ref()?.fabric.as_ref().filter(|_| gpus(job) > 0)?;
    let (transport, gpu_direct) = (fabric.transport?, fabric.gpu_direct);
    let has_links = several_nodes || gpus(job) > 1;
    has_links.then_some(Prediction { transport, gpu_direct, several_nodes, is_own: false, shares_memory: false })
}

/// Compares the ranks' reports with the prediction and writes the verdict once.
pub(super) fn report(snapshot: &JobSnapshot<'_>, valid: &ValidJob, draft: &mut Draft<'_>) -> Option<EventDraft> {
    let (job, log_observations) = (snapshot.job, snapshot.log_observations);
    if log_observations.is_empty() || observed(job).is_some() {
        return None;
    }
    let predicted = prediction(job, valid.request.processes_per_node)?;
    let nodes = &job.status.as_ref()?.placement.as_ref()?.nodes;
    let nodes: Vec<_> =
        (0_u32..).zip(nodes).map(|(rank, node)| (node.node_name.as_str(), log_observations.get(&rank))).collect();
    let slow = measured(snapshot, draft);
    let Some(found) = compare(predicted, &nodes) else { return slow };
    let (state, reason) = match found.verdict {
        ObservedVerdict::AsForecast => ("True", conditions::AS_FORECAST),
        ObservedVerdict::OtherTransport if job.spec.fabric.mode == FabricMode::Required => {
            ("False", conditions::TRANSPORT_DIFFERS)
        }
        // The job does not require a particular transport.
        ObservedVerdict::OtherTransport | ObservedVerdict::Slower => ("True", conditions::TRANSPORT_DIFFERS),
        ObservedVerdict::Unknown => ("", ""),
    };
    if !reason.is_empty() {
        draft.condition(conditions::FABRIC_READY, state, reason, found.message.clone());
    }
    let event = (reason == conditions::TRANSPORT_DIFFERS)
        .then(|| EventDraft::warning(events::TRANSPORT_DIFFERS, found.message.clone()));
    draft.next.fabric.get_or_insert_default().observed = Some(found);
    slow.or(event)
}

/// Writes the measurements of the ranks, with the nodes and devices of slow links.
fn measured(snapshot: &JobSnapshot<'_>, draft: &mut Draft<'_>) -> Option<EventDraft> {
    let fabric = snapshot.job.status.as_ref().and_then(|status| status.fabric.as_ref());
    let found =
        snapshot.log_observations.get(&0)?.measured.as_ref().filter(|_| fabric.is_none_or(|f| f.measured.is_none()))?;
    let placement = snapshot.job.status.as_ref()?.placement.as_ref()?;
    let predicted = placement.predicted_bus_bandwidth.as_ref().and_then(gigabytes_per_second);
    let predicted = predicted.map_or(String::new(), |rate| format!(" ({rate} GB/s predicted for GPUs and their NICs)"));
    let rate = |bytes: f64| format!("{:.3} GB/s", bytes / 1e9);
    let (got, least) = (rate(found.bus_bandwidth), rate(found.least));
    let mut message = format!("{got} in an all-reduce over {} ranks, {least} required{predicted}", found.ranks);
    let slow = found.slow();
    for link in slow.iter().take(MAX_SLOW_NAMED) {
        let (from, to) =
            (endpoint(snapshot, &placement.nodes, link.from), endpoint(snapshot, &placement.nodes, link.to));
        message.push_str(&format!("; {} from {from} to {to}", rate(link.bytes_per_second)));
    }
    if slow.len() > MAX_SLOW_NAMED {
        message.push_str(&format!("; and {} more slow links", slow.len() - MAX_SLOW_NAMED));
    }
    let is_enough = found.shortfall().is_none();
    let (verdict, state, reason) = match (is_enough, snapshot.job.spec.fabric.preflight.mode) {
        (true, _) => (MeasuredVerdict::Passed, "True", conditions::AS_FORECAST),
        (false, PreflightMode::Enforce) => (MeasuredVerdict::Failed, "False", conditions::SLOW_FABRIC),
        (false, _) => (MeasuredVerdict::Failed, "True", conditions::SLOW_FABRIC),
    };
    draft.condition(conditions::FABRIC_READY, state, reason, message.clone());
    let bus_bandwidth = Quantity(format!("{}k", (found.bus_bandwidth / 1e3).round().max(0.0) as u64));
    let measured = FabricMeasurement { verdict, bus_bandwidth, message: message.clone() };
    draft.next.fabric.get_or_insert_default().measured = Some(measured);
    (!is_enough).then(|| EventDraft::warning(events::SLOW_FABRIC, message))
}

/// A rank as an endpoint of a link: node, GPU if it has one, and NICs with their rails.
fn endpoint(snapshot: &JobSnapshot<'_>, nodes: &[PlacedNode], rank: u32) -> String {
    let first = |node: &&PlacedNode| node.first_rank.unsigned_abs() <= rank;
    let Some(node) = nodes.iter().filter(first).max_by_key(|node| node.first_rank) else {
        return format!("rank {rank}");
    };
    let mut text = format!("rank {rank} on {}", node.node_name);
    let local = rank - node.first_rank.unsigned_abs();
    if let Some(uuid) = node.gpus.get(local as usize) {
        text.push_str(&format!(", GPU {uuid}"));
    }
    let machine = snapshot.nodes.get(&node.node_name).and_then(|view| view.described());
    let route = machine.and_then(|machine| machine.facts.host.as_ref()?.default_route.clone());
    let with_rail = |nic: &String| match machine.and_then(|machine| machine.nics.iter().position(|of| of == nic)) {
        Some(rail) => format!("{nic} (rail {rail})"),
        None => nic.clone(),
    };
    let nics: Vec<String> = if node.shape.nics.is_empty() {
        route.into_iter().collect()
    } else {
        node.shape.nics.iter().map(with_rail).collect()
    };
    if !nics.is_empty() {
        text.push_str(&format!(", {}", nics.join(" ")));
    }
    text
}

/// Why a job whose transport violates its policy must be stopped, `None` if it continues.
pub(super) fn policy_violation(job: &TrainJob) -> Option<String> {
    let policy = &job.spec.fabric;
    let stops = policy.mode == FabricMode::Required && policy.on_fallback == FallbackAction::Fail;
    let found = observed(job).filter(|found| stops && found.verdict == ObservedVerdict::OtherTransport)?;
    Some(format!("{}; spec.fabric.onFallback is Fail", found.message))
}

#[cfg(test)]
mod tests;
