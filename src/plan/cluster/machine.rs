//! Devices of a node with their names, and their values, which nodes of the same kind share.

use jiff::Timestamp;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use switchyard_core::devices::{Devices, Gpu};
use switchyard_core::path::PathClass;
use switchyard_core::placement::gpus::{MAX_GPUS, Shape};
use switchyard_core::rates;
use switchyard_crds::gpu_topology::{FabricState, GPUTopology, GPUTopologyStatus};
use switchyard_fabric as fabric;
use switchyard_topology::{cluster, report};
use switchyard_worker_contract::CpuList;

/// Known devices of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Values of its GPU sets.
    pub shape: Arc<Shape>,
    /// Its report without node-specific fields.
    pub facts: Arc<GPUTopologyStatus>,
    /// Its GPUs, by position.
    pub gpus: Vec<NamedGpu>,
    /// NICs that carry training traffic, by position. The order is the rail order.
    pub nics: Vec<String>,
    /// Bit mask of GPUs that may be allocated: whole and healthy ones.
    pub usable: u32,
    /// Its NVLink domain.
    pub clique: Option<String>,
    /// When the facts were read.
    pub observed: Option<Timestamp>,
}

/// A GPU with its name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NamedGpu {
    /// NVML's index, which users know.
    pub index: u32,
    pub uuid: String,
    /// NUMA node of the PCI device.
    pub numa_node: Option<u32>,
    /// Its equal share of that NUMA node's cores, divided among the GPUs there. `None` if unknown.
    pub cpus: Option<CpuList>,
}

impl Machine {
    /// Bit mask of these GPUs' positions. UUIDs of other machines are ignored.
    pub fn mask<'a>(&self, uuids: impl IntoIterator<Item = &'a str>) -> u32 {
        let position = |uuid: &str| self.gpus.iter().position(|gpu| gpu.uuid == uuid);
        uuids.into_iter().filter_map(position).fold(0, |mask, gpu| mask | 1 << gpu)
    }
}

/// Shapes and facts, one copy for each kind of node, dropped with the last node of that kind.
#[derive(Debug, Default)]
pub struct Shapes {
    known: BTreeMap<Devices, Weak<Shape>>,
    /// Keyed by JSON text.
    facts: BTreeMap<String, Weak<GPUTopologyStatus>>,
}

impl Shapes {
    fn of(&mut self, devices: Devices) -> Arc<Shape> {
        if let Some(shape) = self.known.get(&devices).and_then(Weak::upgrade) {
            return shape;
        }
        self.known.retain(|_, shape| shape.strong_count() > 0);
        let shape = Arc::new(Shape::new(&devices));
        self.known.insert(devices, Arc::downgrade(&shape));
        shape
    }

    /// Returns the shared copy of facts that equal those of other nodes.
    fn facts_of(&mut self, facts: GPUTopologyStatus) -> Arc<GPUTopologyStatus> {
        let text = serde_json::to_string(&facts).unwrap_or_default();
        if let Some(same) = self.facts.get(&text).and_then(Weak::upgrade) {
            return same;
        }
        self.facts.retain(|_, facts| facts.strong_count() > 0);
        let facts = Arc::new(facts);
        self.facts.insert(text, Arc::downgrade(&facts));
        facts
    }

    /// Reads the devices of a report.
    ///
    /// # Errors
    /// One sentence with the field, the value found and the value expected.
    pub fn machine(&mut self, report: &GPUTopology) -> Result<Machine, String> {
        let Some(status) = &report.status else {
            return Err("status: got nothing; expected the agent's report".into());
        };
        let named = report::devices(status).map_err(|error| error.to_string())?;
        let count = named.devices.gpus.len();
        if count > MAX_GPUS {
            return Err(format!("status.gpus: got {count} GPUs; expected at most {MAX_GPUS}"));
        }
        let name = |nic: &usize| {
            let nic = &status.nics[*nic];
            nic.rdma_device.clone().unwrap_or_else(|| nic.name.clone())
        };
        let mut gpus: Vec<NamedGpu> = status
            .gpus
            .iter()
            .map(|gpu| NamedGpu {
                index: gpu.index,
                uuid: gpu.uuid.clone(),
                numa_node: report::numa_of(status, gpu.numa_node),
                cpus: None,
            })
            .collect();
        share_cores(report, &mut gpus);
        Ok(Machine {
            gpus,
            nics: named.nics.iter().map(name).collect(),
            usable: named.usable,
            // Not valid until the fabric manager has completed.
            clique: status
                .fabric
                .as_ref()
                .filter(|fabric| fabric.state == FabricState::Completed)
                .and_then(|fabric| Some(format!("{}.{}", fabric.cluster_uuid.as_ref()?, fabric.clique_id?))),
            observed: status.observed_time.as_ref().map(|time| time.0),
            facts: self.facts_of(fabric::facts(status)),
            shape: self.of(named.devices),
        })
    }
}

/// Divides the cores of each NUMA node among its GPUs, in position order. Each rank is pinned near
/// its GPU, and no two ranks share a core, whichever jobs they belong to.
fn share_cores(report: &GPUTopology, gpus: &mut [NamedGpu]) {
    let Ok(named) = cluster::build([report]) else { return };
    for numa in named.cluster.nodes.iter().flat_map(|node| &node.numa_nodes) {
        let of_node: Vec<usize> = (0..gpus.len()).filter(|gpu| gpus[*gpu].numa_node == Some(numa.id)).collect();
        let (cores, count) = (&numa.cores, of_node.len());
        for (place, gpu) in of_node.into_iter().enumerate().filter(|_| cores.len() >= count) {
            let own = &cores[place * cores.len() / count..(place + 1) * cores.len() / count];
            gpus[gpu].cpus = Some(CpuList::new(own.iter().flat_map(|core| core.cpus.iter().copied())));
        }
    }
}

/// Values of a node of which only the number of GPUs is known: assume the slowest links.
pub(super) fn unreported(gpus: usize) -> Shape {
    let count = gpus.min(MAX_GPUS);
    let gpu = Gpu { pcie_rate: rates::pcie(None), ..Gpu::default() };
    Shape::new(&Devices {
        gpus: vec![gpu; count],
        direct_links: vec![0; count * count],
        gpu_paths: vec![PathClass::Sys; count * count],
        socket_rate: rates::socket(None, None),
        ..Devices::default()
    })
}
