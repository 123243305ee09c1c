//! Free resources of every node: allocatable less the requests of pods, and the unallocated GPUs.
//! Updated incrementally.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use switchyard_core::quantity::Resources;
use switchyard_crds::device_use::DeviceUse;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_plan::cluster::is_stale;
use switchyard_plan::cluster::machine::{Machine, Shapes};
use switchyard_plan::cluster::view::NodeView;

/// Name prefixes of the takers that hold resources for restarting gangs, and for the head of the
/// queue.
pub(crate) const RESTART_PREFIX: &str = "restart/";
pub(crate) const RESERVED_PREFIX: &str = "reserved/";

/// Nodes and their usage.
#[derive(Debug, Default)]
pub struct Usage {
    nodes: BTreeMap<String, NodeView>,
    /// Shares by taker: the UID of a pod, a claim, or another name.
    shares: BTreeMap<String, Share>,
    /// Takers by node, including nodes that are not known yet.
    takers_by_node: BTreeMap<String, Vec<String>>,
    /// Agents' reports, by node.
    reports: BTreeMap<String, Report>,
    /// UUIDs of GPUs that drivers offer for claims, by node and slice.
    offers: BTreeMap<String, BTreeMap<String, Vec<String>>>,
    shapes: Shapes,
}

/// The resources that a taker (a pod, a claim, a reservation) holds on a node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Share {
    pub node: String,
    pub amount: Resources,
    /// UUIDs of GPUs.
    pub gpus: Vec<String>,
    /// Whether it is released only by deleting the pod, which does not end by itself.
    pub is_lasting: bool,
    /// UIDs of the pods for which a claim is reserved. Its GPUs are released with the last of them.
    pub reserved_for: Vec<String>,
}

impl AsMut<Usage> for Usage {
    fn as_mut(&mut self) -> &mut Usage {
        self
    }
}

/// Usage, or a type that contains it, without some shares. Dropping this restores the shares, even
/// after a panic, because a lost share would be allocated twice.
#[derive(Debug)]
pub struct UsageOverlay<'a, T: AsMut<Usage>> {
    base: &'a mut T,
    removed: BTreeMap<String, Share>,
}

impl<'a, T: AsMut<Usage>> UsageOverlay<'a, T> {
    /// Takes out the shares of these takers until this is dropped.
    pub fn new<S: AsRef<str>>(base: &'a mut T, takers: &[S]) -> UsageOverlay<'a, T> {
        let mut overlay = UsageOverlay { base, removed: BTreeMap::new() };
        overlay.remove(takers);
        overlay
    }

    /// Takes out more shares. Returns their nodes.
    pub fn remove<S: AsRef<str>>(&mut self, takers: &[S]) -> BTreeSet<String> {
        let usage = self.base.as_mut();
        let mut nodes = BTreeSet::new();
        for taker in takers.iter().map(AsRef::as_ref) {
            if let Some(share) = usage.shares.get(taker).cloned() {
                self.removed.insert(taker.to_string(), share);
                nodes.extend(usage.set_share(taker, None));
            }
        }
        nodes
    }

    /// Puts shares back that were taken out. Returns their nodes.
    pub fn restore<S: AsRef<str>>(&mut self, takers: &[S]) -> BTreeSet<String> {
        let mut nodes = BTreeSet::new();
        for taker in takers.iter().map(AsRef::as_ref) {
            if let Some(share) = self.removed.remove(taker) {
                nodes.insert(share.node.clone());
                self.base.as_mut().set_share(taker, Some(share));
            }
        }
        nodes
    }
}

impl<T: AsMut<Usage>> Deref for UsageOverlay<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.base
    }
}

impl<T: AsMut<Usage>> DerefMut for UsageOverlay<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.base
    }
}

impl<T: AsMut<Usage>> Drop for UsageOverlay<'_, T> {
    fn drop(&mut self) {
        for (taker, share) in std::mem::take(&mut self.removed) {
            self.base.as_mut().set_share(&taker, Some(share));
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Report {
    machine: Result<Machine, String>,
    in_use: Vec<DeviceUse>,
}

impl Usage {
    /// All nodes by name.
    pub fn nodes(&self) -> &BTreeMap<String, NodeView> {
        &self.nodes
    }

    /// A node appeared or changed. Returns whether there may be more room than before.
    pub fn set_node(&mut self, mut view: NodeView) -> bool {
        let name = view.facts.name.clone();
        view.free = view.allocatable.clone();
        if let Some(before) = self.nodes.get(&name).filter(|before| before.facts.labels == view.facts.labels) {
            view.facts.labels = before.facts.labels.clone();
        }
        for share in self.takers_by_node.get(&name).into_iter().flatten().map(|taker| &self.shares[taker]) {
            view.free = view.free.less(&share.amount);
            if share.is_lasting {
                view.lasting = view.lasting.plus(&share.amount);
            }
        }
        let before = self.nodes.insert(name.clone(), view);
        self.refresh(&name);
        let view = &self.nodes[&name];
        before.is_none_or(|before| before != *view)
    }

    /// A node was deleted.
    pub fn remove_node(&mut self, name: &str) {
        self.nodes.remove(name);
    }

    /// Sets the share of a taker; `None` releases it. Returns the node on which resources were
    /// released.
    pub fn set_share(&mut self, taker: &str, share: Option<Share>) -> Option<String> {
        if self.shares.get(taker) == share.as_ref() {
            return None;
        }
        let freed = self.shares.remove(taker);
        if let Some(before) = &freed {
            if let Some(takers) = self.takers_by_node.get_mut(&before.node) {
                takers.retain(|other| other != taker);
                if takers.is_empty() {
                    self.takers_by_node.remove(&before.node);
                }
            }
            if let Some(node) = self.nodes.get_mut(&before.node) {
                node.free = node.free.plus(&before.amount);
                if before.is_lasting {
                    node.lasting = node.lasting.less(&before.amount);
                }
            }
            self.recount_gpus(&before.node);
        }
        if let Some(share) = share {
            let node = share.node.clone();
            if let Some(node) = self.nodes.get_mut(&node) {
                node.free = node.free.less(&share.amount);
                if share.is_lasting {
                    node.lasting = node.lasting.plus(&share.amount);
                }
            }
            self.takers_by_node.entry(node.clone()).or_default().push(taker.to_string());
            self.shares.insert(taker.to_string(), share);
            self.recount_gpus(&node);
        }
        freed.map(|share| share.node)
    }

    /// A node without some of its takers.
    pub fn node_without(&self, name: &str, is_removed: impl Fn(&str) -> bool) -> Option<NodeView> {
        let mut view = self.nodes.get(name)?.clone();
        let takers = self.takers_by_node.get(name).into_iter().flatten();
        let (removed, stay): (Vec<&String>, Vec<&String>) = takers.partition(|taker| is_removed(taker));
        for taker in &removed {
            view.free = view.free.plus(&self.shares[*taker].amount);
        }
        if !removed.is_empty() {
            view.taken = self.gpus_of(name, stay.into_iter());
        }
        Some(view)
    }

    /// Bit mask of the GPUs of a node that these takers hold.
    fn gpus_of<'a>(&self, node: &str, takers: impl Iterator<Item = &'a String>) -> u32 {
        let machine = self.reports.get(node).and_then(|report| report.machine.as_ref().ok());
        let mask = |machine: &Machine| {
            let masks = takers.map(|taker| machine.mask(self.shares[taker].gpus.iter().map(String::as_str)));
            masks.fold(0, |all, gpus| all | gpus)
        };
        machine.map_or(0, mask)
    }

    /// The share of a taker.
    pub fn share(&self, taker: &str) -> Option<&Share> {
        self.shares.get(taker)
    }

    /// Stores the report of a node's agent. Returns whether it affects placement.
    pub fn set_report(&mut self, name: &str, report: Result<&GPUTopology, String>) -> bool {
        let name = name.to_string();
        let status = report.as_ref().ok().and_then(|report| report.status.as_ref());
        let in_use = status.map(|status| status.in_use.clone()).unwrap_or_default();
        let next = Report { machine: report.and_then(|report| self.shapes.machine(report)), in_use };
        // A report that only renews the time, before the old one expired, is not a change.
        let is_new = self.reports.get(&name).is_none_or(|before| {
            let mut same = before.clone();
            if let (Ok(same), Ok(next)) = (&mut same.machine, &next.machine) {
                let is_late = same.observed.zip(next.observed).is_some_and(|(before, now)| is_stale(before, now));
                same.observed = next.observed.filter(|_| !is_late);
            }
            same != next
        });
        self.reports.insert(name.clone(), next);
        self.refresh(&name);
        is_new
    }

    /// The report of a node was deleted.
    pub fn remove_report(&mut self, name: &str) {
        self.reports.remove(name);
        self.refresh(name);
    }

    /// Number of nodes by state of their reports.
    pub fn reports(&self) -> BTreeMap<&'static str, usize> {
        let mut counts: BTreeMap<&'static str, usize> =
            ["usable", "unusable", "none", "notNeeded"].map(|word| (word, 0)).into();
        for node in self.nodes.values() {
            let word = match &node.machine {
                Some(Ok(_)) => "usable",
                Some(Err(_)) => "unusable",
                None if node.gpus() > 0 || node.offered.is_some() => "none",
                // Agents may run only on nodes with GPUs.
                None => "notNeeded",
            };
            *counts.entry(word).or_default() += 1;
        }
        counts
    }

    /// UUIDs of the GPUs that the kubelet assigned to a pod, as reported by the node's agent.
    pub fn assigned_gpus(&self, node: &str, namespace: &str, pod: &str) -> Vec<String> {
        let uses = self.reports.get(node).map(|report| report.in_use.as_slice()).unwrap_or_default();
        let is_theirs = |used: &&DeviceUse| used.namespace == namespace && used.pod == pod;
        uses.iter().filter(is_theirs).map(|used| used.device.clone()).collect()
    }

    /// Sets the GPUs of a node that a slice offers for claims, which may be empty; `None` if it has
    /// no GPUs. Returns whether the offer changed.
    pub fn set_offer(&mut self, slice: &str, node: &str, uuids: Option<Vec<String>>) -> bool {
        let offers = self.offers.entry(node.to_string()).or_default();
        let is_new = offers.get(slice) != uuids.as_ref();
        match uuids {
            Some(uuids) => drop(offers.insert(slice.to_string(), uuids)),
            None => drop(offers.remove(slice)),
        }
        if offers.is_empty() {
            self.offers.remove(node);
        }
        self.refresh(node);
        is_new
    }

    /// GPUs of a node offered for claims; `None` if no slice has GPUs there.
    pub(crate) fn offered(&self, node: &str) -> Option<impl Iterator<Item = &String>> {
        Some(self.offers.get(node)?.values().flatten())
    }

    /// Recomputes the allocated GPUs of a node, and those among them that are released only when a
    /// pod is deleted.
    fn recount_gpus(&mut self, name: &str) {
        let takers = || self.takers_by_node.get(name).into_iter().flatten();
        let taken = self.gpus_of(name, takers());
        let lasting = self.gpus_of(name, takers().filter(|taker| self.is_lasting(taker)));
        if let Some(view) = self.nodes.get_mut(name) {
            (view.taken, view.lasting_gpus) = (taken, lasting);
        }
    }

    /// Whether a taker's share is released only when a pod is deleted. The pods of a claim run on
    /// the node of its devices, so a recount of that node covers changes of their shares.
    fn is_lasting(&self, taker: &str) -> bool {
        let share = &self.shares[taker];
        let is_lasting = |pod: &String| self.shares.get(pod).is_some_and(|pod| pod.is_lasting);
        share.is_lasting || share.reserved_for.iter().any(is_lasting)
    }

    /// Recomputes the GPU state of a node from reports and offers.
    fn refresh(&mut self, name: &str) {
        self.recount_gpus(name);
        let report = self.reports.get(name);
        let machine = report.and_then(|report| report.machine.as_ref().ok());
        let mask = |uuids: &mut dyn Iterator<Item = &String>| {
            machine.map_or(0, |machine| machine.mask(uuids.map(String::as_str)))
        };
        let in_use = report.map_or(0, |report| mask(&mut report.in_use.iter().map(|used| &used.device)));
        let offered = self.offered(name).map(|mut uuids| mask(&mut uuids));
        let Some(view) = self.nodes.get_mut(name) else { return };
        (view.in_use, view.offered) = (in_use, offered);
        if view.machine.as_ref() != report.map(|report| &report.machine) {
            view.machine = report.map(|report| report.machine.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Share, Usage, UsageOverlay};
    use serde_json::json;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use switchyard_plan::cluster::view::NodeView;

    #[test]
    fn a_report_counts_as_missing_only_on_gpu_nodes() {
        let mut usage = Usage::default();
        for (name, gpus) in [("cpu", "0"), ("plugin", "8"), ("driver", "0")] {
            let node =
                json!({"metadata": {"name": name}, "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": gpus}}});
            usage.set_node(NodeView::of(&serde_json::from_value(node).unwrap()));
        }
        usage.set_offer("slice", "driver", Some(vec!["GPU-1".into()]));
        assert_eq!(usage.reports(), [("usable", 0), ("unusable", 0), ("none", 2), ("notNeeded", 1)].into());
    }

    #[test]
    fn removed_shares_are_restored_after_a_panic() {
        let mut usage = Usage::default();
        let share = |gpu: &str| Share { node: "n".into(), gpus: vec![gpu.into()], ..Share::default() };
        usage.set_share("a", Some(share("GPU-1")));
        usage.set_share("b", Some(share("GPU-2")));
        let caught = catch_unwind(AssertUnwindSafe(|| {
            let mut overlay = UsageOverlay::new(&mut usage, &["a", "nobody"]);
            overlay.remove(&["b"]);
            assert!(overlay.share("a").is_none() && overlay.share("b").is_none());
            assert_eq!(overlay.restore(&["a", "nobody"]), ["n".to_string()].into());
            assert!(overlay.share("a").is_some() && overlay.share("b").is_none());
            panic!("in the middle");
        }));
        assert!(caught.is_err());
        assert_eq!((usage.share("a"), usage.share("b")), (Some(&share("GPU-1")), Some(&share("GPU-2"))));
    }
}
