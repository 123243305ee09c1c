//! Explains why a gang cannot be placed, in numbers, with the smallest changes that would make it
//! fit.

use super::admitted::Admitted;
use super::candidates::Candidates;
use super::demand::GangDemand;
use super::excluded::Excluded;
use super::placement_request::PlacementRequest;
use super::ranks::{HOST, Shortage};
use super::view::NodeView;
use crate::eligible::Unfit;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use switchyard_core::placement::gpus::{Fleet, Group, MinLink, Refusal, Request, UNLIMITED};
use switchyard_core::quantity::Resources;
use switchyard_core::rates::gigabytes;
use switchyard_core::units::plural;
use switchyard_crds::MinLink as ApiMinLink;

/// Maximum number of reasons named.
const MAX_NAMED: usize = 3;

/// Why there is no placement.
#[derive(Debug, Clone, PartialEq)]
pub struct NoPlacement {
    /// One sentence.
    pub sentence: String,
    /// Changes of the manifest. Each of them is sufficient.
    pub changes: Vec<Change>,
    /// Excluded nodes, with reasons.
    pub excluded: Vec<(String, Excluded)>,
    /// Nodes with room for a pod.
    pub open: u32,
    /// Fewer nodes have room than the gang has pods: more nodes would help.
    pub lacks_nodes: bool,
}

/// A change of the manifest with which the job would fit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The field and its value.
    pub field: String,
    /// Resulting ring bandwidth of the job, in MB/s. `None` if it has no ring, or if nothing is
    /// known.
    pub bandwidth: Option<u32>,
}

impl NoPlacement {
    /// For a request that no cluster could satisfy.
    pub fn impossible(sentence: String) -> NoPlacement {
        NoPlacement { sentence, changes: Vec::new(), excluded: Vec::new(), open: 0, lacks_nodes: false }
    }
}

impl std::fmt::Display for NoPlacement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.sentence)?;
        for (number, Change { field, bandwidth }) in self.changes.iter().enumerate() {
            f.write_str(if number == 0 { "; smallest change that fits: " } else { ", or " })?;
            f.write_str(field)?;
            if let Some(bandwidth) = bandwidth {
                write!(f, " ({} GB/s)", gigabytes(*bandwidth))?;
            }
        }
        Ok(())
    }
}

/// Names the binding constraint and finds changes that would lift it.
pub(super) fn explain(
    demand: &GangDemand<'_>,
    candidates: &Candidates<'_>,
    fleet: &mut Fleet,
    solver_request: &Request,
    refusal: &Refusal,
) -> NoPlacement {
    let request = demand.request;
    let count = request.valid.request.nodes;
    let [_, below_min_link, fit] = refusal.groups.first().copied().unwrap_or_default();
    let mut wanted: Vec<String> = Vec::new();
    if demand.gpus() > 0 {
        wanted.push(format!("{} GPU{}", demand.gpus(), plural(demand.gpus().into())));
    }
    // Every pod implicitly requests one pod slot: mention it only if the pod requests nothing else.
    if demand.gpus() == 0 || demand.pod.amounts.names().count() > 1 {
        wanted.push(demand.pod.amounts.to_string());
    }
    let mut sentence = match (solver_request.within, refusal.fullest) {
        (Some(level), Some((most, node))) if fit >= count => {
            let key = &candidates.tree.keys[level];
            let name = candidates.tree.domain(node.0 as usize, level).unwrap_or("a node without that label");
            format!(
                "{fit} nodes have room for {}, but one {key} has at most {most} of {count}, in {name}",
                wanted.join(", ")
            )
        }
        _ if count == 1 && fit == 0 => format!("no node has room for {}", wanted.join(", ")),
        _ => format!("{fit} of {count} needed nodes have room for {}", wanted.join(", ")),
    };
    if let Some(level) = solver_request.within {
        let without = (0..candidates.nodes.len()).filter(|node| candidates.tree.domain(*node, level).is_none()).count();
        if without > 0 {
            sentence.push_str(&format!(
                "; {without} node{} no label {}",
                if without == 1 { " has" } else { "s have" },
                candidates.tree.keys[level]
            ));
        }
    }
    if below_min_link > 0 {
        let link = request.job.spec.topology_policy.node_topology.min_link;
        sentence.push_str(&format!(
            "; on {below_min_link} node{} the free GPUs are not joined by {link:?} or better",
            plural(below_min_link.into())
        ));
    }
    sentence.push_str(&pinned(demand, candidates));
    sentence.push_str(&describe_excluded(&candidates.excluded));
    if candidates.nodes.is_empty() {
        sentence.push_str("; the cluster has no nodes");
    }
    let changes = changes(request, fleet, solver_request, &candidates.tree.keys);
    let open = fit + below_min_link;
    NoPlacement { sentence, changes, excluded: Vec::new(), open, lacks_nodes: open < count }
}

/// Too few nodes satisfy the rules of some pods, which admission gave different rules.
pub(super) fn rank_shortage(shortage: &Shortage, candidates: &Candidates<'_>) -> NoPlacement {
    let sentence = shortage.sentence(|node| candidates.nodes[node].facts.name.clone());
    let open = candidates.open().count() as u32;
    NoPlacement { sentence, changes: Vec::new(), excluded: candidates.excluded_nodes(), open, lacks_nodes: false }
}

/// The hosts that pods are pinned to and that cannot take them.
fn pinned(demand: &GangDemand<'_>, candidates: &Candidates<'_>) -> String {
    let mut sentence = String::new();
    let rules = &demand.pod.rules;
    if let Some(host) = rules.shared_pin().filter(|_| demand.request.valid.request.nodes > 1) {
        sentence.push_str(&format!("; all pods are pinned to {host}, and each pod of a gang needs its own node"));
    }
    let why = |host: &str| {
        let is_host = |node: &&NodeView| node.facts.labels.get(HOST).is_some_and(|label| label == host);
        match candidates.nodes.iter().position(is_host) {
            Some(node) => candidates.excluded[node].as_ref().map(ToString::to_string),
            None => Some("no node has this name".into()),
        }
    };
    let unmet = rules.pins().filter_map(|(host, rank)| Some((host, rank, why(host)?)));
    for (host, rank, why) in unmet.take(MAX_NAMED) {
        sentence.push_str(&format!("; pod {rank} is pinned to {host}: {why}"));
    }
    sentence
}

/// Maximum number of pod rules for which changes are tried: each try costs as much as a placement.
const MAX_RULES: usize = 4;

/// Adds sufficient changes of tolerations, selectors and affinities. `with` returns the job's
/// bandwidth if its pods had the given rules.
pub(super) fn add_rule_changes(
    mut why: NoPlacement,
    request: &PlacementRequest<'_>,
    nodes: &BTreeMap<String, NodeView>,
    with: impl Fn(&Admitted) -> Option<Option<u32>>,
) -> NoPlacement {
    // Number of nodes that each rule excludes. Changing the rule makes at most these nodes
    // available, in addition to those with room.
    let mut excluded_by_rule: Vec<(&Unfit, u32)> = Vec::new();
    for (_, excluded) in &why.excluded {
        let Excluded::Unfit(unfit) = excluded else { continue };
        match excluded_by_rule.iter_mut().find(|(other, _)| *other == unfit) {
            Some((_, count)) => *count += 1,
            None => excluded_by_rule.push((unfit, 1)),
        }
    }
    let open = nodes.len() - why.excluded.len();
    let missing = (request.valid.request.nodes as usize).saturating_sub(open) as u32;
    excluded_by_rule.retain(|(unfit, count)| unfit.change().is_some() && *count >= missing);
    excluded_by_rule.sort_by_key(|(_, count)| Reverse(*count));
    let mut changes = Vec::new();
    for (unfit, _) in excluded_by_rule.into_iter().take(MAX_RULES) {
        let rules = request.admitted.rules.iter().map(|rules| Arc::new(rules.without(unfit))).collect();
        let admitted = Admitted { rules, ..request.admitted.clone() };
        if let (Some(field), Some(bandwidth)) = (unfit.change(), with(&admitted)) {
            changes.push(Change { field, bandwidth });
        }
    }
    // List these before changes that would alter the job's nature.
    changes.append(&mut why.changes);
    why.changes = changes;
    why
}

/// Names the resource that most excluded nodes lack, and the most frequent reasons why others
/// cannot be used.
fn describe_excluded(excluded: &[Option<Excluded>]) -> String {
    let mut sentence = String::new();
    let mut short: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    let mut gpus: Vec<u32> = Vec::new();
    // This job's own experience with a node precedes reasons that exclude it for every job.
    let mut refused: BTreeMap<(bool, String), usize> = BTreeMap::new();
    // Neighbouring nodes are mostly excluded for the same reason, so format it once.
    for same in excluded.chunk_by(|a, b| a == b) {
        match &same[0] {
            None => {}
            Some(Excluded::Short { name, free, .. }) => {
                short.entry(name).or_default().extend(same.iter().map(|_| free))
            }
            Some(Excluded::Gpus { free, .. }) => gpus.push(*free),
            Some(other) => {
                let others_too = !matches!(other, Excluded::Avoided(_));
                *refused.entry((others_too, other.to_string())).or_default() += same.len();
            }
        }
    }
    if let Some(most) = gpus.iter().max() {
        sentence.push_str(&format!("; most free GPUs on the others: {most}"));
    }
    // If several resources are short on equally many nodes, report the first.
    if let Some((name, free)) = short.iter().rev().max_by_key(|(_, free)| free.len()) {
        let most = Resources::amount(name, free.iter().copied().max().unwrap_or(0));
        sentence.push_str(&format!("; most free {name} on the others: {most}"));
    }
    // Most nodes may be excluded by the job's own selector. Then the shortage on the other nodes is
    // the relevant information.
    let mut refused: Vec<((bool, String), usize)> = refused.into_iter().collect();
    refused.sort_by_key(|((others_too, _), nodes)| (*others_too, Reverse(*nodes)));
    for ((_, why), nodes) in refused.iter().take(MAX_NAMED) {
        sentence.push_str(&format!("; {nodes} node{} cannot be used: {why}", plural(*nodes as u64)));
    }
    sentence
}

/// Changes that are each sufficient: dropping a level, fewer nodes, fewer GPUs per node, slower
/// links.
fn changes(
    request: &PlacementRequest<'_>,
    fleet: &mut Fleet,
    solver_request: &Request,
    keys: &[String],
) -> Vec<Change> {
    let mut changes = Vec::new();
    let group = solver_request.groups[0];
    let mut fits = |solver_request: &Request| {
        fleet.bandwidth(solver_request).map(|bandwidth| Some(bandwidth).filter(|bandwidth| *bandwidth != UNLIMITED))
    };
    let with = |group: Group| Request { groups: vec![group], ..solver_request.clone() };
    if let Some(level) = solver_request.within {
        let freed = Request { within: None, ..solver_request.clone() };
        if let Some(bandwidth) = fits(&freed) {
            let domains = &request.job.spec.topology_policy.domains;
            let position = domains.iter().position(|domain| domain.key == keys[level]).unwrap_or(0);
            changes.push(Change { field: format!("topologyPolicy.domains[{position}].mode: Preferred"), bandwidth });
        }
    }
    if solver_request.min_link != MinLink::System {
        let better = MinLink::ALL.into_iter().filter(|link| *link > solver_request.min_link);
        let mut relaxed = better.map(|link| (link, Request { min_link: link, ..solver_request.clone() }));
        if let Some((link, bandwidth)) = relaxed.find_map(|(link, solver_request)| Some((link, fits(&solver_request)?)))
        {
            let word = match link {
                MinLink::NVLink => ApiMinLink::NVLink,
                MinLink::PCIeSwitch => ApiMinLink::PCIeSwitch,
                MinLink::PCIeHost => ApiMinLink::PCIeHost,
                MinLink::Numa => ApiMinLink::NUMA,
                MinLink::System => ApiMinLink::System,
            };
            changes.push(Change { field: format!("topologyPolicy.nodeTopology.minLink: {word:?}"), bandwidth });
        }
    }
    // Whatever fits with some number of nodes also fits with fewer.
    let (mut most, mut too_many) = (0, group.pods);
    let mut bandwidth = None;
    while too_many - most > 1 {
        let pods = most.midpoint(too_many);
        match fits(&with(Group { pods, ..group })) {
            Some(found) => (most, bandwidth) = (pods, found),
            None => too_many = pods,
        }
    }
    if most > 0 {
        changes.push(Change { field: format!("trainer.numNodes: {most}"), bandwidth });
    }
    let fewer = (1..group.gpus).rev().map(|gpus| (gpus, with(Group { gpus, ..group })));
    let mut fewer = fewer.filter(|_| most == 0 || group.pods == 1);
    if let Some((gpus, bandwidth)) = fewer.find_map(|(gpus, solver_request)| Some((gpus, fits(&solver_request)?))) {
        let field = format!("trainer.resourcesPerNode.limits[nvidia.com/gpu]: {gpus}");
        changes.push(Change { field, bandwidth });
    }
    changes
}
