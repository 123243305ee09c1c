//! Faults that checks report. Equal faults of several nodes are merged into one finding.

use super::super::gang::{Gang, Member};
use std::collections::BTreeMap;
use switchyard_crds::PreflightSeverity;
use switchyard_crds::gpu_topology::GPUTopologyStatus;

/// Maximum number of nodes and devices named in a message. The rest are counted.
const MAX_NAMED: usize = 3;

/// A fault of a node or of the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub severity: PreflightSeverity,
    /// The problem, without the node; the message puts the node first.
    pub what: String,
    /// The consequence.
    pub effect: String,
    /// The fact and its source.
    pub evidence: String,
    /// How to fix it.
    pub fix: String,
}

impl Fault {
    pub fn block(what: impl Into<String>) -> Fault {
        Fault::new(PreflightSeverity::Block, what.into())
    }

    pub fn warn(what: impl Into<String>) -> Fault {
        Fault::new(PreflightSeverity::Warn, what.into())
    }

    pub fn of(severity: PreflightSeverity, what: impl Into<String>) -> Fault {
        Fault::new(severity, what.into())
    }

    fn new(severity: PreflightSeverity, what: String) -> Fault {
        Fault { severity, what, effect: String::new(), evidence: String::new(), fix: String::new() }
    }

    pub fn effect(self, effect: impl Into<String>) -> Fault {
        Fault { effect: effect.into(), ..self }
    }

    pub fn evidence(self, evidence: impl Into<String>) -> Fault {
        Fault { evidence: evidence.into(), ..self }
    }

    pub fn fix(self, fix: impl Into<String>) -> Fault {
        Fault { fix: fix.into(), ..self }
    }

    /// Marks the fault as the job's instead of a node's.
    pub fn of_job(self) -> NodeFault {
        NodeFault { nodes: Vec::new(), fault: self }
    }
}

/// A fault with the ranks of its nodes; no ranks if it is the job's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeFault {
    pub nodes: Vec<u32>,
    pub fault: Fault,
}

/// The faults, or why the check does not apply.
pub(super) type Outcome = Result<Vec<NodeFault>, String>;

/// Checks every node that reports. `look` returns the faults of a node, or the fact that is
/// missing. If there are no faults but a fact is missing, the check is skipped, not passed.
pub(super) fn each(
    gang: &Gang<'_>,
    run: impl Fn(u32, &Member<'_>, &GPUTopologyStatus) -> Result<Vec<Fault>, String>,
) -> Outcome {
    let mut found: Vec<NodeFault> = Vec::new();
    let mut unknown: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for (rank, member) in (0..).zip(&gang.members) {
        let faults = match member.facts {
            Some(facts) => run(rank, member, facts),
            None => Err(member.silence.to_string()),
        };
        match faults {
            Err(why) => unknown.entry(why).or_default().push(rank),
            Ok(faults) => faults.into_iter().for_each(|fault| add(&mut found, rank, fault)),
        }
    }
    match unknown.into_iter().next() {
        Some((why, nodes)) if found.is_empty() => Err(format!("{}: {why}", node_list(gang, &nodes))),
        _ => Ok(found),
    }
}

fn add(found: &mut Vec<NodeFault>, rank: u32, fault: Fault) {
    match found.iter_mut().find(|known| known.fault == fault) {
        Some(known) => known.nodes.push(rank),
        None => found.push(NodeFault { nodes: vec![rank], fault }),
    }
}

/// Formats nodes: `gpu-01`, `2 of 8 nodes (gpu-01, gpu-02)`, `all 8 nodes`, `both nodes`.
pub(super) fn node_list(gang: &Gang<'_>, ranks: &[u32]) -> String {
    let all = gang.members.len();
    match ranks {
        [only] => gang.members[*only as usize].name.to_string(),
        [_, _] if all == 2 => "both nodes".into(),
        ranks if ranks.len() == all => format!("all {all} nodes"),
        ranks => format!("{} of {all} nodes ({})", ranks.len(), names(gang, ranks)),
    }
}

fn names(gang: &Gang<'_>, ranks: &[u32]) -> String {
    list(ranks.iter().map(|rank| gang.members[*rank as usize].name))
}

/// Formats names: `mlx5_0, mlx5_1, mlx5_2 and 5 more`.
pub(super) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    // One more name is as short as `and 1 more`.
    let shown = if names.len() <= MAX_NAMED + 1 { names.len() } else { MAX_NAMED };
    let more = names.len() - shown;
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{rest}", names[..shown].join(", "))
}

/// The values of a fact if the nodes differ: `9000 on 6 of 8 nodes (…), 1500 on gpu-07`. The most
/// frequent value comes first. Nodes without a value are ignored.
pub(super) fn differences(
    gang: &Gang<'_>,
    value: impl Fn(&Member<'_>, &GPUTopologyStatus) -> Option<String>,
) -> Option<String> {
    let mut values: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for (rank, member) in (0..).zip(&gang.members) {
        if let Some(value) = member.facts.and_then(|facts| value(member, facts)) {
            values.entry(value).or_default().push(rank);
        }
    }
    if values.len() < 2 {
        return None;
    }
    let mut values: Vec<(String, Vec<u32>)> = values.into_iter().collect();
    values.sort_by_key(|(_, ranks)| std::cmp::Reverse(ranks.len()));
    let parts: Vec<String> =
        values.iter().map(|(value, ranks)| format!("{value} on {}", node_list(gang, ranks))).collect();
    Some(parts.join(", "))
}
