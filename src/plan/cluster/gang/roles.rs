//! Placement of a job with roles: one role after the other, each like a job of its own on what the
//! roles before it leave. Roles that need most of a node come first, and roles that are near
//! another one come after it.

use super::{Placed, levels_and_policy, place_alike};
use crate::cluster::levels::Tree;
use crate::cluster::placement_request::PlacementRequest;
use crate::cluster::refusal::{Change, NoPlacement};
use crate::cluster::view::NodeView;
use crate::job::Role;
use crate::resources::bytes_per_second;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::placement::gpus::UNLIMITED;
use switchyard_core::rates::gigabytes;
use switchyard_core::units::plural;
use switchyard_crds::{PlacedNode, PlacementStatus, TopologyMode};

type Nodes = BTreeMap<String, NodeView>;

/// The placement request of every role, in rank order. Empty for a job without roles.
pub fn role_requests<'a>(request: &PlacementRequest<'a>) -> Vec<PlacementRequest<'a>> {
    let roles = request.valid.roles.iter().zip(&request.admitted.roles);
    let of_role =
        |(role, admitted): (&'a Role, _)| PlacementRequest { job: &role.job, valid: &role.valid, admitted, ..*request };
    roles.map(of_role).collect()
}

/// Places the pods of all roles. If one domain must contain the job, tries every such domain, and
/// takes the one where the ring is fastest.
///
/// # Errors
/// The role without a placement, and why it has none.
pub(super) fn place(request: &PlacementRequest<'_>, nodes: &Nodes) -> Result<Placed, NoPlacement> {
    let anywhere = place_all(request, nodes)?;
    let (levels, policy) = levels_and_policy(request);
    let views: Vec<&NodeView> = nodes.values().collect();
    let tree = levels.tree(policy, &views, false);
    let Some(level) = tree.within else { return Ok(anywhere) };
    let mut by_domain: BTreeMap<u32, Nodes> = BTreeMap::new();
    for (position, node) in views.iter().enumerate() {
        if let Some(domain) = domain(&tree, position, level) {
            by_domain.entry(domain).or_default().insert(node.facts.name.clone(), (*node).clone());
        }
    }
    let mut best: Option<(f64, Placed)> = None;
    for placed in by_domain.values().filter_map(|nodes| place_all(request, nodes).ok()) {
        let rate = placed.status.predicted_bus_bandwidth.as_ref().and_then(bytes_per_second).unwrap_or(0.0);
        if best.as_ref().is_none_or(|(most, _)| *most < rate) {
            best = Some((rate, placed));
        }
    }
    let key = tree.keys.get(level).map_or("domain", String::as_str);
    let sentence = || format!("every role has room, but no {key} has room for all of them");
    let refused = || NoPlacement { open: request.valid.min_nodes(), ..NoPlacement::impossible(sentence()) };
    best.map(|(_, placed)| placed).ok_or_else(refused)
}

fn place_all(request: &PlacementRequest<'_>, nodes: &Nodes) -> Result<Placed, NoPlacement> {
    let roles = &request.valid.roles;
    let requests = role_requests(request);
    let mut left = nodes.clone();
    let mut placed: Vec<Option<Placed>> = vec![None; roles.len()];
    let mut order: Vec<usize> = (0..roles.len()).collect();
    order.sort_by_key(|index| (roles[*index].near.is_some(), Reverse(roles[*index].valid.pod.gpus), *index));
    for index in order {
        let role = &roles[index];
        let target = role.near.and_then(|near| Some((&roles[near], placed[near].as_ref()?)));
        let found = match target {
            Some((near, target)) => place_near(role, &requests[index], &left, near, &target.status.nodes),
            None => place_role(role, &requests[index], &left),
        };
        let found = found.map_err(|why| name_role(why, request, role))?;
        for node in &found.status.nodes {
            charge(&mut left, node, &requests[index]);
        }
        placed[index] = Some(found);
    }
    Ok(join(request, placed.into_iter().flatten().collect()))
}

/// Takes the resources of a placed pod from its node.
fn charge(nodes: &mut Nodes, placed: &PlacedNode, request: &PlacementRequest<'_>) {
    let Some(node) = nodes.get_mut(&placed.node_name) else { return };
    node.free = node.free.less(&request.admitted.requests);
    node.taken |= node.described().map_or(0, |machine| machine.mask(placed.gpus.iter().map(String::as_str)));
}

/// Places a role on different nodes. Outside the rendezvous, where no rank exchanges data with each
/// other one, its pods share nodes if there are too few.
fn place_role(role: &Role, request: &PlacementRequest<'_>, nodes: &Nodes) -> Result<Placed, NoPlacement> {
    let refused = match place_alike(request, nodes) {
        Ok(placed) => return Ok(placed),
        Err(refused) => refused,
    };
    if role.in_rendezvous || role.pods() == 1 {
        return Err(refused);
    }
    let mut single = role.valid.clone();
    single.request.nodes = 1;
    let mut left = nodes.clone();
    // Nodes with fewer pods of the role than others: spread pods have more bandwidth each.
    let mut fewest = left.keys().cloned().collect::<BTreeSet<String>>();
    let mut all: Option<Placed> = None;
    for rank in 0..role.pods() {
        let mut admitted = request.admitted.clone();
        if let Some(kind) = admitted.rule_of_rank.get(rank as usize).copied() {
            admitted.rules = admitted.rules.get(kind).cloned().into_iter().collect();
        }
        admitted.rule_of_rank.clear();
        let own = PlacementRequest { valid: &single, admitted: &admitted, ..*request };
        let spread: Nodes = left
            .iter()
            .filter(|(name, _)| fewest.contains(*name))
            .map(|(name, node)| (name.clone(), node.clone()))
            .collect();
        let placed = place_alike(&own, &spread).or_else(|_| {
            fewest = left.keys().cloned().collect();
            place_alike(&own, &left)
        });
        let Ok(placed) = placed else { return Err(refused) };
        for node in &placed.status.nodes {
            charge(&mut left, node, request);
            fewest.remove(&node.node_name);
        }
        match &mut all {
            None => all = Some(placed),
            Some(all) => all.status.nodes.extend(placed.status.nodes),
        }
    }
    let mut all = all.ok_or(refused)?;
    let names: BTreeSet<&str> = all.status.nodes.iter().map(|node| node.node_name.as_str()).collect();
    all.status.reason = format!("{} pods share {} node{}", role.pods(), names.len(), plural(names.len() as u64));
    (all.status.predicted_bus_bandwidth, all.status.best_possible, all.status.limited_by) = (None, None, None);
    Ok(all)
}

/// Places a role as near to the nodes of another one as possible: on them, else in the smallest
/// domains that contain them.
fn place_near(
    role: &Role,
    request: &PlacementRequest<'_>,
    nodes: &Nodes,
    near: &Role,
    targets: &[PlacedNode],
) -> Result<Placed, NoPlacement> {
    let names: BTreeSet<&str> = targets.iter().map(|node| node.node_name.as_str()).collect();
    let on_targets: Nodes = nodes
        .iter()
        .filter(|(name, _)| names.contains(name.as_str()))
        .map(|(name, node)| (name.clone(), node.clone()))
        .collect();
    if let Ok(mut placed) = place_role(role, request, &on_targets) {
        placed.status.reason.push_str(&format!("; on the nodes of role {}, without the network", near.name));
        return Ok(placed);
    }
    let levels = levels_and_policy(request);
    let views: Vec<&NodeView> = nodes.values().collect();
    let tree = levels.0.tree(levels.1, &views, false);
    let position = |name: &str| views.iter().position(|node| node.facts.name == name);
    let targets: Vec<usize> = names.iter().filter_map(|name| position(name)).collect();
    let ignored = request.job.spec.topology_policy.mode == TopologyMode::Ignored;
    for level in (0..tree.levels.len().saturating_sub(1)).filter(|_| !ignored) {
        let around: BTreeSet<Option<u32>> = targets.iter().map(|node| domain(&tree, *node, level)).collect();
        let inside = |node: usize| domain(&tree, node, level).is_some_and(|own| around.contains(&Some(own)));
        let within: Nodes = (0..views.len())
            .filter(|node| inside(*node))
            .map(|node| (views[node].facts.name.clone(), views[node].clone()))
            .collect();
        if let Ok(placed) = place_role(role, request, &within) {
            return Ok(with_distance(placed, &tree, &views, near, &targets));
        }
    }
    place_role(role, request, nodes).map(|placed| with_distance(placed, &tree, &views, near, &targets))
}

fn domain(tree: &Tree, node: usize, level: usize) -> Option<u32> {
    tree.domains.get(node)?.get(level).copied().flatten()
}

/// Adds the distance between a role and the one that it is near to the reason, with the bandwidth
/// out of the slowest node: what its NICs carry across the smallest domain that contains both.
fn with_distance(mut placed: Placed, tree: &Tree, views: &[&NodeView], near: &Role, targets: &[usize]) -> Placed {
    let own =
        placed.status.nodes.iter().filter_map(|node| views.iter().position(|view| view.facts.name == node.node_name));
    let all: Vec<usize> = own.chain(targets.iter().copied()).collect();
    let last = tree.levels.len().saturating_sub(1);
    let shares = |level: usize| {
        let mut domains = all.iter().map(|node| domain(tree, *node, level));
        let first = domains.next().flatten();
        first.is_some() && domains.all(|other| other == first)
    };
    let level = (0..last).find(|level| shares(*level)).unwrap_or(last);
    let outward = |node: &usize| {
        let machine = views.get(*node)?.described()?;
        // All GPUs of a node together use all of its NICs.
        Some(machine.shape.outward(machine.shape.all(), tree.levels.get(level).copied())).filter(|rate| *rate > 0)
    };
    let rates: Option<Vec<u32>> = all.iter().map(outward).collect();
    let rate = rates.and_then(|rates| rates.into_iter().min()).filter(|rate| *rate != UNLIMITED);
    let rate = rate.map(|rate| format!(", {} GB/s between them", gigabytes(rate))).unwrap_or_default();
    let place = match tree.keys.get(level).filter(|_| level < last) {
        Some(key) => format!("in the same {key} as"),
        None => "on other nodes than".to_string(),
    };
    placed.status.reason.push_str(&format!("; {place} role {}{rate}", near.name));
    placed
}

/// A refusal of one role, as a refusal of the job.
fn name_role(why: NoPlacement, request: &PlacementRequest<'_>, role: &Role) -> NoPlacement {
    let is_lead = request.valid.lead().is_some_and(|lead| lead.first_node == role.first_node);
    let in_role = |change: Change| {
        let field = match change.field.strip_prefix("trainer.") {
            Some(rest) => format!("roles[{}].{}", role.name, rest.replace("numNodes", "replicas")),
            None => change.field,
        };
        Change { field, ..change }
    };
    NoPlacement {
        sentence: format!("role {}: {}", role.name, why.sentence),
        changes: why.changes.into_iter().map(in_role).collect(),
        // The role that needs most has room, if another one is refused.
        open: if is_lead { why.open } else { request.valid.min_nodes() },
        ..why
    }
}

/// Joins the placements of all roles, in rank order. The figures come from the role whose ranks
/// form the ring.
fn join(request: &PlacementRequest<'_>, placed: Vec<Placed>) -> Placed {
    let roles = &request.valid.roles;
    let ring = request.valid.collective().map(|ring| ring.first_node);
    let mut status = PlacementStatus::default();
    let mut reasons = Vec::new();
    let mut excluded = Vec::new();
    for (role, placed) in roles.iter().zip(placed) {
        let nodes = role.node_ranks().zip(placed.status.nodes);
        status
            .nodes
            .extend(nodes.map(|(rank, node)| PlacedNode { first_rank: request.valid.first_rank(rank) as i32, ..node }));
        reasons.push(format!("role {}: {}", role.name, placed.status.reason));
        if ring == Some(role.first_node) {
            status.predicted_bus_bandwidth = placed.status.predicted_bus_bandwidth;
            status.best_possible = placed.status.best_possible;
            status.limited_by = placed.status.limited_by;
        }
        if excluded.is_empty() {
            excluded = placed.excluded;
        }
    }
    status.reason = reasons.join("; ").chars().take(1024).collect();
    Placed { status, excluded }
}
