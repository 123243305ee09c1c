//! A file as NCCL's graph: its devices, their attachment points, and the paths between them.

use super::tables::{MAX_ELEMENTS, class, is_bridge, link_rate, number};
use super::{Document, Element};
use switchyard_core::devices::{self, Devices};
use switchyard_core::path::PathClass;
use switchyard_core::rates;
use switchyard_crds::gpu_topology::GPUTopologyStatus;

/// The machine that a file describes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NcclGraph {
    /// NUMA nodes in file order.
    pub cpus: Vec<Cpu>,
    /// GPUs by bus id.
    pub gpus: Vec<Device>,
    /// NICs by bus id. If the file names the ports of a NIC, each port is an entry.
    pub nics: Vec<Device>,
    /// Devices of a kind that neither the file nor the report gives, by bus id.
    pub others: Vec<Device>,
}

/// A NUMA node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cpu {
    /// Its number as the file writes it; empty if unknown.
    pub numa_node: String,
    /// Instruction set.
    pub architecture: Option<String>,
    pub vendor: Option<String>,
    /// Family and model of an x86 CPU.
    pub model: Option<(i64, i64)>,
}

/// A GPU, or a port of a NIC.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// Bus id; empty for a NIC attached to a CPU.
    pub bus_id: String,
    /// Port name (`mlx5_0`), if the file gives it.
    pub name: Option<String>,
    /// Position of its NUMA node in [`NcclGraph::cpus`].
    pub cpu: usize,
    /// Bus ids of the bridges above it, from the CPU down: one for each switch.
    pub bridges: Vec<String>,
    /// Rate of its PCIe link in MB/s; `None` if NCCL queries the kernel.
    pub link_rate: Option<u32>,
    /// Port rate in megabits (10^6) per second.
    pub port_megabits: Option<u64>,
    /// NVLinks to GPUs, by bus id.
    pub nvlinks: Vec<(String, u32)>,
    /// Number of NVLinks to switches.
    pub switch_links: u32,
    /// Compute capability times ten.
    pub sm: Option<u32>,
    /// Whether NVLink-C2C joins it to its CPU.
    pub coherent: bool,
    /// Line in the file.
    pub line: u32,
}

/// More GPUs than a node has, as in a file of an NVLink domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} GPUs: expected at most 32, those of one machine")]
pub struct TooManyGpus(pub usize);

impl NcclGraph {
    /// Reads the machine from a file. The report supplies the kind of devices that the file marks
    /// neither as GPU nor as NIC.
    pub fn read(document: &Document, status: Option<&GPUTopologyStatus>) -> NcclGraph {
        let mut machine = NcclGraph::default();
        let systems = document.outermost().filter(|at| document.elements[*at].tag == "system");
        let cpus: Vec<usize> =
            systems.flat_map(|system| document.children(system, "cpu").collect::<Vec<_>>()).collect();
        for (position, cpu) in cpus.into_iter().enumerate() {
            machine.cpus.push(Cpu::of(&document.elements[cpu]));
            for nic in document.children(cpu, "nic") {
                let own = Device { cpu: position, line: document.elements[nic].line, ..Device::default() };
                machine.nics.extend(ports(document, nic, &own));
            }
            // Depth first without recursion, because a file can be nested deeper than the stack
            // allows.
            let mut waiting: Vec<(usize, Vec<String>)> =
                document.children(cpu, "pci").map(|pci| (pci, vec![])).collect();
            while let Some((pci, bridges)) = waiting.pop() {
                machine.add(document, pci, position, bridges, &mut waiting, status);
            }
        }
        for devices in [&mut machine.gpus, &mut machine.nics, &mut machine.others] {
            devices.sort_by(|a, b| (&a.bus_id, &a.name).cmp(&(&b.bus_id, &b.name)));
        }
        machine
    }

    /// Adds a device, or queues the devices below a bridge.
    fn add(
        &mut self,
        document: &Document,
        pci: usize,
        cpu: usize,
        bridges: Vec<String>,
        waiting: &mut Vec<(usize, Vec<String>)>,
        status: Option<&GPUTopologyStatus>,
    ) {
        let element = &document.elements[pci];
        let bus_id = element.get("busid").unwrap_or_default().to_string();
        let class = element.get("class");
        let (gpu, nic) = (document.children(pci, "gpu").next(), document.children(pci, "nic").next());
        let inner: Vec<usize> = document.children(pci, "pci").collect();
        let is_gpu = gpu.is_some() || class.is_some_and(|class| class.starts_with(class::GPU));
        let is_nic = nic.is_some() || class.is_some_and(|class| class.starts_with(class::NIC));
        if !is_gpu && !is_nic && (!inner.is_empty() || class.is_some_and(is_bridge)) {
            // Deeper nesting than NCCL has room for would only cost time.
            if bridges.len() >= MAX_ELEMENTS {
                return;
            }
            let below: Vec<String> = bridges.into_iter().chain([bus_id]).collect();
            waiting.extend(inner.into_iter().map(|inner| (inner, below.clone())));
            return;
        }
        let (speed, width) = (element.get("link_speed"), element.get("link_width"));
        let link_rate = (speed.is_some() || width.is_some()).then(|| link_rate(speed, width));
        let mut device = Device { bus_id, cpu, bridges, link_rate, line: element.line, ..Device::default() };
        let is_it = |known: &Option<String>| known.as_ref() == Some(&device.bus_id);
        let is_gpu = is_gpu || status.is_some_and(|status| status.gpus.iter().any(|gpu| is_it(&gpu.bus_id)));
        let is_nic = is_nic || status.is_some_and(|status| status.nics.iter().any(|nic| is_it(&nic.bus_id)));
        if is_gpu {
            if let Some(gpu) = gpu {
                device.links(document, gpu);
            }
            self.gpus.push(device);
        } else if let Some(nic) = nic {
            self.nics.extend(ports(document, nic, &device));
        } else if is_nic {
            self.nics.push(device);
        } else {
            self.others.push(device);
        }
    }

    /// True if no device is behind a switch, as in a virtual machine with passed-through devices.
    pub fn is_flat(&self) -> bool {
        self.gpus.iter().chain(&self.nics).all(|device| device.bridges.is_empty())
    }

    /// Class of the path between two devices.
    pub fn path(&self, a: &Device, b: &Device) -> PathClass {
        let common = a.bridges.iter().zip(&b.bridges).take_while(|(a, b)| a == b).count();
        match common {
            _ if a.cpu != b.cpu => PathClass::Sys,
            0 => PathClass::Phb,
            _ if a.bridges.len() == common && b.bridges.len() == common => PathClass::Pix,
            _ => PathClass::Pxb,
        }
    }

    /// The devices and the paths between them, and a mask of the GPUs that NVLink-C2C joins to
    /// their CPU.
    ///
    /// # Errors
    /// More GPUs than a node has.
    pub fn devices(&self) -> Result<(Devices, u32), TooManyGpus> {
        let count = self.gpus.len();
        if count > 32 {
            return Err(TooManyGpus(count));
        }
        let gpu = |gpu: &Device| {
            let link_rate = gpu.sm.map_or(rates::UNKNOWN_NVLINK, rates::nvlink_by_sm);
            let has_links = gpu.switch_links > 0 || !gpu.nvlinks.is_empty();
            devices::Gpu {
                pcie_rate: gpu.link_rate.unwrap_or(rates::pcie(None)),
                link_rate: if has_links { link_rate } else { 0 },
                switch_links: u8::try_from(gpu.switch_links).unwrap_or(u8::MAX),
            }
        };
        let nic =
            |nic: &Device| devices::Nic { rate: rates::nic(nic.port_megabits).min(nic.link_rate.unwrap_or(u32::MAX)) };
        let mut all = Devices {
            gpus: self.gpus.iter().map(gpu).collect(),
            nics: self.nics.iter().map(nic).collect(),
            socket_rate: self.cpus.first().map_or(rates::UNKNOWN_SOCKET, Cpu::socket_rate),
            ..Devices::default()
        };
        for (at, one) in self.gpus.iter().enumerate() {
            for (other_at, other) in self.gpus.iter().enumerate() {
                let direct =
                    one.nvlinks.iter().find(|(target, _)| *target == other.bus_id).map_or(0, |(_, count)| *count);
                all.direct_links.push(u8::try_from(direct).unwrap_or(u8::MAX));
                all.gpu_paths.push(if at == other_at { PathClass::Same } else { self.path(one, other) });
            }
            all.nic_paths.extend(self.nics.iter().map(|nic| self.path(one, nic)));
        }
        let coherent =
            self.gpus.iter().enumerate().filter(|(_, gpu)| gpu.coherent).fold(0, |mask, (at, _)| mask | 1 << at);
        Ok((all, coherent))
    }
}

impl Cpu {
    fn of(element: &Element) -> Cpu {
        let model = element.get("familyid").and_then(number).zip(element.get("modelid").and_then(number));
        Cpu {
            numa_node: element.get("numaid").unwrap_or_default().to_string(),
            architecture: element.get("arch").map(str::to_string),
            vendor: element.get("vendor").map(str::to_string),
            model,
        }
    }

    fn socket_rate(&self) -> u32 {
        rates::socket_by_model(self.architecture.as_deref(), self.vendor.as_deref(), self.model)
    }
}

impl Device {
    /// Reads the links of a `<gpu>`.
    fn links(&mut self, document: &Document, gpu: usize) {
        let element = &document.elements[gpu];
        self.sm = element.get("sm").and_then(number).and_then(|sm| u32::try_from(sm).ok());
        self.coherent = document.children(gpu, "c2c").next().is_some();
        for link in document.children(gpu, "nvlink").map(|link| &document.elements[link]) {
            let count = link.get("count").and_then(number).and_then(|count| u32::try_from(count).ok()).unwrap_or(0);
            match link.get("target") {
                Some(target) if link.get("tclass").is_some_and(|class| class.starts_with(class::GPU)) => {
                    self.nvlinks.push((target.to_string(), count));
                }
                _ => self.switch_links = self.switch_links.saturating_add(count),
            }
        }
    }
}

/// One device per port that a `<nic>` names, or a single device if it names none.
fn ports(document: &Document, nic: usize, device: &Device) -> Vec<Device> {
    let port = |net: usize| {
        let net = &document.elements[net];
        let speed = net.get("speed").and_then(number).and_then(|speed| u64::try_from(speed).ok());
        Device { name: net.get("name").map(str::to_string), port_megabits: speed, ..device.clone() }
    };
    let ports: Vec<Device> = document.children(nic, "net").map(port).collect();
    if ports.is_empty() { vec![device.clone()] } else { ports }
}
