//! A place for a gang that lost nodes: the others stay where they are.

use super::choose;
use super::fleet::Fleet;
use super::solve::{Placement, Pod, Refusal, Request};
use crate::topology::model::NodeOrd;

impl Fleet {
    /// Finds a place that has the bandwidth of the best one and moves as few pods as possible: `earlier` says where each pod was, in the
    /// order of ranks, and what it had. Pods that stay keep their ranks, and those that move take the ranks of the holes. That comes before
    /// the number of domains, because a pod that moves loads its data and its image again. Gangs of one group only; others are placed
    /// anew.
    ///
    /// # Errors
    /// There is no place at all.
    pub fn repair(&mut self, request: &Request, earlier: &[(Option<NodeOrd>, u32)]) -> Result<Placement, Refusal> {
        let best = self.solve(request)?;
        let [group] = request.groups.as_slice() else { return Ok(best) };
        if earlier.len() != group.pods as usize || request.slices.is_some() {
            return Ok(best);
        }
        let kept = self.filled(request, earlier, best.bandwidth);
        Ok(kept.unwrap_or(best))
    }

    /// Fills the holes of an earlier place in the smallest domain where that has this bandwidth.
    fn filled(&self, request: &Request, earlier: &[(Option<NodeOrd>, u32)], bandwidth: u32) -> Option<Placement> {
        let group = request.groups[0];
        let last = request.within.unwrap_or(self.levels.len() - 1);
        for level in 0..=last {
            let reach = Some(self.levels[level]);
            // A lone pod sends to nobody.
            let value = |position: usize, set: u32| {
                let shape = &self.shapes[self.sites[position].shape as usize];
                shape.value(set, reach.filter(|_| group.pods > 1), request.min_link)
            };
            let stays = |(node, set): &(Option<NodeOrd>, u32)| {
                let position = self.position((*node)?)?;
                let place = &self.sites[position];
                let is_there = place.open && place.free & set == *set && set.count_ones() == u32::from(group.gpus);
                (is_there && value(position, *set) >= bandwidth).then_some(position)
            };
            let kept: Vec<Option<usize>> = earlier.iter().map(stays).collect();
            let first = kept.iter().flatten().next().copied()?;
            let domain = self.sites[first].domain[level];
            if kept.iter().flatten().any(|position| self.sites[*position].domain[level] != domain) {
                continue;
            }
            let alone = self.levels.len();
            let spread = &self.view(group.gpus, request.min_link).spreads[if group.pods > 1 { level } else { alone }];
            let is_enough = |position: &usize| {
                spread.values[spread.ranks[*position] as usize] >= bandwidth && !kept.contains(&Some(*position))
            };
            let mut others: Vec<usize> = self.domains[level][domain as usize].clone().filter(is_enough).collect();
            // Nearest to those that stay, then broken ones first.
            let near = |position: &usize| {
                let shares = |below: usize| {
                    let own = self.sites[*position].domain[below];
                    kept.iter().flatten().any(|kept| self.sites[*kept].domain[below] == own)
                };
                (0..level).find(|below| shares(*below)).unwrap_or(level)
            };
            others.sort_by_key(|position| (near(position), self.sites[*position].free.count_ones(), *position));
            let holes = kept.iter().filter(|position| position.is_none()).count();
            if others.len() < holes {
                continue;
            }
            let filled = self.pods(request, earlier, &kept, &others[..holes]);
            if filled.bandwidth >= bandwidth {
                return Some(filled);
            }
        }
        None
    }

    fn pods(
        &self,
        request: &Request,
        earlier: &[(Option<NodeOrd>, u32)],
        kept: &[Option<usize>],
        others: &[usize],
    ) -> Placement {
        let mut others = others.iter();
        let chosen: Vec<(usize, usize)> =
            kept.iter().filter_map(|kept| Some((0, kept.or_else(|| others.next().copied())?))).collect();
        let nodes: Vec<NodeOrd> = chosen.iter().map(|(_, position)| self.sites[*position].node).collect();
        let level = self.spread_of(&nodes);
        let mut pods = choose::devices(self, request, level, &chosen);
        for (((pod, (_, position)), kept), (_, set)) in pods.iter_mut().zip(&chosen).zip(kept).zip(earlier) {
            if kept.is_some() {
                let shape = &self.shapes[self.sites[*position].shape as usize];
                let outward = shape.outward(*set, level.map(|level| self.levels[level]));
                let (ring, gpus) = (shape.ring[*set as usize], shape.by_rail(*set));
                *pod = Pod { set: *set, gpus, ring, outward, ..pod.clone() };
            }
        }
        self.placement(pods, level)
    }
}
