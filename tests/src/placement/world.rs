//! Small clusters, and their best placement by exhaustive search.

use super::{bandwidth, best_pod, positions};
use crate::Random;
use crate::gpus::{MACHINES, Machine};
use std::collections::HashMap;
use switchyard_core::devices::{Devices, Gpu, Nic};
use switchyard_core::model::NodeOrd;
use switchyard_core::path::PathClass;
use switchyard_core::placement::gpus::{Fleet, Group, Level, MinLink, Placement, Request, Site};
use switchyard_topology::report;

/// Visits every choice of nodes for all pods, as (group, node).
type Visit<'a> = &'a mut dyn FnMut(&[(usize, usize)]);

/// Components of a fleet with two levels below the cluster.
#[derive(Debug, Clone)]
pub struct World {
    /// Levels, from smallest to largest.
    pub levels: Vec<Level>,
    /// Node types.
    pub shapes: Vec<Devices>,
    /// The nodes.
    pub sites: Vec<Site>,
}

impl World {
    /// Builds the solver's fleet.
    pub fn fleet(&self) -> Fleet {
        Fleet::new(self.levels.clone(), &self.shapes, &self.sites).expect("a fleet")
    }

    /// Names of a node's domains from `level` up. A domain's name is relative to its parents; an
    /// unlabelled domain is named after its content.
    fn name(&self, node: usize, level: usize) -> Vec<String> {
        let mut below = format!("node {node}");
        let mut path: Vec<String> = Vec::new();
        for (number, label) in self.sites[node].domains.iter().enumerate() {
            below = label.map_or(format!("of {below}"), |label| label.to_string());
            if number >= level {
                path.push(below.clone());
            }
        }
        path
    }

    /// Level of the smallest domain that contains these nodes, or `None` for a single node. It is
    /// derived from the labels, not from the fleet.
    pub fn level(&self, nodes: &[usize]) -> Option<usize> {
        (nodes.len() > 1).then(|| {
            (0..self.levels.len())
                .find(|level| nodes.iter().all(|node| self.name(*node, *level) == self.name(nodes[0], *level)))
                .expect("the last level is the cluster")
        })
    }

    /// Returns a world with up to `max` nodes, 3 levels, and up to 3 node types with up to 4 GPUs.
    pub fn random(random: &Random, max: usize) -> World {
        let (a, b) = (1 + random.below(1000) as u32, 1 + random.below(1000) as u32);
        let shapes: Vec<Devices> = (0..1 + random.below(3)).map(|_| any_devices(random, 4)).collect();
        World::around(random, shapes, 1 + random.below(max), [a.max(b), a.min(b)])
    }

    /// Returns a world with these node types: racks with two blocks each, these shares of the
    /// injection bandwidth, and an occasional missing label.
    pub fn around(random: &Random, shapes: Vec<Devices>, nodes: usize, shares: [u32; 2]) -> World {
        let nvlink = random.below(2) == 0;
        let levels = vec![
            Level { share: 1000, nvlink },
            Level { share: shares[0], nvlink: false },
            Level { share: shares[1], nvlink: false },
        ];
        let site = |_| {
            let (rack, free) = (random.below(4) as u32, random.next());
            // Either many or few free GPUs.
            let free = if random.below(3) == 0 { free & free >> 32 } else { free | free >> 32 };
            let label = |label: u32| (random.below(60) > 0).then_some(label);
            Site {
                shape: random.below(shapes.len()) as u32,
                free: free as u32,
                open: random.below(10) > 0,
                domains: [label(rack), label(rack / 2)].into(),
            }
        };
        let sites = (0..nodes).map(site).collect();
        World { levels, shapes, sites }
    }

    /// Visits every choice of distinct nodes for all pods, as (group, node).
    fn choices(&self, request: &Request, visit: Visit<'_>) {
        self.choose(request, (0, request.groups[0].pods, 0), &mut Vec::new(), visit);
    }

    fn choose(
        &self,
        request: &Request,
        (group, left, from): (usize, u32, usize),
        chosen: &mut Vec<(usize, usize)>,
        visit: Visit<'_>,
    ) {
        if left == 0 {
            match request.groups.get(group + 1) {
                Some(next) => self.choose(request, (group + 1, next.pods, 0), chosen, visit),
                None => visit(chosen),
            }
            return;
        }
        for node in from..self.sites.len() {
            if self.sites[node].open && chosen.iter().all(|(_, other)| *other != node) {
                chosen.push((group, node));
                self.choose(request, (group, left - 1, node + 1), chosen, visit);
                chosen.pop();
            }
        }
    }

    /// Returns the bandwidth of the best placement, and for it the fewest domains at each level,
    /// from largest to smallest.
    pub fn best(&self, request: &Request) -> Option<(u32, Vec<usize>)> {
        let mut known: HashMap<(u32, u32, u8, Option<usize>), Option<u32>> = HashMap::new();
        let mut best: Option<(u32, Vec<usize>)> = None;
        self.choices(request, &mut |chosen| {
            let nodes: Vec<usize> = chosen.iter().map(|(_, node)| *node).collect();
            let level = self.level(&nodes);
            if request.within.is_some_and(|within| level.is_some_and(|level| level > within)) {
                return;
            }
            let value = chosen.iter().map(|(group, node)| {
                let (site, gpus) = (&self.sites[*node], request.groups[*group].gpus);
                let devices = &self.shapes[site.shape as usize];
                let free = site.free & ((1_u32 << devices.gpus.len()) - 1);
                let spread = level.map(|level| self.levels[level]);
                let key = (site.shape, free, gpus, level);
                *known.entry(key).or_insert_with(|| best_pod(devices, free, gpus, spread, request.min_link))
            });
            let Some(value) = value.collect::<Option<Vec<u32>>>().and_then(|values| values.into_iter().min()) else {
                return;
            };
            let domains = self.domains(&nodes);
            let is_better = |(max, fewest): &(u32, Vec<usize>)| value > *max || value == *max && domains < *fewest;
            if best.as_ref().is_none_or(is_better) {
                best = Some((value, domains));
            }
        });
        best
    }

    /// Returns the minimum number of moved pods over all placements with this bandwidth. `earlier`
    /// holds each pod's previous node and GPUs.
    pub fn fewest_moves(&self, request: &Request, earlier: &[(Option<NodeOrd>, u32)], bandwidth: u32) -> Option<usize> {
        let mut fewest: Option<usize> = None;
        self.choices(request, &mut |chosen| {
            let nodes: Vec<usize> = chosen.iter().map(|(_, node)| *node).collect();
            let level = self.level(&nodes);
            if request.within.is_some_and(|within| level.is_some_and(|level| level > within)) {
                return;
            }
            let spread = level.map(|level| self.levels[level]);
            let mut moves = 0;
            for node in nodes {
                let site = &self.sites[node];
                let devices = &self.shapes[site.shape as usize];
                let free = site.free & ((1_u32 << devices.gpus.len()) - 1);
                let stays = earlier.iter().any(|(before, set)| {
                    *before == Some(NodeOrd(node as u32))
                        && set & !free == 0
                        && super::bandwidth(devices, &positions(*set), spread, request.min_link)
                            .is_some_and(|value| value >= bandwidth)
                });
                let best = best_pod(devices, free, request.groups[0].gpus, spread, request.min_link);
                match best {
                    _ if stays => {}
                    Some(best) if best >= bandwidth => moves += 1,
                    _ => return,
                }
            }
            fewest = Some(fewest.map_or(moves, |fewest| fewest.min(moves)));
        });
        fewest
    }

    /// Counts idle nodes in a node's domain at each level, from smallest to largest.
    pub fn idle_nodes_nearby(&self, node: usize) -> Vec<usize> {
        let is_idle = |site: &Site| {
            let all = (1_u32 << self.shapes[site.shape as usize].gpus.len()) - 1;
            site.open && all > 0 && site.free & all == all
        };
        let idle: Vec<usize> = (0..self.sites.len()).filter(|other| is_idle(&self.sites[*other])).collect();
        let count_nearby =
            |level| idle.iter().filter(|other| self.name(**other, level) == self.name(node, level)).count();
        (0..self.levels.len()).map(count_nearby).collect()
    }

    /// Returns the number of domains that these nodes span at each level, from largest to smallest.
    pub fn domains(&self, nodes: &[usize]) -> Vec<usize> {
        let count = |level: usize| {
            let mut names: Vec<_> = nodes.iter().map(|node| self.name(*node, level)).collect();
            names.sort();
            names.dedup();
            names.len()
        };
        (0..self.levels.len()).rev().map(count).collect()
    }

    /// Checks that a placement is what it claims to be. Panics if not.
    pub fn check(&self, request: &Request, placement: &Placement) {
        let nodes: Vec<usize> = placement.pods.iter().map(|pod| pod.node.0 as usize).collect();
        let mut distinct = nodes.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), nodes.len(), "one pod per node");
        let level = self.level(&nodes);
        assert_eq!(placement.level, level);
        assert!(request.within.is_none_or(|within| level.is_none_or(|level| level <= within)));
        for (number, group) in request.groups.iter().enumerate() {
            assert_eq!(placement.pods.iter().filter(|pod| pod.group == number).count(), group.pods as usize);
        }
        let values = placement.pods.iter().map(|pod| {
            let site = &self.sites[pod.node.0 as usize];
            assert!(site.open && pod.set & !site.free == 0, "free GPUs of an open node");
            let mut gpus: Vec<usize> = pod.gpus.iter().map(|gpu| usize::from(*gpu)).collect();
            gpus.sort_unstable();
            assert_eq!(gpus, positions(pod.set));
            assert_eq!(gpus.len(), usize::from(request.groups[pod.group].gpus));
            let spread = level.map(|level| self.levels[level]);
            bandwidth(&self.shapes[site.shape as usize], &gpus, spread, request.min_link).expect("joined well enough")
        });
        assert_eq!(values.min().expect("a pod"), placement.bandwidth.max(1));
    }
}

const PATHS: [PathClass; 5] = [PathClass::Pix, PathClass::Pxb, PathClass::Phb, PathClass::Node, PathClass::Sys];

/// Returns a node with up to `max` GPUs: switched, meshed, bridged or without NVLink.
pub fn any_devices(random: &Random, max: usize) -> Devices {
    let (count, nics, kind) = (random.below(max + 1), random.below(4), random.below(4));
    let mut devices = Devices { socket_rate: 10_000 + 1000 * random.below(30) as u32, ..Devices::default() };
    let link_rate = *random.pick(&[18_000, 20_000, 20_600]);
    for _ in 0..count {
        // A switched machine may have a GPU that has lost some or all of its links.
        let switch_links = if kind == 0 { *random.pick(&[18, 18, 18, 17, 0]) } else { 0 };
        devices.gpus.push(Gpu { pcie_rate: *random.pick(&[12_000, 24_000, 48_000]), link_rate, switch_links });
    }
    devices.nics = (0..nics).map(|_| Nic { rate: *random.pick(&[12_500, 25_000, 50_000]) }).collect();
    devices.direct_links = vec![0; count * count];
    devices.gpu_paths = vec![PathClass::Same; count * count];
    for a in 0..count {
        for b in 0..a {
            let links = match kind {
                1 => *random.pick(&[0, 1, 1, 2]),
                2 if a / 2 == b / 2 => 4,
                _ => 0,
            };
            let path = *random.pick(&PATHS);
            for index in [a * count + b, b * count + a] {
                devices.direct_links[index] = links;
                devices.gpu_paths[index] = path;
            }
        }
    }
    devices.nic_paths = (0..count * nics).map(|_| *random.pick(&PATHS)).collect();
    devices
}

/// Returns a gang with up to `groups` groups of up to `pods` pods each.
pub fn any_request(random: &Random, groups: usize, pods: usize) -> Request {
    let group = |_| Group { pods: 1 + random.below(pods) as u32, gpus: *random.pick(&[0, 1, 1, 2, 2, 3, 4]) };
    Request {
        groups: (0..groups).map(group).collect(),
        min_link: *random.pick(&[MinLink::NVLink, MinLink::Numa, MinLink::System, MinLink::System]),
        within: (random.below(10) < 3).then(|| random.below(3)),
        slices: None,
    }
}

/// Returns the machines in tests/fixtures/topo by file name, with their devices as `switchyard topo
/// import` reads them.
pub fn fixtures() -> Vec<(String, Devices)> {
    let read = |machine: &Machine| {
        let report = machine.report(machine.fixture);
        let devices = report::devices(&report.status.expect("a status")).expect("devices").devices;
        (machine.fixture.to_string(), devices)
    };
    MACHINES.iter().map(read).collect()
}
