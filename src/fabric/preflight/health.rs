//! GPUs that are lost or need a reset.

use super::fault::{Fault, Outcome, each, list};
use super::input::{CheckInput, is_of_gang};
use std::collections::BTreeSet;
use switchyard_crds::conditions::topology::CONSISTENT;
use switchyard_crds::gpu_topology::{MigMode, RowRemapping};
use switchyard_crds::names::GPU_RESOURCE;

/// Check 13: the bus, the driver, the agent and the device plugin count the same GPUs.
pub(super) fn lost(input: &CheckInput<'_>) -> Outcome {
    if input.gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    // The GPUs of equal machines in the gang show which addresses to expect.
    let all: Vec<BTreeSet<&str>> = input
        .gang
        .members
        .iter()
        .map(|member| {
            member.facts.into_iter().flat_map(|facts| &facts.gpus).filter_map(|gpu| gpu.bus_id.as_deref()).collect()
        })
        .collect();
    each(input.gang, |rank, member, facts| {
        let counted = facts.gpu_count.ok_or("gpuCount is not reported")?;
        let answering = facts.gpus.len() as u32;
        let of_bus = facts
            .conditions
            .iter()
            .find(|condition| condition.type_ == CONSISTENT && condition.message.contains("gpuCount"));
        let is_split = facts.gpus.iter().any(|gpu| gpu.mig.as_ref().is_some_and(|mig| mig.mode == MigMode::Enabled));
        let offered = u32::try_from(member.allocatable.get(GPU_RESOURCE) / 1000).unwrap_or(0);
        let at = || {
            let own = &all[rank as usize];
            let others: BTreeSet<&str> = all.iter().filter(|other| own.is_subset(other)).flatten().copied().collect();
            let missing: Vec<&str> = others.difference(own).copied().collect();
            if missing.is_empty() { String::new() } else { format!("; other nodes have one at {}", list(missing)) }
        };
        let fix = "look for XID 79 in the node's kernel log (dmesg | grep -i xid); drain the node and restart it";
        let effect = "the device plugin may fail for every pod of the node, and a rank that gets the GPU ends";
        if counted != answering {
            return Ok(vec![
                Fault::block(format!("{answering} of {counted} GPUs answer{}", at()))
                    .effect(effect)
                    .evidence("gpuCount and gpus[] of the GPUTopology")
                    .fix(fix),
            ]);
        }
        if let Some(condition) = of_bus {
            return Ok(vec![
                Fault::block(format!("the driver has lost a GPU{}", at()))
                    .effect(effect)
                    .evidence(format!("condition Consistent of the GPUTopology: {}", condition.message))
                    .fix(fix),
            ]);
        }
        // A plugin that shares GPUs offers each one several times; a DRA driver offers none this
        // way.
        let is_odd = offered > 0 && answering > 0 && !is_split && !offered.is_multiple_of(answering);
        if is_odd && offered > answering {
            return Ok(vec![
                Fault::block(format!("the device plugin offers {offered} GPUs, and {answering} answer{}", at()))
                    .effect(effect)
                    .evidence(format!("{GPU_RESOURCE} of the node's allocatable; gpus[] of the GPUTopology"))
                    .fix(fix),
            ]);
        }
        if is_odd {
            return Ok(vec![
                Fault::warn(format!("the device plugin offers {offered} of {answering} GPUs"))
                    .effect("it treats the others as broken, or as in use by others")
                    .evidence(format!("{GPU_RESOURCE} of the node's allocatable; gpus[] of the GPUTopology"))
                    .fix("look into the log of the device plugin on that node"),
            ]);
        }
        Ok(Vec::new())
    })
}

/// Check 14: what the driver reports about each GPU.
pub(super) fn recovery(input: &CheckInput<'_>) -> Outcome {
    if input.gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    each(input.gang, |_, member, facts| {
        let rows = |gpu: &switchyard_crds::gpu_topology::Gpu| gpu.ecc.as_ref().and_then(|ecc| ecc.row_remapping);
        if facts.gpus.iter().all(|gpu| gpu.health.is_none() && rows(gpu).is_none()) {
            return Err("health and ecc of gpus[] are not reported".into());
        }
        let mut faults = Vec::new();
        for (position, gpu) in facts.gpus.iter().enumerate() {
            let action =
                gpu.health.as_ref().map(|health| health.recovery_action.as_str()).filter(|action| *action != "None");
            let (what, blocks, fix) = match (action, rows(gpu)) {
                (Some(action), _) => (format!("the driver asks for {action}"), true, remedy(action)),
                (None, Some(RowRemapping::Failed)) => {
                    ("a row of memory could not be replaced".into(), true, "have the GPU exchanged")
                }
                (None, Some(RowRemapping::Pending)) => (
                    "a row of memory waits to be replaced".into(),
                    false,
                    "reset the GPU when it is free (nvidia-smi -r)",
                ),
                (None, _) => continue,
            };
            let is_ours = is_of_gang(member, position);
            let name = format!("GPU {}", gpu.index);
            let fault = match (is_ours, blocks) {
                (true, true) => Fault::block(format!("{name}: {what}")),
                (true, false) => Fault::warn(format!("{name}: {what}")),
                (false, _) => Fault::warn(format!("{name}: {what}; the job does not use it")),
            };
            faults.push(
                fault
                    .effect("a rank on such a GPU fails soon, or computes on memory that is not sound")
                    .evidence("gpus[].health.recoveryAction and gpus[].ecc of the GPUTopology")
                    .fix(fix),
            );
        }
        Ok(faults)
    })
}

/// Remedy for a recovery action of NVML.
fn remedy(action: &str) -> &'static str {
    match action {
        "GPUReset" => "end what uses the GPU and reset it (nvidia-smi -r -i N)",
        "NodeReboot" => "drain the node and restart it",
        "DrainP2P" | "DrainAndReset" => "end the jobs on all GPUs of the node, then reset the GPU (nvidia-smi -r -i N)",
        _ => "see NVIDIA's XID catalogue for what the driver asks",
    }
}
