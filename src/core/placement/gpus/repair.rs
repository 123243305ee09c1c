//! A new placement for a gang that lost nodes. The other pods stay where they are.

use super::choose;
use super::fleet::Fleet;
use super::request::{Placement, Pod, Refusal, Request};
use crate::model::NodeOrd;

impl Fleet {
    /// Finds a placement with the best possible bandwidth that moves as few pods as possible.
    /// `earlier` gives the node and the GPU set of each pod, in rank order. Pods that stay keep
    /// their ranks, and moved pods take the vacant ranks. Moving few pods takes precedence over few
    /// domains, because a moved pod pulls its image and loads its data again. Gangs of several
    /// groups are placed from scratch.
    ///
    /// # Errors
    /// No placement exists.
    pub fn repair(&mut self, request: &Request, earlier: &[(Option<NodeOrd>, u32)]) -> Result<Placement, Refusal> {
        let best = self.solve(request)?;
        let [group] = request.groups.as_slice() else { return Ok(best) };
        if earlier.len() != group.pods as usize || request.slices.is_some() {
            return Ok(best);
        }
        let kept = self.fill_vacancies(request, earlier, best.bandwidth);
        Ok(kept.unwrap_or(best))
    }

    /// Fills the vacancies of an earlier placement in the domain where most pods can stay and
    /// enough other nodes reach this bandwidth. Given a domain and a bandwidth, nodes are
    /// independent of each other, so no placement of this bandwidth moves fewer pods.
    fn fill_vacancies(
        &self,
        request: &Request,
        earlier: &[(Option<NodeOrd>, u32)],
        bandwidth: u32,
    ) -> Option<Placement> {
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
            let site = &self.sites[position];
            let is_there = site.open
                && site.domain[level] == domain
                && site.free & set == *set
                && set.count_ones() == u32::from(group.gpus);
            let value = || self.shapes[site.shape as usize].value(*set, reach, request.min_link);
            (is_there && value() >= bandwidth && value() > 0).then_some(position)
        };
        earlier.iter().map(stays).collect()
    }

    /// Other nodes of a domain that reach the bandwidth: nearest to the pods that stay first, then
    /// partly used nodes.
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
