//! Requests and scheduling rules of a gang's pods after admission. Admission may add tolerations,
//! namespace or queue selectors, LimitRange defaults, RuntimeClass overhead, and sidecars to the
//! template.

use super::view::PodView;
use crate::ValidJob;
use crate::eligible::NodeRules;
use crate::job::Role;
use std::collections::BTreeMap;
use std::sync::Arc;
use switchyard_core::quantity::Resources;
use switchyard_crds::TrainJobStatus;

#[derive(Debug, Clone, PartialEq)]
pub struct Admitted {
    /// Requests of the pod that requests most.
    pub requests: Resources,
    /// Distinct node rules of the pods.
    pub rules: Vec<Arc<NodeRules>>,
    /// Index into `rules` by node rank if the pods' rules differ: Kueue may pin each pod to a
    /// different node.
    pub rule_of_rank: Vec<usize>,
    /// The same for each role, in rank order. The other fields then describe the role that needs
    /// most.
    pub roles: Vec<Admitted>,
}

impl Admitted {
    /// Builds it from the pods' rules, in rank order.
    pub fn new(requests: Resources, of_ranks: impl IntoIterator<Item = Arc<NodeRules>>) -> Admitted {
        let mut rules: Vec<Arc<NodeRules>> = Vec::new();
        // Thousands of pods may each be pinned to their own node, so rules are only compared with
        // rules that have the same selector.
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
        let mut rule_of_rank: Vec<usize> = of_ranks.into_iter().map(&mut position).collect();
        if rules.len() < 2 {
            rule_of_rank.clear();
        }
        Admitted { requests, rules, rule_of_rank, roles: Vec::new() }
    }

    /// Derives it from the template, for pods that do not exist yet.
    pub fn of_template(valid: &ValidJob, status: Option<&TrainJobStatus>) -> Admitted {
        if !valid.roles.is_empty() {
            return Admitted::of_roles(valid, |role| Admitted::of_template(&role.valid, role.job.status.as_ref()));
        }
        Admitted::new(valid.pod.requests(status), [Arc::new(NodeRules::of(&valid.pod.spec))])
    }

    /// Derives it from the gated pods, or from the template if there are none.
    pub fn of<'a>(
        valid: &ValidJob,
        status: Option<&TrainJobStatus>,
        pods: impl IntoIterator<Item = &'a PodView>,
    ) -> Admitted {
        let pods: Vec<&PodView> = pods.into_iter().collect();
        if valid.roles.is_empty() {
            return Admitted::of_alike(valid, status, 0, &pods);
        }
        Admitted::of_roles(valid, |role| {
            let own: Vec<&PodView> =
                pods.iter().copied().filter(|pod| role.node_ranks().contains(&pod.node_rank)).collect();
            Admitted::of_alike(&role.valid, role.job.status.as_ref(), role.first_node, &own)
        })
    }

    fn of_roles(valid: &ValidJob, of: impl Fn(&Role) -> Admitted) -> Admitted {
        let roles = valid.roles.iter().map(&of).collect();
        let lead = valid.lead().map(of).unwrap_or_else(|| Admitted::new(Resources::default(), []));
        Admitted { roles, ..lead }
    }

    /// Requests of the pod of this node rank.
    pub fn requests_of(&self, valid: &ValidJob, node_rank: u32) -> &Resources {
        let mut roles = valid.roles.iter().zip(&self.roles);
        let own = roles.find(|(role, _)| role.node_ranks().contains(&node_rank));
        own.map_or(&self.requests, |(_, admitted)| &admitted.requests)
    }

    /// Derives it from pods that are alike; `first` is the lowest node rank.
    fn of_alike(valid: &ValidJob, status: Option<&TrainJobStatus>, first: u32, pods: &[&PodView]) -> Admitted {
        let mut requests = Resources::default();
        let mut by_rank: BTreeMap<u32, Arc<NodeRules>> = BTreeMap::new();
        for pod in pods {
            let Some(own) = &pod.rules else { continue };
            requests = requests.max(&pod.requests);
            by_rank.insert(pod.node_rank.saturating_sub(first), own.clone());
        }
        let Some(any) = by_rank.values().next().cloned() else { return Admitted::of_template(valid, status) };
        let rule_of_rank = |rank| by_rank.get(&rank).unwrap_or(&any).clone();
        Admitted::new(requests, (0..valid.request.nodes).map(rule_of_rank))
    }
}
