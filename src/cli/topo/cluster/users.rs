//! Finds the user of each GPU, from the GPUs assigned to jobs, the kubelets' reports, and the GPU
//! counts of other pods.

use super::Use;
use crate::snapshot::{SnapshotFile, name_of};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use switchyard_crds::conditions;
use switchyard_crds::device_use::DeviceUse;
use switchyard_crds::names::GPU_RESOURCE;
use switchyard_ledger::offline::Cluster;
use switchyard_plan::cluster::is_over;
use switchyard_plan::cluster::view::{NodeView, PodView};

/// GPU users by node.
pub(super) struct Users {
    /// Users by node and GPU UUID.
    by_name: BTreeMap<(String, String), String>,
    /// GPUs requested by each user's pods on each node.
    counted: BTreeMap<String, BTreeMap<String, usize>>,
    /// User numbers in order of first appearance.
    numbers: BTreeMap<String, usize>,
}

impl Users {
    pub(super) fn of(file: &SnapshotFile, cluster: &Cluster) -> Users {
        let mut users = Users { by_name: BTreeMap::new(), counted: BTreeMap::new(), numbers: BTreeMap::new() };
        let mut owners: BTreeMap<(String, String), String> = BTreeMap::new();
        for item in file.items.iter().filter(|item| item["kind"] == "Pod") {
            // Unreadable pods were already rejected when the cluster was built.
            let Ok(pod) = Deserialize::deserialize(item) else { continue };
            let pod = PodView::of(&pod);
            let namespace = text(item, "/metadata/namespace");
            let owner = format!("{namespace}/{}", job_of(item).unwrap_or(&pod.name));
            let gpus = usize::try_from(pod.requests.get(GPU_RESOURCE) / 1000).unwrap_or(0);
            if let Some(node) = pod.node.as_ref().filter(|_| gpus > 0 && !pod.is_over()) {
                *users.counted.entry(node.clone()).or_default().entry(owner.clone()).or_default() += gpus;
            }
            owners.insert((namespace, pod.name), owner);
        }
        for item in file.items.iter().filter(|item| item["kind"] == "GPUTopology") {
            let node = text(item, "/metadata/name");
            let uses = item.pointer("/status/inUse").and_then(|uses| Vec::<DeviceUse>::deserialize(uses).ok());
            for used in uses.into_iter().flatten() {
                // A slightly old report can still list a deleted pod; then the user is unknown.
                if let Some(owner) = owners.get(&(used.namespace, used.pod)) {
                    users.by_name.insert((node.clone(), used.device), owner.clone());
                }
            }
        }
        for job in cluster.jobs().into_iter().filter(|job| !is_over(job)) {
            let Some(status) = &job.status else { continue };
            if !status.is(conditions::PLACED) {
                continue;
            }
            for node in status.placement.iter().flat_map(|place| &place.nodes) {
                for gpu in &node.gpus {
                    users.by_name.insert((node.node_name.clone(), gpu.clone()), name_of(job));
                }
            }
        }
        users
    }

    /// Users by number.
    pub(super) fn names(self) -> Vec<String> {
        let mut names: Vec<(String, usize)> = self.numbers.into_iter().collect();
        names.sort_by_key(|(_, number)| *number);
        names.into_iter().map(|(name, _)| name).collect()
    }

    fn number(&mut self, user: &str) -> usize {
        let next = self.numbers.len();
        *self.numbers.entry(user.to_owned()).or_insert(next)
    }

    /// Number and use of each GPU of a node.
    pub(super) fn of_node(&mut self, view: &NodeView) -> Vec<(u32, Use)> {
        let node = &view.facts.name;
        let mut waiting = self.counted.remove(node).unwrap_or_default();
        let mut gpus: Vec<(u32, Use)> = match view.described() {
            None => (0..view.gpus()).map(|gpu| (gpu, Use::Free)).collect(),
            Some(machine) => {
                let mut gpus = Vec::new();
                for (position, gpu) in machine.gpus.iter().enumerate() {
                    let user = self.by_name.get(&(node.clone(), gpu.uuid.clone())).cloned();
                    if let Some(left) = user.as_ref().and_then(|user| waiting.get_mut(user)) {
                        *left = left.saturating_sub(1);
                    }
                    let bit = 1 << position;
                    let used = match user {
                        _ if machine.usable & bit == 0 => Use::NotUsable,
                        Some(user) => Use::By(self.number(&user)),
                        None if (view.taken | view.in_use) & bit != 0 => Use::Unknown,
                        None => Use::Free,
                    };
                    gpus.push((gpu.index, used));
                }
                gpus
            }
        };
        for (user, mut left) in waiting.into_iter().filter(|(_, count)| *count > 0) {
            let number = self.number(&user);
            let used_by = if left < gpus.len() { Use::Counted(number) } else { Use::By(number) };
            // Assign GPUs of unknown users first, then free ones.
            for wanted in [Use::Unknown, Use::Free] {
                for (_, used) in gpus.iter_mut().filter(|(_, used)| *used == wanted).take(left) {
                    *used = used_by;
                    left -= 1;
                }
            }
        }
        gpus
    }
}

/// The TrainJob that controls a pod.
fn job_of(pod: &Value) -> Option<&str> {
    let owners = pod.pointer("/metadata/ownerReferences")?.as_array()?;
    let ours = owners.iter().find(|owner| owner["kind"] == "TrainJob" && owner["controller"] == true)?;
    ours["name"].as_str()
}

fn text(item: &Value, path: &str) -> String {
    item.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned()
}
