//! Selects nodes for a gang: highest bandwidth first, then fewest domains.

use super::choose;
use super::fleet::{Fleet, FleetNode, MAX_LEVELS, Spread};
use super::groups;
use super::request::{Group, MAX_GROUPS, Placement, Pod, Refusal, Request, Slices};
use super::ring::{MinLink, UNLIMITED};
use crate::model::NodeOrd;
use std::ops::Range;

/// Level, value rank and domain of a gang of equal pods. Nodes and GPUs are chosen afterwards.
struct Decision {
    level: usize,
    rank: u32,
    domain: usize,
}

impl Fleet {
    /// Finds the placement with the highest bandwidth, then the fewest domains from the largest
    /// level down, then the least fragmentation. The same fleet and request give the same result.
    ///
    /// # Errors
    /// No placement exists. The fleet is unchanged.
    pub fn solve(&mut self, request: &Request) -> Result<Placement, Refusal> {
        if let Some(invalid) = self.invalid(request) {
            return Err(Refusal { invalid: Some(invalid), ..Refusal::default() });
        }
        for group in &request.groups {
            self.prepare(group.gpus, request.min_link);
        }
        let chosen = match request.groups.as_slice() {
            [group] if group.pods == 1 => self.single_node(*group, request).map(|node| vec![(0, node)]),
            [group] => self
                .decide(*group, request)
                .map(|decision| self.select_nodes(*group, request, &decision))
                .map(|nodes| nodes.into_iter().map(|position| (0, position)).collect()),
            _ => groups::solve(self, request),
        };
        chosen.map(|chosen| self.finish(request, chosen)).ok_or_else(|| self.refusal(request))
    }

    /// Bandwidth that [`Fleet::solve`] would find, without selecting nodes and GPUs; `None` if no
    /// placement exists.
    pub fn bandwidth(&mut self, request: &Request) -> Option<u32> {
        match request.groups.as_slice() {
            [group] if group.pods > 1 && self.invalid(request).is_none() => {
                self.prepare(group.gpus, request.min_link);
                let (level, rank, _) = self.best_reachable(*group, request)?;
                Some(self.view(group.gpus, request.min_link).spreads[level].values[rank as usize])
            }
            _ => self.solve(request).ok().map(|placement| placement.bandwidth),
        }
    }

    /// Usable nodes with enough free GPUs, but no set joined by `min_link` or better.
    pub fn below_min_link(&mut self, gpus: u8, min_link: MinLink) -> Vec<NodeOrd> {
        self.prepare(gpus, min_link);
        let alone = &self.view(gpus, min_link).spreads[self.levels.len()];
        let sites = self.sites.iter().zip(&alone.ranks);
        let below = sites.filter(|(site, rank)| site.open && site.free.count_ones() >= gpus.into() && **rank == 0);
        below.map(|(site, _)| site.node).collect()
    }

    fn invalid(&self, request: &Request) -> Option<&'static str> {
        let groups = &request.groups;
        let last = self.levels.len() - 1;
        match request {
            _ if groups.is_empty() || groups.len() > MAX_GROUPS => Some("expected 1 to 6 groups of pods"),
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

    /// The node for a single pod. Its value is its ring bandwidth, because it sends to no other
    /// pod. Tie-break: fewest free GPUs, then fewest idle nodes in its domains, comparing the
    /// smallest domain first. That keeps idle domains whole for gangs.
    fn single_node(&self, group: Group, request: &Request) -> Option<usize> {
        let spread = &self.view(group.gpus, request.min_link).spreads[self.levels.len()];
        let best = *spread.ranks.iter().max()?;
        let fits = |position: &usize| best > 0 && spread.ranks[*position] == best;
        let idle = self.idle_nodes();
        let idle_around = |site: &FleetNode| {
            let mut idle_around = [0; MAX_LEVELS];
            idle.iter()
                .enumerate()
                .for_each(|(level, counts)| idle_around[level] = counts[site.domain[level] as usize]);
            idle_around
        };
        let cost = |position: &usize| {
            let site = &self.sites[*position];
            (site.free.count_ones(), idle_around(site), *position)
        };
        (0..self.sites.len()).filter(fits).min_by_key(cost)
    }

    /// Number of usable nodes whose GPUs are all free, for each domain of each level.
    fn idle_nodes(&self) -> Vec<Vec<u32>> {
        let mut counts: Vec<Vec<u32>> = self.domains.iter().map(|domains| vec![0; domains.len()]).collect();
        let is_idle =
            |site: &&FleetNode| site.open && site.free != 0 && site.free == self.shapes[site.shape as usize].all();
        for site in self.sites.iter().filter(is_idle) {
            counts.iter_mut().enumerate().for_each(|(level, counts)| counts[site.domain[level] as usize] += 1);
        }
        counts
    }

    /// The best value, at the lowest level that reaches it. If several domains do, the one where
    /// the gang is least spread, then the one with the least spare room.
    ///
    /// Given a value and a level, nodes are independent: the gang fits in a domain if and only if
    /// the domain has enough nodes of at least this value. A level never carries more than the
    /// level below it, so the largest such value is exact.
    fn decide(&self, group: Group, request: &Request) -> Option<Decision> {
        let (level, rank, domains) = self.best_reachable(group, request)?;
        let spread = &self.view(group.gpus, request.min_link).spreads[level];
        let cost = |domain: &usize| {
            let capacity = self.capacity(spread, level, *domain, rank, request.slices);
            let spare = capacity.total() - group.pods;
            let used = if level == 0 { Vec::new() } else { capacity.distribute(self, level, *domain, group.pods).1 };
            (used.into_iter().rev().collect::<Vec<_>>(), spare, *domain)
        };
        let domain = if domains.len() == 1 { domains[0] } else { domains.into_iter().min_by_key(cost)? };
        Some(Decision { level, rank, domain })
    }

    /// The lowest level that reaches the best value, the rank of that value there, and the domains
    /// that reach it.
    fn best_reachable(&self, group: Group, request: &Request) -> Option<(usize, u32, Vec<usize>)> {
        let view = self.view(group.gpus, request.min_link);
        let last = request.within.unwrap_or(self.levels.len() - 1);
        let mut best: Option<(u32, usize, u32, Vec<usize>)> = None;
        for (level, spread) in view.spreads[..=last].iter().enumerate() {
            for domain in 0..self.domains[level].len() {
                let rank = match request.slices.filter(|slices| slices.level < level) {
                    None => spread.best_rank(domain, group.pods),
                    Some(_) => self.best_rank_in_slices(spread, level, domain, group.pods, request),
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

    fn best_rank_in_slices(&self, spread: &Spread, level: usize, domain: usize, pods: u32, request: &Request) -> u32 {
        let fits = |rank: &u32| self.capacity(spread, level, domain, *rank, request.slices).total() >= pods;
        (1..spread.values.len() as u32).rev().find(fits).unwrap_or(0)
    }

    /// Nodes of a domain with at least this rank, counted for every domain in it.
    fn capacity(&self, spread: &Spread, level: usize, domain: usize, rank: u32, slices: Option<Slices>) -> Capacity {
        Capacity::count(self, level, domain, slices, |position| spread.ranks[position] >= rank)
    }

    fn select_nodes(&self, group: Group, request: &Request, decision: &Decision) -> Vec<usize> {
        let Decision { level, rank, domain } = *decision;
        let spread = &self.view(group.gpus, request.min_link).spreads[level];
        let capacity = self.capacity(spread, level, domain, rank, request.slices);
        let mut chosen = Vec::with_capacity(group.pods as usize);
        for (leaf, pods) in capacity.distribute(self, level, domain, group.pods).0 {
            let range = self.domains[0][leaf].clone();
            let mut nodes: Vec<usize> = range.filter(|position| spread.ranks[*position] >= rank).collect();
            // Use partly occupied nodes first.
            nodes.sort_by_key(|position| (self.sites[*position].free.count_ones(), *position));
            chosen.extend_from_slice(&nodes[..pods as usize]);
        }
        chosen
    }

    /// Selects the GPUs on the chosen nodes (group and position of each) and sorts the pods by
    /// rank.
    fn finish(&self, request: &Request, mut chosen: Vec<(usize, usize)>) -> Placement {
        chosen.sort_unstable_by_key(|(_, position)| *position);
        let nodes: Vec<NodeOrd> = chosen.iter().map(|(_, position)| self.sites[*position].node).collect();
        let level = self.spread_of(&nodes);
        let pods = choose::devices(self, request, level, &chosen);
        self.placement(pods, level)
    }

    /// Summarizes pods whose GPUs are chosen.
    pub(super) fn placement(&self, pods: Vec<Pod>, level: Option<usize>) -> Placement {
        let bandwidth = pods.iter().map(|pod| pod.ring.min(pod.outward)).min().unwrap_or(UNLIMITED);
        let site = |pod: &Pod| &self.sites[self.positions[pod.node.0 as usize] as usize];
        let used = |level: usize| {
            let mut used: Vec<u32> = pods.iter().map(|pod| site(pod).domain[level]).collect();
            used.sort_unstable();
            used.dedup();
            used.len() as u32
        };
        let domains = (0..self.levels.len()).map(used).collect();
        Placement { bandwidth, level, domains, pods }
    }

    /// Counts what is missing. Takes time linear in the number of nodes.
    fn refusal(&self, request: &Request) -> Refusal {
        let closed = self.sites.iter().filter(|site| !site.open).count() as u32;
        let mut refusal = Refusal { closed, ..Refusal::default() };
        for group in &request.groups {
            let alone = &self.view(group.gpus, request.min_link).spreads[self.levels.len()];
            let mut counts = [0; 3];
            for (site, rank) in self.sites.iter().zip(&alone.ranks).filter(|(site, _)| site.open) {
                let few = site.free.count_ones() < u32::from(group.gpus);
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
            let room = |domain: usize| self.capacity(spread, level, domain, 1, request.slices).total();
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
pub(super) struct Capacity {
    /// From the smallest level up: the index of the first domain, and the capacities from there on.
    rows: Vec<(usize, Vec<u32>)>,
    slices: Option<Slices>,
}

impl Capacity {
    /// Counts the nodes that fit. Domains at the slice level take whole slices only.
    pub fn count(
        fleet: &Fleet,
        level: usize,
        domain: usize,
        slices: Option<Slices>,
        fits: impl Fn(usize) -> bool,
    ) -> Capacity {
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
        Capacity { rows, slices: slices.filter(|slices| slices.level < level) }
    }

    /// Pods that fit into the whole domain.
    pub fn total(&self) -> u32 {
        self.rows.last().map_or(0, |(_, row)| row.iter().sum())
    }

    /// Spreads pods over the fewest domains, level by level from above. Returns the smallest
    /// domains with their pods, and the number of domains used at each level below.
    ///
    /// The domains of a level are chosen jointly for all domains chosen above it, because the
    /// number of pods in each of those is still open. Below the slice level it is not open, so each
    /// domain is handled on its own.
    pub fn distribute(&self, fleet: &Fleet, level: usize, domain: usize, pods: u32) -> (Vec<(usize, u32)>, Vec<u32>) {
        let mut parts = vec![(domain, pods)];
        let mut used = vec![0; level];
        for below in (0..level).rev() {
            let (first, rooms) = &self.rows[below];
            let rooms_in = |domain: usize| {
                let children = fleet.within(below + 1, domain, below);
                children.map(|child| (rooms[child - first], child)).filter(|(room, _)| *room > 0)
            };
            parts = if self.slices.is_some_and(|slices| below < slices.level) {
                parts.iter().flat_map(|(domain, pods)| pack(rooms_in(*domain).collect(), *pods)).collect()
            } else {
                pack(parts.iter().flat_map(|(domain, _)| rooms_in(*domain)).collect(), pods)
            };
            used[below] = parts.len() as u32;
        }
        parts.sort_unstable();
        (parts, used)
    }
}

/// Fills the roomiest domains first and puts the remaining pods where they fit most tightly, which
/// gives the fewest possible domains. Takes capacities as (pods, domain) and returns (domain,
/// pods).
fn pack(mut rooms: Vec<(u32, usize)>, pods: u32) -> Vec<(usize, u32)> {
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
