//! GPUs and NICs of one node as placement sees them. Devices are addressed by position; rates are
//! one-way, in MB/s (10^6 bytes per second).

use crate::path::PathClass;

/// Rate of a NIC of unknown speed, and of a node without a known NIC: NCCL assumes 10 Gbit/s
/// (graph/topo.cc).
pub const UNKNOWN_NIC: u32 = 1_250;

/// GPUs and NICs of a node and the paths between them. If two nodes compare equal, every set of
/// devices has the same values on both.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Devices {
    /// GPUs, by position.
    pub gpus: Vec<Gpu>,
    /// NICs that carry training traffic, by position. Their order is the rail order.
    pub nics: Vec<Nic>,
    /// Direct NVLinks between two GPUs, bypassing switches. Symmetric `gpus.len()` × `gpus.len()`
    /// matrix, row-major.
    pub direct_links: Vec<u8>,
    /// PCIe path class of two GPUs, in the same layout.
    pub gpu_paths: Vec<PathClass>,
    /// PCIe path class of a GPU and a NIC: `gpus.len()` rows of `nics.len()`.
    pub nic_paths: Vec<PathClass>,
    /// Rate between two NUMA nodes.
    pub socket_rate: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gpu {
    /// Rate of its PCIe link.
    pub pcie_rate: u32,
    /// Rate of one NVLink.
    pub link_rate: u32,
    /// NVLinks that go to switches.
    pub switch_links: u8,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nic {
    /// Rate of its port.
    pub rate: u32,
}

impl Devices {
    /// Number of direct NVLinks between two GPUs.
    pub fn direct(&self, a: usize, b: usize) -> u32 {
        self.direct_links[a * self.gpus.len() + b].into()
    }

    /// PCIe side of two GPUs.
    pub fn gpu_path(&self, a: usize, b: usize) -> PathClass {
        self.gpu_paths[a * self.gpus.len() + b]
    }

    /// PCIe side of a GPU and a NIC.
    pub fn nic_path(&self, gpu: usize, nic: usize) -> PathClass {
        self.nic_paths[gpu * self.nics.len() + nic]
    }

    /// The node as seen by a job that has only these GPUs, by position: NCCL ignores GPUs without a
    /// rank.
    pub fn only(&self, gpus: &[usize]) -> Devices {
        let pairs = || gpus.iter().flat_map(|a| gpus.iter().map(move |b| a * self.gpus.len() + b));
        Devices {
            gpus: gpus.iter().map(|gpu| self.gpus[*gpu]).collect(),
            nics: self.nics.clone(),
            direct_links: pairs().map(|pair| self.direct_links[pair]).collect(),
            gpu_paths: pairs().map(|pair| self.gpu_paths[pair]).collect(),
            nic_paths: gpus.iter().flat_map(|gpu| (0..self.nics.len()).map(|nic| self.nic_path(*gpu, nic))).collect(),
            socket_rate: self.socket_rate,
        }
    }

    /// NVLink rate between two GPUs, through switches or not; 0: none.
    pub fn nvlink_rate(&self, a: usize, b: usize) -> u32 {
        let (one, other) = (self.gpus[a], self.gpus[b]);
        let direct = self.direct(a, b) * one.link_rate.min(other.link_rate);
        direct.max(one.switch_rate().min(other.switch_rate()))
    }

    /// PCIe rate between two GPUs. A host bridge costs a sixth (`INTEL_P2P_OVERHEAD` of NCCL's
    /// graph/topo.h).
    pub fn pcie_rate(&self, a: usize, b: usize) -> u32 {
        let rate = self.gpus[a].pcie_rate.min(self.gpus[b].pcie_rate);
        match self.gpu_path(a, b) {
            PathClass::Same | PathClass::Pix | PathClass::Pxb => rate,
            PathClass::Phb | PathClass::Node => rate / 6 * 5,
            PathClass::Sys => (rate / 6 * 5).min(self.socket_rate),
        }
    }

    /// Rate between a GPU and a NIC.
    pub fn nic_rate(&self, gpu: usize, nic: usize) -> u32 {
        let rate = self.gpus[gpu].pcie_rate.min(self.nics[nic].rate);
        if self.nic_path(gpu, nic) == PathClass::Sys { rate.min(self.socket_rate) } else { rate }
    }
}

impl Gpu {
    /// The rate at which it can send to its switches.
    pub fn switch_rate(self) -> u32 {
        u32::from(self.switch_links) * self.link_rate
    }
}
