//! A place for the whole gang: the nodes, the GPUs on them, the order of ranks, and why there; or why there is none.

mod chosen;
#[cfg(test)]
mod tests;

use super::admitted::Admitted;
use super::excluded::Excluded;
use super::levels::Levels;
use super::machine::Machine;
use super::need::Need;
use super::question::Question;
use super::ranks::Shortage;
use super::refusal::{self, NoPlace};
use super::sites::Sites;
use super::view::NodeView;
use chosen::{Chosen, ranges};
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

/// A place for every pod of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// For the status of the job.
    pub status: PlacementStatus,
    /// Nodes that are left out, with the reason.
    pub excluded: Vec<(String, Excluded)>,
}

/// Chooses the nodes and the GPUs.
///
/// # Errors
/// Why there is no place, and the smallest changes with which there is one.
pub fn place(question: &Question<'_>, nodes: &BTreeMap<String, NodeView>) -> Result<Placed, NoPlace> {
    let need = Need::of(question);
    if need.gpus() as usize > MAX_GPUS {
        let gpus = need.gpus();
        return Err(NoPlace::impossible(format!(
            "{GPU_RESOURCE}: got {gpus} for each node; expected at most {MAX_GPUS}"
        )));
    }
    let (levels, policy) = levels_and_policy(question);
    let mut sites = Sites::of(nodes, levels, policy, &need);
    let mut request = request(&need, &sites, policy);
    let mut fleet = sites.fleet();
    let (placement, note) = solve(&need, &mut sites, &mut fleet, &mut request).map_err(|refused| {
        let refused = match refused {
            NoPlacement::Room(refused) => refused,
            NoPlacement::Ranks(shortage) => return refusal::of_ranks(&shortage, &sites),
        };
        let why = refusal::explain(&need, &sites, &mut fleet, &request, &refused);
        sites.note_links(&mut fleet, &request, question.job.spec.topology_policy.node_topology.min_link);
        let why = NoPlace { excluded: sites.left_out(), ..why };
        let with = |admitted: &Admitted| {
            let question = Question { admitted, ..*question };
            let bandwidth = Sites::of(nodes, levels, policy, &Need::of(&question)).fleet().bandwidth(&request);
            bandwidth.map(|bandwidth| Some(bandwidth).filter(|bandwidth| *bandwidth != UNLIMITED))
        };
        refusal::with_rules_changed(why, question, nodes, with)
    })?;
    // No bandwidth is claimed for nodes without a report.
    let is_known = sites.nodes.iter().any(|node| node.described().is_some());
    let best = if is_known { sites.empty().bandwidth(&request).unwrap_or(0) } else { 0 };
    let best = best.max(placement.bandwidth);
    let status = Chosen { need: &need, sites: &sites, placement: &placement, best }.status(note);
    Ok(Placed { status, excluded: sites.left_out() })
}

/// Whether there is a place: `place` without the place or the reasons, which cost many times as much.
pub fn fits(question: &Question<'_>, nodes: &BTreeMap<String, NodeView>) -> bool {
    let need = Need::of(question);
    if need.gpus() as usize > MAX_GPUS {
        return false;
    }
    let (levels, policy) = levels_and_policy(question);
    let mut sites = Sites::of(nodes, levels, policy, &need);
    let mut request = request(&need, &sites, policy);
    let mut fleet = sites.fleet();
    solve(&need, &mut sites, &mut fleet, &mut request).is_ok()
}

/// The levels and the policy that count: none of either where the job ignores topology.
fn levels_and_policy<'a>(question: &Question<'a>) -> (&'a Levels, &'a api::TopologyPolicy) {
    static IGNORED: LazyLock<(Levels, api::TopologyPolicy)> =
        LazyLock::new(|| (Levels::none(), api::TopologyPolicy::default()));
    let policy = &question.job.spec.topology_policy;
    if policy.mode == TopologyMode::Ignored { (&IGNORED.0, &IGNORED.1) } else { (question.rules.levels, policy) }
}

fn request(need: &Need<'_>, sites: &Sites<'_>, policy: &api::TopologyPolicy) -> Request {
    Request {
        groups: vec![Group { pods: need.question.valid.request.nodes, gpus: need.gpus() as u8 }],
        min_link: min_link(policy.node_topology.min_link),
        within: sites.tree.within,
        slices: None,
    }
}

/// Why there is no placement.
enum NoPlacement {
    Room(Refusal),
    /// The pods were admitted with different rules, by which some of them have too few nodes.
    Ranks(Shortage),
}

/// Finds the placement and what was given up for it. `request` becomes the one that was served.
fn solve(
    need: &Need<'_>,
    sites: &mut Sites<'_>,
    fleet: &mut Fleet,
    request: &mut Request,
) -> Result<(Placement, Option<String>), NoPlacement> {
    let (placement, note) = solve_for_any_rank(need, sites, fleet, request).map_err(NoPlacement::Room)?;
    let rules = &need.demand.rules;
    if rules.are_equal() {
        return Ok((placement, note));
    }
    let facts = |nodes: &[usize]| nodes.iter().map(|node| &sites.nodes[*node].facts).collect::<Vec<_>>();
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
    // The best nodes do not fit all ranks. Of each domain that may contain the gang, nodes are taken that do, and the best of these
    // placements is chosen.
    let badly: Vec<usize> =
        fleet.below_min_link(request.groups[0].gpus, request.min_link).iter().map(|node| node.0 as usize).collect();
    let mut by_domain: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    for node in sites.open().filter(|node| badly.binary_search(node).is_err()) {
        let domain = request.within.map(|level| sites.tree.domains[node].get(level).copied().flatten());
        if domain != Some(None) {
            by_domain.entry(domain.flatten()).or_default().push(node);
        }
    }
    let before = earlier(need.question.job, sites);
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
        let Ok(placement) = sites.only(&only).repair(request, &before) else { continue };
        let Ok(placement) = in_order(&placement) else { continue };
        if best.as_ref().is_none_or(|best| best.bandwidth < placement.bandwidth) {
            best = Some(placement);
        }
    }
    best.map(|placement| (placement, note)).ok_or(NoPlacement::Ranks(why))
}

/// The same as if each pod might run on every node on which some pod may.
fn solve_for_any_rank(
    need: &Need<'_>,
    sites: &mut Sites<'_>,
    fleet: &mut Fleet,
    request: &mut Request,
) -> Result<(Placement, Option<String>), Refusal> {
    let question = need.question;
    let policy = &question.job.spec.topology_policy;
    let before = earlier(question.job, sites);
    if need.gpus() == 0 && sites.open().any(|node| sites.nodes[node].gpus() > 0) {
        // Nodes with GPUs are for those that need them, as long as there are others.
        if let Ok(placement) = sites.without_gpus().repair(request, &before) {
            return Ok((placement, None));
        }
    }
    let asked = policy.node_topology.min_link;
    let refused = match fleet.repair(request, &before) {
        Ok(placement) => {
            sites.note_links(fleet, request, asked);
            return Ok((placement, None));
        }
        Err(refused) => refused,
    };
    let loose = Request { min_link: MinLink::System, ..request.clone() };
    if policy.mode == TopologyMode::Preferred
        && request.min_link != MinLink::System
        && let Ok(placement) = fleet.repair(&loose, &before)
    {
        *request = loose;
        let count = question.valid.request.nodes;
        return Ok((placement, Some(format!("minLink {asked:?} is given up: no {count} nodes have it free"))));
    }
    Err(refused)
}

/// The slowest link that a ring may contain, in the words of placement.
fn min_link(link: api::MinLink) -> MinLink {
    match link {
        api::MinLink::NVLink => MinLink::NVLink,
        api::MinLink::PCIeSwitch => MinLink::PCIeSwitch,
        api::MinLink::PCIeHost => MinLink::PCIeHost,
        api::MinLink::NUMA => MinLink::Numa,
        api::MinLink::System => MinLink::System,
    }
}

/// Where the pods were before, in the order of ranks.
fn earlier(job: &TrainJob, sites: &Sites<'_>) -> Vec<(Option<NodeOrd>, u32)> {
    let placement = job.status.as_ref().and_then(|status| status.placement.as_ref());
    let of_node = |placed: &PlacedNode| {
        // Nodes are in the order of their names.
        let position = sites.nodes.binary_search_by(|node| node.facts.name.cmp(&placed.node_name)).ok();
        let machine = position.and_then(|position| sites.nodes[position].described());
        let set = machine.map_or(0, |machine| machine.mask(placed.gpus.iter().map(String::as_str)));
        (position.map(|position| NodeOrd(position as u32)), set)
    };
    placement.iter().flat_map(|placement| placement.nodes.iter().map(of_node)).collect()
}

/// Thousandths of the plan's value below which other GPUs are a loss worth reporting.
const AS_GOOD: u64 = 950;

/// What a pod of a gang of `pods` has instead of the plan's GPUs, and what that costs; `None`: they are as good, or one of the two is not
/// known.
pub(super) fn compare(machine: &Machine, pods: usize, planned: &[String], actual: &[String]) -> Option<String> {
    let mask = |uuids: &[String]| machine.mask(uuids.iter().map(String::as_str));
    let (planned, actual) = (mask(planned), mask(actual));
    // A single pod sends nothing to others.
    let reach = (pods > 1).then_some(Level { share: 1000, nvlink: false });
    let value = |set: u32| machine.shape.value(set, reach, MinLink::System);
    let (wanted, got) = (value(planned), value(actual));
    let is_known = planned != 0 && actual != 0;
    if planned == actual || !is_known || u64::from(got) * 1000 >= u64::from(wanted) * AS_GOOD {
        return None;
    }
    let names = |set: u32| ranges(bits(set).filter_map(|gpu| Some(machine.gpus.get(gpu)?.index)).collect());
    Some(format!(
        "GPUs {} in place of {}: {} GB/s in place of {}",
        names(actual),
        names(planned),
        gigabytes(got),
        gigabytes(wanted)
    ))
}
