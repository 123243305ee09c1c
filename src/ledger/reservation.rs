//! What the head of the queue holds for itself.

use crate::job::JobId;
use switchyard_crds::PlacedNode;
use switchyard_plan::cluster::turn::Turn;

/// What the head of the queue holds.
#[derive(Debug)]
pub struct Reservation {
    pub job: JobId,
    pub turn: Turn,
    pub nodes: Vec<PlacedNode>,
}

impl Reservation {
    /// Names under which its nodes are taken in the usage.
    pub fn takers(&self) -> impl Iterator<Item = String> {
        (0..self.nodes.len()).map(|rank| format!("held/{}/{rank}", self.job.uid))
    }
}
