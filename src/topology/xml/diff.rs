//! Differences between two files, as NCCL sees them.

use super::graph::{Cpu, Device, NcclGraph, TooManyGpus};
use crate::nccl::{NcclPath, NcclPaths};
use std::collections::BTreeSet;
use switchyard_core::rates::gigabytes;

/// A difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A device that only one file has.
    Only {
        /// Whether it is in the first file.
        first: bool,
        /// `GPU` or `NIC`.
        what: &'static str,
        /// Bus id.
        device: String,
    },
    /// A path of a different class.
    Path {
        /// Bus ids of a GPU and of a second GPU or a NIC.
        pair: [String; 2],
        /// Whether the second device is a NIC.
        nic: bool,
        /// Classes in the first and in the second file.
        class: [NcclPath; 2],
    },
    /// A PCIe link of different speed, in MB/s; `None` if NCCL queries the kernel.
    Link {
        device: String,
        /// Speeds in the first and in the second file.
        rate: [Option<u32>; 2],
    },
    /// CPUs that NCCL sees differently.
    Cpu {
        numa_node: String,
        /// Descriptions in the first and in the second file.
        described: [String; 2],
    },
}

impl Change {
    /// Whether a path between two devices, or the presence of a device, differs.
    pub fn affects_paths(&self) -> bool {
        matches!(self, Change::Only { .. } | Change::Path { .. })
    }

    /// What differs: `GPU 0000:1a:00.0 to NIC 0000:1b:00.0`.
    pub fn subject(&self) -> String {
        match self {
            Change::Only { what, device, .. } => format!("{what} {device}"),
            Change::Path { pair: [a, b], nic, .. } => format!("GPU {a} to {} {b}", if *nic { "NIC" } else { "GPU" }),
            Change::Link { device, .. } => format!("PCIe link of {device}"),
            Change::Cpu { numa_node, .. } => format!("CPUs of NUMA node {numa_node}"),
        }
    }

    /// How it differs: `PHB (…) -> PIX (…): GPUDirect RDMA becomes possible`.
    pub fn what(&self) -> String {
        let speed = |rate: &Option<u32>| match rate {
            Some(rate) => format!("{} GB/s", gigabytes(*rate)),
            None => "as the kernel says".to_string(),
        };
        match self {
            Change::Only { first, .. } => format!("in the {} only", if *first { "first" } else { "second" }),
            Change::Path { nic, class: [before, after], .. } => {
                let rdma = match (nic, before.has_direct_rdma(), after.has_direct_rdma()) {
                    (true, false, true) => ": GPUDirect RDMA becomes possible",
                    (true, true, false) => ": GPUDirect RDMA is lost",
                    _ => "",
                };
                let named = |class: &NcclPath| format!("{} ({})", class.word(), class.meaning());
                format!("{} -> {}{rdma}", named(before), named(after))
            }
            Change::Link { rate: [before, after], .. } => format!("{} -> {}", speed(before), speed(after)),
            Change::Cpu { described: [before, after], .. } => format!("{before} -> {after}"),
        }
    }
}

/// Differences from the first to the second file: devices, path classes, links, CPUs, in this order
/// and by bus id.
///
/// NVLinks count only if both files name them, because a file meant for loading names none.
///
/// # Errors
/// More GPUs than a machine has.
pub fn diff(first: &NcclGraph, second: &NcclGraph) -> Result<Vec<Change>, TooManyGpus> {
    let (mut first, mut second) = (first.clone(), second.clone());
    let has_links = |machine: &NcclGraph| {
        machine.gpus.iter().any(|gpu| gpu.switch_links > 0 || !gpu.nvlinks.is_empty() || gpu.coherent)
    };
    if !(has_links(&first) && has_links(&second)) {
        for gpu in first.gpus.iter_mut().chain(&mut second.gpus) {
            (gpu.switch_links, gpu.coherent) = (0, false);
            gpu.nvlinks.clear();
        }
    }
    let gpus = Shared::of(&first.gpus, &second.gpus);
    let nics = Shared::of(&first.nics, &second.nics);
    let mut changes: Vec<Change> = gpus.only("GPU").chain(nics.only("NIC")).collect();
    changes.extend(path_changes(&first, &second, &gpus, &nics)?);
    let pairs = gpus.both.iter().map(|both| (&first.gpus[both.first], &second.gpus[both.second]));
    let pairs = pairs.chain(nics.both.iter().map(|both| (&first.nics[both.first], &second.nics[both.second])));
    changes.extend(
        pairs
            .filter(|(a, b)| a.link_rate != b.link_rate)
            .map(|(a, b)| Change::Link { device: a.bus_id.clone(), rate: [a.link_rate, b.link_rate] }),
    );
    changes.extend(first.cpus.iter().filter_map(|cpu| {
        let other = second.cpus.iter().find(|other| other.numa_node == cpu.numa_node)?;
        let described = [cpu, other].map(Cpu::words);
        (described[0] != described[1]).then(|| Change::Cpu { numa_node: cpu.numa_node.clone(), described })
    }));
    Ok(changes)
}

/// Positions of a device that both files have.
struct Common {
    bus_id: String,
    first: usize,
    second: usize,
}

/// Devices of one kind in two files.
struct Shared {
    both: Vec<Common>,
    /// Bus ids in only one file, and whether that is the first.
    single: Vec<(bool, String)>,
}

impl Shared {
    /// Matches devices by bus id. Of several ports at one address, the first counts.
    fn of(first: &[Device], second: &[Device]) -> Shared {
        let ids = |devices: &[Device]| -> BTreeSet<String> {
            devices.iter().map(|device| device.bus_id.clone()).filter(|bus_id| !bus_id.is_empty()).collect()
        };
        let at = |devices: &[Device], bus_id: &str| devices.iter().position(|device| device.bus_id == bus_id);
        let mut shared = Shared { both: Vec::new(), single: Vec::new() };
        for bus_id in ids(first).union(&ids(second)) {
            match (at(first, bus_id), at(second, bus_id)) {
                (Some(first), Some(second)) => shared.both.push(Common { bus_id: bus_id.clone(), first, second }),
                (first, _) => shared.single.push((first.is_some(), bus_id.clone())),
            }
        }
        shared
    }

    fn only(&self, what: &'static str) -> impl Iterator<Item = Change> + '_ {
        self.single.iter().map(move |(first, device)| Change::Only { first: *first, what, device: device.clone() })
    }
}

/// Paths of different class between devices that both files have.
fn path_changes(
    first: &NcclGraph,
    second: &NcclGraph,
    gpus: &Shared,
    nics: &Shared,
) -> Result<Vec<Change>, TooManyGpus> {
    let (first_devices, first_coherent) = first.devices()?;
    let (second_devices, second_coherent) = second.devices()?;
    let (before, after) =
        (NcclPaths::new(&first_devices, first_coherent), NcclPaths::new(&second_devices, second_coherent));
    let mut changes = Vec::new();
    for (position, a) in gpus.both.iter().enumerate() {
        let others = gpus.both[position + 1..].iter().map(|b| (b, false)).chain(nics.both.iter().map(|b| (b, true)));
        for (b, nic) in others {
            let class = match nic {
                false => [before.gpus(a.first, b.first), after.gpus(a.second, b.second)],
                true => [before.nic(a.first, b.first), after.nic(a.second, b.second)],
            };
            if class[0] != class[1] {
                changes.push(Change::Path { pair: [a.bus_id.clone(), b.bus_id.clone()], nic, class });
            }
        }
    }
    Ok(changes)
}

impl Cpu {
    /// For example `x86_64 GenuineIntel, family 6, model 143`.
    fn words(&self) -> String {
        let words: Vec<&str> = [&self.architecture, &self.vendor].into_iter().flatten().map(String::as_str).collect();
        let model = self.model.map_or(String::new(), |(family, model)| format!(", family {family}, model {model}"));
        if words.is_empty() { format!("not said{model}") } else { format!("{}{model}", words.join(" ")) }
    }
}
