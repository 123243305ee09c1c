//! The interface through which processes find each other.

use super::super::gang::Gang;
use super::super::profile::Profile;
use super::{Outcome, RULES, Rule, is_for, leave, set};
use switchyard_crds::{DecisionOutcome, FabricDecision, Framework};

/// Interface of the pod network inside a pod, as container runtimes name it.
const POD_INTERFACE: &str = "eth0";

/// The decided value of `*_IFNAME` for the node of this rank.
pub fn interface(decisions: &[FabricDecision], rank: u32) -> Option<&str> {
    let is_interface = |decision: &&FabricDecision| {
        let rule = RULES.iter().find(|rule| rule.name == decision.name);
        rule.is_some_and(|rule| rule.is_per_node() && Rule::is_env(rule.name))
    };
    let of_rank = |decision: &&FabricDecision| decision.outcome == DecisionOutcome::Set && is_for(decision, rank);
    decisions.iter().filter(is_interface).find(of_rank)?.value.as_deref()
}

/// For NCCL, which treats names without the sign as prefixes.
pub(super) fn socket_interface(gang: &Gang<'_>, rank: u32) -> Outcome {
    let reason =
        "NCCL would try other interfaces first, such as ib0 or a secondary network, which may not lead to all nodes";
    outgoing_interface(gang, rank, "=", reason)
}

/// For programs that take a full name.
pub(super) fn plain_interface(gang: &Gang<'_>, rank: u32) -> Outcome {
    let reason =
        "it binds to the address of the host's name otherwise, which may be a loopback address, and reads no file";
    outgoing_interface(gang, rank, "", reason)
}

/// The interface through which the processes of a node reach the others, prefixed with `sign`.
fn outgoing_interface(gang: &Gang<'_>, rank: u32, sign: &str, reason: &str) -> Outcome {
    if !gang.uses_host_network() {
        let name = pod_interface(gang.profile);
        return set(format!("{sign}{name}"), reason, "spec.hostNetwork is not set: the interface of the pod network");
    }
    let host = gang.members[rank as usize].facts.and_then(|facts| facts.host.as_ref());
    match host.and_then(|host| host.default_route.as_deref()) {
        Some(name) => set(format!("{sign}{name}"), reason, "spec.hostNetwork; host.defaultRoute of the GPUTopology"),
        None => leave("the interface of the default route is not known", "no host.defaultRoute in the GPUTopology"),
    }
}

/// The interface variables of processes that read no file, with their value in the pod network;
/// `None` if the value depends on the node and is known only after placement.
pub fn interfaces(
    framework: Framework,
    uses_host_network: bool,
    profile: Option<&Profile>,
) -> Vec<(&'static str, Option<String>)> {
    let names =
        RULES.iter().filter(|rule| rule.scope.includes(framework) && rule.is_per_node() && Rule::is_env(rule.name));
    let value = (!uses_host_network).then(|| pod_interface(profile).to_string());
    names.map(|rule| (rule.name, value.clone())).collect()
}

fn pod_interface(profile: Option<&Profile>) -> &str {
    profile.and_then(|profile| profile.pod_interface.as_deref()).unwrap_or(POD_INTERFACE)
}
