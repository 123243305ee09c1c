//! Nodes that are not registered although pods of jobs are bound to them.

use super::Index;
use crate::job::JobId;
use jiff::{SignedDuration, Timestamp};

/// How long missing nodes are remembered. Their pods are given up long before.
const MISSING_FOR: SignedDuration = SignedDuration::from_hours(1);

impl Index {
    /// Records since when the nodes of a job's pods are missing.
    pub fn note_missing(&mut self, job: &JobId, now: Timestamp) {
        // Entries whose pods are gone as well are never used again.
        self.missing.retain(|_, since| now.duration_since(*since) < MISSING_FOR);
        let pods = self.job_states.get(job).into_iter().flat_map(|state| state.pods.values());
        for node in pods.filter(|pod| !pod.is_over()).filter_map(|pod| pod.node.as_ref()) {
            if !self.usage.nodes().contains_key(node) {
                self.missing.entry(node.clone()).or_insert(now);
            }
        }
    }
}
