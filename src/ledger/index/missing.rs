//! Nodes that are not registered although pods of jobs are bound to them.

use super::Index;
use crate::job::JobId;
use jiff::{SignedDuration, Timestamp};

/// Nodes that are missing are remembered for this long: their pods are given up long before.
const MISSING_FOR: SignedDuration = SignedDuration::from_hours(1);

impl Index {
    /// Notes since when nodes of a job's pods are not there.
    pub fn note_missing(&mut self, job: &JobId, now: Timestamp) {
        // Those whose pods are gone as well are not asked for again.
        self.missing.retain(|_, since| now.duration_since(*since) < MISSING_FOR);
        let pods = self.families.get(job).into_iter().flat_map(|family| family.pods.values());
        for node in pods.filter(|pod| !pod.is_over()).filter_map(|pod| pod.node.as_ref()) {
            if !self.usage.nodes().contains_key(node) {
                self.missing.entry(node.clone()).or_insert(now);
            }
        }
    }
}
