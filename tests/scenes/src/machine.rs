//! The expanded form of a scene.

use crate::failures::Failures;
use crate::path::expand;
use crate::scene::{GpuGroup, NicGroup, Scene, SceneError};
use std::collections::BTreeMap;
use switchyard_worker_contract::CpuList;

/// A machine: every device with its location.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// The scene that it was expanded from.
    pub scene: Scene,
    /// GPUs by index.
    pub gpus: Vec<Gpu>,
    /// RDMA ports by name.
    pub ports: Vec<Port>,
    /// Paths of NVSwitches.
    pub nvswitches: Vec<Vec<String>>,
    /// CPUs of the NUMA nodes, by node number.
    pub nodes: BTreeMap<u32, (CpuList, u64)>,
    roots: BTreeMap<String, u32>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Index in the driver.
    pub index: u32,
    /// Stable name.
    pub uuid: String,
    /// Root complex, bridges, device.
    pub path: Vec<String>,
    /// NUMA node according to the kernel.
    pub numa: Option<u32>,
    /// NUMA node according to the driver.
    pub affinity: Option<u32>,
    /// NUMA node of its memory.
    pub memory_node: Option<u32>,
    /// Properties shared by its group; the list of locations is empty.
    pub kind: GpuGroup,
}

/// An RDMA device with one port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Name of the RDMA device.
    pub name: String,
    /// Root complex, bridges, device.
    pub path: Vec<String>,
    /// NUMA node according to the kernel.
    pub numa: Option<u32>,
    /// Properties shared by its group; the list of ports is empty.
    pub kind: NicGroup,
    /// PCI address of the physical function, for a virtual one.
    pub function_of: Option<String>,
}

/// The far end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkEnd {
    /// A GPU.
    Gpu(u32),
    /// A switch.
    Switch,
}

/// Common ancestor of two GPUs, with the driver's numbers (`nvmlGpuTopologyLevel_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)]
pub enum Ancestor {
    Single = 10,
    Multiple = 20,
    HostBridge = 30,
    Node = 40,
    System = 50,
}

fn wrong(field: impl Into<String>, got: impl std::fmt::Display, expected: &'static str) -> SceneError {
    SceneError::Field { field: field.into(), got: format!("`{got}`"), expected }
}

fn list(field: &str, text: &str) -> Result<CpuList, SceneError> {
    text.parse().map_err(|_| wrong(field, text, "a list such as 0-3,8"))
}

impl Machine {
    /// Expands a scene.
    ///
    /// # Errors
    /// Names the first invalid value.
    pub fn new(scene: Scene) -> Result<Machine, SceneError> {
        let (mut nodes, mut roots) = (BTreeMap::new(), BTreeMap::new());
        for numa in &scene.numa {
            let cpus = if numa.cpus.is_empty() { CpuList::default() } else { list("numa.cpus", &numa.cpus)? };
            for id in list("numa.node", &numa.node)?.iter() {
                nodes.insert(id, (cpus.clone(), numa.gib));
                roots.extend(numa.roots.iter().map(|root| (root_name(root), id)));
            }
        }
        let mut machine = Machine { gpus: Vec::new(), ports: Vec::new(), nvswitches: Vec::new(), nodes, roots, scene };
        for group in machine.scene.gpus.clone() {
            for (position, at) in group.at.iter().enumerate() {
                let path = expand(at).ok_or_else(|| wrong("gpus.at", at, "a path such as 15/01.0/16:00.0"))?;
                let index = machine.gpus.len() as u32;
                machine.gpus.push(Gpu {
                    index,
                    uuid: format!("GPU-{:08x}-5c3e-4a1b-9d2f-{index:012x}", 0x5eed_0000 + index),
                    numa: machine.numa_of(&path),
                    affinity: machine.numa_of(&path).or(group.affinity.get(position).copied()),
                    memory_node: group.memory_nodes.get(position).copied(),
                    path,
                    kind: GpuGroup { at: Vec::new(), ..group.clone() },
                });
            }
        }
        for group in machine.scene.nics.clone() {
            for (name, at) in &group.ports {
                let path = expand(at).ok_or_else(|| wrong("nics.ports", at, "a path such as 15/01.0/16:00.0"))?;
                let kind = NicGroup { ports: BTreeMap::new(), ..group.clone() };
                let numa = machine.numa_of(&path);
                let port = Port { name: name.clone(), path, numa, kind, function_of: None };
                let functions = (0..group.functions).map(|number| function(&port, number));
                let all: Vec<Port> = std::iter::once(port.clone()).chain(functions).collect();
                machine.ports.extend(all);
            }
        }
        machine.ports.sort_by(|a, b| a.name.cmp(&b.name));
        for at in &machine.scene.nvswitches {
            machine.nvswitches.push(expand(at).ok_or_else(|| wrong("nvswitches", at, "a path such as 15/01.0"))?);
        }
        machine.check()?;
        Ok(machine)
    }

    fn check(&self) -> Result<(), SceneError> {
        let count = self.gpus.len() as u32;
        if let Some([a, b, _]) = self.scene.mesh.iter().find(|[a, b, _]| a == b || *a >= count || *b >= count) {
            return Err(wrong("mesh", format!("{a}, {b}"), "two GPUs that are there"));
        }
        for links in self.scene.failures.nvlinks_down.values() {
            list("failures.nvlinksDown", links)?;
        }
        let mut seen = std::collections::BTreeSet::new();
        let devices = self.gpus.iter().map(|gpu| &gpu.path).chain(self.ports.iter().map(|port| &port.path));
        for path in devices.chain(&self.nvswitches) {
            if !seen.insert(path.last()) {
                return Err(wrong("at", path.join("/"), "a unique PCI address for every device"));
            }
        }
        if let Some(pair) = self.gpus.windows(2).find(|pair| pair[0].path.last() >= pair[1].path.last()) {
            return Err(wrong("gpus.at", pair[1].path.join("/"), "GPUs in the order of their addresses"));
        }
        Ok(())
    }

    fn numa_of(&self, path: &[String]) -> Option<u32> {
        self.roots.get(path.first()?).copied()
    }

    /// NVLinks of a GPU by number, and whether each is up.
    pub fn links(&self, gpu: u32, failures: &Failures) -> Vec<(LinkEnd, bool)> {
        let switch_links = self.gpus.get(gpu as usize).map_or(0, |gpu| gpu.kind.switch_links);
        let mut ends = vec![LinkEnd::Switch; switch_links as usize];
        for [a, b, count] in &self.scene.mesh {
            let other = if *a == gpu { b } else { a };
            if gpu == *a || gpu == *b {
                ends.extend((0..*count).map(|_| LinkEnd::Gpu(*other)));
            }
        }
        let down: CpuList = failures.nvlinks_down.get(&gpu).and_then(|list| list.parse().ok()).unwrap_or_default();
        ends.into_iter().enumerate().map(|(number, end)| (end, !down.contains(number as u32))).collect()
    }

    /// Common ancestor of two GPUs.
    pub fn ancestor(&self, a: u32, b: u32, failures: &Failures) -> Ancestor {
        let (one, other) = (&self.gpus[a as usize], &self.gpus[b as usize]);
        let known = |gpu: &Gpu| gpu.affinity.filter(|_| !failures.numa_unknown.contains(&gpu.index));
        let shared = one.path.iter().zip(&other.path).take_while(|(x, y)| x == y).count();
        let below = one.path.len().max(other.path.len()) - shared;
        match shared {
            _ if self.scene.far_apart => Ancestor::System,
            0 if known(one).is_some() && known(one) == known(other) => Ancestor::Node,
            0 => Ancestor::System,
            1 => Ancestor::HostBridge,
            // The device itself and the downstream port above it.
            _ if below <= 2 => Ancestor::Single,
            _ => Ancestor::Multiple,
        }
    }
}

fn root_name(short: &str) -> String {
    if short.contains(':') { format!("pci{short}") } else { format!("pci0000:{short}") }
}

/// A virtual function of a port, which is one of the next functions of the same device.
fn function(port: &Port, number: u32) -> Port {
    let mut path = port.path.clone();
    let physical = path.pop().unwrap_or_default();
    let device = physical.rsplit_once('.').map_or("", |(device, _)| device);
    path.push(format!("{device}.{:x}", number + 1));
    Port { name: format!("{}v{number}", port.name), path, function_of: Some(physical), ..port.clone() }
}
