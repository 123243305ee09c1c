//! PCIe: ACS redirection, the path from NICs to GPU memory, and links that trained slowly.

use super::super::profile::training_ports;
use super::fault::{Fault, Outcome, each, list};
use super::input::{CheckInput, gpus, is_flat};
use std::collections::BTreeSet;
use switchyard_core::path::{PathClass, path_class};
use switchyard_core::units::counted;
use switchyard_crds::gpu_topology::{DmaBuf, GPUTopologyStatus, Gpu, ModuleState, PcieLink};
use switchyard_topology::report::numa_of;

/// Check 9: bridges that redirect traffic between devices through the CPU.
pub(super) fn acs(input: &CheckInput<'_>) -> Outcome {
    let gang = input.gang;
    if gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    let uses_rdma = input.uses_rdma().is_ok();
    each(gang, |_, member, facts| {
        let acs = facts.host.as_ref().and_then(|host| host.acs.as_ref());
        let acs = acs.ok_or("host.acs is not reported: the agent may not read it (its option is off)")?;
        let own = gpus(member, facts);
        let has_nvlink = own.iter().all(|gpu| gpu.nvlinks.as_ref().is_some_and(|links| links.up > 0));
        if !uses_rdma && (has_nvlink || own.len() < 2) {
            return Ok(Vec::new());
        }
        let paths: BTreeSet<&str> = own.iter().flat_map(|gpu| &gpu.pcie_path).map(String::as_str).collect();
        let on_path: Vec<&str> =
            acs.redirecting.iter().map(String::as_str).filter(|bridge| paths.contains(bridge)).collect();
        let Some(first) = on_path.first() else { return Ok(Vec::new()) };
        let what = format!(
            "ACS redirects on {} above the GPUs: {}",
            counted(on_path.len() as u64, "bridge"),
            list(on_path.iter().copied())
        );
        let evidence = "host.acs.redirecting and gpus[].pciePath of the GPUTopology";
        let fault = if is_flat(facts) {
            Fault::warn(what).fix("in a virtual machine ACS stays on: the hypervisor has to enable ATS on the NICs")
        } else {
            Fault::block(what).fix(format!(
                "turn ACS off in the BIOS, or on each bridge at every boot, as root: setpci -s {first} ECAP_ACS+6.w=0000"
            ))
        };
        Ok(vec![
            fault
                .effect("data between GPUs and NICs takes the way over the CPU: half of the bandwidth, or a hang")
                .evidence(evidence),
        ])
    })
}

/// Check 10: NICs can access GPU memory.
pub(super) fn direct(input: &CheckInput<'_>) -> Outcome {
    input.verbs()?;
    input.uses_rdma()?;
    each(input.gang, |_, member, facts| {
        let mut faults = Vec::new();
        let host = facts.host.as_ref();
        let peermem = host.and_then(|host| host.peermem);
        let dma_buf = host.and_then(|host| host.dma_buf);
        let effect = "data bounces through host memory: a fraction of the bandwidth";
        if peermem == Some(ModuleState::NotLoaded) && dma_buf != Some(DmaBuf::Likely) {
            faults.push(
                Fault::warn(
                    "NICs do not reach GPU memory: nvidia-peermem is not loaded, and DMA-BUF is not to be expected",
                )
                .effect(effect)
                .evidence("host.peermem and host.dmaBuf of the GPUTopology")
                .fix("modprobe nvidia-peermem, or use the open kernel module of the driver with Linux 5.12 or newer"),
            );
        }
        let own = gpus(member, facts);
        // One GPU near a NIC relays the data of its neighbours (PXN).
        if !is_flat(facts) && !own.is_empty() && own.iter().all(|gpu| is_far(gpu, facts)) {
            faults.push(
                Fault::warn("no NIC is on the PCIe switch of a GPU")
                    .effect(effect)
                    .evidence("gpus[].pciePath and nics[].pciePath of the GPUTopology: every way is PHB or farther")
                    .fix("nothing in software; NCCL_NET_GDR_LEVEL=PHB only if a measurement on these nodes is faster with it"),
            );
        }
        if faults.is_empty() && peermem.is_none() && dma_buf.is_none() {
            return Err("host.peermem and host.dmaBuf are not reported".into());
        }
        Ok(faults)
    })
}

/// Whether every NIC is beyond NCCL's GPUDirect range. Unknown paths do not count as far, and on
/// Grace data uses the CPU's own link (`NCCL_NET_GDR_C2C`).
fn is_far(gpu: &Gpu, facts: &GPUTopologyStatus) -> bool {
    let is_grace = facts.cpus.as_ref().is_some_and(|cpus| cpus.architecture.as_deref() == Some("aarch64"));
    if gpu.pcie_path.is_empty() || gpu.memory_numa_node.is_some() || is_grace {
        return false;
    }
    let ways = training_ports(facts).filter(|nic| !nic.pcie_path.is_empty()).map(|nic| {
        path_class(&gpu.pcie_path, &nic.pcie_path, numa_of(facts, gpu.numa_node), numa_of(facts, nic.numa_node))
    });
    ways.min().is_some_and(|nearest| nearest > PathClass::Pxb)
}

/// Check 15: links with fewer lanes or of an older generation than possible.
pub(super) fn link(input: &CheckInput<'_>) -> Outcome {
    if input.gang.gpus == 0 {
        return Err("no GPUs".into());
    }
    each(input.gang, |_, member, facts| {
        let own = gpus(member, facts);
        let ports: Vec<_> = training_ports(facts).collect();
        let devices = own.iter().map(|gpu| (format!("GPU {}", gpu.index), gpu.pcie_link.as_ref()));
        let devices: Vec<(String, &PcieLink)> = devices
            .chain(ports.iter().map(|nic| (super::input::port_name(nic), nic.pcie_link.as_ref())))
            .filter_map(|(name, link)| Some((name, link?)))
            .collect();
        if devices.is_empty() {
            return Err("pcieLink of gpus[] and nics[] is not reported".into());
        }
        // Among equal GPUs, the best slot is what all should have.
        let widest =
            |link: &PcieLink| own.iter().filter_map(|gpu| gpu.pcie_link.as_ref()?.max_width).max().max(link.max_width);
        let mut faults = Vec::new();
        for (name, link) in &devices {
            let most = if name.starts_with("GPU") { widest(link) } else { link.max_width };
            if let (Some(now), Some(most)) = (link.width, most)
                && now < most
            {
                faults.push(slow(format!("{name}: x{now} now, x{most} possible")));
            } else if let (Some(now), Some(most)) = (link.generation, link.max_generation)
                && now < most
            {
                faults.push(slow(format!("{name}: PCIe {now} now, PCIe {most} possible")));
            }
        }
        Ok(faults)
    })
}

fn slow(what: String) -> Fault {
    Fault::warn(what)
        .effect("copies to the host and to NICs have a part of the bandwidth, and NCCL plans with it")
        .evidence("pcieLink of the GPUTopology")
        .fix("reseat the card or its riser; look for link errors in the kernel log (dmesg | grep -i aer)")
}
