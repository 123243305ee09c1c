//! The environment that identifies a process as a rank. Every executor sets it first. Further
//! variables depend on the location of files and sockets.

use super::ValidJob;
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
pub(crate) fn identity(valid: &ValidJob, attempt: u32, node_rank: u32) -> Vec<EnvEntry> {
    vec![
        EnvEntry::new(env::JOB, &valid.name, "metadata.name"),
        EnvEntry::new(env::ATTEMPT, attempt, "fences off processes of older attempts"),
        EnvEntry::new(env::NODE_RANK, node_rank, "position of the node in the ring of nodes"),
        EnvEntry::new(env::NUM_NODES, valid.request.nodes, "spec.trainer.numNodes"),
        EnvEntry::new(env::PROCS_PER_NODE, valid.request.processes_per_node, "spec.trainer.numProcPerNode"),
    ]
}
