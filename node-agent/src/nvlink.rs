//! NVLinks of GPUs, and the connection between two GPUs.

use crate::nvml::reason;
use crate::nvml_raw::{self, Remote};
use crate::pci;
use crate::read::Notes;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use std::collections::BTreeMap;
use switchyard_crds::gpu_topology::{Gpu, Link, LinkKind, LinkVia, NvLinks, PathClass};

/// Most NVLinks per GPU, as defined by the driver.
pub(crate) const MAX_LINKS: u32 = 18;

/// NVLinks of one GPU.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    /// All links of the GPU; `None` if it has none.
    pub links: Option<NvLinks>,
    /// Active links to other GPUs, by PCI address: count, and total speed in MB/s.
    gpus: BTreeMap<String, (u32, Option<u64>)>,
    /// Active links to switches, in the same form.
    pub switches: Option<(u32, Option<u64>)>,
}

pub(crate) fn read_ports(nvml: &Nvml, index: u32, device: &Device<'_>, notes: &mut Notes) -> Ports {
    let mut ports = Ports::default();
    for number in 0..MAX_LINKS {
        let link = device.link_wrapper_for(number);
        match link.is_active() {
            Ok(true) => ports.links.get_or_insert_default().up += 1,
            Ok(false) => {
                ports.links.get_or_insert_default().down.push(number);
                continue;
            }
            // The first link index that the GPU does not have; also returned for GPUs without
            // NVLink.
            Err(NvmlError::InvalidArg | NvmlError::NotSupported) => break,
            Err(error @ NvmlError::GpuLost) => {
                notes.add(format!("GPU{index} NVLinks from {number}: {}", reason(&error)));
                break;
            }
            Err(error) => {
                notes.add(format!("GPU{index} NVLink {number}: {}", reason(&error)));
                continue;
            }
        }
        let speed = nvml_raw::link_speed(nvml, device, number);
        let slot = match nvml_raw::remote_device_type(nvml, device, number) {
            Some(Remote::Switch) => ports.switches.get_or_insert((0, Some(0))),
            Some(Remote::Gpu) => match link.remote_pci_info().map(|info| pci::bus_id(&info.bus_id)) {
                Ok(Some(id)) => ports.gpus.entry(id).or_insert((0, Some(0))),
                Ok(None) => continue,
                Err(error) => {
                    notes.add(format!("GPU{index} NVLink {number}: other end unknown: {}", reason(&error)));
                    continue;
                }
            },
            Some(Remote::Other) => continue,
            None => {
                notes.add(format!("GPU{index} NVLink {number}: other end unknown"));
                continue;
            }
        };
        slot.0 += 1;
        slot.1 = slot.1.zip(speed).map(|(sum, speed)| sum + speed);
    }
    ports
}

/// One NVLink entry and one PCIe path entry per pair of GPUs. All three lists have the same order.
pub(crate) fn read_links(
    nvml: &Nvml,
    gpus: &[Gpu],
    devices: &[Device<'_>],
    ports: &[Ports],
    notes: &mut Notes,
) -> Vec<Link> {
    let mut links = Vec::new();
    for a in 0..gpus.len() {
        for b in a + 1..gpus.len() {
            let entry = |kind| Link {
                a: gpus[a].uuid.clone(),
                b: gpus[b].uuid.clone(),
                kind,
                count: None,
                via: None,
                megabytes_per_second: None,
                path_class: None,
            };
            let direct = gpus[b].bus_id.as_ref().and_then(|id| ports[a].gpus.get(id)).copied();
            let switched = ports[a].switches.zip(ports[b].switches).map(|(x, y)| {
                let speed = x.1.zip(y.1).map(|(x, y)| x.min(y));
                (x.0.min(y.0), speed)
            });
            let nvlink = direct.map(|found| (found, LinkVia::Direct));
            if let Some(((count, speed), via)) = nvlink.or(switched.map(|found| (found, LinkVia::Switch))) {
                links.push(Link {
                    count: Some(count),
                    via: Some(via),
                    megabytes_per_second: speed.filter(|speed| *speed > 0),
                    ..entry(LinkKind::NVLink)
                });
            }
            match nvml.topology_common_ancestor(&devices[a], &devices[b]) {
                Ok(level) => links.push(Link { path_class: Some(path_class(level)), ..entry(LinkKind::PCIe) }),
                Err(NvmlError::NotSupported) => {}
                Err(error) => {
                    let (a, b) = (gpus[a].index, gpus[b].index);
                    notes.add(format!("GPU{a} to GPU{b}: common ancestor unknown: {}", reason(&error)));
                }
            }
        }
    }
    links
}

fn path_class(level: TopologyLevel) -> PathClass {
    match level {
        TopologyLevel::Internal => PathClass::Internal,
        TopologyLevel::Single => PathClass::PIX,
        TopologyLevel::Multiple => PathClass::PXB,
        TopologyLevel::HostBridge => PathClass::PHB,
        TopologyLevel::Node => PathClass::NODE,
        TopologyLevel::System => PathClass::SYS,
    }
}
