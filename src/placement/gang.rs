//! A place for a gang of equal parts: as many distinct nodes as it has parts, each with room for one.
//!
//! The simple placement: nodes in the order given, the first ones that fit. All or nothing.

use crate::topology::model::NodeOrd;

/// Free amounts of a node, in the order of the resources asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreeNode {
    /// One per resource.
    pub free: Vec<i64>,
}

/// Why there is no place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shortage {
    /// Nodes that fit.
    pub fit: u32,
    /// The resource that most of the others lack, by its position, and the largest free amount among those that lack it.
    pub lacking: Option<(usize, i64)>,
}

/// Chooses `count` distinct nodes with room for `need` each.
///
/// # Errors
/// Fewer nodes fit.
pub fn solve(nodes: &[FreeNode], need: &[i64], count: u32) -> Result<Vec<NodeOrd>, Shortage> {
    let fits = |node: &FreeNode| node.free.iter().zip(need).all(|(free, need)| free >= need);
    let chosen: Vec<NodeOrd> = (0_u32..)
        .zip(nodes)
        .filter(|(_, node)| fits(node))
        .take(count as usize)
        .map(|(position, _)| NodeOrd(position))
        .collect();
    if chosen.len() == count as usize {
        return Ok(chosen);
    }
    let lacking = (0..need.len())
        .map(|resource| {
            let short = nodes.iter().map(|node| node.free[resource]).filter(|free| *free < need[resource]);
            (short.clone().count(), resource, short.max())
        })
        .filter_map(|(nodes, resource, best)| Some((nodes, resource, best?)))
        // The first resource where several are short on as many nodes.
        .max_by_key(|(nodes, resource, _)| (*nodes, usize::MAX - resource));
    Err(Shortage { fit: chosen.len() as u32, lacking: lacking.map(|(_, resource, best)| (resource, best.max(0))) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nodes(free: &[[i64; 2]]) -> Vec<FreeNode> {
        free.iter().map(|free| FreeNode { free: free.to_vec() }).collect()
    }

    #[test]
    fn the_first_that_fit_in_the_order_given() {
        let nodes = nodes(&[[1, 9], [4, 9], [4, 1], [5, 5]]);
        assert_eq!(solve(&nodes, &[4, 2], 2), Ok(vec![NodeOrd(1), NodeOrd(3)]));
        assert_eq!(solve(&nodes, &[4, 2], 3), Err(Shortage { fit: 2, lacking: Some((0, 1)) }));
        assert_eq!(solve(&nodes, &[0, 9], 3), Err(Shortage { fit: 2, lacking: Some((1, 5)) }));
        assert_eq!(solve(&[], &[1], 1), Err(Shortage { fit: 0, lacking: None }));
    }

    proptest! {
        #[test]
        fn all_or_nothing_and_never_more_than_is_free(
            free in prop::collection::vec([0_i64..9, 0_i64..9], 0..12), need in [0_i64..9, 0_i64..9], count in 1_u32..6,
        ) {
            let nodes = nodes(&free);
            let fit = free.iter().filter(|free| free[0] >= need[0] && free[1] >= need[1]).count();
            match solve(&nodes, &need, count) {
                Ok(chosen) => {
                    prop_assert_eq!(chosen.len(), count as usize);
                    prop_assert!(chosen.windows(2).all(|pair| pair[0].0 < pair[1].0), "distinct, and in order");
                    for node in &chosen {
                        let free = free[node.0 as usize];
                        prop_assert!(free[0] >= need[0] && free[1] >= need[1]);
                    }
                    // A node that is not chosen does not matter.
                    let mut changed = nodes.clone();
                    for (position, node) in changed.iter_mut().enumerate() {
                        if position > chosen[chosen.len() - 1].0 as usize {
                            node.free = vec![0, 0];
                        }
                    }
                    prop_assert_eq!(solve(&changed, &need, count), Ok(chosen));
                }
                Err(short) => {
                    prop_assert_eq!(short.fit as usize, fit);
                    prop_assert!(fit < count as usize);
                }
            }
        }
    }
}
