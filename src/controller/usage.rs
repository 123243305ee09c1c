//! What is free on every node: allocatable less what pods take, kept up to date change by change.

use crate::plan::cluster::view::NodeView;
use crate::plan::resources::Resources;
use std::collections::{BTreeMap, HashMap};

/// Nodes and who takes what on them.
#[derive(Debug, Default)]
pub(super) struct Usage {
    nodes: BTreeMap<String, NodeView>,
    allocatable: HashMap<String, Resources>,
    /// By UID of the pod.
    shares: HashMap<String, Share>,
    /// UIDs by node; a node that is not known yet may have some.
    on: HashMap<String, Vec<String>>,
}

#[derive(Debug, Clone, PartialEq)]
struct Share {
    node: String,
    amount: Resources,
}

impl Usage {
    pub fn nodes(&self) -> &BTreeMap<String, NodeView> {
        &self.nodes
    }

    /// A node appeared or changed. Answers whether there may be more room than before.
    pub fn set_node(&mut self, mut view: NodeView, allocatable: Resources) -> bool {
        let name = view.facts.name.clone();
        view.free = allocatable.clone();
        for uid in self.on.get(&name).into_iter().flatten() {
            view.free = view.free.less(&self.shares[uid].amount);
        }
        let before = self.nodes.get(&name);
        let better = before.is_none_or(|before| before.facts != view.facts || before.free != view.free);
        self.allocatable.insert(name.clone(), allocatable);
        self.nodes.insert(name, view);
        better
    }

    /// A node is gone.
    pub fn remove_node(&mut self, name: &str) {
        self.nodes.remove(name);
        self.allocatable.remove(name);
    }

    /// A pod takes this much on this node; `None`: nothing (any more). Answers whether something became free.
    pub fn set_share(&mut self, uid: &str, share: Option<(String, Resources)>) -> bool {
        let share = share.map(|(node, amount)| Share { node, amount });
        if self.shares.get(uid) == share.as_ref() {
            return false;
        }
        let freed = self.shares.remove(uid);
        if let Some(before) = &freed {
            if let Some(uids) = self.on.get_mut(&before.node) {
                uids.retain(|other| other != uid);
            }
            if let Some(node) = self.nodes.get_mut(&before.node) {
                node.free = node.free.plus(&before.amount);
            }
        }
        if let Some(share) = share {
            if let Some(node) = self.nodes.get_mut(&share.node) {
                node.free = node.free.less(&share.amount);
            }
            self.on.entry(share.node.clone()).or_default().push(uid.to_string());
            self.shares.insert(uid.to_string(), share);
        }
        freed.is_some()
    }
}
