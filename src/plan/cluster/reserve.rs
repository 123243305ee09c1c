//! Reservation for a job that finds no room: the nodes on which it can start first.

use super::find::find;
use super::gang;
use super::need::Demand;
use super::question::Question;
use super::view::NodeView;
use std::collections::BTreeMap;
use switchyard_crds::PlacedNode;

/// Chooses the nodes and GPUs for a job that finds no room such that as few busy nodes as possible
/// must be emptied. Ties prefer nodes that it already reserves. Pods that do not end by themselves
/// stay. `None` if the job would not fit even then.
pub fn reserve(
    question: &Question<'_>,
    nodes: &BTreeMap<String, NodeView>,
    held: &[PlacedNode],
) -> Option<Vec<PlacedNode>> {
    let demand = Demand::of(question);
    let order = least_used(question, &demand, nodes, held);
    let open = order.iter().filter(|node| demand.has_room(node)).count();
    let gains = order.iter().map(|node| usize::from(!demand.has_room(node)));
    let few = few(open, question.valid.request.nodes, gains)?;
    let mut emptied = Emptied { nodes: nodes.clone(), order, count: 0 };
    let place = |nodes: &BTreeMap<String, NodeView>| find(question, nodes).ok().map(|found| found.placed.status.nodes);
    let mut search = |fits: &dyn Fn(&BTreeMap<String, NodeView>) -> bool| {
        let enough = least(few, emptied.order.len(), |count| fits(emptied.first(count)))?;
        place(emptied.first(enough))
    };
    // If the fabric of the first nodes with room is unacceptable, search for placements with an
    // acceptable fabric, which takes longer.
    search(&|nodes| gang::fits(question, nodes)).or_else(|| search(&|nodes| place(nodes).is_some()))
}

/// The smallest number of steps after which `pods` nodes have room for a pod each: `open` nodes
/// have room now, and each step adds some. `None` if all steps together are not enough.
pub fn few(mut open: usize, pods: u32, mut gains: impl Iterator<Item = usize>) -> Option<usize> {
    let mut steps = 0;
    while open < pods as usize {
        open += gains.next()?;
        steps += 1;
    }
    Some(steps)
}

/// The smallest number for which `fits_with` holds, which must be monotonic and false below `few`.
/// `None` if it does not even hold for `most`. Tries `few` first, because a count that is just
/// enough usually fits, and a call may cost as much as a plan.
pub fn least(few: usize, most: usize, mut fits_with: impl FnMut(usize) -> bool) -> Option<usize> {
    if few > most {
        return None;
    }
    if fits_with(few) {
        return Some(few);
    }
    let (mut few, mut enough) = (few + 1, most);
    if few > enough || !fits_with(enough) {
        return None;
    }
    while few < enough {
        let middle = few.midpoint(enough);
        if fits_with(middle) { enough = middle } else { few = middle + 1 }
    }
    Some(enough)
}

/// Nodes that would have room for a pod after all pods that end by themselves have ended. Least
/// used first, then those that are already reserved.
fn least_used<'a>(
    question: &Question<'_>,
    demand: &Demand,
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
    let is_of_use = |node: &&NodeView| {
        question.left_out.get(&node.facts.name).is_none_or(|avoided| avoided.is_last_resort)
            && demand.may_use(node)
            && demand.has_room(&empty(node))
    };
    let mut order: Vec<&NodeView> = nodes.values().filter(is_of_use).collect();
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
        fn the_least_is_found_and_asked_for_once_where_the_count_was_right(
            few in 0_usize..20, more in 0_usize..20, most in 0_usize..40,
        ) {
            let (enough, mut asked) = (few + more, 0);
            let found = least(few, most, |count| {
                asked += 1;
                count >= enough
            });
            prop_assert_eq!(found, Some(enough).filter(|enough| *enough <= most));
            prop_assert!(more > 0 || asked <= 1);
        }

        #[test]
        fn no_step_less_gives_all_pods_room(open in 0_usize..9, pods in 0_u32..20, gains in prop::collection::vec(0_usize..4, 0..9)) {
            let after = |steps: usize| open + gains[..steps].iter().sum::<usize>() >= pods as usize;
            match few(open, pods, gains.iter().copied()) {
                None => prop_assert!(!after(gains.len())),
                Some(steps) => prop_assert!(after(steps) && (steps == 0 || !after(steps - 1))),
            }
        }
    }
}
