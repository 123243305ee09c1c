//! Placement of a whole gang: nodes, GPUs and rank order with the reasons, or why there is no
//! placement.

mod pipelines;
mod placement_status;
mod roles;
#[cfg(test)]
mod tests;

use super::admitted::Admitted;
use super::candidates::Candidates;
use super::demand::GangDemand;
use super::excluded::Excluded;
use super::levels::Levels;
use super::machine::Machine;
use super::placement_request::PlacementRequest;
use super::ranks::Shortage;
use super::refusal::{self, NoPlacement};
use super::view::NodeView;
use placement_status::{PlacementStatusBuilder, ranges};
pub use roles::role_requests;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use switchyard_core::model::NodeOrd;
use switchyard_core::placement::gpus::ring::bits;
use switchyard_core::placement::gpus::{
    Fleet, Group, Level, MAX_GPUS, MinLink, Placement, Refusal, Request, UNLIMITED,
};
use switchyard_core::rates::gigabytes;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_crds::{self as api, PlacedNode, PlacementStatus, TopologyMode, TrainJob};

/// A placement for every pod of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// For the status of the job.
    pub status: PlacementStatus,
    /// Excluded nodes, with reasons.
    pub excluded: Vec<(String, Excluded)>,
}

/// Chooses nodes and GPUs.
///
/// # Errors
/// Why there is no placement, and the smallest changes that would make one possible.
pub fn place(request: &PlacementRequest<'_>, nodes: &BTreeMap<String, NodeView>) -> Result<Placed, NoPlacement> {
    if request.valid.roles.is_empty() { place_alike(request, nodes) } else { roles::place(request, nodes) }
}

/// Chooses nodes and GPUs for pods that are alike.
fn place_alike(request: &PlacementRequest<'_>, nodes: &BTreeMap<String, NodeView>) -> Result<Placed, NoPlacement> {
    let demand = GangDemand::of(request);
    if demand.gpus() as usize > MAX_GPUS {
        let gpus = demand.gpus();
        return Err(NoPlacement::impossible(format!(
            "{GPU_RESOURCE}: got {gpus} for each node; expected at most {MAX_GPUS}"
        )));
    }
    let (levels, policy) = levels_and_policy(request);
    let mut candidates = Candidates::of(nodes, levels, policy, &demand);
    let mut solver_request = to_solver_request(&demand, &candidates, policy);
    let mut fleet = candidates.fleet();
    let (mut placement, note) =
        solve(&demand, &mut candidates, &mut fleet, &mut solver_request).map_err(|refused| {
            let refused = match refused {
                SolveError::Room(refused) => refused,
                SolveError::Ranks(shortage) => return refusal::rank_shortage(&shortage, &candidates),
            };
            let why = refusal::explain(&demand, &candidates, &mut fleet, &solver_request, &refused);
            candidates.note_links(&mut fleet, &solver_request, request.job.spec.topology_policy.node_topology.min_link);
            let why = NoPlacement { excluded: candidates.excluded_nodes(), ..why };
            let with = |admitted: &Admitted| {
                let request = PlacementRequest { admitted, ..*request };
                let bandwidth =
                    Candidates::of(nodes, levels, policy, &GangDemand::of(&request)).fleet().bandwidth(&solver_request);
                bandwidth.map(|bandwidth| Some(bandwidth).filter(|bandwidth| *bandwidth != UNLIMITED))
            };
            refusal::add_rule_changes(why, request, nodes, with)
        })?;
    // Predict no bandwidth for nodes without a report.
    let is_known = candidates.nodes.iter().any(|node| node.described().is_some());
    let best = if is_known { candidates.empty().bandwidth(&solver_request).unwrap_or(0) } else { 0 };
    let best = best.max(placement.bandwidth);
    let mut notes: Vec<String> = note.into_iter().collect();
    if let Some(engine) = &request.valid.engine {
        let processes = request.valid.request.processes_per_node;
        if demand.pod.rules.is_uniform() {
            pipelines::order(engine, processes, &candidates, &mut placement);
        }
        notes.extend(pipelines::sentences(engine, processes, &candidates, &placement));
    }
    let status =
        PlacementStatusBuilder { demand: &demand, candidates: &candidates, placement: &placement, best }.status(notes);
    Ok(Placed { status, excluded: candidates.excluded_nodes() })
}

/// Whether a placement exists. Much cheaper than `place`, which also computes the placement and the
/// reasons.
pub fn fits(request: &PlacementRequest<'_>, nodes: &BTreeMap<String, NodeView>) -> bool {
    if !request.valid.roles.is_empty() {
        return roles::place(request, nodes).is_ok();
    }
    let demand = GangDemand::of(request);
    if demand.gpus() as usize > MAX_GPUS {
        return false;
    }
    let (levels, policy) = levels_and_policy(request);
    let mut candidates = Candidates::of(nodes, levels, policy, &demand);
    let mut solver_request = to_solver_request(&demand, &candidates, policy);
    let mut fleet = candidates.fleet();
    solve(&demand, &mut candidates, &mut fleet, &mut solver_request).is_ok()
}

/// Levels and policy that apply. Both are empty if the job ignores topology.
fn levels_and_policy<'a>(request: &PlacementRequest<'a>) -> (&'a Levels, &'a api::TopologyPolicy) {
    static IGNORED: LazyLock<(Levels, api::TopologyPolicy)> =
        LazyLock::new(|| (Levels::none(), api::TopologyPolicy::default()));
    let policy = &request.job.spec.topology_policy;
    if policy.mode == TopologyMode::Ignored { (&IGNORED.0, &IGNORED.1) } else { (request.rules.levels, policy) }
}

fn to_solver_request(demand: &GangDemand<'_>, candidates: &Candidates<'_>, policy: &api::TopologyPolicy) -> Request {
    Request {
        groups: vec![Group { pods: demand.request.valid.request.nodes, gpus: demand.gpus() as u8 }],
        min_link: min_link(policy.node_topology.min_link),
        within: candidates.tree.within,
        slices: None,
    }
}

/// Why there is no placement.
enum SolveError {
    Room(Refusal),
    /// Admission gave the pods different rules, and too few nodes satisfy the rules of some of
    /// them.
    Ranks(Shortage),
}

/// Finds the placement and what was given up for it. Replaces `request` by the one that was
/// satisfied.
fn solve(
    demand: &GangDemand<'_>,
    candidates: &mut Candidates<'_>,
    fleet: &mut Fleet,
    solver_request: &mut Request,
) -> Result<(Placement, Option<String>), SolveError> {
    let (placement, note) = solve_for_any_rank(demand, candidates, fleet, solver_request).map_err(SolveError::Room)?;
    let rules = &demand.pod.rules;
    if rules.is_uniform() {
        return Ok((placement, note));
    }
    let facts = |nodes: &[usize]| nodes.iter().map(|node| &candidates.nodes[*node].facts).collect::<Vec<_>>();
    let in_order = |placement: &Placement| {
        let nodes: Vec<usize> = placement.pods.iter().map(|pod| pod.node.0 as usize).collect();
        let by_rank = rules.assign(&facts(&nodes))?;
        let pods = by_rank.iter().map(|position| placement.pods[*position].clone()).collect();
        Ok(Placement { pods, ..placement.clone() })
    };
    let shortage = match in_order(&placement) {
        Ok(placement) => return Ok((placement, note)),
        Err(shortage) => Shortage { nodes: Vec::new(), ..shortage },
    };
    // The best nodes do not suit all ranks. For each domain that may contain the gang, cover the
    // ranks with suitable nodes, and choose the best of these placements.
    let below_min_link: Vec<usize> = fleet
        .below_min_link(solver_request.groups[0].gpus, solver_request.min_link)
        .iter()
        .map(|node| node.0 as usize)
        .collect();
    let mut by_domain: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    for node in candidates.open().filter(|node| below_min_link.binary_search(node).is_err()) {
        let domain = solver_request.within.map(|level| candidates.tree.domains[node].get(level).copied().flatten());
        if domain != Some(None) {
            by_domain.entry(domain.flatten()).or_default().push(node);
        }
    }
    let previous = previous_placement(demand.request.job, candidates);
    let mut best: Option<Placement> = None;
    let mut why = shortage;
    for nodes in by_domain.values() {
        let covered = match rules.cover(&facts(nodes)) {
            Ok(covered) => covered,
            Err(shortage) => {
                let named = shortage.nodes.iter().map(|node| nodes[*node]).collect();
                why = Shortage { nodes: named, ..shortage };
                continue;
            }
        };
        let only: Vec<usize> = covered.into_iter().map(|position| nodes[position]).collect();
        let Ok(placement) = candidates.only(&only).repair(solver_request, &previous) else { continue };
        let Ok(placement) = in_order(&placement) else { continue };
        if best.as_ref().is_none_or(|best| best.bandwidth < placement.bandwidth) {
            best = Some(placement);
        }
    }
    best.map(|placement| (placement, note)).ok_or(SolveError::Ranks(why))
}

/// Solves as if each pod could run on every node that any pod may use.
fn solve_for_any_rank(
    demand: &GangDemand<'_>,
    candidates: &mut Candidates<'_>,
    fleet: &mut Fleet,
    solver_request: &mut Request,
) -> Result<(Placement, Option<String>), Refusal> {
    let request = demand.request;
    let policy = &request.job.spec.topology_policy;
    let previous = previous_placement(request.job, candidates);
    if demand.gpus() == 0 && candidates.open().any(|node| candidates.nodes[node].gpus() > 0) {
        // Prefer CPU-only nodes for CPU-only jobs.
        if let Ok(placement) = candidates.without_gpus().repair(solver_request, &previous) {
            return Ok((placement, None));
        }
    }
    let min_link = policy.node_topology.min_link;
    let refused = match fleet.repair(solver_request, &previous) {
        Ok(placement) => {
            candidates.note_links(fleet, solver_request, min_link);
            return Ok((placement, None));
        }
        Err(refused) => refused,
    };
    let relaxed = Request { min_link: MinLink::System, ..solver_request.clone() };
    if policy.mode == TopologyMode::Preferred
        && solver_request.min_link != MinLink::System
        && let Ok(placement) = fleet.repair(&relaxed, &previous)
    {
        *solver_request = relaxed;
        let count = request.valid.request.nodes;
        return Ok((placement, Some(format!("minLink {min_link:?} is not met: no {count} nodes have it free"))));
    }
    Err(refused)
}

/// Converts the API's slowest allowed ring link to the solver's type.
fn min_link(link: api::MinLink) -> MinLink {
    match link {
        api::MinLink::NVLink => MinLink::NVLink,
        api::MinLink::PCIeSwitch => MinLink::PCIeSwitch,
        api::MinLink::PCIeHost => MinLink::PCIeHost,
        api::MinLink::NUMA => MinLink::Numa,
        api::MinLink::System => MinLink::System,
    }
}

/// The previous placement of the pods, in rank order.
fn previous_placement(job: &TrainJob, candidates: &Candidates<'_>) -> Vec<(Option<NodeOrd>, u32)> {
    let placement = job.status.as_ref().and_then(|status| status.placement.as_ref());
    let of_node = |placed: &PlacedNode| {
        // Nodes are sorted by name.
        let position = candidates.nodes.binary_search_by(|node| node.facts.name.cmp(&placed.node_name)).ok();
        let machine = position.and_then(|position| candidates.nodes[position].described());
        let set = machine.map_or(0, |machine| machine.mask(placed.gpus.iter().map(String::as_str)));
        (position.map(|position| NodeOrd(position as u32)), set)
    };
    placement.iter().flat_map(|placement| placement.nodes.iter().map(of_node)).collect()
}

/// Other GPUs are reported as a loss if their value is below this many thousandths of the plan's.
const EQUIVALENT_PERMILLE: u64 = 950;

/// Compares a pod's actual GPUs with the planned ones and returns the cost, for a gang of `pods`.
/// `None` if they are as good, or if either set is unknown.
pub(super) fn compare(machine: &Machine, pods: usize, planned: &[String], actual: &[String]) -> Option<String> {
    let mask = |uuids: &[String]| machine.mask(uuids.iter().map(String::as_str));
    let (planned, actual) = (mask(planned), mask(actual));
    // A single pod has no traffic between nodes.
    let reach = (pods > 1).then_some(Level { share: 1000, nvlink: false });
    let value = |set: u32| machine.shape.value(set, reach, MinLink::System);
    let (wanted, got) = (value(planned), value(actual));
    let is_known = planned != 0 && actual != 0;
    if planned == actual || !is_known || u64::from(got) * 1000 >= u64::from(wanted) * EQUIVALENT_PERMILLE {
        return None;
    }
    let names = |set: u32| ranges(bits(set).filter_map(|gpu| Some(machine.gpus.get(gpu)?.index)).collect());
    Some(format!(
        "GPUs {} instead of {}: {} GB/s instead of {}",
        names(actual),
        names(planned),
        gigabytes(got),
        gigabytes(wanted)
    ))
}
