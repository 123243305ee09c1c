//! Path classes between devices as NCCL defines them, which differ from `nvidia-smi topo`.
//!
//! NCCL has no NODE. It keeps one CPU per NUMA node, so two host bridges of one NUMA node meet
//! there like two ports of one host bridge, and both are PHB. NCCL also has paths that the matrix
//! of `nvidia-smi` cannot show: over the NVLinks of a third GPU, and over NVLink-C2C. The classes
//! and their order are those of NVIDIA/nccl `src/include/graph.h`. They are computed in
//! `src/graph/paths.cc` (`ncclTopoSetPaths`, `ncclTopoComputePaths`) and, for PCIe, in
//! `src/graph/xml.cc` (`ncclTopoGetXmlFromSys`).
//!
//! Two cases follow the report instead of NCCL: pairs of PCIe switches that NCCL merges
//! (`ncclTopoFlattenBcmSwitches`), and devices whose NUMA node the kernel does not know, which NCCL
//! groups together and this module keeps apart.

use std::cmp::Reverse;
use switchyard_core::devices::Devices;
use switchyard_core::gpu_model;
use switchyard_core::path::PathClass;
use switchyard_crds::gpu_topology::{GPUTopologyStatus, Gpu};

/// NCCL path classes between two devices, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NcclPath {
    /// The same device.
    Loc,
    /// NVLink, direct or through a switch.
    Nvl,
    /// Over the NVLinks of one other GPU.
    Nvb,
    /// NVLink-C2C between a GPU and its CPU.
    C2c,
    /// Within one PCIe switch.
    Pix,
    /// Across several PCIe switches, without a CPU.
    Pxb,
    /// GPU to NIC over NVLink-C2C to the NIC's CPU.
    P2c,
    /// GPU to NIC over the NVLink of a GPU next to the NIC.
    Pxn,
    /// Through a CPU, within one NUMA node.
    Phb,
    /// Between NUMA nodes.
    Sys,
}

impl NcclPath {
    /// Name in NCCL's log and in `NCCL_P2P_LEVEL`.
    pub fn word(self) -> &'static str {
        match self {
            NcclPath::Loc => "LOC",
            NcclPath::Nvl => "NVL",
            NcclPath::Nvb => "NVB",
            NcclPath::C2c => "C2C",
            NcclPath::Pix => "PIX",
            NcclPath::Pxb => "PXB",
            NcclPath::P2c => "P2C",
            NcclPath::Pxn => "PXN",
            NcclPath::Phb => "PHB",
            NcclPath::Sys => "SYS",
        }
    }

    /// Short description of the class.
    pub fn meaning(self) -> &'static str {
        match self {
            NcclPath::Loc => "itself",
            NcclPath::Nvl => "NVLink",
            NcclPath::Nvb => "over the NVLinks of one other GPU",
            NcclPath::C2c => "NVLink-C2C over the CPU",
            NcclPath::Pix => "same PCIe switch",
            NcclPath::Pxb => "several PCIe switches",
            NcclPath::P2c => "NVLink-C2C to the NIC's CPU",
            NcclPath::Pxn => "over the NVLink of the NIC's GPU",
            NcclPath::Phb => "via CPU, same NUMA node",
            NcclPath::Sys => "across NUMA nodes",
        }
    }

    /// Class of a PCIe-only path.
    pub fn of_pcie(class: PathClass) -> NcclPath {
        match class {
            PathClass::Same => NcclPath::Loc,
            PathClass::Pix => NcclPath::Pix,
            PathClass::Pxb => NcclPath::Pxb,
            PathClass::Phb | PathClass::Node => NcclPath::Phb,
            PathClass::Sys => NcclPath::Sys,
        }
    }

    /// Whether NCCL allows two GPUs at this distance to access each other's memory; otherwise data
    /// goes through host memory. The default of `NCCL_P2P_LEVEL` is PXB, and SYS between two GPUs
    /// of a machine with AMD CPUs (`ncclTopoCheckP2p`).
    pub fn has_p2p(self, is_amd_pair: bool) -> bool {
        self <= NcclPath::Pxb || is_amd_pair
    }

    /// Whether NCCL lets a NIC at this distance access GPU memory directly. The default of
    /// `NCCL_NET_GDR_LEVEL` is PXB, extended to P2C because `NCCL_NET_GDR_C2C` is on by default
    /// (`ncclTopoCheckGdr`).
    pub fn has_direct_rdma(self) -> bool {
        self <= NcclPath::P2c
    }
}

/// The paths between the devices of one node.
#[derive(Debug, Clone, Copy)]
pub struct NcclPaths<'a> {
    devices: &'a Devices,
    /// GPUs joined to their CPU by NVLink-C2C, one bit each.
    coherent: u32,
}

impl<'a> NcclPaths<'a> {
    /// Paths between `devices`, which were read from `status`.
    pub fn from_report(status: &GPUTopologyStatus, devices: &'a Devices) -> NcclPaths<'a> {
        let gpus = status.gpus.iter().take(devices.gpus.len()).enumerate();
        let coherent = gpus.filter(|(_, gpu)| is_coherent(gpu)).fold(0, |mask, (gpu, _)| mask | 1 << gpu);
        NcclPaths::new(devices, coherent)
    }

    /// Paths between `devices`. `coherent` has one bit for each GPU joined to its CPU by
    /// NVLink-C2C.
    pub fn new(devices: &'a Devices, coherent: u32) -> NcclPaths<'a> {
        NcclPaths { devices, coherent }
    }

    /// Path between two GPUs.
    pub fn gpus(&self, a: usize, b: usize) -> NcclPath {
        if a == b {
            return NcclPath::Loc;
        }
        if self.devices.nvlink_rate(a, b) > 0 {
            return NcclPath::Nvl;
        }
        let class = self.devices.gpu_path(a, b);
        let relayed = self.relayed_rate(a, b);
        // Within one PCIe switch the path is as short as over another GPU, so the faster one wins.
        if relayed > 0 && (class > PathClass::Pix || relayed >= self.devices.pcie_rate(a, b)) {
            return NcclPath::Nvb;
        }
        if self.is_coherent(a) && self.is_coherent(b) && class <= PathClass::Node {
            return NcclPath::C2c;
        }
        NcclPath::of_pcie(class)
    }

    /// Rate between two GPUs, one-way, in MB/s; `None` if unknown.
    pub fn gpu_rate(&self, a: usize, b: usize) -> Option<u32> {
        match self.gpus(a, b) {
            NcclPath::Loc | NcclPath::C2c => None,
            NcclPath::Nvl => Some(self.devices.nvlink_rate(a, b)),
            NcclPath::Nvb => Some(self.relayed_rate(a, b)),
            _ => Some(self.devices.pcie_rate(a, b)),
        }
    }

    /// Best rate over a third GPU with NVLinks to both; 0 if there is none. Switches do not relay
    /// for a GPU without links to them.
    fn relayed_rate(&self, a: usize, b: usize) -> u32 {
        let direct = |a: usize, b: usize| match self.devices.direct(a, b) {
            0 => 0,
            _ => self.devices.nvlink_rate(a, b),
        };
        (0..self.devices.gpus.len()).map(|over| direct(a, over).min(direct(over, b))).max().unwrap_or(0)
    }

    /// The GPU's own path to a NIC. [`NcclPaths::relay`] says where NCCL takes another one.
    pub fn nic(&self, gpu: usize, nic: usize) -> NcclPath {
        let class = NcclPath::of_pcie(self.devices.nic_path(gpu, nic));
        if class == NcclPath::Phb && self.is_coherent(gpu) && self.is_local(gpu, nic) { NcclPath::P2c } else { class }
    }

    /// The GPU through which NCCL sends to a NIC that is far from this GPU (PXN). It is next to the
    /// NIC and joined to this GPU by NVLink. Incoming data takes the GPU's own path.
    pub fn relay(&self, gpu: usize, nic: usize) -> Option<usize> {
        let next = self.local_gpu(nic)?;
        let is_worth_it =
            self.devices.nic_rate(next, nic) > self.devices.nic_rate(gpu, nic) || self.nic(gpu, nic) > NcclPath::Pxn;
        let is_relay = next != gpu
            && self.gpus(next, gpu) == NcclPath::Nvl
            && self.nic(next, nic).has_direct_rdma()
            && is_worth_it;
        is_relay.then_some(next)
    }

    /// The GPU that relays to a NIC for all others: the first of the nearest GPUs that uses the NIC
    /// (`ncclTopoGetLocalGpu`).
    fn local_gpu(&self, nic: usize) -> Option<usize> {
        let near: Vec<(usize, Vec<usize>)> = self.nearest(nic).map(|gpu| (gpu, self.nics(gpu))).collect();
        let channels = near.iter().map(|(_, nics)| nics.len()).max().unwrap_or(0);
        let taken =
            |channel: usize| near.iter().find(|(_, nics)| nics[channel % nics.len()] == nic).map(|(gpu, _)| *gpu);
        (0..channels).find_map(taken)
    }

    /// GPUs nearest to a NIC: those with the fastest paths, and among these the shortest.
    fn nearest(&self, nic: usize) -> impl Iterator<Item = usize> + '_ {
        let rank = move |gpu: usize| {
            (Reverse(self.devices.nic_rate(gpu, nic)), NcclPath::of_pcie(self.devices.nic_path(gpu, nic)))
        };
        let best = (0..self.devices.gpus.len()).map(rank).min();
        (0..self.devices.gpus.len()).filter(move |gpu| Some(rank(*gpu)) == best)
    }

    /// Whether this GPU uses a NIC: it is among the fastest for the GPU, and among these the
    /// nearest (`ncclTopoGetLocal`).
    pub fn is_local(&self, gpu: usize, nic: usize) -> bool {
        let rank =
            |nic: usize| (Reverse(self.devices.nic_rate(gpu, nic)), NcclPath::of_pcie(self.devices.nic_path(gpu, nic)));
        (0..self.devices.nics.len()).all(|other| rank(nic) <= rank(other))
    }

    /// The NICs that NCCL assigns to a GPU, first channel first (`ncclTopoGetLocalNetType`). GPUs
    /// near the same NICs divide them by GPU number. Empty if there are no NICs.
    pub fn nics(&self, gpu: usize) -> Vec<usize> {
        let near: Vec<usize> = (0..self.devices.nics.len()).filter(|nic| self.is_local(gpu, *nic)).collect();
        let Some(first) = near.first() else { return near };
        let sharing = self.nearest(*first).count().max(1);
        let start = gpu % sharing;
        let start = if near.len().is_power_of_two() { mirrored(start, near.len()) } else { start };
        (0..near.len().div_ceil(sharing)).map(|channel| near[(start + channel) % near.len()]).collect()
    }

    fn is_coherent(&self, gpu: usize) -> bool {
        self.coherent & 1 << gpu != 0
    }
}

/// Reverses the bits of a number below a power of two, which spreads neighbours far apart
/// (`mirrorBits`).
fn mirrored(value: usize, power: usize) -> usize {
    let bits = power.trailing_zeros();
    (0..bits).filter(|bit| value & 1 << bit != 0).fold(0, |mirrored, bit| mirrored | 1 << (bits - 1 - bit))
}

/// Whether the GPU is joined to its CPU by NVLink-C2C, as in Grace products: its memory is then a
/// NUMA node.
pub fn is_coherent(gpu: &Gpu) -> bool {
    let model = gpu.model.as_deref().and_then(gpu_model::find);
    gpu.memory_numa_node.is_some()
        || model.is_some_and(|model| ["GH", "GB"].iter().any(|of| model.name.starts_with(of)))
}

#[cfg(test)]
mod tests;
