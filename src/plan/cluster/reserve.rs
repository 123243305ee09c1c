//! Reservation for a job that finds no room: the nodes on which it can start first.

use super::demand::Demand;
use super::gang;
use super::place_with_fabric::place_with_fabric;
use super::placement_request::PlacementRequest;
use super::view::NodeView;
use std::collections::BTreeMap;
use switchyard_crds::PlacedNode;

/// Chooses the nodes and GPUs for a job that finds no room such that as few busy nodes as possible
/// must be emptied. Ties prefer nodes that it already reserves. Pods that do not end by themselves
/// stay. `None` if the job would not fit even then.
pub fn reserve(
    request: &PlacementRequest<'_>,
    nodes: &BTreeMap<String, NodeView>,
    held: &[PlacedNode],
) -> Option<Vec<PlacedNode>> {
    let demand = Demand::of(request);
    let demands: Vec<Demand> = gang::role_requests(request).iter().map(Demand::of).collect();
    let order =
        least_used(request, if demands.is_empty() { std::slice::from_ref(&demand) } else { &demands }, nodes, held);
    let open = order.iter().filter(|node| demand.has_room(node)).count();
    let gains = order.iter().map(|node| usize::from(!demand.has_room(node) && demand.has_room(&empty(node))));
    let steps_until_room = steps_until_room(open, request.valid.min_nodes(), gains)?;
    let mut emptied = Emptied { nodes: nodes.clone(), order, count: 0 };
    let placement = |nodes: &BTreeMap<String, NodeView>| {
        place_with_fabric(request, nodes).ok().map(|found| found.placed.status.nodes)
    };
    let mut search = |fits: &dyn Fn(&BTreeMap<String, NodeView>) -> bool| {
        let enough = smallest_fitting(steps_until_room, emptied.order.len(), |count| fits(emptied.first(count)))?;
        placement(emptied.first(enough))
    };
    // If the fabric of the first nodes with room is unacceptable, search for placements with an
    // acceptable fabric, which takes longer.
    search(&|nodes| gang::fits(request, nodes)).or_else(|| search(&|nodes| placement(nodes).is_some()))
}

/// The smallest number of steps after which `pods` nodes have room for a pod each: `open` nodes
/// have room now, and each step adds some. `None` if all steps together are not enough.
fn steps_until_room(mut open: usize, pods: u32, mut gains: impl Iterator<Item = usize>) -> Option<usize> {
    let mut steps = 0;
    while open < pods as usize {
        open += gains.next()?;
        steps += 1;
    }
    Some(steps)
}

/// The smallest number for which `fits_with` holds. It must be monotonic, and false below `least`.
/// `None` if it does not even hold for `most`. Tries `least` first, because a count that is just
/// enough usually fits, and a call may cost as much as a plan.
pub fn smallest_fitting(least: usize, most: usize, mut fits_with: impl FnMut(usize) -> bool) -> Option<usize> {
    if least > most {
        return None;
    }
    if fits_with(least) {
        return Some(least);
    }
    let (mut least, mut enough) = (least + 1, most);
    if least > enough || !fits_with(enough) {
        return None;
    }
    while least < enough {
        let middle = least.midpoint(enough);
        if fits_with(middle) { enough = middle } else { least = middle + 1 }
    }
    Some(enough)
}

/// A minimal set of candidates without which something fits, the first ones of their order
/// preferred: none of them can be left out. At least the first `least` are needed if none of these
/// is left out. `None` if it does not fit without all of them either.
pub fn fewest(least: usize, candidates: usize, mut fits_without: impl FnMut(&[usize]) -> bool) -> Option<Vec<usize>> {
    let all: Vec<usize> = (0..candidates).collect();
    let enough = smallest_fitting(least, candidates, |count| fits_without(&all[..count]))?;
    let mut chosen = all[..enough].to_vec();
    // Last ones first, because they have the highest priority. Without the very last one, the
    // others are known to be too few.
    for candidate in (0..enough.saturating_sub(1)).rev() {
        let rest: Vec<usize> = chosen.iter().copied().filter(|other| *other != candidate).collect();
        if fits_without(&rest) {
            chosen = rest;
        }
    }
    Some(chosen)
}

/// Nodes that would have room for a pod of any of these kinds after all pods that end by themselves
/// have ended. Least used first, then those that are already reserved.
fn least_used<'a>(
    request: &PlacementRequest<'_>,
    demands: &[Demand],
    nodes: &'a BTreeMap<String, NodeView>,
    held: &[PlacedNode],
) -> Vec<&'a NodeView> {
    let used = |node: &NodeView| {
        let share = |name: &str| {
            let all = node.allocatable.get(name);
            if all == 0 { 0 } else { (all - node.free.get(name)).saturating_mul(1000) / all }
        };
        (node.taken.count_ones(), node.allocatable.names().map(share).max().unwrap_or(0))
    };
    let is_held = |node: &NodeView| held.iter().any(|held| held.node_name == node.facts.name);
    let is_candidate = |node: &&NodeView| {
        request.avoided_nodes.get(&node.facts.name).is_none_or(|avoided| avoided.is_last_resort)
            && demands.iter().any(|demand| demand.can_use(node) && demand.has_room(&empty(node)))
    };
    let mut order: Vec<&NodeView> = nodes.values().filter(is_candidate).collect();
    order.sort_by_cached_key(|node| (used(node), !is_held(node), node.facts.name.clone()));
    order
}

/// The nodes with the first ones of an order emptied.
struct Emptied<'a> {
    nodes: BTreeMap<String, NodeView>,
    order: Vec<&'a NodeView>,
    /// Number of emptied nodes.
    count: usize,
}

impl Emptied<'_> {
    /// The nodes with the first `count` emptied.
    fn first(&mut self, count: usize) -> &BTreeMap<String, NodeView> {
        for number in self.count.min(count)..self.count.max(count) {
            let was = self.order[number];
            let now = if number < count { empty(was) } else { was.clone() };
            self.nodes.insert(was.facts.name.clone(), now);
        }
        self.count = count;
        &self.nodes
    }
}

/// A node after all pods that end by themselves have ended.
fn empty(node: &NodeView) -> NodeView {
    NodeView { free: node.allocatable.less(&node.lasting), taken: node.lasting_gpus, in_use: 0, ..node.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_smallest_fit_is_found_with_one_try_if_the_count_is_exact(
            steps_until_room in 0_usize..20, more in 0_usize..20, most in 0_usize..40,
        ) {
            let (enough, mut tries) = (steps_until_room + more, 0);
            let found = smallest_fitting(steps_until_room, most, |count| {
                tries += 1;
                count >= enough
            });
            prop_assert_eq!(found, Some(enough).filter(|enough| *enough <= most));
            prop_assert!(more > 0 || tries <= 1);
        }

        #[test]
        fn no_candidate_can_be_left_out(
            sizes in prop::collection::vec(0_usize..9, 0..10), need in 0_usize..30, is_exact in any::<bool>(),
        ) {
            let freed = |chosen: &[usize]| chosen.iter().map(|index| sizes[*index]).sum::<usize>();
            let steps = steps_until_room(0, need as u32, sizes.iter().copied());
            let least = steps.map_or(sizes.len() + 1, |steps| if is_exact { steps } else { 0 });
            match fewest(least, sizes.len(), |chosen| freed(chosen) >= need) {
                None => prop_assert!(sizes.iter().sum::<usize>() < need),
                Some(chosen) => {
                    prop_assert!(freed(&chosen) >= need);
                    for left_out in &chosen {
                        let rest: Vec<usize> = chosen.iter().copied().filter(|other| other != left_out).collect();
                        prop_assert!(freed(&rest) < need);
                    }
                }
            }
        }

        #[test]
        fn one_step_fewer_leaves_a_pod_without_room(open in 0_usize..9, pods in 0_u32..20, gains in prop::collection::vec(0_usize..4, 0..9)) {
            let after = |steps: usize| open + gains[..steps].iter().sum::<usize>() >= pods as usize;
            match steps_until_room(open, pods, gains.iter().copied()) {
                None => prop_assert!(!after(gains.len())),
                Some(steps) => prop_assert!(after(steps) && (steps == 0 || !after(steps - 1))),
            }
        }
    }
}
