//! What the pods of a gang ask for as they were admitted. Admission adds to the template: tolerations, selectors of namespaces and queues,
//! defaults of a LimitRange, the overhead of a runtime, sidecars.

use super::view::PodView;
use crate::ValidJob;
use crate::eligible::NodeRules;
use std::collections::BTreeMap;
use std::sync::Arc;
use switchyard_core::quantity::Resources;
use switchyard_crds::TrainJobStatus;

#[derive(Debug, Clone, PartialEq)]
pub struct Admitted {
    /// Of the pod that asks for most.
    pub requests: Resources,
    /// What the pods say of their nodes, each rule once.
    pub rules: Vec<Arc<NodeRules>>,
    /// Position in `rules` by node rank, where not all pods have the same: Kueue may pin each of them to another node.
    pub of_rank: Vec<usize>,
}

impl Admitted {
    /// Of pods with these rules, in the order of their ranks.
    pub fn new(requests: Resources, of_ranks: impl IntoIterator<Item = Arc<NodeRules>>) -> Admitted {
        let mut rules: Vec<Arc<NodeRules>> = Vec::new();
        // Thousands of pods may be pinned to a node each: they are compared with those of the same selector only.
        let mut by_selector: BTreeMap<BTreeMap<String, String>, Vec<usize>> = BTreeMap::new();
        let mut position = |own: Arc<NodeRules>| {
            let alike = by_selector.entry(own.selector.clone()).or_default();
            let known = alike.iter().copied().find(|known| rules[*known] == own);
            known.unwrap_or_else(|| {
                alike.push(rules.len());
                rules.push(own);
                rules.len() - 1
            })
        };
        let mut of_rank: Vec<usize> = of_ranks.into_iter().map(&mut position).collect();
        if rules.len() < 2 {
            of_rank.clear();
        }
        Admitted { requests, rules, of_rank }
    }

    /// As the template says, for pods that have not been made.
    pub fn of_template(valid: &ValidJob, status: Option<&TrainJobStatus>) -> Admitted {
        Admitted::new(valid.pod.requests(status), [Arc::new(NodeRules::of(&valid.pod.spec))])
    }

    /// As the gated pods say; as the template says where there are none.
    pub fn of<'a>(
        valid: &ValidJob,
        status: Option<&TrainJobStatus>,
        pods: impl IntoIterator<Item = &'a PodView>,
    ) -> Admitted {
        let mut requests = Resources::default();
        let mut by_rank: BTreeMap<u32, Arc<NodeRules>> = BTreeMap::new();
        for pod in pods {
            let Some(own) = &pod.rules else { continue };
            requests = requests.max(&pod.requests);
            by_rank.insert(pod.node_rank, own.clone());
        }
        let Some(first) = by_rank.values().next().cloned() else { return Admitted::of_template(valid, status) };
        let of_rank = |rank| by_rank.get(&rank).unwrap_or(&first).clone();
        Admitted::new(requests, (0..valid.request.nodes).map(of_rank))
    }
}
