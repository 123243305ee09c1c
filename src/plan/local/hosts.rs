//! A run on several machines without a cluster. Each machine plans its own part.

use crate::job::Invalid;
use serde::Serialize;
use switchyard_core::placement::Request;

/// The machines of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hosts {
    /// One machine per node of the job, in rank order. Rank 0 listens on the first.
    pub names: Vec<String>,
    /// Position of this machine among them.
    pub node_rank: u32,
}

impl Hosts {
    /// The part of a request that this machine runs.
    ///
    /// # Errors
    /// The names are not one per node, or this machine is not among them.
    pub(super) fn share(&self, request: &Request) -> Result<Request, Invalid> {
        let invalid = |field: &str, got: String, expected: String| Invalid { field: field.to_owned(), got, expected };
        let count = self.names.len();
        if count != request.nodes as usize {
            let expected = format!("{}, one for each node of spec.trainer.numNodes", request.nodes);
            return Err(invalid("--hosts", count.to_string(), expected));
        }
        if let Some(twice) = self.names.iter().enumerate().find(|(at, name)| self.names[..*at].contains(name)) {
            return Err(invalid("--hosts", format!("{} twice", twice.1), "each machine once".to_owned()));
        }
        if self.node_rank as usize >= count {
            return Err(invalid("--node-rank", self.node_rank.to_string(), format!("a number below {count}")));
        }
        Ok(Request { nodes: 1, ..*request })
    }
}
