//! Processes, pods and settings of the manifest, checked against the nodes of the gang.

use super::fault::{Fault, NodeFault, Outcome, differences, each, list};
use super::input::{CheckInput, gpus, is_flat};
use crate::lint::{self, Options, Severity};
use crate::variables::is_visible_devices;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use switchyard_crds::Transport;

/// Check 17: one process for each GPU, and GPUs chosen by the device plugin.
pub(super) fn ranks(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    if gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    let mut found = Vec::new();
    let (processes, gpus) = (gang.processes, gang.gpus);
    if processes > gpus {
        found.push(
            Fault::block(format!("{processes} processes on {gpus} GPUs of each node"))
                .effect("two ranks share a GPU: \"Duplicate GPU detected\"")
                .evidence("trainer.numProcPerNode; nvidia.com/gpu of trainer.resourcesPerNode.limits")
                .fix(format!("set trainer.numProcPerNode to {gpus}, or ask for {processes} GPUs"))
                .of_job(),
        );
    }
    for (name, value) in gang.own.iter().filter(|(name, _)| is_visible_devices(name)) {
        found.push(
            Fault::block(format!("{name}={} chooses GPUs by hand", value.unwrap_or("...")))
                .effect("it overrides what the device plugin gave the pod: ranks of several jobs may meet on one GPU")
                .evidence("the environment of the trainer")
                .fix(format!("delete {name}"))
                .of_job(),
        );
    }
    Ok(found)
}

/// Check 18: NCCL treats two pods of a gang on one node as two hosts.
pub(super) fn one_per_node(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    if !gang.has_several_nodes() {
        return Err("one pod".into());
    }
    if gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    let mut pods: BTreeMap<&str, u32> = BTreeMap::new();
    gang.members.iter().for_each(|member| *pods.entry(member.name).or_default() += 1);
    let shared: Vec<String> =
        pods.iter().filter(|(_, count)| **count > 1).map(|(name, count)| format!("{count} pods on {name}")).collect();
    if shared.is_empty() {
        return Ok(Vec::new());
    }
    let what = format!(
        "{}: these pods cannot use NVLink or shared memory with each other",
        list(shared.iter().map(String::as_str))
    );
    // Over RDMA, data still uses the NIC. Over TCP it is slow without any message.
    let is_fast = matches!(gang.transport(), Some(Transport::RDMA | Transport::Plugin));
    let fault = if is_fast { Fault::warn(what) } else { Fault::block(what) };
    let fault = fault
        .effect(if is_fast { "data between them takes the NIC" } else { "data between them takes TCP" })
        .evidence("placement: NCCL distinguishes hosts by name and boot id, and each pod has its own /dev/shm")
        .fix(format!("halve trainer.numNodes and give each pod all GPUs of a node, now {}", gang.gpus));
    Ok(vec![fault.of_job()])
}

/// Check 19: a topology file is for one kind of machine, and only for machines that hide their
/// topology.
pub(super) fn topology_file(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    if gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    let path = match gang.own.get("NCCL_TOPO_FILE") {
        None => return Err("no topology file is named".into()),
        Some(None) => return Err("the value of NCCL_TOPO_FILE is not in the manifest".into()),
        Some(Some(path)) => *path,
    };
    let setting = format!("NCCL_TOPO_FILE={path}");
    let fix = "delete NCCL_TOPO_FILE: NCCL reads the tree of each node from sysfs";
    let mut found: Vec<NodeFault> = each(gang, |_, _, facts| {
        if facts.gpus.iter().all(|gpu| gpu.pcie_path.is_empty()) {
            return Err("gpus[].pciePath is not reported".into());
        }
        if is_flat(facts) {
            return Ok(Vec::new());
        }
        Ok(vec![
            Fault::warn(format!("{setting} where the machine shows its own PCIe tree"))
                .effect("NCCL takes the file for the truth: an old one sends data over ways that are not there")
                .evidence("gpus[].pciePath of the GPUTopology has switches")
                .fix(fix),
        ])
    })?;
    let differ = differences(gang, |_, facts| {
        let ids: Vec<&str> = facts.gpus.iter().filter_map(|gpu| gpu.bus_id.as_deref()).collect();
        Some(format!("GPUs at {}", list(ids)))
    });
    if let Some(differ) = differ {
        found.push(
            Fault::block(format!("{setting} for machines that differ: {differ}"))
                .effect("bus ids of the file are not those of every node: NCCL does not start, or takes wrong ways")
                .evidence("gpus[].busID of the GPUTopology")
                .fix(fix)
                .of_job(),
        );
    }
    if found.is_empty() {
        return Err(format!("what is in {path} only the image has: it is not read here"));
    }
    Ok(found)
}

/// Check 21: CPUs near each GPU.
pub(super) fn cpus(input: &CheckInput<'_>) -> Outcome {
    if input.gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    each(input.gang, |_, member, facts| {
        if facts.numa_nodes.len() == 1 {
            return Ok(Vec::new());
        }
        if facts.numa_nodes.is_empty() {
            return Err("numaNodes is not reported".into());
        }
        let mut faults = Vec::new();
        let unknown: Vec<String> = gpus(member, facts)
            .iter()
            .filter(|gpu| gpu.numa_node.is_none())
            .map(|gpu| format!("GPU {}", gpu.index))
            .collect();
        if !unknown.is_empty() {
            faults.push(
                Fault::warn(format!("the NUMA node of {} is not known", list(unknown.iter().map(String::as_str))))
                    .effect("CPUs and memory near the GPU cannot be chosen: copies may cross the sockets")
                    .evidence("gpus[].numaNode of the GPUTopology: the kernel says -1")
                    .fix("update the firmware, or have the hypervisor pass the NUMA node on"),
            );
        }
        match facts.host.as_ref().and_then(|host| host.kubelet.as_ref()) {
            Some(kubelet) => {
                let is_none = |policy: &Option<String>| policy.as_deref() == Some("none");
                let off =
                    [("topologyManagerPolicy", &kubelet.topology_manager), ("cpuManagerPolicy", &kubelet.cpu_manager)];
                let off: Vec<&str> = off.iter().filter(|(_, policy)| is_none(policy)).map(|(name, _)| *name).collect();
                if !off.is_empty() {
                    let nodes = facts.numa_nodes.len();
                    faults.push(
                        Fault::warn(format!("{} none, on a machine with {nodes} NUMA nodes", off.join(" and ")))
                            .effect("the kubelet may give the pod CPUs of another socket than its GPUs'")
                            .evidence("host.kubelet of the GPUTopology")
                            .fix("set cpuManagerPolicy: static and topologyManagerPolicy: best-effort in the kubelet's configuration"),
                    );
                }
                Ok(faults)
            }
            None if faults.is_empty() => Err("host.kubelet is not reported".into()),
            None => Ok(faults),
        }
    })
}

/// Lint rules whose subject other checks cover using the facts of the nodes.
const COVERED_BY_OTHER_CHECKS: [&str; 5] =
    ["gid-index", "visible-devices", "process-count", "debug-section", "launcher-owned"];

/// Check 22: findings of `switchyard lint` in the user's own environment.
pub(super) fn settings(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    if gang.own.is_empty() {
        return Err("the trainer has no environment of the user's own".into());
    }
    let entry = |(name, value): (&&str, &Option<&str>)| value.map(|value| json!({"name": name, "value": value}));
    let env: Vec<Value> = gang.own.iter().filter_map(entry).collect();
    let document = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trainer"},
        "spec": {"hostNetwork": gang.uses_host_network(), "containers": [{"name": "trainer", "env": env}]},
    });
    let linted = lint::lint(&document, Options::default());
    let findings = linted.iter().flat_map(|linted| &linted.findings);
    let reported = findings
        .filter(|finding| finding.severity < Severity::Note && !COVERED_BY_OTHER_CHECKS.contains(&finding.rule));
    let fault = |finding: &lint::Finding| {
        Fault::warn(format!("{}: {}", finding.got, finding.why))
            .evidence(format!(
                "the environment of the trainer; lint rule {}{}",
                finding.rule,
                finding.link.map(|link| format!(", {link}")).unwrap_or_default()
            ))
            .fix(finding.fix.clone())
            .of_job()
    };
    Ok(reported.map(fault).collect())
}
