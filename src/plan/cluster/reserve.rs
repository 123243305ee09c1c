//! Where a job that finds no room can begin first: which nodes have to become free for it.

use super::find::find;
use super::gang;
use super::need::Demand;
use super::question::Question;
use super::view::NodeView;
use std::collections::BTreeMap;
use switchyard_crds::PlacedNode;

/// The nodes, and the GPUs on them, that a job which finds no room would have if as few busy nodes as possible were emptied, of equal ones
/// those that it holds already. `None`: it would not fit into the empty cluster either.
pub fn reserve(
    question: &Question<'_>,
    nodes: &BTreeMap<String, NodeView>,
    held: &[PlacedNode],
) -> Option<Vec<PlacedNode>> {
    let mut emptied = Emptied::of(question, nodes, held);
    let few = emptied.few(question.valid.request.nodes as usize)?;
    let place = |nodes: &BTreeMap<String, NodeView>| find(question, nodes).ok().map(|found| found.placed.status.nodes);
    let mut search = |fits: &dyn Fn(&BTreeMap<String, NodeView>) -> bool| {
        let enough = least(few, emptied.order.len(), |count| fits(emptied.first(count)))?;
        place(emptied.first(enough))
    };
    // Where the fabric of the first nodes with room is wrong, the search goes by places that may be used: that takes longer.
    search(&|nodes| gang::fits(question, nodes)).or_else(|| search(&|nodes| place(nodes).is_some()))
}

/// The least number with which something fits, where less than `few` is never enough and with more it still fits. `None`: not even with the
/// most. What is just enough by a count usually fits, and one answer may cost as much as a plan.
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

/// The nodes as they are, but for some of those that a job could use, on which nothing runs.
struct Emptied<'a> {
    nodes: BTreeMap<String, NodeView>,
    /// Nodes that would have room for a pod if nothing ran there, the least used first; and whether they have it as they are.
    order: Vec<(&'a NodeView, bool)>,
    /// So many of them are empty.
    count: usize,
}

impl<'a> Emptied<'a> {
    fn of(question: &Question<'_>, nodes: &'a BTreeMap<String, NodeView>, held: &[PlacedNode]) -> Emptied<'a> {
        let demand = Demand::of(question);
        let used = |node: &NodeView| {
            let share = |name: &str| {
                let all = node.allocatable.get(name);
                if all == 0 { 0 } else { (all - node.free.get(name)).saturating_mul(1000) / all }
            };
            (node.taken.count_ones(), node.allocatable.names().map(share).max().unwrap_or(0))
        };
        let is_held = |node: &NodeView| held.iter().any(|held| held.node_name == node.facts.name);
        let is_of_use = |node: &&NodeView| {
            !question.left_out.contains_key(&node.facts.name) && demand.may_use(node) && demand.has_room(&empty(node))
        };
        let mut order: Vec<&NodeView> = nodes.values().filter(is_of_use).collect();
        order.sort_by_cached_key(|node| (used(node), !is_held(node), node.facts.name.clone()));
        let order = order.into_iter().map(|node| (node, demand.has_room(node))).collect();
        Emptied { nodes: nodes.clone(), order, count: 0 }
    }

    /// The fewest of the first ones that have to be empty for so many pods to have room on a node each; `None`: there are too few nodes.
    fn few(&self, pods: usize) -> Option<usize> {
        let open = self.order.iter().filter(|(_, has_room)| *has_room).count();
        let missing = pods.saturating_sub(open);
        let full = self.order.iter().enumerate().filter(|(_, (_, has_room))| !has_room);
        if missing == 0 { Some(0) } else { full.map(|(number, _)| number + 1).nth(missing - 1) }
    }

    /// The nodes where the first ones are empty.
    fn first(&mut self, count: usize) -> &BTreeMap<String, NodeView> {
        for number in self.count.min(count)..self.count.max(count) {
            let was = self.order[number].0;
            let now = if number < count { empty(was) } else { was.clone() };
            self.nodes.insert(was.facts.name.clone(), now);
        }
        self.count = count;
        &self.nodes
    }
}

/// A node on which nothing runs.
fn empty(node: &NodeView) -> NodeView {
    NodeView { free: node.allocatable.clone(), taken: 0, in_use: 0, ..node.clone() }
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
    }
}
