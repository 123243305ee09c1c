//! Searches for a placement with enough room and an acceptable fabric. A node that blocks the start
//! is excluded, and the next best placement is tried. Each try costs as much as the first plan.
//! After a limited number of tries (in a small cluster, as many as there are nodes) all nodes of
//! the same kind are excluded together. Both limits are counts, so the result is deterministic.

use super::fabric::{self, FabricDecisions};
use super::gang::{self, Placed};
use super::placement_request::{Avoided, PlacementRequest};
use super::refusal::NoPlacement;
use super::view::NodeView;
use std::collections::BTreeMap;
use switchyard_core::quantity::Resources;
use switchyard_crds::gpu_topology::GPUTopologyStatus;

/// Node visits allowed over all tries together, about 50 ms.
const MAX_NODE_VISITS: usize = 50_000;
/// Number of tries in the largest clusters, and of tries that exclude nodes by kind.
const MIN_TRIES: usize = 8;

/// A placement and its fabric decisions.
#[derive(Debug, Clone, PartialEq)]
pub struct PlacementWithFabric {
    pub placed: Placed,
    pub fabric: Option<FabricDecisions>,
}

/// Why no placement was found.
#[derive(Debug, Clone, PartialEq)]
pub enum PlacementFailure {
    NoRoom(NoPlacement),
    WrongFabric(Box<WrongFabric>),
}

/// There is room, but the gang must not start on the fabric of those nodes.
#[derive(Debug, Clone, PartialEq)]
pub struct WrongFabric {
    /// The best placement.
    pub placed: Placed,
    /// Why the gang must not start there.
    pub why: String,
    /// Fabric decisions for that placement.
    pub decided: Option<FabricDecisions>,
}

/// Searches for a placement, first without the nodes that are a last resort.
///
/// # Errors
/// Why there is none. If several placements fail the fabric check, the best one is reported.
pub fn place_with_fabric(
    request: &PlacementRequest<'_>,
    nodes: &BTreeMap<String, NodeView>,
) -> Result<PlacementWithFabric, PlacementFailure> {
    let avoided_nodes = firmly_avoided(request);
    if avoided_nodes.len() < request.avoided_nodes.len()
        && let Ok(found) = search(request, nodes, max_tries(nodes.len()))
    {
        return Ok(found);
    }
    search(&PlacementRequest { avoided_nodes: &avoided_nodes, ..*request }, nodes, max_tries(nodes.len()))
}

/// Whether there would be a placement if the fabric of all nodes were acceptable. Much cheaper than
/// a search for one.
pub fn fits_on_any_fabric(request: &PlacementRequest<'_>, nodes: &BTreeMap<String, NodeView>) -> bool {
    gang::fits(&PlacementRequest { avoided_nodes: &firmly_avoided(request), ..*request }, nodes)
}

/// The avoided nodes that are not a last resort.
fn firmly_avoided(request: &PlacementRequest<'_>) -> BTreeMap<String, Avoided> {
    let firmly = request.avoided_nodes.iter().filter(|(_, avoidance)| !avoidance.is_last_resort);
    firmly.map(|(name, avoidance)| (name.clone(), avoidance.clone())).collect()
}

/// Number of tries that exclude single nodes.
fn max_tries(nodes: usize) -> usize {
    (MAX_NODE_VISITS / nodes.max(1)).max(MIN_TRIES)
}

fn search(
    request: &PlacementRequest<'_>,
    nodes: &BTreeMap<String, NodeView>,
    single: usize,
) -> Result<PlacementWithFabric, PlacementFailure> {
    let mut avoided_nodes = request.avoided_nodes.clone();
    let mut best: Option<PlacementFailure> = None;
    for tried in 0..single + MIN_TRIES {
        let placed = match gang::place(&PlacementRequest { avoided_nodes: &avoided_nodes, ..*request }, nodes) {
            Ok(placed) => placed,
            Err(why) => return Err(best.unwrap_or(PlacementFailure::NoRoom(why))),
        };
        let (refused, decided) = match fabric::decide(request, nodes, &placed.status) {
            Err(refused) => (refused, None),
            Ok(decided) => match fabric::preflight_refusal(request.job, decided.as_ref()) {
                None => return Ok(PlacementWithFabric { placed, fabric: decided }),
                Some(refused) => (refused, decided),
            },
        };
        let blamed = refused.ranks.iter().filter_map(|rank| placed.status.nodes.get(*rank as usize));
        let blamed: Vec<String> = blamed.map(|node| node.node_name.clone()).collect();
        let is_whole_gang = blamed.is_empty();
        let kinds: Vec<Kind<'_>> = blamed.iter().filter_map(|name| nodes.get(name)).map(kind).collect();
        let alike = nodes.values().filter(|node| tried + 1 >= single && kinds.contains(&kind(node)));
        let alike: Vec<String> = alike.map(|node| node.facts.name.clone()).collect();
        let avoidance = || Avoided { reason: refused.why.clone(), is_last_resort: false };
        avoided_nodes.extend(blamed.into_iter().chain(alike).map(|node| (node, avoidance())));
        best.get_or_insert_with(|| {
            PlacementFailure::WrongFabric(Box::new(WrongFabric { placed, why: refused.why, decided }))
        });
        if is_whole_gang {
            break;
        }
    }
    Err(best.expect("invariant: at least one placement was tried"))
}

/// Inputs of the fabric decision except names: the devices that the agent reports, and the
/// resources that the node offers.
type Kind<'a> = (Option<&'a GPUTopologyStatus>, &'a Resources);

fn kind(node: &NodeView) -> Kind<'_> {
    (node.described().map(|machine| &*machine.facts), &node.allocatable)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::admitted::Admitted;
    use super::super::fabric::tests::mostly_refused;
    use super::*;
    use crate::cluster::levels::Levels;
    use crate::cluster::placement_request::PlacementRules;
    use crate::objects::Defaults;
    use crate::validate;
    use jiff::Timestamp;

    /// Regression test: the ninth placement was acceptable, but the job kept waiting.
    #[test]
    fn a_placement_is_found_behind_many_forbidden_ones() {
        let mut world = mostly_refused(40);
        // Start the attempt: only then are the pods' device requests known.
        world.step();
        let valid = validate(&world.job).unwrap();
        let (defaults, levels, avoided_nodes) = (Defaults::default(), Levels::default(), BTreeMap::new());
        let admitted = Admitted::of_template(&valid, world.job.status.as_ref());
        let rules = PlacementRules { defaults: &defaults, levels: &levels, now: Timestamp::UNIX_EPOCH };
        let request = PlacementRequest {
            job: &world.job,
            valid: &valid,
            rules,
            admitted: &admitted,
            avoided_nodes: &avoided_nodes,
        };
        let names = |found: Result<PlacementWithFabric, PlacementFailure>| {
            let found = found.ok().map(|found| found.placed.status.nodes);
            found.into_iter().flatten().map(|node| node.node_name).collect::<Vec<_>>()
        };
        assert_eq!(names(place_with_fabric(&request, &world.nodes)), ["n40", "n41"], "nodes are excluded one by one");
        // In a cluster so large that this takes too long, nodes are excluded by kind.
        assert_eq!(names(search(&request, &world.nodes, 1)), ["n40", "n41"]);
    }
}
