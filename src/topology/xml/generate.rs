//! Generates a topology file from a report: the tree that NCCL finds when it walks up from each
//! device to its CPU.

use super::tables::{ARCHITECTURES, HIDDEN_SWITCH, VENDORS, class, is_bus_id, max_elements, speed_word};
use crate::nccl::is_coherent;
use crate::report::{self, ReportError, numa_of};
use std::collections::BTreeMap;
use std::fmt::Write;
use switchyard_core::rates;
use switchyard_crds::gpu_topology::{GPUTopologyStatus, Nic, PcieLink};
use switchyard_worker_contract::CpuList;

/// Maximum number of CPUs in a mask. NCCL's strings are too short for longer masks, so NCCL then
/// reads the mask from the kernel.
const MAX_CPUS: u32 = 28 * 32;

/// What the file says about devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Only where they are attached, for NCCL to load.
    Tree,
    /// Also NVLinks, ports and speeds, for people to read. NCCL would trust these even if they are
    /// outdated.
    Devices,
}

/// Why a report does not yield a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GenerateError {
    #[error("status.gpus: none: expected a machine with GPUs")]
    NoGpu,
    /// A device whose path is unknown.
    #[error("{0}: got no pciePath: expected the path from the root complex to the device")]
    NoPath(String),
    /// A bus id that NCCL never matches.
    #[error(
        "{field}: got {got:?}: expected a bus id such as 0000:1a:00.0, with four digits of domain as NCCL compares it"
    )]
    BusId { field: String, got: String },
    /// More tags than NCCL reads.
    #[error("{got} tags: expected at most {most}, because NCCL needs room for its own tags")]
    TooMany { got: usize, most: usize },
    /// The report contradicts itself.
    #[error(transparent)]
    Report(#[from] ReportError),
}

/// A `<pci>` tag.
#[derive(Debug, Default)]
struct Pci {
    attributes: String,
    /// Its content other than devices, one line each.
    inner: Vec<String>,
    below: BTreeMap<String, Pci>,
}

/// Generates the file for a report: GPUs, and the NICs that carry training traffic. The same report
/// gives the same bytes.
///
/// # Errors
/// A report without GPUs, or with devices that NCCL could not find.
pub fn generate(status: &GPUTopologyStatus, content: Content) -> Result<String, GenerateError> {
    if status.gpus.is_empty() {
        return Err(GenerateError::NoGpu);
    }
    let named = report::devices(status)?;
    let mut cpus: BTreeMap<i64, BTreeMap<String, Pci>> = BTreeMap::new();
    for (position, gpu) in status.gpus.iter().enumerate() {
        let own =
            place(&mut cpus, format!("status.gpus[{position}]"), &gpu.pcie_path, numa_of(status, gpu.numa_node), None)?;
        own.attributes = format!("class=\"{}\"{}", class::WHOLE_GPU, link(gpu.pcie_link.as_ref()));
        if content == Content::Devices {
            own.inner = gpu_lines(status, &named.devices, position);
        }
    }
    for position in &named.nics {
        let nic = &status.nics[*position];
        if nic.pcie_path.is_empty() {
            continue;
        }
        let field = format!("status.nics[{position}]");
        let own = place(&mut cpus, field, &nic.pcie_path, numa_of(status, nic.numa_node), lookup_address(nic))?;
        let word = if nic.link_layer.as_deref() == Some("InfiniBand") {
            class::WHOLE_INFINIBAND
        } else {
            class::WHOLE_ETHERNET
        };
        own.attributes = format!("class=\"{word}\"{}", link(nic.pcie_link.as_ref()));
        if content == Content::Devices {
            own.inner.push(net_line(nic));
        }
    }
    let mut text = String::from("<system version=\"1\">\n");
    for (numa_node, devices) in &cpus {
        text.push_str(&format!("  <cpu numaid=\"{numa_node}\"{}>\n", cpu_attributes(status, *numa_node)));
        devices.iter().for_each(|(bus_id, pci)| pci.write(&mut text, bus_id, 4));
        text.push_str("  </cpu>\n");
    }
    text.push_str("</system>\n");
    let count = text.lines().filter(|line| !line.trim_start().starts_with("</")).count();
    let most = max_elements(named.nics.len());
    if content == Content::Tree && count > most { Err(GenerateError::TooMany { got: count, most }) } else { Ok(text) }
}

/// The address under which NCCL looks up a NIC. NCCL's own transport for InfiniBand and RoCE treats
/// all functions and devices of a bus as one NIC (`ncclIbGetPciPath`). Plugin transports, such as
/// EFA's, do not.
pub(super) fn lookup_address(nic: &Nic) -> Option<String> {
    let is_own_transport = nic.rdma_device.is_some()
        && nic.link_layer.as_deref().is_some_and(|layer| ["InfiniBand", "Ethernet"].contains(&layer));
    let bus_id = nic.bus_id.as_deref().or(nic.pcie_path.last().map(String::as_str));
    let bus = bus_id.filter(|bus_id| is_own_transport && is_bus_id(bus_id))?;
    Some(format!("{}00.0", &bus[..8]))
}

/// Returns the tag of a device, creating the tags of the bridges above it.
fn place<'a>(
    cpus: &'a mut BTreeMap<i64, BTreeMap<String, Pci>>,
    field: String,
    path: &[String],
    numa_node: Option<u32>,
    address: Option<String>,
) -> Result<&'a mut Pci, GenerateError> {
    let mut chain = climb(path);
    let Some(device) = chain.first_mut() else { return Err(GenerateError::NoPath(field)) };
    if let Some(address) = &address {
        *device = address;
    }
    if let Some(wrong) = chain.iter().find(|bus_id| !is_bus_id(bus_id)) {
        return Err(GenerateError::BusId { field: format!("{field}.pciePath"), got: (*wrong).to_string() });
    }
    // -1 is what the kernel shows for an unknown NUMA node.
    let numa_node = numa_node.map_or(-1, i64::from);
    let top = chain.last().copied().unwrap_or_default();
    // A bridge has a single position, even if its devices report different NUMA nodes.
    let home = cpus.iter().find(|(_, devices)| devices.contains_key(top)).map_or(numa_node, |(home, _)| *home);
    let mut devices = cpus.entry(home).or_default();
    for bridge in chain[1..].iter().rev() {
        let pci = devices.entry((*bridge).to_string()).or_default();
        if pci.attributes.is_empty() {
            pci.attributes = format!("class=\"{}\"", class::BRIDGE);
        }
        devices = &mut pci.below;
    }
    Ok(devices.entry(chain[0].to_string()).or_default())
}

/// Bus ids from a device up to its CPU, as NCCL walks: two steps at a time, past the downstream
/// port of a switch, until an element is not a bus id (`ncclTopoGetXmlFromSys`).
fn climb(path: &[String]) -> Vec<&str> {
    let mut chain = Vec::new();
    let mut at = path.len();
    while at > 0 {
        chain.push(path[at - 1].as_str());
        // A root complex (pci0000:17) does not have the form of a bus id.
        at = if at >= 3 && [at - 2, at - 3].iter().all(|above| is_bus_id(&path[*above])) { at - 2 } else { 0 };
    }
    chain
}

impl Pci {
    fn write(&self, text: &mut String, bus_id: &str, indent: usize) {
        let gap = " ".repeat(indent);
        let head = format!("{gap}<pci busid=\"{bus_id}\" {}", self.attributes);
        if self.inner.is_empty() && self.below.is_empty() {
            text.push_str(&format!("{head}/>\n"));
            return;
        }
        text.push_str(&format!("{head}>\n"));
        self.below.iter().for_each(|(bus_id, pci)| pci.write(text, bus_id, indent + 2));
        if self.inner.first().is_some_and(|line| line.starts_with("<net")) {
            text.push_str(&format!("{gap}  <nic>\n"));
            self.inner.iter().for_each(|line| text.push_str(&format!("{gap}    {line}\n")));
            text.push_str(&format!("{gap}  </nic>\n"));
        } else {
            self.inner.iter().for_each(|line| text.push_str(&format!("{gap}  {line}\n")));
        }
        text.push_str(&format!("{gap}</pci>\n"));
    }
}

/// CPU attributes of a NUMA node from the report, in NCCL's vocabulary. NCCL queries the CPU for
/// the rest.
fn cpu_attributes(status: &GPUTopologyStatus, numa_node: i64) -> String {
    let node = status.numa_nodes.iter().find(|node| i64::from(node.id) == numa_node);
    let cpus = node.and_then(|node| node.cpus.as_deref()).and_then(|list| list.parse::<CpuList>().ok());
    let mut out = String::new();
    if let Some(mask) = cpus.and_then(|cpus| mask(&cpus)) {
        out.push_str(&format!(" affinity=\"{mask}\""));
    }
    let Some(cpus) = &status.cpus else { return out };
    let architecture = cpus
        .architecture
        .as_deref()
        .and_then(|own| ARCHITECTURES.iter().find(|(word, uname)| *uname == own || *word == own));
    if let Some((word, _)) = architecture {
        out.push_str(&format!(" arch=\"{word}\""));
        let vendor = cpus.vendor.as_deref().filter(|vendor| *word == "x86_64" && VENDORS.contains(vendor));
        out.push_str(&vendor.map_or(String::new(), |vendor| format!(" vendor=\"{vendor}\"")));
    }
    out
}

/// The kernel's CPU mask: groups of 32, highest first; `None` if there are no CPUs, or too many.
fn mask(cpus: &CpuList) -> Option<String> {
    let most = cpus.iter().max().filter(|cpu| *cpu < MAX_CPUS)?;
    let mut groups = vec![0_u32; most as usize / 32 + 1];
    cpus.iter().for_each(|cpu| groups[cpu as usize / 32] |= 1 << (cpu % 32));
    Some(groups.iter().rev().map(|group| format!("{group:08x}")).collect::<Vec<_>>().join(","))
}

/// Speed and width of a link, if known. NCCL reads missing ones from the kernel.
fn link(link: Option<&PcieLink>) -> String {
    let speed = link.and_then(|link| link.generation.or(link.max_generation)).and_then(speed_word);
    let width = link.and_then(|link| link.width.or(link.max_width));
    let mut out = speed.map_or(String::new(), |speed| format!(" link_speed=\"{speed}\""));
    if let Some(width) = width {
        let _ = write!(out, " link_width=\"{width}\"");
    }
    out
}

/// The lines of `<gpu>` with its NVLinks.
fn gpu_lines(status: &GPUTopologyStatus, devices: &switchyard_core::devices::Devices, gpu: usize) -> Vec<String> {
    let own = devices.gpus[gpu];
    let sm = rates::sm_by_nvlink(own.link_rate).map_or(String::new(), |sm| format!(" sm=\"{sm}\""));
    let mut inner = Vec::new();
    for (other, known) in status.gpus.iter().enumerate().filter(|(other, _)| devices.direct(gpu, *other) > 0) {
        let target = known.pcie_path.last().map_or("", String::as_str);
        let count = devices.direct(gpu, other);
        inner.push(format!("  <nvlink target=\"{target}\" count=\"{count}\" tclass=\"{}\"/>", class::WHOLE_GPU));
    }
    if own.switch_links > 0 {
        let (count, class) = (own.switch_links, class::WHOLE_SWITCH);
        inner.push(format!("  <nvlink target=\"{HIDDEN_SWITCH}\" count=\"{count}\" tclass=\"{class}\"/>"));
    }
    if is_coherent(&status.gpus[gpu]) {
        inner.push("  <c2c/>".to_string());
    }
    let head = format!("<gpu dev=\"{}\"{sm}", status.gpus[gpu].index);
    if inner.is_empty() {
        return vec![format!("{head}/>")];
    }
    [format!("{head}>")].into_iter().chain(inner).chain(["</gpu>".to_string()]).collect()
}

fn net_line(nic: &Nic) -> String {
    // Names come from firmware; drop characters that would end the attribute value.
    let name: String = nic
        .rdma_device
        .as_deref()
        .unwrap_or(&nic.name)
        .chars()
        .filter(|c| c.is_ascii_graphic() && *c != '"' && *c != '<')
        .collect();
    let speed = nic.rate_megabits_per_second.map_or(String::new(), |rate| format!(" speed=\"{rate}\""));
    let port = nic.port.map_or(String::new(), |port| format!(" port=\"{port}\""));
    format!("<net name=\"{name}\"{speed}{port}/>")
}
