//! Which jobs have to end, or make way, until another job has room.

use crate::usage::{Usage, UsageOverlay};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::PlacedNode;
use switchyard_plan::cluster::place_with_fabric::{fits_on_any_fabric, place_with_fabric};
use switchyard_plan::cluster::reserve::{fewest, smallest_fitting};
use switchyard_plan::cluster::view::NodeView;
use switchyard_plan::cluster::{Demand, PlacementRequest};

/// The nodes without some of these jobs, as another job sees them. A search tries hundreds of
/// similar sets, so only the difference to the last one is applied.
pub(super) struct WithoutJobs<'a> {
    request: &'a PlacementRequest<'a>,
    usage: UsageOverlay<'a, Usage>,
    /// Takers of each job.
    takers: &'a [Vec<String>],
    removed: BTreeSet<usize>,
    demand: Demand,
    /// Nodes with room for a pod.
    open: BTreeSet<String>,
}

impl<'a> WithoutJobs<'a> {
    pub(super) fn new(
        request: &'a PlacementRequest<'a>,
        usage: &'a mut Usage,
        takers: &'a [Vec<String>],
    ) -> WithoutJobs<'a> {
        let demand = Demand::of(request);
        let open = usage.nodes().values().filter(|node| demand.has_room(node));
        let open = open.map(|node| node.facts.name.clone()).collect();
        let usage = UsageOverlay::new::<&str>(usage, &[]);
        WithoutJobs { request, usage, takers, removed: BTreeSet::new(), demand, open }
    }

    /// The smallest number of jobs that have to end, in this order, until the other job can start
    /// by `good`. `None` if even all of them are not enough.
    pub(super) fn first(
        &mut self,
        good: impl Fn(&PlacementRequest<'_>, &BTreeMap<String, NodeView>) -> bool,
    ) -> Option<usize> {
        let least = self.first_with_room()?;
        let request = self.request;
        smallest_fitting(least, self.takers.len(), |ended| good(request, self.nodes_without(0..ended)))
    }

    /// As few of the jobs as possible, the first ones preferred, without which the other job can
    /// start, and its nodes then. `None` if it cannot start without all of them either.
    pub(super) fn fewest(&mut self) -> Option<(Vec<usize>, Vec<PlacedNode>)> {
        let least = self.first_with_room()?;
        let chosen = self.fewest_where(least, fits_on_any_fabric)?;
        if let Some(nodes) = self.placement_without(chosen.iter().copied()) {
            return Some((chosen, nodes));
        }
        // The job must not start on the fabric of these nodes. Others take longer to find.
        let chosen = self.fewest_where(least, |request, nodes| place_with_fabric(request, nodes).is_ok())?;
        let nodes = self.placement_without(chosen.iter().copied())?;
        Some((chosen, nodes))
    }

    fn fewest_where(
        &mut self,
        least: usize,
        fits: fn(&PlacementRequest<'_>, &BTreeMap<String, NodeView>) -> bool,
    ) -> Option<Vec<usize>> {
        fewest(least, self.takers.len(), |removed| {
            self.remove_only(removed.iter().copied());
            // Most sets leave too few nodes, and to count them costs a fraction of a search.
            self.has_room() && fits(self.request, self.usage.nodes())
        })
    }

    /// The nodes that the other job gets without these jobs.
    pub(super) fn placement_without(&mut self, jobs: impl IntoIterator<Item = usize>) -> Option<Vec<PlacedNode>> {
        let request = self.request;
        place_with_fabric(request, self.nodes_without(jobs)).ok().map(|found| found.placed.status.nodes)
    }

    fn nodes_without(&mut self, jobs: impl IntoIterator<Item = usize>) -> &BTreeMap<String, NodeView> {
        self.remove_only(jobs);
        self.usage.nodes()
    }

    /// The smallest number of jobs that have to end, in this order, until every pod has room on a
    /// node of its own.
    fn first_with_room(&mut self) -> Option<usize> {
        self.remove_only([]);
        for ended in 0..self.takers.len() {
            if self.has_room() {
                return Some(ended);
            }
            let changed = self.usage.remove(&self.takers[ended]);
            self.removed.insert(ended);
            self.recount(changed);
        }
        self.has_room().then_some(self.takers.len())
    }

    fn has_room(&self) -> bool {
        self.open.len() >= self.request.valid.min_nodes() as usize
    }

    fn remove_only(&mut self, jobs: impl IntoIterator<Item = usize>) {
        let removed: BTreeSet<usize> = jobs.into_iter().collect();
        let mut changed = BTreeSet::new();
        for job in removed.difference(&self.removed) {
            changed.extend(self.usage.remove(&self.takers[*job]));
        }
        for job in self.removed.difference(&removed) {
            changed.extend(self.usage.restore(&self.takers[*job]));
        }
        self.removed = removed;
        self.recount(changed);
    }

    fn recount(&mut self, changed: BTreeSet<String>) {
        for name in changed {
            if self.usage.nodes().get(&name).is_some_and(|node| self.demand.has_room(node)) {
                self.open.insert(name);
            } else {
                self.open.remove(&name);
            }
        }
    }
}

#[cfg(test)]
mod tests;
