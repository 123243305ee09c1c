//! Preflight: checks the chosen gang before anything starts, from the agents' reports, the pod and
//! the decisions. Uses no GPU time. Pure.
//!
//! ```text
//! gang (reports, pod, own environment) + decisions ─> `CHECKS` ─> faults of nodes ─> folded ─> PreflightStatus
//! ```
//!
//! A check without the facts it needs is skipped with a reason, never counted as passed. Numbers
//! and titles are stable, because messages of the doctor and the documentation refer to them
//! (`docs/placement-and-fabric.md`).

mod addresses;
mod environment;
mod fault;
mod health;
mod input;
mod memory;
mod nvlink;
mod pcie;
mod pods;
mod transport;

use super::gang::Gang;
use fault::{NodeFault, Outcome};
use input::CheckInput;
use switchyard_core::units::counted;
use switchyard_crds::{FabricDecision, PreflightFinding, PreflightSeverity, PreflightSkip, PreflightStatus};

/// Limits on all findings and on those of one check. A fault that differs on every node must not
/// hide the findings of other checks.
const MAX_FINDINGS: usize = 64;
const MAX_PER_CHECK: usize = 4;

pub struct Check {
    /// Stable.
    pub number: u8,
    /// Shown to users; stable.
    pub title: &'static str,
    run: fn(&CheckInput<'_>) -> Outcome,
}

const fn check(number: u8, title: &'static str, run: fn(&CheckInput<'_>) -> Outcome) -> Check {
    Check { number, title, run }
}

/// All checks, by number.
pub const CHECKS: [Check; 27] = [
    check(1, "RDMA in the pod", transport::granted),
    check(2, "interface", addresses::interface),
    check(3, "RoCE GID", addresses::gid),
    check(4, "MTU, rate, port errors", transport::uniform),
    check(5, "RDMA devices", transport::adapters),
    check(6, "address of RoCE port", addresses::without_address),
    check(7, "/dev/shm", memory::shared),
    check(8, "locked memory", memory::locked),
    check(9, "ACS", pcie::acs),
    check(10, "GPUDirect RDMA", pcie::direct),
    check(11, "Fabric Manager", nvlink::fabric_manager),
    check(12, "NVLink between nodes", nvlink::between_nodes),
    check(13, "lost GPU", health::lost),
    check(14, "GPU health", health::recovery),
    check(15, "PCIe link", pcie::link),
    check(16, "NVLinks", nvlink::links),
    check(17, "ranks per GPU", pods::ranks),
    check(18, "pods per node", pods::one_per_node),
    check(19, "topology file", pods::topology_file),
    check(20, "Gloo interface", addresses::gloo),
    check(21, "CPUs near GPUs", pods::cpus),
    check(22, "user's settings", pods::settings),
    check(23, "mixed gang", environment::mixed),
    check(24, "link flaps", transport::flaps),
    check(25, "device files", environment::device_files),
    check(26, "limits and UVM", environment::limits),
    check(27, "memory limit", memory::limit),
];

/// Result of all checks.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PreflightResult {
    pub status: PreflightStatus,
    /// Ranks of the nodes that cause every blocking finding; empty if nothing blocks, or if the job
    /// or the whole gang is at fault.
    pub blamed: Vec<u32>,
}

/// Checks a gang. `decisions` come from [`super::decide`].
pub fn run(gang: &Gang<'_>, decisions: &[FabricDecision]) -> PreflightResult {
    let input = CheckInput { gang, decisions };
    let mut status = PreflightStatus::default();
    let mut blocks: Vec<Vec<u32>> = Vec::new();
    for check in &CHECKS {
        match (check.run)(&input) {
            Ok(found) if found.is_empty() => status.passed += 1,
            Ok(found) => {
                let blocking = found.iter().filter(|found| found.fault.severity == PreflightSeverity::Block);
                blocks.extend(blocking.map(|found| found.nodes.clone()));
                status.findings.extend(findings(gang, check, found));
            }
            Err(reason) => {
                let (check, title) = (check.number.into(), check.title.into());
                status.skipped.push(PreflightSkip { check, title, reason: cut(&reason, 512) });
            }
        }
    }
    status.not_applicable = status.skipped.len() as i32;
    status.findings.sort_by_key(|finding| (finding.severity, finding.check));
    status.findings.truncate(MAX_FINDINGS);
    let is_of_nodes = blocks.iter().all(|nodes| !nodes.is_empty());
    let mut blamed = if is_of_nodes { blocks.concat() } else { Vec::new() };
    blamed.sort_unstable();
    blamed.dedup();
    PreflightResult { status, blamed }
}

/// The first blocking finding with its fix, as one sentence.
pub fn blocking(status: &PreflightStatus) -> Option<String> {
    let first = status.findings.iter().find(|finding| finding.severity == PreflightSeverity::Block)?;
    Some(format!("preflight check {} ({}): {}; {}", first.check, first.title, first.message, first.fix))
}

/// Summarizes the number of findings; `None` if there are none.
pub fn count(status: &PreflightStatus) -> Option<String> {
    let of = |severity| status.findings.iter().filter(|finding| finding.severity == severity).count();
    match (of(PreflightSeverity::Block), of(PreflightSeverity::Warn)) {
        (0, 0) => None,
        (0, warnings) => Some(counted(warnings as u64, "warning")),
        (blocks, 0) => Some(format!("{} would block", counted(blocks as u64, "finding"))),
        (blocks, warnings) => {
            Some(format!("{} would block, {}", counted(blocks as u64, "finding"), counted(warnings as u64, "warning")))
        }
    }
}

/// The first findings of a check, blocking ones first. The last one says how many were omitted.
fn findings(gang: &Gang<'_>, check: &Check, mut found: Vec<NodeFault>) -> Vec<PreflightFinding> {
    found.sort_by_key(|found| found.fault.severity);
    let more = found.len().saturating_sub(MAX_PER_CHECK);
    let mut shown: Vec<PreflightFinding> =
        found.iter().take(MAX_PER_CHECK).map(|found| finding(gang, check, found)).collect();
    if let Some(last) = shown.last_mut().filter(|_| more > 0) {
        last.message = cut(
            &format!("{}; and {} of this check", cut(&last.message, 960), counted(more as u64, "more finding")),
            1024,
        );
    }
    shown
}

fn finding(gang: &Gang<'_>, check: &Check, found: &NodeFault) -> PreflightFinding {
    let fault = &found.fault;
    let message = match found.nodes.is_empty() {
        true => fault.what.clone(),
        false => format!("{}: {}", fault::node_list(gang, &found.nodes), fault.what),
    };
    PreflightFinding {
        check: check.number.into(),
        title: check.title.into(),
        severity: fault.severity,
        message: cut(&message, 1024),
        effect: cut(&fault.effect, 512),
        evidence: cut(&fault.evidence, 1024),
        fix: cut(&fault.fix, 1024),
    }
}

fn cut(text: &str, most: usize) -> String {
    text.chars().take(most).collect()
}
