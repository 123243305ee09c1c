//! Placement of a whole gang: nodes, GPUs and rank order with the reasons, or why there is no
//! placement.

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
    // Predict no bandwidth for nodes without a report.
    let is_known = sites.nodes.iter().any(|node| node.described().is_some());
    let best = if is_known { sites.empty().bandwidth(&request).unwrap_or(0) } else { 0 };
    let best = best.max(placement.bandwidth);
    let status = Chosen { need: &need, sites: &sites, placement: &placement, best }.status(note);
    Ok(Placed { status, excluded: sites.left_out() })
}

/// Whether a placement exists. Much cheaper than `place`, which also computes the placement and the
/// reasons.
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

/// Levels and policy that apply. Both are empty if the job ignores topology.
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
    /// Admission gave the pods different rules, and too few nodes satisfy the rules of some of
    /// them.
    Ranks(Shortage),
}

/// Finds the placement and what was given up for it. Replaces `request` by the one that was
/// satisfied.
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
    // The best nodes do not suit all ranks. For each domain that may contain the gang, cover the
    // ranks with suitable nodes, and choose the best of these placements.
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

/// Solves as if each pod could run on every node that any pod may use.
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
        // Prefer CPU-only nodes for CPU-only jobs.
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
fn earlier(job: &TrainJob, sites: &Sites<'_>) -> Vec<(Option<NodeOrd>, u32)> {
    let placement = job.status.as_ref().and_then(|status| status.placement.as_ref());
    let of_node = |placed: &PlacedNode| {
        // Nodes are sorted by name.
        let position = sites.nodes.binary_search_by(|node| node.facts.name.cmp(&placed.node_name)).ok();
        let machine = position.and_then(|position| sites.nodes[position].described());
        let set = machine.map_or(0, |machine| machine.mask(placed.gpus.iter().map(String::as_str)));
        (position.map(|position| NodeOrd(position as u32)), set)
    };
    placement.iter().flat_map(|placement| placement.nodes.iter().map(of_node)).collect()
}

/// Other GPUs are reported as a loss if their value is below this many thousandths of the plan's.
const AS_GOOD: u64 = 950;

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
