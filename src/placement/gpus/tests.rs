//! Placement against brute force. The evaluator below is written from the statement of the problem and shares no code with the tables.

use super::*;
use crate::topology::devices::{Devices, Gpu, Nic};
use crate::topology::model::NodeOrd;
use crate::topology::path::PathClass;
use proptest::prelude::*;
use std::collections::HashMap;

mod evaluate {
    use super::*;

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

    /// Rings over a set, each as its edges.
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
                ring.iter().for_each(|edge| *links.get_mut(&key(*edge)).unwrap() -= 1);
                best = best.max(1 + disjoint(&rings[index..], links));
                ring.iter().for_each(|edge| *links.get_mut(&key(*edge)).unwrap() += 1);
            }
        }
        best
    }

    pub fn ring(devices: &Devices, set: &[usize]) -> u32 {
        if set.len() < 2 {
            return UNLIMITED;
        }
        if set.iter().all(|gpu| devices.gpus[*gpu].switch_links > 0) {
            return set
                .iter()
                .map(|gpu| u32::from(devices.gpus[*gpu].switch_links) * devices.gpus[*gpu].link_rate)
                .min()
                .unwrap();
        }
        let all = rings(set);
        if set.len() > 2 {
            let mut links = HashMap::new();
            for (i, a) in set.iter().enumerate() {
                for b in &set[i + 1..] {
                    links.insert((*a, *b), u32::from(devices.direct_links[a * devices.gpus.len() + b]));
                }
            }
            let possible: Vec<_> = all
                .iter()
                .filter(|ring| ring.iter().all(|(a, b)| links[&(*a.min(b), *a.max(b))] > 0))
                .cloned()
                .collect();
            let cycles = disjoint(&possible, &mut links);
            if cycles > 0 {
                return 2 * cycles * set.iter().map(|gpu| devices.gpus[*gpu].link_rate).min().unwrap();
            }
        }
        let slowest = |ring: &Vec<(usize, usize)>| {
            ring.iter().map(|(a, b)| nvlink(devices, *a, *b).max(pcie(devices, *a, *b))).min().unwrap()
        };
        all.iter().map(slowest).max().unwrap()
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

    pub fn joined(devices: &Devices, set: &[usize], min_link: MinLink) -> bool {
        let good = |ring: &Vec<(usize, usize)>| ring.iter().all(|(a, b)| class(devices, *a, *b) <= min_link);
        set.len() < 2 || rings(set).iter().any(good)
    }

    pub fn injection(devices: &Devices, set: &[usize]) -> u32 {
        let count = devices.nics.len();
        if set.is_empty() {
            return devices.nics.iter().map(|nic| nic.rate).max().unwrap_or(UNKNOWN_NIC);
        }
        let mut carried = vec![0; count];
        for gpu in set {
            let Some(best) = (0..count).map(|nic| devices.nic_paths[gpu * count + nic]).min() else { continue };
            for nic in (0..count).filter(|nic| devices.nic_paths[gpu * count + nic] == best) {
                let way = match best {
                    PathClass::Sys => devices.gpus[*gpu].pcie_rate.min(devices.socket_rate),
                    _ => devices.gpus[*gpu].pcie_rate,
                };
                carried[nic] = carried[nic].max(way.min(devices.nics[nic].rate));
            }
        }
        match carried.iter().sum::<u32>() {
            0 => UNKNOWN_NIC,
            sum => sum.min(set.iter().map(|gpu| devices.gpus[*gpu].pcie_rate).sum()),
        }
    }

    /// Bandwidth of a pod of a gang of this spread (`None`: it is the whole gang); `None`: its GPUs are not joined well enough.
    pub fn pod(devices: &Devices, set: &[usize], level: Option<Level>, min_link: MinLink) -> Option<u32> {
        let out = level.map_or(UNLIMITED, |level| {
            let nics = (u64::from(injection(devices, set)) * u64::from(level.share) / 1000) as u32;
            let switches =
                set.iter().map(|gpu| u32::from(devices.gpus[*gpu].switch_links) * devices.gpus[*gpu].link_rate);
            if level.nvlink { nics.max(switches.min().unwrap_or(0)) } else { nics }
        });
        joined(devices, set, min_link).then(|| ring(devices, set).min(out).max(1))
    }
}

fn positions(mask: u32) -> Vec<usize> {
    (0..32).filter(|bit| mask >> bit & 1 == 1).collect()
}

/// Best pod of `gpus` GPUs, from all sets.
fn best_pod(devices: &Devices, free: u32, gpus: u8, level: Option<Level>, min_link: MinLink) -> Option<u32> {
    let sets = (0..=free).filter(|set| set & !free == 0 && set.count_ones() == u32::from(gpus));
    sets.filter_map(|set| evaluate::pod(devices, &positions(set), level, min_link)).max()
}

const PATHS: [PathClass; 5] = [PathClass::Pix, PathClass::Pxb, PathClass::Phb, PathClass::Node, PathClass::Sys];

/// A node of up to `most` GPUs: switched, meshed, bridged or without NVLink.
fn any_devices(most: usize) -> impl Strategy<Value = Devices> {
    (0..=most, 0_usize..4, 0_u8..4, any::<u64>()).prop_map(|(count, nics, kind, seed)| {
        let mut state = seed | 1;
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut devices = Devices { socket_rate: 10_000 + 1000 * draw(30) as u32, ..Devices::default() };
        let link_rate = [18_000, 20_000, 20_600][draw(3) as usize];
        for _ in 0..count {
            // A switched machine with a GPU that has lost some links, or all.
            let switch_links = if kind == 0 { [18, 18, 18, 17, 0][draw(5) as usize] } else { 0 };
            devices.gpus.push(Gpu { pcie_rate: [12_000, 24_000, 48_000][draw(3) as usize], link_rate, switch_links });
        }
        devices.nics = (0..nics).map(|_| Nic { rate: [12_500, 25_000, 50_000][draw(3) as usize] }).collect();
        devices.direct_links = vec![0; count * count];
        devices.gpu_paths = vec![PathClass::Same; count * count];
        for a in 0..count {
            for b in 0..a {
                let links = match kind {
                    1 => [0, 1, 1, 2][draw(4) as usize],
                    2 => {
                        if a / 2 == b / 2 {
                            4
                        } else {
                            0
                        }
                    }
                    _ => 0,
                };
                let path = PATHS[draw(5) as usize];
                for place in [a * count + b, b * count + a] {
                    devices.direct_links[place] = links;
                    devices.gpu_paths[place] = path;
                }
            }
        }
        devices.nic_paths = (0..count * nics).map(|_| PATHS[draw(5) as usize]).collect();
        devices
    })
}

/// A fleet of two levels below the cluster, as its parts.
#[derive(Debug, Clone)]
struct World {
    levels: Vec<Level>,
    shapes: Vec<Devices>,
    sites: Vec<Site>,
}

impl World {
    fn fleet(&self) -> Fleet {
        Fleet::new(self.levels.clone(), &self.shapes, &self.sites).unwrap()
    }

    /// Level of the smallest domain of these nodes: from the labels, not from the fleet.
    fn level(&self, nodes: &[usize]) -> Option<usize> {
        // A domain has a name of its own within the larger ones; an unknown one is named after what it contains.
        let name = |node: usize, level: usize| -> Vec<String> {
            let labels = &self.sites[node].domains;
            let mut below = format!("node {node}");
            let mut path: Vec<String> = Vec::new();
            for (number, label) in labels.iter().enumerate() {
                below = label.map_or(format!("of {below}"), |label| label.to_string());
                if number >= level {
                    path.push(below.clone());
                }
            }
            path
        };
        (nodes.len() > 1).then(|| {
            (0..self.levels.len())
                .find(|level| nodes.iter().all(|node| name(*node, *level) == name(nodes[0], *level)))
                .unwrap()
        })
    }
}

fn any_world(nodes: std::ops::Range<usize>) -> impl Strategy<Value = World> {
    let shapes = prop::collection::vec(any_devices(4), 1..4);
    let shares = (1_u32..=1000, 1_u32..=1000, any::<bool>());
    (shapes, prop::collection::vec((any::<u32>(), any::<u32>(), 0_u32..10), nodes), shares).prop_map(
        |(shapes, nodes, (a, b, nvlink))| {
            let (rack, block) = (a.max(b), a.min(b));
            let levels = vec![
                Level { share: 1000, nvlink },
                Level { share: rack, nvlink: false },
                Level { share: block, nvlink: false },
            ];
            let site = |(draw, free, closed): (u32, u32, u32)| {
                let rack = draw % 4;
                // Racks 0 and 1 are of block 0; now and then a label is missing.
                let label = |missing: bool, label: u32| (!missing).then_some(label);
                Site {
                    shape: draw / 64 % shapes.len() as u32,
                    free: free & free.rotate_left(7) | free >> 16,
                    open: closed > 0,
                    domains: vec![label(draw % 61 == 0, rack), label(draw % 59 == 0, rack / 2)],
                }
            };
            let sites = nodes.into_iter().map(site).collect();
            World { levels, shapes, sites }
        },
    )
}

fn any_request(groups: std::ops::RangeInclusive<usize>, most_pods: u32) -> impl Strategy<Value = Request> {
    let sizes = prop::sample::select(vec![0_u8, 1, 1, 2, 2, 3, 4]);
    let group = (1..=most_pods, sizes).prop_map(|(pods, gpus)| Group { pods, gpus });
    let min_link = prop::sample::select(vec![MinLink::NVLink, MinLink::Numa, MinLink::System, MinLink::System]);
    let within = prop::option::weighted(0.3, 0_usize..3);
    (prop::collection::vec(group, groups), min_link, within).prop_map(|(groups, min_link, within)| Request {
        groups,
        min_link,
        within,
        slices: None,
    })
}

/// Every choice of distinct nodes for all pods, group by group.
fn choices(world: &World, request: &Request, visit: &mut dyn FnMut(&[(usize, usize)])) {
    fn next(
        world: &World,
        request: &Request,
        group: usize,
        left: u32,
        from: usize,
        chosen: &mut Vec<(usize, usize)>,
        visit: &mut dyn FnMut(&[(usize, usize)]),
    ) {
        if left == 0 {
            match request.groups.get(group + 1) {
                Some(next_group) => next(world, request, group + 1, next_group.pods, 0, chosen, visit),
                None => visit(chosen),
            }
            return;
        }
        for node in from..world.sites.len() {
            if world.sites[node].open && chosen.iter().all(|(_, other)| *other != node) {
                chosen.push((group, node));
                next(world, request, group, left - 1, node + 1, chosen, visit);
                chosen.pop();
            }
        }
    }
    next(world, request, 0, request.groups[0].pods, 0, &mut Vec::new(), visit);
}

/// Best bandwidth of all placements.
fn oracle(world: &World, request: &Request) -> Option<u32> {
    let mut known: HashMap<(u32, u32, u8, Option<usize>), Option<u32>> = HashMap::new();
    let mut best = None;
    choices(world, request, &mut |chosen| {
        let nodes: Vec<usize> = chosen.iter().map(|(_, node)| *node).collect();
        let level = world.level(&nodes);
        if request.within.is_some_and(|within| level.is_some_and(|level| level > within)) {
            return;
        }
        let value = chosen.iter().map(|(group, node)| {
            let (site, gpus) = (&world.sites[*node], request.groups[*group].gpus);
            let devices = &world.shapes[site.shape as usize];
            let free = site.free & ((1_u32 << devices.gpus.len()) - 1);
            let spread = level.map(|level| world.levels[level]);
            *known
                .entry((site.shape, free, gpus, level))
                .or_insert_with(|| best_pod(devices, free, gpus, spread, request.min_link))
        });
        if let Some(value) = value.collect::<Option<Vec<u32>>>().and_then(|values| values.into_iter().min()) {
            best = best.max(Some(value));
        }
    });
    best
}

/// Whether an answer is what it says it is.
fn check(world: &World, request: &Request, placement: &Placement) {
    let nodes: Vec<usize> = placement.pods.iter().map(|pod| pod.node.0 as usize).collect();
    let mut distinct = nodes.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), nodes.len(), "one pod per node");
    let level = world.level(&nodes);
    assert_eq!(placement.level, level);
    assert!(request.within.is_none_or(|within| level.is_none_or(|level| level <= within)));
    for (number, group) in request.groups.iter().enumerate() {
        assert_eq!(placement.pods.iter().filter(|pod| pod.group == number).count(), group.pods as usize);
    }
    let values = placement.pods.iter().map(|pod| {
        let site = &world.sites[pod.node.0 as usize];
        assert!(site.open && pod.set & !site.free == 0, "free GPUs of an open node");
        let mut gpus: Vec<usize> = pod.gpus.iter().map(|gpu| usize::from(*gpu)).collect();
        gpus.sort_unstable();
        assert_eq!(gpus, positions(pod.set));
        assert_eq!(gpus.len(), usize::from(request.groups[pod.group].gpus));
        let spread = level.map(|level| world.levels[level]);
        evaluate::pod(&world.shapes[site.shape as usize], &gpus, spread, request.min_link).expect("joined well enough")
    });
    assert_eq!(values.min().unwrap(), placement.bandwidth.max(1));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(300), ..ProptestConfig::default() })]

    /// The node oracle on random machines: all sets, all values.
    #[test]
    fn every_set_of_every_machine_has_the_value_of_the_statement(devices in any_devices(6)) {
        let shape = Shape::new(&devices);
        let worst = ring::worst_links(&devices);
        for set in 1_u32..1 << devices.gpus.len() {
            let gpus = positions(set);
            prop_assert_eq!(shape.ring[set as usize], evaluate::ring(&devices, &gpus), "ring of {:?}", gpus);
            prop_assert_eq!(shape.injection[set as usize], evaluate::injection(&devices, &gpus), "injection of {:?}", gpus);
            for class in MinLink::ALL {
                prop_assert_eq!(worst[set as usize] <= class, evaluate::joined(&devices, &gpus, class));
            }
        }
    }
}

/// Cases of a property: more where `SWITCHYARD_CASES` says so.
fn cases(usual: u32) -> u32 {
    std::env::var("SWITCHYARD_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(2_000), ..ProptestConfig::default() })]

    /// The cluster oracle for equal pods.
    #[test]
    fn equal_pods_get_the_best_there_is(world in any_world(1..9), request in any_request(1..=1, 5)) {
        let placement = world.fleet().solve(&request);
        prop_assert_eq!(placement.as_ref().ok().map(|placement| placement.bandwidth.max(1)), oracle(&world, &request));
        if let Ok(placement) = &placement {
            check(&world, &request, placement);
        }
    }

    /// The same for gangs of unequal pods.
    #[test]
    fn unequal_pods_get_the_best_there_is(world in any_world(2..7), request in any_request(2..=3, 2)) {
        let placement = world.fleet().solve(&request);
        prop_assert_eq!(placement.as_ref().ok().map(|placement| placement.bandwidth.max(1)), oracle(&world, &request));
        if let Ok(placement) = &placement {
            check(&world, &request, placement);
        }
    }

    /// A fleet that was changed node by node answers like one that was made so.
    #[test]
    fn a_fleet_kept_up_to_date_is_a_new_one(
        world in any_world(1..9), request in any_request(1..=2, 4), changes in prop::collection::vec((any::<u32>(), any::<u32>(), any::<bool>()), 1..20),
    ) {
        let mut kept = world.fleet();
        let _ = kept.solve(&request);
        let mut changed = world.clone();
        for (node, free, open) in changes {
            let node = node as usize % world.sites.len();
            kept.set(NodeOrd(node as u32), free, open);
            (changed.sites[node].free, changed.sites[node].open) = (free, open);
        }
        prop_assert_eq!(kept.solve(&request), changed.fleet().solve(&request));
    }

    /// More free GPUs never make it worse, and the order of the nodes does not matter.
    #[test]
    fn more_is_never_less(world in any_world(1..9), request in any_request(1..=2, 4), node in any::<u32>(), more in any::<u32>()) {
        let value = |world: &World| world.fleet().solve(&request).ok().map(|placement| placement.bandwidth);
        let before = value(&world);
        let mut richer = world.clone();
        let node = node as usize % world.sites.len();
        richer.sites[node].free |= more;
        richer.sites[node].open = true;
        prop_assert!(value(&richer) >= before);
        let mut turned = world.clone();
        turned.sites.reverse();
        prop_assert_eq!(value(&turned), before);
    }

    /// Whole slices only, and nothing is refused that fits.
    #[test]
    fn slices_stay_whole(world in any_world(2..9), slice in 1_u32..4, count in 1_u32..4, gpus in 0_u8..3, level in 0_usize..2) {
        let groups = vec![Group { pods: slice * count, gpus }];
        let slices = Some(Slices { level, pods: slice });
        let request = Request { groups, min_link: MinLink::System, within: None, slices };
        let placement = world.fleet().solve(&request);
        let name = |nodes: &[usize]| world.level(nodes).unwrap_or(0) <= level;
        let fits = |node: &usize| {
            let site = &world.sites[*node];
            site.open && (site.free & ((1 << world.shapes[site.shape as usize].gpus.len()) - 1)).count_ones() >= gpus.into()
        };
        let mut domains: Vec<Vec<usize>> = Vec::new();
        for node in (0..world.sites.len()).filter(fits) {
            match domains.iter_mut().find(|domain| name(&[domain[0], node])) {
                Some(domain) => domain.push(node),
                None => domains.push(vec![node]),
            }
        }
        let room: usize = domains.iter().map(|domain| domain.len() / slice as usize).sum();
        prop_assert_eq!(placement.is_ok(), room >= count as usize);
        if let Ok(placement) = placement {
            check(&world, &request, &placement);
            for domain in domains {
                let inside = placement.pods.iter().filter(|pod| domain.contains(&(pod.node.0 as usize))).count();
                prop_assert!(inside.is_multiple_of(slice as usize));
            }
        }
    }
}
