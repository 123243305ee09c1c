//! The environment that identifies a process as a rank. Every executor sets it first. Further
//! variables depend on the location of files and sockets.

use super::GangPod;
use serde::Serialize;
use switchyard_worker_contract::env;

/// One environment variable and why it is set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvEntry {
    pub name: String,
    pub value: String,
    /// Why it has this value.
    pub reason: String,
}

impl EnvEntry {
    pub(crate) fn new(name: &str, value: impl ToString, reason: impl Into<String>) -> EnvEntry {
        EnvEntry { name: name.into(), value: value.to_string(), reason: reason.into() }
    }
}

/// Variables that all processes of a node share: job, attempt, position in the gang.
pub(crate) fn identity(pod: &GangPod<'_>) -> Vec<EnvEntry> {
    let GangPod { valid, node_rank, .. } = *pod;
    let mut entries = vec![
        EnvEntry::new(env::JOB, &valid.name, "metadata.name"),
        EnvEntry::new(env::ATTEMPT, pod.attempt, "fences off processes of older attempts"),
        EnvEntry::new(env::NODE_RANK, node_rank, "position of the node in the ring of nodes"),
        EnvEntry::new(env::NUM_NODES, valid.request.nodes, "spec.trainer.numNodes"),
        EnvEntry::new(env::PROCS_PER_NODE, pod.processes(), "spec.trainer.numProcPerNode"),
    ];
    let Some(own) = valid.role_of(node_rank) else { return entries };
    entries.push(EnvEntry::new(ROLE, &own.name, "spec.roles[].name"));
    entries.push(EnvEntry::new(ROLE_INDEX, node_rank - own.first_node, "index of the pod in its role"));
    for role in &valid.roles {
        let hosts: Vec<String> = role.node_ranks().map(|rank| pod.host(rank)).collect();
        let reason = format!("hosts of role {}, by index", role.name);
        entries.push(EnvEntry::new(&hosts_variable(&role.name), hosts.join(","), reason));
    }
    entries
}

/// Name of the pod's role.
const ROLE: &str = "SWITCHYARD_ROLE";
/// Index of the pod in its role, from 0.
const ROLE_INDEX: &str = "SWITCHYARD_ROLE_INDEX";

/// Variable with the hosts of a role: `SWITCHYARD_HOSTS_ACTOR_GPU` for `actor-gpu`.
fn hosts_variable(role: &str) -> String {
    format!("SWITCHYARD_HOSTS_{}", role.to_ascii_uppercase().replace('-', "_"))
}
