//! Checks a file against the report of its machine.

use super::diff::diff;
use super::finding::{Findings, Rule};
use super::generate::lookup_address;
use super::graph::{Device, NcclGraph};
use super::tables::{INVENTED, MAX_ELEMENTS, class, is_bus_id, max_elements};
use super::{Content, Document, generate, parse};
use crate::report::{self, numa_of};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::gpu_topology::GPUTopologyStatus;

/// Kind of a device in the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Gpu,
    Nic,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Gpu => "GPU",
            Kind::Nic => "NIC",
        }
    }
}

/// A device of the report.
struct Known {
    kind: Kind,
    name: String,
    numa_node: Option<u32>,
}

/// Reports where a file differs from the report of its machine.
pub fn check_against(document: &Document, status: &GPUTopologyStatus) -> Findings {
    let mut findings = Findings::default();
    let (known, remapped) = addresses(status);
    let machine = NcclGraph::read(document, Some(status));
    let bridges: BTreeSet<&str> = status
        .gpus
        .iter()
        .map(|gpu| &gpu.pcie_path)
        .chain(status.nics.iter().map(|nic| &nic.pcie_path))
        .flat_map(|path| path.iter().map(String::as_str))
        .collect();
    let gpus = machine.gpus.iter().map(|gpu| (Some(Kind::Gpu), gpu));
    let nics = machine.nics.iter().map(|nic| (Some(Kind::Nic), nic));
    let declared = gpus.chain(nics).chain(machine.others.iter().map(|other| (None, other)));
    for (kind, device) in declared.filter(|(_, device)| is_bus_id(&device.bus_id)) {
        check_device(device, kind, &machine, &known, &remapped, &mut findings);
    }
    for (position, element) in document.elements.iter().enumerate().filter(|(_, element)| element.tag == "pci") {
        let Some(bus_id) = element.get("busid").filter(|bus_id| is_bus_id(bus_id)) else { continue };
        let is_bridge = document.children(position, "pci").next().is_some();
        if !is_bridge || bridges.contains(bus_id) || bus_id.starts_with(INVENTED) {
            continue;
        }
        if element.get("class").is_none() {
            let got = format!("the bridge {bus_id}, which the machine does not have, without class");
            findings.add(&Rule::CLASS, Some(element.line), got, format!("class=\"{}\"", class::BRIDGE));
        } else {
            let fix = format!("a bus id of the machine, or one beginning with {INVENTED} for a bridge that you invent");
            findings.add(&Rule::NO_DEVICE, Some(element.line), format!("the bridge {bus_id}"), fix);
        }
    }
    let there: BTreeSet<&str> = document.all("pci").filter_map(|pci| pci.get("busid")).collect();
    let missing: Vec<String> = known
        .iter()
        .filter(|(bus_id, _)| !there.contains(bus_id.as_str()))
        .map(|(bus_id, device)| format!("{} {} ({bus_id})", device.kind.word(), device.name))
        .collect();
    if !missing.is_empty() {
        let got = format!("no <pci> for {}", missing.join(", "));
        findings.add(&Rule::MISSING_DEVICE, None, got, "a <pci> of that busid where each of them hangs");
    }
    let (count, nics) = (document.elements.len(), known.values().filter(|device| device.kind == Kind::Nic).count());
    let has_devices = document.elements.iter().any(|element| ["gpu", "nic"].contains(&element.tag.as_str()));
    let most = max_elements(nics);
    if count <= MAX_ELEMENTS && count > most && !has_devices {
        let got = format!("{count} tags, for a machine with {nics} NICs");
        findings.add(&Rule::LIMIT, None, got, format!("at most {most}: NCCL adds tags for devices to the same table"));
    }
    redundant(&machine, status, &mut findings);
    findings
}

/// GPUs and training NICs, keyed by the address that NCCL looks up; and a map from addresses that
/// NCCL ignores to those it uses instead.
fn addresses(status: &GPUTopologyStatus) -> (BTreeMap<String, Known>, BTreeMap<String, String>) {
    let mut known = BTreeMap::new();
    let mut remapped = BTreeMap::new();
    for gpu in &status.gpus {
        let numa_node = numa_of(status, gpu.numa_node);
        let device = Known { kind: Kind::Gpu, name: gpu.index.to_string(), numa_node };
        known.extend(gpu.bus_id.clone().map(|bus_id| (bus_id, device)));
    }
    let nics = report::devices(status).map_or(Vec::new(), |named| named.nics);
    for nic in nics.iter().map(|nic| &status.nics[*nic]) {
        let name = nic.rdma_device.clone().unwrap_or_else(|| nic.name.clone());
        let device = Known { kind: Kind::Nic, name, numa_node: numa_of(status, nic.numa_node) };
        let Some(own) = nic.bus_id.clone() else { continue };
        let looked_up = lookup_address(nic).unwrap_or_else(|| own.clone());
        if looked_up != own {
            remapped.insert(own, looked_up.clone());
        }
        known.entry(looked_up).or_insert(device);
    }
    (known, remapped)
}

fn check_device(
    device: &Device,
    declared: Option<Kind>,
    machine: &NcclGraph,
    known: &BTreeMap<String, Known>,
    remapped: &BTreeMap<String, String>,
    findings: &mut Findings,
) {
    let (line, bus_id) = (Some(device.line), &device.bus_id);
    let Some(found) = known.get(bus_id) else {
        return match remapped.get(bus_id) {
            Some(looked_up) => {
                findings.add(&Rule::MERGED_NIC, line, format!("busid=\"{bus_id}\""), format!("busid=\"{looked_up}\""));
            }
            None => findings.add(
                &Rule::NO_DEVICE,
                line,
                format!("busid=\"{bus_id}\""),
                "a bus id of this machine, or take it out",
            ),
        };
    };
    if let Some(declared) = declared.filter(|declared| *declared != found.kind) {
        let got = format!("{bus_id} as a {}, which is {} {}", declared.word(), found.kind.word(), found.name);
        findings.add(&Rule::OTHER_CLASS, line, got, "the file of this machine");
    }
    let numa_node = &machine.cpus[device.cpu].numa_node;
    if let Some(own) = found.numa_node.filter(|own| own.to_string() != *numa_node) {
        let got = format!("{} {} in NUMA node {numa_node}", found.kind.word(), found.name);
        findings.add(
            &Rule::OTHER_NUMA,
            line,
            got,
            format!("put it into <cpu numaid=\"{own}\">, unless you know better than the kernel"),
        );
    }
}

/// Reports a file that describes exactly what the machine reports anyway.
fn redundant(machine: &NcclGraph, status: &GPUTopologyStatus, findings: &mut Findings) {
    let Ok(own) = generate(status, Content::Tree) else { return };
    let own = NcclGraph::read(&parse(&own).document, None);
    let classes_are_equal =
        diff(&own, machine).is_ok_and(|changes| changes.iter().all(|change| !change.affects_paths()));
    if classes_are_equal {
        findings.add(
            &Rule::NEEDLESS,
            None,
            "the ways between all devices are those of the machine",
            "do without the file: unset NCCL_TOPO_FILE",
        );
    }
}
