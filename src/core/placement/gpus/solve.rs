//! Nodes for a gang: the best bandwidth, then the fewest domains.

use super::choose;
use super::fleet::{Fleet, MOST_LEVELS, Slot, Spread};
use super::groups;
use super::request::{Group, MOST_GROUPS, Placement, Pod, Refusal, Request, Slices};
use super::ring::{MinLink, UNLIMITED};
use crate::model::NodeOrd;
use std::ops::Range;

/// Where a gang of equal pods goes before its GPUs are chosen.
struct Decision {
    level: usize,
    rank: u32,
    domain: usize,
}

impl Fleet {
    /// Finds the placement with the most bandwidth: first that, then the fewest domains from the largest level down, then the least
    /// fragmentation. The same fleet and request give the same result.
    ///
    /// # Errors
    /// There is no placement; nothing changes.
    pub fn solve(&mut self, request: &Request) -> Result<Placement, Refusal> {
        if let Some(nonsense) = self.nonsense(request) {
            return Err(Refusal { nonsense: Some(nonsense), ..Refusal::default() });
        }
        for group in &request.groups {
            self.prepare(group.gpus, request.min_link);
        }
        let chosen = match request.groups.as_slice() {
            [group] if group.pods == 1 => self.lone(*group, request).map(|node| vec![(0, node)]),
            [group] => self
                .decide(*group, request)
                .map(|decision| self.nodes_of(*group, request, &decision))
                .map(|nodes| nodes.into_iter().map(|position| (0, position)).collect()),
            _ => groups::solve(self, request),
        };
        chosen.map(|chosen| self.finish(request, chosen)).ok_or_else(|| self.refusal(request))
    }

    /// The bandwidth that [`Fleet::solve`] would find, without choosing nodes and GPUs; `None`: there is no place.
    pub fn bandwidth(&mut self, request: &Request) -> Option<u32> {
        match request.groups.as_slice() {
            [group] if group.pods > 1 && self.nonsense(request).is_none() => {
                self.prepare(group.gpus, request.min_link);
                let (level, rank, _) = self.reached_anywhere(*group, request)?;
                Some(self.view(group.gpus, request.min_link).spreads[level].values[rank as usize])
            }
            _ => self.solve(request).ok().map(|placement| placement.bandwidth),
        }
    }

    /// Nodes that may be used and have enough free GPUs, of which no set is joined by `min_link` or better.
    pub fn badly_joined(&mut self, gpus: u8, min_link: MinLink) -> Vec<NodeOrd> {
        self.prepare(gpus, min_link);
        let alone = &self.view(gpus, min_link).spreads[self.levels.len()];
        let sites = self.sites.iter().zip(&alone.ranks);
        let badly = sites.filter(|(site, rank)| site.open && site.free.count_ones() >= gpus.into() && **rank == 0);
        badly.map(|(site, _)| site.node).collect()
    }

    fn nonsense(&self, request: &Request) -> Option<&'static str> {
        let groups = &request.groups;
        let last = self.levels.len() - 1;
        match request {
            _ if groups.is_empty() || groups.len() > MOST_GROUPS => Some("expected 1 to 6 groups of pods"),
            _ if groups.iter().any(|group| group.pods == 0) => Some("a group without pods"),
            Request { within: Some(level), .. } if *level > last => Some("no such level"),
            Request { slices: Some(slices), .. } if slices.level > last => Some("no such level of slices"),
            Request { slices: Some(slices), .. }
                if slices.pods == 0 || groups.len() > 1 || !groups[0].pods.is_multiple_of(slices.pods) =>
            {
                Some("slices: expected one group, of a multiple of the pods of a slice")
            }
            _ => None,
        }
    }

    /// The node for a single pod: its value is that of its ring, because it sends to no other pod. Of equal nodes the one with fewest free GPUs,
    /// then that in the smallest domains with fewest whole nodes: domains that are whole stay so for gangs.
    fn lone(&self, group: Group, request: &Request) -> Option<usize> {
        let spread = &self.view(group.gpus, request.min_link).spreads[self.levels.len()];
        let best = *spread.ranks.iter().max()?;
        let fits = |position: &usize| best > 0 && spread.ranks[*position] == best;
        let whole = self.whole();
        let beside = |site: &Slot| {
            let mut beside = [0; MOST_LEVELS];
            whole.iter().enumerate().for_each(|(level, counts)| beside[level] = counts[site.domain[level] as usize]);
            beside
        };
        let cost = |position: &usize| {
            let site = &self.sites[*position];
            (site.free.count_ones(), beside(site), *position)
        };
        (0..self.sites.len()).filter(fits).min_by_key(cost)
    }

    /// Nodes of each domain of each level that may be used and of which all GPUs are free.
    fn whole(&self) -> Vec<Vec<u32>> {
        let mut counts: Vec<Vec<u32>> = self.domains.iter().map(|domains| vec![0; domains.len()]).collect();
        let is_whole =
            |site: &&Slot| site.open && site.free != 0 && site.free == self.shapes[site.shape as usize].all();
        for site in self.sites.iter().filter(is_whole) {
            counts.iter_mut().enumerate().for_each(|(level, counts)| counts[site.domain[level] as usize] += 1);
        }
        counts
    }

    /// The best value, at the lowest level that has it; of several domains the one where the gang is least spread, then that with the
    /// least room left.
    ///
    /// Given a value and a level, nodes do not depend on each other: the gang fits in a domain if and only if it has enough nodes of at least
    /// this value. What a level carries does not grow with the level, so the largest such value is the true one.
    fn decide(&self, group: Group, request: &Request) -> Option<Decision> {
        let (level, rank, domains) = self.reached_anywhere(group, request)?;
        let spread = &self.view(group.gpus, request.min_link).spreads[level];
        let cost = |domain: &usize| {
            let rooms = self.rooms(spread, level, *domain, rank, request.slices);
            let spare = rooms.all() - group.pods;
            let used = if level == 0 { Vec::new() } else { rooms.descend(self, level, *domain, group.pods).1 };
            (used.into_iter().rev().collect::<Vec<_>>(), spare, *domain)
        };
        let domain = if domains.len() == 1 { domains[0] } else { domains.into_iter().min_by_key(cost)? };
        Some(Decision { level, rank, domain })
    }

    /// The lowest level that has the best value, the rank of that value there, and the domains that have it.
    fn reached_anywhere(&self, group: Group, request: &Request) -> Option<(usize, u32, Vec<usize>)> {
        let view = self.view(group.gpus, request.min_link);
        let last = request.within.unwrap_or(self.levels.len() - 1);
        let mut best: Option<(u32, usize, u32, Vec<usize>)> = None;
        for (level, spread) in view.spreads[..=last].iter().enumerate() {
            for domain in 0..self.domains[level].len() {
                let rank = match request.slices.filter(|slices| slices.level < level) {
                    None => spread.reached(domain, group.pods),
                    Some(_) => self.reached_in_slices(spread, level, domain, group.pods, request),
                };
                let value = spread.values[rank as usize];
                match &mut best {
                    _ if rank == 0 => {}
                    Some((most, at, _, domains)) if *most == value && *at == level => domains.push(domain),
                    Some((most, ..)) if *most >= value => {}
                    _ => best = Some((value, level, rank, vec![domain])),
                }
            }
        }
        best.map(|(_, level, rank, domains)| (level, rank, domains))
    }

    fn reached_in_slices(&self, spread: &Spread, level: usize, domain: usize, pods: u32, request: &Request) -> u32 {
        let fits = |rank: &u32| self.rooms(spread, level, domain, *rank, request.slices).all() >= pods;
        (1..spread.values.len() as u32).rev().find(fits).unwrap_or(0)
    }

    /// Nodes of a domain that have at least this rank, counted for every domain in it.
    fn rooms(&self, spread: &Spread, level: usize, domain: usize, rank: u32, slices: Option<Slices>) -> Rooms {
        Rooms::count(self, level, domain, slices, |position| spread.ranks[position] >= rank)
    }

    fn nodes_of(&self, group: Group, request: &Request, decision: &Decision) -> Vec<usize> {
        let Decision { level, rank, domain } = *decision;
        let spread = &self.view(group.gpus, request.min_link).spreads[level];
        let rooms = self.rooms(spread, level, domain, rank, request.slices);
        let mut chosen = Vec::with_capacity(group.pods as usize);
        for (leaf, pods) in rooms.descend(self, level, domain, group.pods).0 {
            let range = self.domains[0][leaf].clone();
            let mut nodes: Vec<usize> = range.filter(|position| spread.ranks[*position] >= rank).collect();
            // Partly used nodes go first.
            nodes.sort_by_key(|position| (self.sites[*position].free.count_ones(), *position));
            chosen.extend_from_slice(&nodes[..pods as usize]);
        }
        chosen
    }

    /// Chooses the GPUs on the nodes (group and position of each), and puts the pods in the order of ranks.
    fn finish(&self, request: &Request, mut chosen: Vec<(usize, usize)>) -> Placement {
        chosen.sort_unstable_by_key(|(_, position)| *position);
        let nodes: Vec<NodeOrd> = chosen.iter().map(|(_, position)| self.sites[*position].node).collect();
        let level = self.spread_of(&nodes);
        let pods = choose::devices(self, request, level, &chosen);
        self.placement(pods, level)
    }

    /// Sums up pods whose GPUs are chosen.
    pub(super) fn placement(&self, pods: Vec<Pod>, level: Option<usize>) -> Placement {
        let bandwidth = pods.iter().map(|pod| pod.ring.min(pod.outward)).min().unwrap_or(UNLIMITED);
        let place = |pod: &Pod| &self.sites[self.positions[pod.node.0 as usize] as usize];
        let used = |level: usize| {
            let mut used: Vec<u32> = pods.iter().map(|pod| place(pod).domain[level]).collect();
            used.sort_unstable();
            used.dedup();
            used.len() as u32
        };
        let domains = (0..self.levels.len()).map(used).collect();
        Placement { bandwidth, level, domains, pods }
    }

    /// Counts what is missing. Takes time in proportion to the nodes.
    fn refusal(&self, request: &Request) -> Refusal {
        let closed = self.sites.iter().filter(|place| !place.open).count() as u32;
        let mut refusal = Refusal { closed, ..Refusal::default() };
        for group in &request.groups {
            let alone = &self.view(group.gpus, request.min_link).spreads[self.levels.len()];
            let mut counts = [0; 3];
            for (place, rank) in self.sites.iter().zip(&alone.ranks).filter(|(place, _)| place.open) {
                let few = place.free.count_ones() < u32::from(group.gpus);
                counts[if few {
                    0
                } else if *rank == 0 {
                    1
                } else {
                    2
                }] += 1;
            }
            refusal.groups.push(counts);
        }
        let widest = request.groups.iter().max_by_key(|group| group.gpus);
        if let (Some(level), Some(group)) = (request.within, widest) {
            let spread = &self.view(group.gpus, request.min_link).spreads[level];
            let room = |domain: usize| self.rooms(spread, level, domain, 1, request.slices).all();
            let fullest = (0..self.domains[level].len()).map(|domain| (room(domain), domain));
            let fullest = fullest.max_by_key(|(room, domain)| (*room, std::cmp::Reverse(*domain)));
            refusal.fullest = fullest.map(|(room, domain)| (room, self.sites[self.domains[level][domain].start].node));
        }
        refusal
    }

    /// Domains of a lower level that are part of a domain.
    fn within(&self, level: usize, domain: usize, below: usize) -> Range<usize> {
        let Range { start, end } = self.domains[level][domain];
        let lower = &self.domains[below];
        lower.partition_point(|range| range.start < start)..lower.partition_point(|range| range.start < end)
    }
}

/// Pods that fit into a domain and into each domain below it.
pub(super) struct Rooms {
    /// From the smallest level up: number of the first domain, and the rooms from there on.
    rows: Vec<(usize, Vec<u32>)>,
    slices: Option<Slices>,
}

impl Rooms {
    /// Counts the nodes that fit. Domains of the level of slices take whole slices only.
    pub fn count(
        fleet: &Fleet,
        level: usize,
        domain: usize,
        slices: Option<Slices>,
        fits: impl Fn(usize) -> bool,
    ) -> Rooms {
        let mut rows: Vec<(usize, Vec<u32>)> = Vec::with_capacity(level + 1);
        for below in 0..=level {
            let range = fleet.within(level, domain, below);
            let nodes = |range: &Range<usize>| range.clone().filter(|position| fits(*position)).count() as u32;
            let mut row: Vec<u32> = match rows.last() {
                None => fleet.domains[0][range.clone()].iter().map(nodes).collect(),
                Some((first, lower)) => {
                    let sum = |domain: usize| {
                        let children = fleet.within(below, domain, below - 1);
                        lower[children.start - first..children.end - first].iter().sum()
                    };
                    range.clone().map(sum).collect()
                }
            };
            if let Some(slices) = slices.filter(|slices| slices.level == below && below < level) {
                row.iter_mut().for_each(|room| *room -= *room % slices.pods);
            }
            rows.push((range.start, row));
        }
        Rooms { rows, slices: slices.filter(|slices| slices.level < level) }
    }

    /// Pods that fit into the whole domain.
    pub fn all(&self) -> u32 {
        self.rows.last().map_or(0, |(_, row)| row.iter().sum())
    }

    /// Spreads pods over the fewest domains, level by level from above. Returns the smallest domains with their pods, and how many domains of
    /// each level below are used.
    ///
    /// The domains of a level are chosen over all domains chosen above it together, because how many pods each of those takes is still open. The
    /// exception is below slices, whose domains have taken theirs.
    pub fn descend(&self, fleet: &Fleet, level: usize, domain: usize, pods: u32) -> (Vec<(usize, u32)>, Vec<u32>) {
        let mut parts = vec![(domain, pods)];
        let mut used = vec![0; level];
        for below in (0..level).rev() {
            let (first, rooms) = &self.rows[below];
            let rooms_in = |domain: usize| {
                let children = fleet.within(below + 1, domain, below);
                children.map(|child| (rooms[child - first], child)).filter(|(room, _)| *room > 0)
            };
            parts = if self.slices.is_some_and(|slices| below < slices.level) {
                parts.iter().flat_map(|(domain, pods)| fewest(rooms_in(*domain).collect(), *pods)).collect()
            } else {
                fewest(parts.iter().flat_map(|(domain, _)| rooms_in(*domain)).collect(), pods)
            };
            used[below] = parts.len() as u32;
        }
        parts.sort_unstable();
        (parts, used)
    }
}

/// Takes pods from the roomiest domains, and the last ones from the domain where they fit most tightly: the fewest domains there can be. Takes
/// rooms as (pods, domain); returns (domain, pods).
fn fewest(mut rooms: Vec<(u32, usize)>, pods: u32) -> Vec<(usize, u32)> {
    rooms.sort_unstable_by_key(|(room, domain)| (std::cmp::Reverse(*room), *domain));
    let (mut taken, mut left) = (Vec::new(), pods);
    for (index, (room, domain)) in rooms.iter().enumerate() {
        if *room < left {
            taken.push((*domain, *room));
            left -= room;
            continue;
        }
        let tight = rooms[index..].iter().filter(|(room, _)| *room >= left);
        taken.extend(tight.min_by_key(|(room, domain)| (*room, *domain)).map(|(_, domain)| (*domain, left)));
        break;
    }
    taken
}
