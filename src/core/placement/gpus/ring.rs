//! Properties of every GPU set of one node: ring capacity inside the set, injection into the
//! fabric, and the worst link of its ring.
//!
//! Computed for all sets at once, each a bit mask: 2^G values.

use crate::devices::{Devices, UNKNOWN_NIC};
use crate::path::PathClass;

/// No limit: a set with at most one GPU has no ring.
pub const UNLIMITED: u32 = u32::MAX;

/// Worst link class allowed in a ring, best first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MinLink {
    NVLink,
    /// Within PCIe switches.
    PCIeSwitch,
    /// Across a host bridge.
    PCIeHost,
    /// Between host bridges of a NUMA node.
    Numa,
    /// Any link.
    #[default]
    System,
}

impl MinLink {
    /// From the best to the worst.
    pub const ALL: [MinLink; 5] =
        [MinLink::NVLink, MinLink::PCIeSwitch, MinLink::PCIeHost, MinLink::Numa, MinLink::System];

    /// Class of the better link between two GPUs.
    pub fn of(devices: &Devices, a: usize, b: usize) -> MinLink {
        if devices.nvlink_rate(a, b) > 0 {
            return MinLink::NVLink;
        }
        match devices.gpu_path(a, b) {
            PathClass::Same | PathClass::Pix | PathClass::Pxb => MinLink::PCIeSwitch,
            PathClass::Phb => MinLink::PCIeHost,
            PathClass::Node => MinLink::Numa,
            PathClass::Sys => MinLink::System,
        }
    }
}

/// Positions of the set bits.
pub fn bits(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let position = left.trailing_zeros() as usize;
        (left != 0).then(|| left &= left - 1).map(|()| position)
    })
}

/// Returns which sets have a Hamiltonian cycle of edges for which `joined` holds. Sets of two need
/// one edge, smaller ones none.
///
/// This is the Held-Karp recursion over (set, end of a path that starts at its lowest GPU), in
/// O(2^G · G).
fn cycles(count: usize, joined: impl Fn(usize, usize) -> bool) -> Vec<bool> {
    let neighbours: Vec<u32> =
        (0..count).map(|a| (0..count).filter(|b| *b != a && joined(a, *b)).fold(0, |mask, b| mask | 1 << b)).collect();
    // End points of paths that cover exactly this set.
    let mut ends = vec![0_u32; 1 << count];
    let mut found = vec![false; 1 << count];
    found[0] = true;
    for mask in 1_u32..1 << count {
        let lowest = mask.trailing_zeros() as usize;
        if mask.count_ones() == 1 {
            (ends[mask as usize], found[mask as usize]) = (mask, true);
            continue;
        }
        let above = mask & !(1 << lowest);
        ends[mask as usize] = bits(above)
            .filter(|end| ends[(mask & !(1 << end)) as usize] & neighbours[*end] != 0)
            .fold(0, |all, end| all | 1 << end);
        found[mask as usize] = ends[mask as usize] & neighbours[lowest] != 0;
    }
    found
}

/// Best class achievable for the worst link of a ring over each set.
pub fn worst_links(devices: &Devices) -> Vec<MinLink> {
    let count = devices.gpus.len();
    let mut worst = vec![MinLink::System; 1 << count];
    for class in MinLink::ALL.into_iter().rev() {
        let possible = cycles(count, |a, b| MinLink::of(devices, a, b) <= class);
        worst.iter_mut().zip(possible).filter(|(_, possible)| *possible).for_each(|(worst, _)| *worst = class);
    }
    worst
}

/// Ring capacity inside each set, one-way, in MB/s.
///
/// Through switches, the weakest GPU's rate to them decides. Over direct NVLinks, every
/// edge-disjoint Hamiltonian cycle counts twice the rate of a link, because it is used in both
/// directions; for two GPUs that is all links between them. Otherwise it is the cycle over any
/// links whose slowest link is fastest.
pub fn ring_capacities(devices: &Devices) -> Vec<u32> {
    let count = devices.gpus.len();
    let edge = |a: usize, b: usize| devices.nvlink_rate(a, b).max(devices.pcie_rate(a, b));
    let mut rates: Vec<u32> = (0..count).flat_map(|a| (0..a).map(move |b| edge(a, b))).collect();
    rates.sort_unstable();
    rates.dedup();
    let mut capacity = vec![0_u32; 1 << count];
    for rate in rates {
        let possible = cycles(count, |a, b| edge(a, b) >= rate);
        capacity.iter_mut().zip(possible).filter(|(_, possible)| *possible).for_each(|(capacity, _)| *capacity = rate);
    }
    let has_mesh = devices.direct_links.iter().any(|links| *links > 0);
    for mask in 0_u32..1 << count {
        let slot = &mut capacity[mask as usize];
        let slowest_to_switches = bits(mask).map(|gpu| devices.gpus[gpu].switch_rate()).min().unwrap_or(0);
        if mask.count_ones() <= 1 {
            *slot = UNLIMITED;
        } else if slowest_to_switches > 0 {
            *slot = slowest_to_switches;
        } else if has_mesh && mask.count_ones() > 2 {
            let cycles = disjoint_cycles(devices, mask);
            let link = bits(mask).map(|gpu| devices.gpus[gpu].link_rate).min().unwrap_or(0);
            if cycles > 0 {
                *slot = 2 * cycles * link;
            }
        }
    }
    capacity
}

/// Maximum number of edge-disjoint Hamiltonian cycles over the NVLinks of at least three GPUs. At
/// most half the links of the GPU with the fewest.
fn disjoint_cycles(devices: &Devices, mask: u32) -> u32 {
    let gpus: Vec<usize> = bits(mask).collect();
    let mut links: Vec<Vec<u32>> =
        gpus.iter().map(|a| gpus.iter().map(|b| if a == b { 0 } else { devices.direct(*a, *b) }).collect()).collect();
    let bound = links.iter().map(|row| row.iter().sum::<u32>() / 2).min().unwrap_or(0);
    let mut search = CycleSearch { links: &mut links, path: vec![0], best: 0, bound, steps: 0 };
    search.search(0, None);
    search.best
}

/// Backtracking search that adds one cycle after another. Each cycle starts at the first GPU and is
/// not less than the previous one, so every combination of cycles is tried once.
struct CycleSearch<'a> {
    links: &'a mut [Vec<u32>],
    path: Vec<usize>,
    best: u32,
    bound: u32,
    steps: u64,
}

/// Search limit for one set, so that a nonsensical report costs at most 0.1 s. A DGX-1 needs a
/// tenth of it. At the limit, the best set of cycles found so far is returned, which is a real
/// capacity.
const MAX_STEPS: u64 = 20_000;

impl CycleSearch<'_> {
    fn search(&mut self, complete: u32, before: Option<&[usize]>) {
        self.best = self.best.max(complete);
        self.steps += 1;
        if self.best == self.bound || self.steps > MAX_STEPS {
            return;
        }
        let (count, last) = (self.links.len(), self.path[self.path.len() - 1]);
        if self.path.len() == count {
            // A cycle and its reverse count once.
            let is_new = self.path[1] < last || count == 2;
            if self.links[last][0] > 0 && is_new && before.is_none_or(|before| before <= self.path.as_slice()) {
                self.adjust_links(last, 0, -1);
                let cycle = std::mem::replace(&mut self.path, vec![0]);
                self.search(complete + 1, Some(&cycle));
                self.path = cycle;
                self.adjust_links(last, 0, 1);
            }
            return;
        }
        for gpu in 1..count {
            if self.links[last][gpu] > 0 && !self.path.contains(&gpu) {
                self.adjust_links(last, gpu, -1);
                self.path.push(gpu);
                self.search(complete, before);
                self.path.pop();
                self.adjust_links(last, gpu, 1);
            }
        }
    }

    fn adjust_links(&mut self, a: usize, b: usize, links: i32) {
        self.links[a][b] = self.links[a][b].saturating_add_signed(links);
        self.links[b][a] = self.links[b][a].saturating_add_signed(links);
    }
}

/// NICs nearest to each GPU, as a mask: all NICs with its best path class.
pub fn nearest_nics(devices: &Devices) -> Vec<u64> {
    let nics = 0..devices.nics.len().min(64);
    let nearest = |gpu: usize| {
        let best = nics.clone().map(|nic| devices.nic_path(gpu, nic)).min();
        nics.clone().filter(|nic| Some(devices.nic_path(gpu, *nic)) == best).fold(0, |mask, nic| mask | 1 << nic)
    };
    (0..devices.gpus.len()).map(nearest).collect()
}

/// NICs that each set uses, as a mask, from those nearest to each GPU.
pub fn rails(nearest: &[u64]) -> Vec<u64> {
    let mut rails = vec![0; 1 << nearest.len()];
    for mask in 1_usize..rails.len() {
        rails[mask] = rails[mask & (mask - 1)] | nearest[mask.trailing_zeros() as usize];
    }
    rails
}

/// Injection of each set into the fabric, one-way, in MB/s: the sum over the NICs nearest to any
/// GPU of the set, each limited by its port and by the path to it, and at most the rate of the
/// GPUs' PCIe links. GPUs with the same NIC share it. A process without a GPU (the empty set) sends
/// over one NIC, the fastest.
pub fn injections(devices: &Devices, nearest: &[u64], rails: &[u64]) -> Vec<u32> {
    let of_set = |mask: usize| {
        let rate = |nic: usize| {
            let users = bits(mask as u32).filter(|gpu| nearest[*gpu] & 1 << nic != 0);
            users.map(|gpu| devices.nic_rate(gpu, nic)).max().unwrap_or(0)
        };
        let nics: u32 = (0..devices.nics.len().min(64)).filter(|nic| rails[mask] & 1 << nic != 0).map(rate).sum();
        let pcie = bits(mask as u32).map(|gpu| devices.gpus[gpu].pcie_rate).fold(0_u32, u32::saturating_add);
        if nics == 0 { UNKNOWN_NIC } else { nics.min(pcie) }
    };
    let alone = devices.nics.iter().map(|nic| nic.rate).max().unwrap_or(UNKNOWN_NIC);
    std::iter::once(alone).chain((1..1 << devices.gpus.len()).map(of_set)).collect()
}
