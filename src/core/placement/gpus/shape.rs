//! Values of every GPU set of a node shape. Nodes with equal [`Devices`] share them.

use super::ring::{self, MinLink, UNLIMITED};
use crate::devices::Devices;

/// Maximum number of GPUs per node for which sets are enumerated: 65,536 sets.
pub const MAX_GPUS: usize = 16;

/// A level of domains, such as racks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Level {
    /// Thousandths of the injection bandwidth that cross a domain of this level: 1000 without
    /// oversubscription, 500 at 1:2.
    pub share: u32,
    /// Whether NVLink joins the nodes of a domain.
    pub nvlink: bool,
}

/// A class of nodes with the same devices.
#[derive(Debug, PartialEq, Eq)]
pub struct Shape {
    pub gpus: usize,
    /// Ring capacity of each set.
    pub ring: Vec<u32>,
    /// Injection of each set.
    pub injection: Vec<u32>,
    /// NICs that each set uses.
    pub rails: Vec<u64>,
    worst: Vec<MinLink>,
    /// For each set, the rate of its weakest GPU to NVLink switches.
    switch_rate: Vec<u32>,
    /// How well each set still splits into good pairs, quads and octets: a sum in millionths of the
    /// whole node.
    packing: Vec<u64>,
    /// Distance of each set over PCIe: between its GPUs, and from each to its nearest NIC.
    distance: Vec<u32>,
    /// Rank of each GPU when the node's GPUs are ordered by rail.
    order: Vec<u8>,
}

impl Shape {
    /// Computes the values. `devices` has at most [`MAX_GPUS`] GPUs.
    pub fn new(devices: &Devices) -> Shape {
        let nearest = ring::nearest_nics(devices);
        let rails = ring::rails(&nearest);
        let (ring, injection) = (ring::ring_capacities(devices), ring::injections(devices, &nearest, &rails));
        let sets = 0_u32..1 << devices.gpus.len();
        let rate = |gpu: usize| devices.gpus[gpu].switch_rate();
        let switch_rate = sets.map(|mask| ring::bits(mask).map(rate).min().unwrap_or(0)).collect();
        let mut by_rail: Vec<usize> = (0..devices.gpus.len()).collect();
        by_rail.sort_by_key(|gpu| (nearest[*gpu].trailing_zeros(), *gpu));
        let mut order = vec![0; by_rail.len()];
        by_rail.iter().enumerate().for_each(|(place, gpu)| order[*gpu] = place as u8);
        let packing = packing(devices.gpus.len(), |mask| ring[mask as usize].min(injection[mask as usize]));
        Shape {
            gpus: devices.gpus.len(),
            rails,
            worst: ring::worst_links(devices),
            ring,
            injection,
            switch_rate,
            packing,
            distance: distances(devices),
            order,
        }
    }

    /// Mask of all GPUs.
    pub fn all(&self) -> u32 {
        ((1_u64 << self.gpus) - 1) as u32
    }

    /// Slowest link of the ring over a set.
    pub fn link(&self, mask: u32) -> MinLink {
        self.worst[mask as usize]
    }

    /// Bandwidth of a set to other nodes of the same domain; unlimited if `level` is `None`,
    /// because there are none.
    pub fn outward(&self, mask: u32, level: Option<Level>) -> u32 {
        let Some(level) = level else { return UNLIMITED };
        let injection = u64::from(self.injection[mask as usize]) * u64::from(level.share) / 1000;
        let switch_rate = if level.nvlink { self.switch_rate[mask as usize] } else { 0 };
        switch_rate.max(u32::try_from(injection).unwrap_or(u32::MAX))
    }

    /// Value of a set for a gang of this spread: the slower of its ring and its outward bandwidth,
    /// at least 1. 0 marks sets that must not be used.
    pub fn value(&self, mask: u32, level: Option<Level>, min_link: MinLink) -> u32 {
        if self.worst[mask as usize] > min_link {
            return 0;
        }
        self.ring[mask as usize].min(self.outward(mask, level)).max(1)
    }

    /// Best value of `gpus` GPUs out of each set of free GPUs; 0 if there is none.
    pub fn best(&self, gpus: u8, level: Option<Level>, min_link: MinLink) -> Vec<u32> {
        let mut best = vec![0; 1 << self.gpus];
        if usize::from(gpus) > self.gpus {
            return best;
        }
        for mask in 0..best.len() as u32 {
            best[mask as usize] = match mask.count_ones().cmp(&gpus.into()) {
                std::cmp::Ordering::Less => 0,
                std::cmp::Ordering::Equal => self.value(mask, level, min_link),
                std::cmp::Ordering::Greater => {
                    ring::bits(mask).map(|gpu| best[(mask & !(1 << gpu)) as usize]).max().unwrap_or(0)
                }
            };
        }
        best
    }

    /// Best set of `gpus` free GPUs for a gang of this spread. Tie-break: the set that fragments
    /// the node least, then the one whose GPUs and NICs are nearest to each other.
    pub fn best_set(&self, free: u32, gpus: u8, level: Option<Level>) -> Option<u32> {
        let key = |set: &u32| {
            let value = self.value(*set, level, MinLink::System);
            (value, self.ring[*set as usize], self.packing_score(free, *set), self.nearness(*set), u32::MAX - set)
        };
        subsets(free & self.all(), gpus).max_by_key(key)
    }

    /// Score for taking a set out of the free GPUs, comparable for equal `free`. High if cells stay
    /// whole, either inside or outside the set.
    pub fn packing_score(&self, free: u32, taken: u32) -> u64 {
        10 * self.packing[(free & !taken) as usize] + 9 * self.packing[taken as usize]
    }

    /// Higher the nearer the GPUs of a set are to each other and to NICs. It decides between sets
    /// of equal bandwidth: rates of unknown devices are assumptions, the classes of paths are not.
    pub fn nearness(&self, mask: u32) -> u32 {
        u32::MAX - self.distance[mask as usize]
    }

    /// GPUs of a set in rail order, which is local rank order.
    pub fn by_rail(&self, mask: u32) -> Vec<u8> {
        let mut gpus: Vec<u8> = ring::bits(mask).map(|gpu| gpu as u8).collect();
        gpus.sort_by_key(|gpu| self.order[usize::from(*gpu)]);
        gpus
    }
}

/// Subsets of a set with `gpus` elements, in ascending order. Uses Gosper's hack over the positions
/// in the set.
pub fn subsets(mask: u32, gpus: u8) -> impl Iterator<Item = u32> {
    let places: Vec<usize> = ring::bits(mask).collect();
    let spread = move |chosen: u32| ring::bits(chosen).fold(0, |set, place| set | 1 << places[place]);
    let (count, size) = (mask.count_ones(), u32::from(gpus));
    let first = (size <= count).then(|| (1_u64 << size) - 1);
    std::iter::successors(first, move |chosen| {
        let lowest = chosen & chosen.wrapping_neg();
        let ripple = chosen + lowest;
        // The empty set has one subset.
        let tail = ((chosen ^ ripple) >> 2).checked_div(lowest)?;
        (ripple | tail < 1 << count).then_some(ripple | tail)
    })
    .map(move |chosen| spread(chosen as u32))
}

/// For every set, its farthest path class, then the sum of all classes.
fn distances(devices: &Devices) -> Vec<u32> {
    /// More than the sum over the pairs and NICs of [`MAX_GPUS`] GPUs.
    const FARTHEST: u32 = 10_000;
    let nearest_nic = |gpu| (0..devices.nics.len()).map(|nic| devices.nic_path(gpu, nic) as u32).min().unwrap_or(0);
    let nearest_nics: Vec<u32> = (0..devices.gpus.len()).map(nearest_nic).collect();
    let mut sums = vec![(0_u32, 0_u32); 1 << devices.gpus.len()];
    for mask in 1..sums.len() {
        let (gpu, rest) = (mask.trailing_zeros() as usize, mask & (mask - 1));
        let (mut worst, mut sum) = sums[rest];
        sum += nearest_nics[gpu];
        for other in ring::bits(rest as u32) {
            let class = devices.gpu_path(gpu, other) as u32;
            (worst, sum) = (worst.max(class), sum + class);
        }
        sums[mask] = (worst, sum);
    }
    sums.into_iter().map(|(worst, sum)| worst * FARTHEST + sum).collect()
}

/// For every set, the best total value of disjoint pairs, of disjoint quads and (up to 8 GPUs) of
/// octets, each in millionths of the whole node's value. This is the idea of buddy cells, derived
/// from values instead of hand-drawn cells.
fn packing(count: usize, value: impl Fn(u32) -> u32) -> Vec<u64> {
    let mut total = vec![0_u64; 1 << count];
    // Octets of 16 GPUs would be 6,435 choices for each of 39,203 sets, for little gain: pairs and
    // quads already keep their parts together.
    for size in [2_u8, 4, 8].into_iter().filter(|size| usize::from(*size) <= count && (count <= 8 || *size < 8)) {
        let mut best = vec![0_u64; 1 << count];
        for mask in 1_u32..1 << count {
            let lowest = mask & mask.wrapping_neg();
            let rest = mask & !lowest;
            let with = subsets(rest, size - 1).map(|others| {
                let cell = others | lowest;
                u64::from(value(cell)) + best[(mask & !cell) as usize]
            });
            best[mask as usize] = with.max().unwrap_or(0).max(best[rest as usize]);
        }
        let whole = best[best.len() - 1].max(1);
        total.iter_mut().zip(&best).for_each(|(total, best)| *total += best * 1_000_000 / whole);
    }
    total
}
