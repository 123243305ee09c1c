//! Draws one machine: its NUMA nodes, root complexes, PCIe switches and the devices below them,
//! connected by NVLinks.

mod dot;
mod svg;
#[cfg(test)]
mod tests;

pub(super) use dot::dot;
pub(super) use svg::svg;

use super::devices::{NodeModel, gigabytes};
use super::health::{self, Health};
use super::{cpus_of_node, nic_name, short_name};
use crate::text::plain;
use switchyard_core::units::{plural, three_digits};
use switchyard_crds::gpu_topology::{GPUTopology, GPUTopologyStatus};
use switchyard_topology::{cells, report};

/// Most switches drawn between a root complex and a device; no machine has more.
const MAX_SWITCHES: usize = 8;

/// The contents of a drawing.
struct Drawing {
    name: String,
    /// NUMA nodes in the order of their first devices.
    numa: Vec<Part>,
    /// GPUs, followed by NICs.
    devices: Vec<Device>,
    nvlinks: Vec<NvLink>,
    /// Rate between NUMA nodes, megabytes (10^6) per second.
    socket_rate: Option<u32>,
}

/// A NUMA node, a root complex or a switch.
struct Part {
    label: String,
    parts: Vec<Part>,
    /// Positions in [`Drawing::devices`].
    devices: Vec<usize>,
}

struct Device {
    label: String,
    /// Model or speed.
    detail: String,
    is_gpu: bool,
    is_faulty: bool,
}

/// NVLinks from a GPU to another one or to switches.
struct NvLink {
    a: usize,
    b: Option<usize>,
    count: u32,
    /// Megabytes (10^6) per second, one direction.
    rate: u32,
}

impl NvLink {
    /// `18 NVLinks, 371 GB/s`.
    fn meaning(&self) -> String {
        format!("{} NVLink{}, {} GB/s", self.count, plural(self.count.into()), gigabytes(self.rate))
    }
}

impl Drawing {
    fn of(topology: &GPUTopology) -> Drawing {
        let name = plain(topology.metadata.name.as_deref().unwrap_or("-"));
        let mut drawing =
            Drawing { name, numa: Vec::new(), devices: Vec::new(), nvlinks: Vec::new(), socket_rate: None };
        let Some(status) = &topology.status else { return drawing };
        for gpu in &status.gpus {
            drawing.devices.push(Device {
                label: format!("GPU{}", gpu.index),
                detail: gpu.model.as_deref().map_or(String::new(), short_name),
                is_gpu: true,
                is_faulty: matches!(health::of_gpu(gpu), Health::Faulty(_)),
            });
            drawing.attach(status, report::numa_of(status, gpu.numa_node), &gpu.pcie_path);
        }
        for nic in cells::nics(status) {
            let rate = nic.rate_megabits_per_second.map(|rate| format!("{} Gbit/s", three_digits(rate as f64 / 1e3)));
            let fault = nic.pcie_link.as_ref().and_then(|link| health::pcie(link).flatten());
            drawing.devices.push(Device {
                label: plain(nic_name(nic)),
                detail: rate.unwrap_or_default(),
                is_gpu: false,
                is_faulty: fault.is_some() || nic.state.as_deref() == Some("Down"),
            });
            drawing.attach(status, report::numa_of(status, nic.numa_node), &nic.pcie_path);
        }
        if let Ok(known) = NodeModel::of(status) {
            drawing.link(&known);
        }
        drawing
    }

    /// Adds the last device below its NUMA node, root complex and switches. A switch has two
    /// bridges; like NCCL, we use the upper one.
    fn attach(&mut self, status: &GPUTopologyStatus, numa: Option<u32>, path: &[String]) {
        let label = match numa {
            Some(node) => format!("NUMA {node}, CPUs {}", cpus_of_node(status, numa)),
            None => "NUMA node not known".to_owned(),
        };
        let mut names = vec![label];
        if path.len() > 1 {
            names.push(plain(&path[0]));
        }
        let mut switches: Vec<String> =
            path.iter().rev().skip(2).step_by(2).map(|name| plain(name)).take(MAX_SWITCHES).collect();
        // Counted from the device, the last step can end at the root complex itself.
        if path.len() % 2 == 1 && switches.len() * 2 + 1 == path.len() {
            switches.pop();
        }
        names.extend(switches.into_iter().rev().map(|name| format!("switch {name}")));
        let device = self.devices.len() - 1;
        let mut parts = &mut self.numa;
        for (depth, name) in names.iter().enumerate() {
            let position = parts.iter().position(|part| part.label == *name).unwrap_or_else(|| {
                parts.push(Part { label: name.clone(), parts: Vec::new(), devices: Vec::new() });
                parts.len() - 1
            });
            if depth + 1 == names.len() {
                parts[position].devices.push(device);
                return;
            }
            parts = &mut parts[position].parts;
        }
    }

    fn link(&mut self, known: &NodeModel<'_>) {
        let devices = &known.named.devices;
        self.socket_rate = (self.numa.len() > 1).then_some(devices.socket_rate);
        for (a, gpu) in devices.gpus.iter().enumerate() {
            if gpu.switch_links > 0 {
                self.nvlinks.push(NvLink { a, b: None, count: gpu.switch_links.into(), rate: gpu.switch_rate() });
            }
            for b in a + 1..devices.gpus.len() {
                let count = devices.direct(a, b);
                if count > 0 {
                    self.nvlinks.push(NvLink { a, b: Some(b), count, rate: devices.nvlink_rate(a, b) });
                }
            }
        }
    }
}
