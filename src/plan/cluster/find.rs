//! A place where a gang may start: there is room, and a fabric that it may use. A node with which it may not start is left out, and the next
//! best place is tried.

use super::fabric::{self, Decided};
use super::gang::{self, Placed};
use super::question::{Avoided, Question};
use super::refusal::NoPlace;
use super::view::NodeView;
use std::collections::BTreeMap;

/// Places that are tried: each one costs as much as the first.
const MOST_TRIES: usize = 8;

/// A place, and what was decided for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    pub placed: Placed,
    pub fabric: Option<Decided>,
}

/// Why there is none.
#[derive(Debug, Clone, PartialEq)]
pub enum Nowhere {
    NoRoom(NoPlace),
    WrongFabric(Box<WrongFabric>),
}

/// There is room, but the gang must not start over the fabric of those nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct WrongFabric {
    /// The best place.
    pub placed: Placed,
    /// Why the gang must not start there.
    pub why: String,
    /// What was found there.
    pub decided: Option<Decided>,
}

/// Looks for a place, first without the nodes that are the last resort.
///
/// # Errors
/// Why there is none. Of several places with the wrong fabric, the best one is told.
pub fn find(question: &Question<'_>, nodes: &BTreeMap<String, NodeView>) -> Result<Found, Nowhere> {
    let firmly = || question.left_out.iter().filter(|(_, avoided)| !avoided.is_last_resort);
    if firmly().count() < question.left_out.len()
        && let Ok(found) = find_among(question, nodes)
    {
        return Ok(found);
    }
    let left_out = firmly().map(|(name, avoided)| (name.clone(), avoided.clone())).collect();
    find_among(&Question { left_out: &left_out, ..*question }, nodes)
}

fn find_among(question: &Question<'_>, nodes: &BTreeMap<String, NodeView>) -> Result<Found, Nowhere> {
    let mut left_out = question.left_out.clone();
    let mut best: Option<Nowhere> = None;
    for _ in 0..MOST_TRIES {
        let placed = match gang::place(&Question { left_out: &left_out, ..*question }, nodes) {
            Ok(placed) => placed,
            Err(why) => return Err(best.unwrap_or(Nowhere::NoRoom(why))),
        };
        let (refused, decided) = match fabric::decide(question, nodes, &placed.status) {
            Err(refused) => (refused, None),
            Ok(decided) => match fabric::enforced(question.job, decided.as_ref()) {
                None => return Ok(Found { placed, fabric: decided }),
                Some(refused) => (refused, decided),
            },
        };
        let blamed = refused.ranks.iter().filter_map(|rank| placed.status.nodes.get(*rank as usize));
        let blamed: Vec<String> = blamed.map(|node| node.node_name.clone()).collect();
        let is_of_gang = blamed.is_empty();
        left_out
            .extend(blamed.into_iter().map(|node| (node, Avoided { why: refused.why.clone(), is_last_resort: false })));
        best.get_or_insert_with(|| Nowhere::WrongFabric(Box::new(WrongFabric { placed, why: refused.why, decided })));
        if is_of_gang {
            break;
        }
    }
    Err(best.expect("invariant: at least one place was tried"))
}
