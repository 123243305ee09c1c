//! Which pods of a gang may run on which nodes. Usually all pods have the same rules. A queue with
//! topology-aware scheduling, such as Kueue, pins each pod to its own host or rack.

use super::admitted::Admitted;
use crate::eligible::{self, NodeFacts, NodeRules, Unfit};
use k8s_openapi::api::core::v1::PodSpec;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use switchyard_core::units::plural;

/// Label that identifies a single node in a selector.
pub(super) const HOST: &str = "kubernetes.io/hostname";
/// Maximum number of pods or nodes named in a sentence.
const MAX_NAMED: usize = 4;

/// Node rules of the pods, and the pods they apply to.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RankRules {
    kinds: Vec<Kind>,
    /// Kinds whose selector names a host, by host.
    pinned: BTreeMap<String, Vec<usize>>,
    /// All other kinds.
    unpinned: Vec<usize>,
    /// Rules from the template itself. All others were added by admission.
    template: Template,
}

#[derive(Debug, Clone, PartialEq)]
struct Kind {
    rules: Arc<NodeRules>,
    /// Node ranks in ascending order. Empty if all pods are of this kind.
    ranks: Vec<usize>,
}

#[derive(Debug, Clone, PartialEq)]
struct Template {
    selector: Vec<String>,
    has_affinity: bool,
}

/// Pods that have too few nodes in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shortage {
    /// Node ranks.
    pub ranks: Vec<usize>,
    /// Positions of all nodes that any of them may use.
    pub nodes: Vec<usize>,
}

impl RankRules {
    /// `template` is the pod as specified by the job itself.
    pub fn of(admitted: &Admitted, template: &PodSpec) -> RankRules {
        let kind = |rules: &Arc<NodeRules>| Kind { rules: rules.clone(), ranks: Vec::new() };
        let mut kinds: Vec<Kind> = admitted.rules.iter().map(kind).collect();
        for (rank, kind) in admitted.rule_of_rank.iter().enumerate() {
            kinds[*kind].ranks.push(rank);
        }
        let (mut pinned, mut unpinned) = (BTreeMap::<String, Vec<usize>>::new(), Vec::new());
        for (number, kind) in kinds.iter().enumerate() {
            match kind.rules.selector.get(HOST) {
                Some(host) => pinned.entry(host.clone()).or_default().push(number),
                None => unpinned.push(number),
            }
        }
        let affinity = template.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let template = Template {
            selector: template.node_selector.iter().flat_map(BTreeMap::keys).cloned().collect(),
            has_affinity: affinity
                .is_some_and(|affinity| affinity.required_during_scheduling_ignored_during_execution.is_some()),
        };
        RankRules { kinds, pinned, unpinned, template }
    }

    /// Whether all pods have the same rules.
    pub fn is_uniform(&self) -> bool {
        self.kinds.len() < 2
    }

    /// Why no pod may run on a node, regardless of free resources.
    pub fn refused_by(&self, node: &NodeFacts) -> Option<Unfit> {
        if self.accepting(node).next().is_some() {
            return None;
        }
        let first = self.candidates(node).next().or(self.kinds.first().map(|_| 0))?;
        let unfit = eligible::can_run(&self.kinds[first].rules, node).err()?;
        Some(match unfit {
            Unfit::Selector(key) if !self.template.selector.contains(&key) => Unfit::AddedSelector(key),
            Unfit::Affinity if !self.template.has_affinity => Unfit::AddedAffinity,
            other => other,
        })
    }

    /// Kinds whose pods may use a node as far as host pinning is concerned.
    fn candidates(&self, node: &NodeFacts) -> impl Iterator<Item = usize> {
        let pinned = node.labels.get(HOST).and_then(|host| self.pinned.get(host));
        pinned.into_iter().flatten().chain(&self.unpinned).copied()
    }

    /// Kinds whose pods may run on a node.
    fn accepting(&self, node: &NodeFacts) -> impl Iterator<Item = usize> {
        self.candidates(node).filter(|kind| eligible::can_run(&self.kinds[*kind].rules, node).is_ok())
    }

    /// For each rank, the position in `nodes` of its node, if ranks have different rules. A rank
    /// keeps its own position where its rules allow that.
    ///
    /// # Errors
    /// Pods that have too few nodes.
    pub fn assign(&self, nodes: &[&NodeFacts]) -> Result<Vec<usize>, Shortage> {
        let mut matching = Matching::new(self, nodes);
        for (number, kind) in self.kinds.iter().enumerate() {
            let own = kind.ranks.iter().filter(|rank| matching.nodes_of[number].binary_search(rank).is_ok());
            own.for_each(|rank| matching.owners[*rank] = Some(number));
        }
        matching.complete(self)?;
        let mut by_rank = vec![0; self.kinds.iter().map(|kind| kind.ranks.len()).sum()];
        for (number, kind) in self.kinds.iter().enumerate() {
            kind.ranks.iter().zip(matching.of(number)).for_each(|(rank, node)| by_rank[*rank] = node);
        }
        Ok(by_rank)
    }

    /// Chooses one allowed node for each pod, if pods have different rules. Earlier nodes are
    /// preferred.
    ///
    /// # Errors
    /// Pods that have too few nodes.
    pub fn cover(&self, nodes: &[&NodeFacts]) -> Result<Vec<usize>, Shortage> {
        let mut matching = Matching::new(self, nodes);
        matching.complete(self)?;
        Ok((0..nodes.len()).filter(|node| matching.owners[*node].is_some()).collect())
    }

    /// The host that all pods are pinned to.
    pub fn shared_pin(&self) -> Option<&str> {
        self.pinned.keys().next().filter(|_| self.is_uniform()).map(String::as_str)
    }

    /// Hosts that single pods are pinned to, with the ranks. Empty if all pods are pinned to one
    /// host.
    pub fn pins(&self) -> impl Iterator<Item = (&str, usize)> {
        self.pinned.iter().flat_map(|(host, kinds)| {
            kinds.iter().flat_map(|kind| &self.kinds[*kind].ranks).map(move |rank| (host.as_str(), *rank))
        })
    }
}

/// Assignment of nodes to kinds of pods.
struct Matching {
    /// Nodes that a kind may use, in ascending order.
    nodes_of: Vec<Vec<usize>>,
    owners: Vec<Option<usize>>,
}

impl Matching {
    fn new(rules: &RankRules, nodes: &[&NodeFacts]) -> Matching {
        let mut nodes_of = vec![Vec::new(); rules.kinds.len()];
        for (position, node) in nodes.iter().enumerate() {
            rules.accepting(node).for_each(|kind| nodes_of[kind].push(position));
        }
        Matching { nodes_of, owners: vec![None; nodes.len()] }
    }

    fn of(&self, kind: usize) -> impl Iterator<Item = usize> {
        self.nodes_of[kind].iter().copied().filter(move |node| self.owners[*node] == Some(kind))
    }

    /// Assigns each kind as many nodes as it has pods.
    fn complete(&mut self, rules: &RankRules) -> Result<(), Shortage> {
        for (number, kind) in rules.kinds.iter().enumerate() {
            for _ in self.of(number).count()..kind.ranks.len() {
                self.augment(number, rules)?;
            }
        }
        Ok(())
    }

    /// Assigns one more node to a kind, along the shortest augmenting path: other kinds may have to
    /// exchange nodes.
    fn augment(&mut self, first: usize, rules: &RankRules) -> Result<(), Shortage> {
        // For each node the kind that reached it, and for each kind the node it would give up.
        let mut reached_by: Vec<Option<usize>> = vec![None; self.owners.len()];
        let mut releases: Vec<Option<usize>> = vec![None; self.nodes_of.len()];
        let mut queue = VecDeque::from([first]);
        let mut visited = vec![first];
        while let Some(kind) = queue.pop_front() {
            for node in &self.nodes_of[kind] {
                if reached_by[*node].is_some() || self.owners[*node] == Some(kind) {
                    continue;
                }
                reached_by[*node] = Some(kind);
                let Some(owner) = self.owners[*node] else {
                    self.exchange(*node, first, &reached_by, &releases);
                    return Ok(());
                };
                if owner != first && releases[owner].is_none() {
                    releases[owner] = Some(*node);
                    queue.push_back(owner);
                    visited.push(owner);
                }
            }
        }
        let mut ranks: Vec<usize> = visited.iter().flat_map(|kind| rules.kinds[*kind].ranks.iter().copied()).collect();
        let mut nodes: Vec<usize> = visited.iter().flat_map(|kind| self.nodes_of[*kind].iter().copied()).collect();
        ranks.sort_unstable();
        nodes.sort_unstable();
        nodes.dedup();
        Err(Shortage { ranks, nodes })
    }

    fn exchange(&mut self, free: usize, first: usize, reached_by: &[Option<usize>], releases: &[Option<usize>]) {
        let mut node = free;
        while let Some(kind) = reached_by[node] {
            self.owners[node] = Some(kind);
            match releases[kind].filter(|_| kind != first) {
                Some(released) => node = released,
                None => break,
            }
        }
    }
}

impl Shortage {
    /// Describes the shortage. `name` returns the name of the node at a position.
    pub fn sentence(&self, name: impl Fn(usize) -> String) -> String {
        let ranks = listed(self.ranks.iter().map(ToString::to_string));
        let (pods, nodes) = (self.ranks.len() as u64, self.nodes.len() as u64);
        let accept = if pods == 1 { "accepts" } else { "accept" };
        let names = listed(self.nodes.iter().map(|node| name(*node)));
        let which = if nodes == 0 { String::new() } else { format!(" ({names})") };
        format!(
            "by their rules after admission, {pods} pod{} ({ranks}) {accept} {nodes} of the nodes with room{which}, and each \
             pod of a gang needs its own node",
            plural(pods)
        )
    }
}

fn listed(all: impl ExactSizeIterator<Item = String>) -> String {
    let more = all.len() > MAX_NAMED;
    all.take(MAX_NAMED).collect::<Vec<_>>().join(", ") + if more { ", …" } else { "" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn node(name: usize) -> NodeFacts {
        let labels = [(HOST.to_string(), name.to_string())];
        NodeFacts { name: name.to_string(), labels: Arc::new(labels.into()), ready: true, ..NodeFacts::default() }
    }

    /// Rules that restrict a pod to these nodes.
    fn only(nodes: &[usize]) -> NodeRules {
        let nodes: Vec<String> = nodes.iter().map(ToString::to_string).collect();
        let field = serde_json::json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": HOST, "operator": "In", "values": nodes}]}]});
        NodeRules { required: serde_json::from_value(field).unwrap(), ..NodeRules::default() }
    }

    fn rules(of_ranks: &[NodeRules]) -> RankRules {
        RankRules::of(&Admitted::new(Default::default(), of_ranks.iter().cloned().map(Arc::new)), &PodSpec::default())
    }

    /// Tries every assignment of nodes.
    fn by_brute_force(of_ranks: &[Vec<usize>], taken: &mut Vec<usize>) -> bool {
        let Some(nodes) = of_ranks.get(taken.len()) else { return true };
        nodes.iter().any(|node| {
            if taken.contains(node) {
                return false;
            }
            taken.push(*node);
            let found = by_brute_force(of_ranks, taken);
            taken.pop();
            found
        })
    }

    proptest! {
        #[test]
        fn matching_agrees_with_brute_force(
            of_ranks in prop::collection::vec(prop::collection::btree_set(0_usize..7, 0..4), 2..6),
        ) {
            let of_ranks: Vec<Vec<usize>> = of_ranks.into_iter().map(|nodes| nodes.into_iter().collect()).collect();
            let rules = rules(&of_ranks.iter().map(|nodes| only(nodes)).collect::<Vec<_>>());
            prop_assume!(!rules.is_uniform());
            let nodes: Vec<NodeFacts> = (0..7).map(node).collect();
            let nodes: Vec<&NodeFacts> = nodes.iter().collect();
            let is_possible = by_brute_force(&of_ranks, &mut Vec::new());
            match rules.cover(&nodes) {
                Ok(cover) => {
                    prop_assert!(is_possible && cover.len() == of_ranks.len());
                    let chosen: Vec<&NodeFacts> = cover.iter().map(|node| nodes[*node]).collect();
                    let by_rank = rules.assign(&chosen).unwrap();
                    for (rank, position) in by_rank.iter().enumerate() {
                        prop_assert!(of_ranks[rank].contains(&cover[*position]), "{:?} {:?}", by_rank, cover);
                    }
                    let mut seen = by_rank.clone();
                    seen.sort_unstable();
                    prop_assert_eq!(seen, (0..chosen.len()).collect::<Vec<_>>());
                }
                Err(shortage) => {
                    prop_assert!(!is_possible);
                    prop_assert!(shortage.nodes.len() < shortage.ranks.len(), "{:?}", shortage);
                }
            }
        }
    }

    #[test]
    fn ranks_keep_their_nodes_where_allowed_and_swap_where_required() {
        let nodes: Vec<NodeFacts> = (0..3).map(node).collect();
        let nodes: Vec<&NodeFacts> = nodes.iter().collect();
        let any = || only(&[0, 1, 2]);
        assert_eq!(rules(&[any(), any(), only(&[0])]).assign(&nodes).unwrap(), [1, 2, 0]);
        assert_eq!(rules(&[any(), only(&[1]), any()]).assign(&nodes).unwrap(), [0, 1, 2]);
        // One pod gives its node to another, after a third one has left it.
        assert_eq!(rules(&[only(&[0, 1]), only(&[1, 2]), only(&[0])]).assign(&nodes).unwrap(), [1, 2, 0]);
    }

    #[test]
    fn two_pods_on_one_host_are_named_with_it() {
        let pin =
            |host: &str| NodeRules { selector: [(HOST.to_string(), host.to_string())].into(), ..NodeRules::default() };
        let mut spread = only(&[1]);
        spread.selector = pin("1").selector;
        let rules = rules(&[pin("1"), spread, pin("2")]);
        let nodes: Vec<NodeFacts> = (0..3).map(node).collect();
        assert_eq!(rules.refused_by(&nodes[0]), Some(Unfit::AddedSelector(HOST.into())));
        assert_eq!(rules.refused_by(&nodes[1]), None);
        let shortage = rules.cover(&nodes.iter().collect::<Vec<_>>()).unwrap_err();
        assert_eq!(
            shortage.sentence(|node| format!("n{node}")),
            "by their rules after admission, 2 pods (0, 1) accept 1 of the nodes with room (n1), and each pod of a gang needs its \
             own node"
        );
        assert_eq!(rules.pins().collect::<Vec<_>>(), [("1", 0), ("1", 1), ("2", 2)]);
    }
}
