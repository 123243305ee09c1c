//! NVLink inside a node and between nodes.

use super::fault::{Fault, Outcome, differences, each, list};
use super::input::{CheckInput, gpus, is_of_gang};
use crate::gang::claims_channel;
use switchyard_crds::gpu_topology::{Fabric, FabricState, FabricSummary};

/// Check 11: on machines with NVSwitch, every GPU is registered with the Fabric Manager.
pub(super) fn fabric_manager(input: &CheckInput<'_>) -> Outcome {
    if input.gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    each(input.gang, |_, member, facts| {
        let is_switched = facts.nvswitch.is_some() || facts.gpus.iter().any(|gpu| gpu.fabric.is_some());
        if !is_switched {
            return Err("no NVSwitch".into());
        }
        if facts.gpus.iter().all(|gpu| gpu.fabric.is_none()) {
            return Err("the driver reports no fabric".into());
        }
        let mut faults = Vec::new();
        for (position, gpu) in facts.gpus.iter().enumerate() {
            let Some(what) = gpu.fabric.as_ref().and_then(unsettled) else { continue };
            let what = format!("GPU {}: {what}", gpu.index);
            let is_ours = is_of_gang(member, position);
            let fault =
                if is_ours { Fault::block(what) } else { Fault::warn(format!("{what}; the job does not use it")) };
            faults.push(
                fault
                    .effect("CUDA does not start on such a GPU (error 802), and NVLink SHARP fails where one of them is part of it")
                    .evidence("gpus[].fabric of the GPUTopology")
                    .fix("systemctl status nvidia-fabricmanager on the node; it has to be the release of the driver"),
            );
        }
        Ok(faults)
    })
}

/// Describes an incomplete registration.
fn unsettled(fabric: &Fabric) -> Option<String> {
    match (fabric.state, fabric.result.as_deref()) {
        (FabricState::Completed, None | Some("Success")) => None,
        (FabricState::Completed, Some(result)) => {
            Some(format!("the registration at the Fabric Manager ended with {result}"))
        }
        (FabricState::NotStarted, _) => Some("the Fabric Manager has not spoken yet".into()),
        (FabricState::InProgress, _) => Some("the registration at the Fabric Manager is under way".into()),
    }
}

/// Check 12: NVLink between nodes works on machines that have it.
pub(super) fn between_nodes(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    input.across()?;
    let is_rack = |fabric: Option<&Fabric>| fabric.is_some_and(|fabric| fabric.cluster_uuid.is_some());
    if !gang.members.iter().any(|member| is_rack(member.facts.and_then(|facts| facts.fabric.as_ref()))) {
        return Err("no node is of an NVLink domain of several machines".into());
    }
    let own = |name: &str| gang.own.get(name).copied().flatten();
    if own("NCCL_MNNVL_ENABLE") == Some("0") || own("NCCL_CUMEM_ENABLE") == Some("0") {
        return Err("NVLink between nodes is turned off by the user".into());
    }
    let is_wanted = own("NCCL_MNNVL_ENABLE") == Some("1");
    let fault = |what: String| if is_wanted { Fault::block(what) } else { Fault::warn(what) };
    let mut found = Vec::new();
    let clique =
        |fabric: &Fabric| Some(format!("clique {} of {}", fabric.clique_id?, short(fabric.cluster_uuid.as_ref()?)));
    if let Some(differ) =
        differences(gang, |_, facts| Some(facts.fabric.as_ref().and_then(clique).unwrap_or("no clique".into())))
    {
        found.push(
            fault(format!("the nodes are of different NVLink domains: {differ}"))
                .effect("data between the domains takes the NICs")
                .evidence("fabric.clusterUUID and fabric.cliqueID of the GPUTopology")
                .fix("ask for one domain in topologyPolicy.domains, or leave it: NCCL works without")
                .of_job(),
        );
    }
    let has_channel = claims_channel(gang.pod);
    let of_nodes = each(gang, |_, member, facts| {
        let mut faults = Vec::new();
        let Some(fabric) = &facts.fabric else { return Err("the driver reports no fabric".into()) };
        if let Some(what) = unsettled(fabric) {
            faults.push(
                fault(what)
                    .effect("NVLink between nodes stays off without a word")
                    .evidence("fabric.state of the GPUTopology")
                    .fix("systemctl status nvidia-fabricmanager nvidia-imex on the node"),
            );
        }
        if facts.host.as_ref().is_some_and(|host| host.imex_channels.is_empty()) && !has_channel {
            faults.push(
                Fault::block("no IMEX channel on the node, and the pods claim none")
                    .effect("NCCL ends with \"Cuda failure 800 operation not permitted\" when it exports memory")
                    .evidence("host.imexChannels of the GPUTopology; spec.resourceClaims of the template")
                    .fix("claim a channel of a ComputeDomain of NVIDIA's DRA driver in the template, or set NCCL_MNNVL_ENABLE=0"),
            );
        }
        let sick = gpus(member, facts).into_iter().filter_map(|gpu| {
            let health =
                gpu.fabric.as_ref()?.health.as_ref().filter(|health| health.summary != FabricSummary::Healthy)?;
            Some((gpu.index, health))
        });
        for (index, health) in sick {
            let decoded = if health.faults.is_empty() {
                String::new()
            } else {
                format!(": {}", list(health.faults.iter().map(String::as_str)))
            };
            let what = format!("GPU {index}: the fabric is {:?}{decoded}", health.summary);
            let fault = if health.summary == FabricSummary::Unhealthy { Fault::block(what) } else { Fault::warn(what) };
            faults.push(
                fault
                    .effect("NVLinks of this GPU fail or carry less")
                    .evidence("gpus[].fabric.health of the GPUTopology, decoded from the driver's mask")
                    .fix("nvidia-smi -q -i N (section Fabric) on the node, then the rack's NVLink switches"),
            );
        }
        Ok(faults)
    });
    match of_nodes {
        Ok(faults) => found.extend(faults),
        Err(why) if found.is_empty() => return Err(why),
        Err(_) => {}
    }
    Ok(found)
}

fn short(uuid: &str) -> &str {
    uuid.split('-').next().unwrap_or(uuid)
}

/// Check 16: NVLinks that are down, or fewer than on equal GPUs.
pub(super) fn links(input: &CheckInput<'_>) -> Outcome {
    if input.gang.gpus < 2 && !input.gang.has_several_nodes() {
        return Err("one GPU".into());
    }
    // The best GPU of each model in the gang sets the expected number.
    let all = input.gang.members.iter().filter_map(|member| Some((member, member.facts?)));
    let all = all.flat_map(|(member, facts)| gpus(member, facts));
    let counts: Vec<(Option<&str>, u32)> =
        all.filter_map(|gpu| Some((gpu.model.as_deref(), gpu.nvlinks.as_ref()?.up))).collect();
    each(input.gang, |_, member, facts| {
        let own = gpus(member, facts);
        let most = |model: Option<&str>| counts.iter().filter(|(other, _)| *other == model).map(|(_, up)| *up).max();
        if own.iter().all(|gpu| gpu.nvlinks.is_none()) {
            return Err("no GPU has NVLinks".into());
        }
        let mut faults = Vec::new();
        for gpu in own {
            let Some(links) = &gpu.nvlinks else { continue };
            let most = most(gpu.model.as_deref()).unwrap_or(links.up);
            let what = if !links.down.is_empty() {
                let numbers: Vec<String> = links.down.iter().map(u32::to_string).collect();
                format!("GPU {}: NVLink {} down, {} up", gpu.index, list(numbers.iter().map(String::as_str)), links.up)
            } else if links.up < most {
                format!("GPU {}: {} NVLinks are up, {most} on other GPUs of the gang", gpu.index, links.up)
            } else {
                continue;
            };
            faults.push(
                Fault::warn(what)
                    .effect("this GPU is slower than the others, and the ring goes at its pace")
                    .evidence("gpus[].nvlinks of the GPUTopology")
                    .fix("nvidia-smi nvlink -s on the node; reset the GPU when it is free, then have it checked"),
            );
        }
        Ok(faults)
    })
}
