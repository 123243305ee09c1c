//! Node environment: releases, device files, limits.

use super::super::profile::training_ports;
use super::fault::{Fault, NodeFault, Outcome, differences, each, list};
use super::input::{CheckInput, gpus};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::units::counted;
use switchyard_crds::gpu_topology::{FileState, GPUTopologyStatus};

/// Open files per rank of the job. NCCL's highest documented use is more than 32,768 for 144 ranks
/// with 16 contexts.
const FILES_PER_RANK: u64 = 256;
/// Minimum for any job.
const MIN_FILES: u64 = 1024;
/// Device file for unified memory.
const UVM: &str = "nvidia-uvm";

/// Check 23: the nodes of a gang are equal, and all report.
pub(super) fn mixed(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    let mut found = silent_nodes(input);
    found.extend(outdated_agents(input).into_iter().flatten());
    let host = |facts: &GPUTopologyStatus, value: fn(&switchyard_crds::gpu_topology::Host) -> Option<&String>| {
        facts.host.as_ref().and_then(value).cloned()
    };
    let effect_of_driver = "releases that differ work mostly, and fail in ways that one node alone does not show";
    let mut compare = |what: &str, effect: &str, field: &str, differ: Option<String>| {
        found.extend(differ.map(|differ| {
            Fault::warn(format!("{what}: {differ}"))
                .effect(effect)
                .evidence(format!("{field} of the GPUTopology"))
                .fix("restrict the job to nodes that are alike (a nodeSelector), or bring them to one release")
                .of_job()
        }));
    };
    let set =
        |values: BTreeSet<String>| (!values.is_empty()).then(|| values.into_iter().collect::<Vec<_>>().join(" and "));
    compare(
        "GPUs",
        "the slowest model sets the pace, and the smallest memory the batch",
        "gpus[].model",
        differences(gang, |member, facts| {
            set(gpus(member, facts).iter().filter_map(|gpu| gpu.model.clone()).collect())
        }),
    );
    compare(
        "driver",
        effect_of_driver,
        "host.driver",
        differences(gang, |_, facts| host(facts, |host| host.driver.as_ref())),
    );
    compare(
        "firmware of the NICs",
        effect_of_driver,
        "nics[].firmware",
        differences(gang, |_, facts| set(training_ports(facts).filter_map(|nic| nic.firmware.clone()).collect())),
    );
    compare(
        "training ports",
        "nodes with fewer ports set the pace",
        "nics[]",
        differences(gang, |_, facts| Some(counted(training_ports(facts).count() as u64, "port"))),
    );
    compare(
        "node agents",
        "an older agent reports fewer facts, and checks are skipped there",
        "agentVersion",
        differences(gang, |_, facts| facts.agent_version.clone()),
    );
    if found.is_empty() && gang.members.len() < 2 {
        return Err("one node".into());
    }
    Ok(found)
}

/// Nodes without facts.
fn silent_nodes(input: &CheckInput<'_>) -> Vec<NodeFault> {
    let mut reasons: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for (rank, member) in (0..).zip(&input.gang.members).filter(|(_, member)| member.facts.is_none() || member.is_old) {
        reasons.entry(member.silence).or_default().push(rank);
    }
    let fault = |(why, nodes): (&str, Vec<u32>)| NodeFault {
        nodes,
        fault: Fault::warn(format!("not checked as it is now: {why}"))
            .effect("settings are not derived for it, and faults there show only when the job runs")
            .evidence("GPUTopology of the node")
            .fix("kubectl get pods -o wide for the node agent; look into its log on that node"),
    };
    reasons.into_iter().map(fault).collect()
}

/// Nodes whose agent is older than this program. It can lack facts that the checks need.
fn outdated_agents(input: &CheckInput<'_>) -> Outcome {
    let release = |text: &str| {
        let mut parts = text.split('.').map(|part| part.parse::<u32>().ok());
        Some((parts.next()??, parts.next()??))
    };
    let own = env!("CARGO_PKG_VERSION");
    each(input.gang, |_, _, facts| {
        let agent = facts.agent_version.as_deref().unwrap_or(own);
        let is_older = release(agent).zip(release(own)).is_some_and(|(agent, own)| agent < own);
        let fault = Fault::warn(format!("its node agent is {agent}, and this program {own}"))
            .effect("it reports fewer facts, and the checks that stand on them are skipped")
            .evidence("agentVersion of the GPUTopology")
            .fix("roll the DaemonSet of the node agent out with the release of the controller");
        Ok(is_older.then_some(fault).into_iter().collect())
    })
}

/// Check 25: the device files of the GPUs.
pub(super) fn device_files(input: &CheckInput<'_>) -> Outcome {
    if input.gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    each(input.gang, |_, _, facts| {
        let missing = missing(facts)?;
        let others: Vec<&str> = missing.into_iter().filter(|path| *path != UVM).collect();
        if others.is_empty() {
            return Ok(Vec::new());
        }
        let what = format!("/dev has no {}", list(others));
        Ok(vec![
            Fault::warn(what)
                .effect("the node is offered as ready, and containers on it see no GPU")
                .evidence("host.deviceFiles of the GPUTopology: Missing")
                .fix("nvidia-modprobe -c 0 -u on the node, or restart the driver's container of the GPU operator"),
        ])
    })
}

/// Missing device files.
fn missing(facts: &GPUTopologyStatus) -> Result<Vec<&str>, String> {
    let files = facts.host.as_ref().map(|host| host.device_files.as_slice()).unwrap_or_default();
    if files.is_empty() {
        return Err("host.deviceFiles is not reported".into());
    }
    Ok(files.iter().filter(|file| file.state == FileState::Missing).map(|file| file.path.as_str()).collect())
}

/// Check 26: limits that NCCL needs, and unified memory.
pub(super) fn limits(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    if gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    let ranks = u64::from(gang.processes) * gang.members.len() as u64;
    let needed = (ranks * FILES_PER_RANK).max(MIN_FILES);
    each(gang, |_, _, facts| {
        let mut faults = Vec::new();
        let host = facts.host.as_ref();
        let files = host.and_then(|host| host.open_files_limit.as_deref());
        let stack = host.and_then(|host| host.stack_limit.as_deref());
        if let Some(limit) = files.and_then(|limit| limit.parse::<u64>().ok())
            && limit < needed
        {
            faults.push(
                Fault::warn(format!("containers may open {limit} files; {ranks} ranks may need {needed}"))
                    .effect("NCCL ends with \"Too many open files\" when it connects many ranks")
                    .evidence(format!(
                        "host.openFilesLimit of the GPUTopology; {FILES_PER_RANK} for each rank is our estimate"
                    ))
                    .fix("set LimitNOFILE=1048576 in the service of the container runtime"),
            );
        }
        if stack == Some("Unlimited") {
            faults.push(
                Fault::warn("the stack of a thread is unlimited")
                    .effect("NCCL before 2.28 crashes with it, and later releases take small stacks")
                    .evidence("host.stackLimit of the GPUTopology")
                    .fix("set LimitSTACK=8M in the service of the container runtime"),
            );
        }
        let missing = missing(facts);
        if missing.as_ref().is_ok_and(|missing| missing.contains(&UVM)) {
            faults.push(
                Fault::block("/dev/nvidia-uvm is missing")
                    .effect("CUDA does not start, or NCCL since 2.23 finds no memory pools")
                    .evidence("host.deviceFiles of the GPUTopology: Missing")
                    .fix("modprobe nvidia-uvm and nvidia-modprobe -u on the node; in a virtual machine the hypervisor has to allow it"),
            );
        }
        match missing {
            Err(why) if faults.is_empty() => Err(why),
            _ if faults.is_empty() && (files.is_none() || stack.is_none()) => {
                Err("host.openFilesLimit and host.stackLimit are not reported".into())
            }
            _ => Ok(faults),
        }
    })
}
