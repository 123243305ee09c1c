//! Reference for placement tests: bandwidth of GPU sets and whole placements, by brute force.
//!
//! It is written from the problem statement (src/core/placement/README.md), and shares no code or
//! tables with the solver under test. It panics on invalid input, like a test.

mod world;

use std::collections::HashMap;
use switchyard_core::devices::{Devices, UNKNOWN_NIC};
use switchyard_core::path::PathClass;
use switchyard_core::placement::gpus::{Level, MinLink, UNLIMITED};
pub use world::{World, any_devices, any_request, fixtures};

fn orders(rest: &[usize]) -> Vec<Vec<usize>> {
    if rest.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for (index, first) in rest.iter().enumerate() {
        let mut others = rest.to_vec();
        others.remove(index);
        all.extend(orders(&others).into_iter().map(|mut order| {
            order.insert(0, *first);
            order
        }));
    }
    all
}

/// Returns all rings over a set, each as a list of edges.
fn rings(set: &[usize]) -> Vec<Vec<(usize, usize)>> {
    let rings = orders(&set[1..]).into_iter().filter(|order| order.len() < 2 || order[0] < order[order.len() - 1]);
    rings
        .map(|order| {
            let ring: Vec<usize> = std::iter::once(set[0]).chain(order).collect();
            (0..ring.len()).map(|i| (ring[i], ring[(i + 1) % ring.len()])).collect()
        })
        .collect()
}

fn nvlink(devices: &Devices, a: usize, b: usize) -> u32 {
    let (x, y) = (&devices.gpus[a], &devices.gpus[b]);
    let direct = u32::from(devices.direct_links[a * devices.gpus.len() + b]) * x.link_rate.min(y.link_rate);
    let switched = (u32::from(x.switch_links) * x.link_rate).min(u32::from(y.switch_links) * y.link_rate);
    direct.max(switched)
}

fn pcie(devices: &Devices, a: usize, b: usize) -> u32 {
    let rate = devices.gpus[a].pcie_rate.min(devices.gpus[b].pcie_rate);
    match devices.gpu_paths[a * devices.gpus.len() + b] {
        PathClass::Same | PathClass::Pix | PathClass::Pxb => rate,
        PathClass::Phb | PathClass::Node => rate / 6 * 5,
        PathClass::Sys => devices.socket_rate.min(rate / 6 * 5),
    }
}

fn disjoint(rings: &[Vec<(usize, usize)>], links: &mut HashMap<(usize, usize), u32>) -> u32 {
    let mut best = 0;
    for (index, ring) in rings.iter().enumerate() {
        let key = |(a, b): (usize, usize)| (a.min(b), a.max(b));
        let fits = ring.iter().all(|edge| links.get(&key(*edge)).is_some_and(|count| *count > 0));
        if fits {
            ring.iter().for_each(|edge| *links.get_mut(&key(*edge)).expect("an edge") -= 1);
            best = best.max(1 + disjoint(&rings[index..], links));
            ring.iter().for_each(|edge| *links.get_mut(&key(*edge)).expect("an edge") += 1);
        }
    }
    best
}

/// Returns the ring capacity of a set.
pub fn ring(devices: &Devices, set: &[usize]) -> u32 {
    if set.len() < 2 {
        return UNLIMITED;
    }
    if set.iter().all(|gpu| devices.gpus[*gpu].switch_links > 0) {
        return set
            .iter()
            .map(|gpu| u32::from(devices.gpus[*gpu].switch_links) * devices.gpus[*gpu].link_rate)
            .min()
            .unwrap_or(0);
    }
    let all = rings(set);
    if set.len() > 2 {
        let mut links = HashMap::new();
        for (i, a) in set.iter().enumerate() {
            for b in &set[i + 1..] {
                links.insert((*a, *b), u32::from(devices.direct_links[a * devices.gpus.len() + b]));
            }
        }
        let possible: Vec<_> =
            all.iter().filter(|ring| ring.iter().all(|(a, b)| links[&(*a.min(b), *a.max(b))] > 0)).cloned().collect();
        let cycles = disjoint(&possible, &mut links);
        if cycles > 0 {
            return 2 * cycles * set.iter().map(|gpu| devices.gpus[*gpu].link_rate).min().unwrap_or(0);
        }
    }
    let slowest = |ring: &Vec<(usize, usize)>| {
        ring.iter().map(|(a, b)| nvlink(devices, *a, *b).max(pcie(devices, *a, *b))).min().unwrap_or(0)
    };
    all.iter().map(slowest).max().unwrap_or(0)
}

fn class(devices: &Devices, a: usize, b: usize) -> MinLink {
    match devices.gpu_paths[a * devices.gpus.len() + b] {
        _ if nvlink(devices, a, b) > 0 => MinLink::NVLink,
        PathClass::Same | PathClass::Pix | PathClass::Pxb => MinLink::PCIeSwitch,
        PathClass::Phb => MinLink::PCIeHost,
        PathClass::Node => MinLink::Numa,
        PathClass::Sys => MinLink::System,
    }
}

/// Returns whether a ring over the set exists whose worst link satisfies `min_link`.
pub fn joined(devices: &Devices, set: &[usize], min_link: MinLink) -> bool {
    let good = |ring: &Vec<(usize, usize)>| ring.iter().all(|(a, b)| class(devices, *a, *b) <= min_link);
    set.len() < 2 || rings(set).iter().any(good)
}

/// Returns the injection bandwidth of a set into the fabric.
pub fn injection(devices: &Devices, set: &[usize]) -> u32 {
    let count = devices.nics.len();
    if set.is_empty() {
        return devices.nics.iter().map(|nic| nic.rate).max().unwrap_or(UNKNOWN_NIC);
    }
    let mut carried = vec![0; count];
    for gpu in set {
        let Some(best) = (0..count).map(|nic| devices.nic_paths[gpu * count + nic]).min() else { continue };
        for nic in (0..count).filter(|nic| devices.nic_paths[gpu * count + nic] == best) {
            let path_rate = match best {
                PathClass::Sys => devices.gpus[*gpu].pcie_rate.min(devices.socket_rate),
                _ => devices.gpus[*gpu].pcie_rate,
            };
            carried[nic] = carried[nic].max(path_rate.min(devices.nics[nic].rate));
        }
    }
    match carried.iter().sum::<u32>() {
        0 => UNKNOWN_NIC,
        sum => sum.min(set.iter().map(|gpu| devices.gpus[*gpu].pcie_rate).sum()),
    }
}

/// Returns the bandwidth of a pod in a gang with this spread (`None`: the pod is the whole gang),
/// or `None` if its GPUs do not satisfy `min_link`.
pub fn bandwidth(devices: &Devices, set: &[usize], level: Option<Level>, min_link: MinLink) -> Option<u32> {
    let out = level.map_or(UNLIMITED, |level| {
        let nics = (u64::from(injection(devices, set)) * u64::from(level.share) / 1000) as u32;
        let switches = set.iter().map(|gpu| u32::from(devices.gpus[*gpu].switch_links) * devices.gpus[*gpu].link_rate);
        if level.nvlink { nics.max(switches.min().unwrap_or(0)) } else { nics }
    });
    joined(devices, set, min_link).then(|| ring(devices, set).min(out).max(1))
}
/// Returns the positions of the bits set in a mask.
pub fn positions(mask: u32) -> Vec<usize> {
    (0..32).filter(|bit| mask >> bit & 1 == 1).collect()
}

/// Returns the best bandwidth of a pod with `gpus` GPUs, over all sets of free GPUs.
pub fn best_pod(devices: &Devices, free: u32, gpus: u8, level: Option<Level>, min_link: MinLink) -> Option<u32> {
    let sets = (0..=free).filter(|set| set & !free == 0 && set.count_ones() == u32::from(gpus));
    sets.filter_map(|set| bandwidth(devices, &positions(set), level, min_link)).max()
}
