//! After the start: what the ranks say of their links, beside the forecast of the fabric.
//!
//! The verdict is written to the status with the words of the ranks. Whether it ends the job is decided from the status alone: a
//! controller that takes over decides the same without reading a log.

use super::Snapshot;
use super::events::{self, EventDraft};
use super::status::Draft;
use crate::fabric::{Foretold, compare};
use crate::plan::{ValidJob, objects};
use switchyard_crds::{
    FabricMode, FabricObservation, FallbackAction, Framework, ObservedVerdict, TrainJob, Transport, conditions,
};

/// Whether the beginnings of the logs of this job's pods say something that nobody has compared yet.
pub fn wants_logs(job: &TrainJob, ranks: u32) -> bool {
    observed(job).is_none() && foretold(job, ranks).is_some()
}

fn observed(job: &TrainJob) -> Option<&FabricObservation> {
    job.status.as_ref()?.fabric.as_ref()?.observed.as_ref()
}

/// What was foretold of a job that has a place; `None`: nothing, or there is only one way. `per_node`: ranks of each node.
fn foretold(job: &TrainJob, per_node: u32) -> Option<Foretold> {
    let several_nodes = job.spec.trainer.num_nodes > 1;
    if job.spec.trainer.framework == Framework::Switchyard {
        // The engine has one way between hosts, and one within.
        let shares_memory = per_node > 1;
        let transport = if several_nodes { Transport::TCP } else { Transport::SharedMemory };
        let own = Foretold { transport, gpu_direct: None, several_nodes, is_own: true, shares_memory };
        return (several_nodes || shares_memory).then_some(own);
    }
    let fabric = job.status.as_ref()?.fabric.as_ref().filter(|_| objects::gpus(job) > 0)?;
    let (transport, gpu_direct) = (fabric.transport?, fabric.gpu_direct);
    let has_links = several_nodes || objects::gpus(job) > 1;
    has_links.then_some(Foretold { transport, gpu_direct, several_nodes, is_own: false, shares_memory: false })
}

/// Compares what the ranks say with the forecast, and writes that down once.
pub(super) fn tell(snapshot: &Snapshot<'_>, valid: &ValidJob, draft: &mut Draft<'_>) -> Option<EventDraft> {
    let (job, seen) = (snapshot.job, snapshot.seen);
    if seen.is_empty() || observed(job).is_some() {
        return None;
    }
    let foretold = foretold(job, valid.request.processes_per_node)?;
    let nodes = &job.status.as_ref()?.placement.as_ref()?.nodes;
    let nodes: Vec<_> = (0_u32..).zip(nodes).map(|(rank, node)| (node.node_name.as_str(), seen.get(&rank))).collect();
    let found = compare(foretold, &nodes)?;
    let (state, reason) = match found.verdict {
        ObservedVerdict::AsForecast => ("True", conditions::AS_FORECAST),
        ObservedVerdict::OtherTransport if job.spec.fabric.mode == FabricMode::Required => {
            ("False", conditions::TRANSPORT_DIFFERS)
        }
        // The job asks for none in particular.
        ObservedVerdict::OtherTransport | ObservedVerdict::Slower => ("True", conditions::TRANSPORT_DIFFERS),
        ObservedVerdict::Unknown => ("", ""),
    };
    if !reason.is_empty() {
        draft.condition(conditions::FABRIC_READY, state, reason, found.message.clone());
    }
    let event = (reason == conditions::TRANSPORT_DIFFERS)
        .then(|| EventDraft::warning(events::TRANSPORT_DIFFERS, found.message.clone()));
    draft.next.fabric.get_or_insert_default().observed = Some(found);
    event
}

/// Why a job must be stopped whose data goes another way than it demands; `None`: it goes on.
pub(super) fn refused(job: &TrainJob) -> Option<String> {
    let policy = &job.spec.fabric;
    let stops = policy.mode == FabricMode::Required && policy.on_fallback == FallbackAction::Fail;
    let found = observed(job).filter(|found| stops && found.verdict == ObservedVerdict::OtherTransport)?;
    Some(format!("{}; spec.fabric.onFallback says Fail", found.message))
}

#[cfg(test)]
mod tests;
