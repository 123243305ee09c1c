//! A new placement for a gang that lost nodes: the other pods stay where they are.

use super::choose;
use super::fleet::Fleet;
use super::request::{Placement, Pod, Refusal, Request};
use crate::model::NodeOrd;

impl Fleet {
    /// Finds a place that has the bandwidth of the best one and moves as few pods as possible: `earlier` says where each pod was, in the order of
    /// ranks, and what it had. Pods that stay keep their ranks, and those that move take the ranks of the holes. That comes before the number of
    /// domains, because a pod that moves loads its data and its image again. Gangs of one group only; others are placed from scratch.
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

    /// Fills the holes of an earlier place: in the domain where the most pods stay and where there are enough other nodes, all of this
    /// bandwidth. Given a domain and a bandwidth, nodes do not depend on each other, so that no place of this bandwidth moves fewer pods.
    fn filled(&self, request: &Request, earlier: &[(Option<NodeOrd>, u32)], bandwidth: u32) -> Option<Placement> {
        let last = request.within.unwrap_or(self.levels.len() - 1);
        let mut best: Option<(usize, Vec<Option<usize>>, Vec<usize>)> = None;
        for level in 0..=last {
            let known = earlier.iter().filter_map(|(node, _)| self.position((*node)?));
            let mut domains: Vec<u32> = known.map(|position| self.sites[position].domain[level]).collect();
            domains.sort_unstable();
            domains.dedup();
            for domain in domains {
                let kept = self.kept(request, earlier, bandwidth, (level, domain));
                let stay = kept.iter().flatten().count();
                if best.as_ref().is_some_and(|(most, ..)| *most >= stay) || stay == 0 {
                    continue;
                }
                let others = self.others(request, &kept, bandwidth, (level, domain));
                if others.len() >= earlier.len() - stay {
                    best = Some((stay, kept, others));
                }
            }
        }
        let (_, kept, others) = best?;
        Some(self.pods(request, earlier, &kept, &others)).filter(|filled| filled.bandwidth >= bandwidth)
    }

    /// Position of each pod that can stay where it is if the gang is placed in this domain.
    fn kept(
        &self,
        request: &Request,
        earlier: &[(Option<NodeOrd>, u32)],
        bandwidth: u32,
        (level, domain): (usize, u32),
    ) -> Vec<Option<usize>> {
        let group = request.groups[0];
        // A single pod sends to no other.
        let reach = Some(self.levels[level]).filter(|_| group.pods > 1);
        let stays = |(node, set): &(Option<NodeOrd>, u32)| {
            let position = self.position((*node)?)?;
            let place = &self.sites[position];
            let is_there = place.open
                && place.domain[level] == domain
                && place.free & set == *set
                && set.count_ones() == u32::from(group.gpus);
            let value = || self.shapes[place.shape as usize].value(*set, reach, request.min_link);
            (is_there && value() >= bandwidth && value() > 0).then_some(position)
        };
        earlier.iter().map(stays).collect()
    }

    /// Other nodes of a domain that are good enough: those nearest to the ones that stay, and among these the partly used ones first.
    fn others(
        &self,
        request: &Request,
        kept: &[Option<usize>],
        bandwidth: u32,
        (level, domain): (usize, u32),
    ) -> Vec<usize> {
        let group = request.groups[0];
        let spread = if group.pods > 1 { level } else { self.levels.len() };
        let spread = &self.view(group.gpus, request.min_link).spreads[spread];
        let is_enough = |position: &usize| {
            let rank = spread.ranks[*position];
            rank > 0 && spread.values[rank as usize] >= bandwidth && !kept.contains(&Some(*position))
        };
        let mut others: Vec<usize> = self.domains[level][domain as usize].clone().filter(is_enough).collect();
        let near = |position: &usize| {
            let shares = |below: usize| {
                let own = self.sites[*position].domain[below];
                kept.iter().flatten().any(|kept| self.sites[*kept].domain[below] == own)
            };
            (0..level).find(|below| shares(*below)).unwrap_or(level)
        };
        others.sort_by_cached_key(|position| (near(position), self.sites[*position].free.count_ones(), *position));
        others
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
