//! GPUs held for restarting gangs.

use super::Index;
use crate::job::{JobId, is_live};
use crate::usage::{RESTART_PREFIX, Share};
use std::collections::BTreeSet;
use switchyard_crds::{PlacedNode, conditions};

impl Index {
    /// Holds the GPUs of a restarting gang on its nodes until planning shows that it cannot be
    /// placed. Returns the nodes on which it released some.
    pub fn update_restart_hold(&mut self, id: &JobId) -> BTreeSet<String> {
        let wanted = self.job_of(id).filter(|job| is_live(job) && !job.spec.suspend).and_then(|job| {
            let status = job.status.as_ref()?;
            let placed = status.condition(conditions::PLACED)?;
            let restarts = placed.status == "False" && placed.reason == conditions::RESTARTING;
            status.placement.clone().filter(|_| restarts)
        });
        let nodes = wanted.map(|placement| placement.nodes).unwrap_or_default();
        let next: Vec<String> = (0..nodes.len()).map(|rank| format!("{RESTART_PREFIX}{}/{rank}", id.uid)).collect();
        let mut freed = BTreeSet::new();
        for gone in self.restart_holds.remove(id).into_iter().flatten().skip(next.len()) {
            freed.extend(self.usage.set_share(&gone, None));
        }
        for (taker, PlacedNode { node_name, gpus, .. }) in next.iter().zip(nodes) {
            freed.extend(self.usage.set_share(taker, Some(Share { node: node_name, gpus, ..Share::default() })));
        }
        if !next.is_empty() {
            self.restart_holds.insert(id.clone(), next);
        }
        freed
    }
}
