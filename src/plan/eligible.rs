//! Checks whether a pod may run on a node at all, before free resources matter.
//!
//! Covers node selectors, required node affinity, taints, cordons, readiness and volume topology.
//! Pod affinity and topology spread are left to the scheduler: a gang that it refuses is rolled
//! back.

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PodSpec, Taint, Toleration};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Taint that a cordon adds.
const CORDON: &str = "node.kubernetes.io/unschedulable";

/// Facts about a node that decide whether a pod may run there.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeFacts {
    pub name: String,
    /// The same allocation as long as the labels do not change, so caches can compare it by
    /// address.
    pub labels: Arc<BTreeMap<String, String>>,
    pub taints: Vec<Taint>,
    /// Cordoned.
    pub unschedulable: bool,
    /// It reports that it is ready.
    pub ready: bool,
}

/// Why a node is excluded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Unfit {
    #[error("not ready")]
    NotReady,
    #[error("cordoned")]
    Cordoned,
    #[error("taint {} is not tolerated", describe_taint(.0))]
    Tainted(Taint),
    #[error("label {0} does not match spec.template.spec.nodeSelector")]
    Selector(String),
    #[error("spec.template.spec.affinity.nodeAffinity does not match")]
    Affinity,
    #[error("label {0} does not match the nodeSelector added at admission")]
    AddedSelector(String),
    #[error("the node affinity added at admission does not match")]
    AddedAffinity,
    #[error("PersistentVolumeClaim {0} has no volume there (spec.template.spec.volumes)")]
    Volume(String),
}

/// Prefixes of taints that mark unhealthy nodes, rather than dedicated ones.
const NODE_CONDITION_PREFIXES: [&str; 2] = ["node.kubernetes.io/", "node.cloudprovider.kubernetes.io/"];

impl Unfit {
    /// The manifest change that lifts the restriction.
    pub fn change(&self) -> Option<String> {
        match self {
            Unfit::Tainted(taint) if !NODE_CONDITION_PREFIXES.iter().any(|prefix| taint.key.starts_with(prefix)) => {
                let value = taint.value.as_ref().filter(|value| !value.is_empty());
                let with = value.map_or_else(|| "operator: Exists".into(), |value| format!("value: {value}"));
                Some(format!("template.spec.tolerations: {{key: {}, {with}, effect: {}}}", taint.key, taint.effect))
            }
            Unfit::Selector(key) => Some(format!("template.spec.nodeSelector: without {key}")),
            Unfit::Affinity => Some("template.spec.affinity.nodeAffinity: without it".into()),
            Unfit::Volume(claim) => Some(format!("template.spec.volumes: without PersistentVolumeClaim {claim}")),
            Unfit::NotReady | Unfit::Cordoned | Unfit::Tainted(_) | Unfit::AddedSelector(_) | Unfit::AddedAffinity => {
                None
            }
        }
    }
}

/// A taint as kubectl writes it: `KEY=VALUE:EFFECT`.
fn describe_taint(taint: &Taint) -> String {
    let value =
        taint.value.as_ref().filter(|value| !value.is_empty()).map_or(String::new(), |value| format!("={value}"));
    format!("{}{value}:{}", taint.key, taint.effect)
}

/// A pod's restrictions on nodes.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeRules {
    pub selector: BTreeMap<String, String>,
    /// Required node affinity.
    pub required: Option<NodeSelector>,
    pub tolerations: Vec<Toleration>,
    /// PersistentVolumeClaims of its volumes.
    pub claims: Vec<String>,
    /// Sources of its devices, except the claim that Switchyard creates for it.
    pub devices: Vec<DeviceSource>,
    /// Reach of claims that are not usable from every node, `None` if it has not been read.
    pub reach: Option<Vec<Reach>>,
    /// Objects of `claims` and `devices` that do not exist, each with the field that names it. Read
    /// together with `reach`.
    pub absent: Vec<String>,
}

/// Name inside the pod of the GPU claim that Switchyard creates.
pub(crate) const DEVICES: &str = "switchyard-devices";

/// Target of an entry of `spec.resourceClaims`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceSource {
    Claim(String),
    Template(String),
}

/// Nodes from which a claim can be used.
#[derive(Debug, Clone, PartialEq)]
pub struct Reach {
    pub claim: String,
    pub nodes: NodeSelector,
}

impl NodeRules {
    pub fn of(pod: &PodSpec) -> NodeRules {
        let affinity = pod.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let volumes = pod.volumes.iter().flatten();
        NodeRules {
            selector: pod.node_selector.clone().unwrap_or_default(),
            required: affinity
                .and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution.clone()),
            tolerations: pod.tolerations.clone().unwrap_or_default(),
            claims: volumes
                .filter_map(|volume| Some(volume.persistent_volume_claim.as_ref()?.claim_name.clone()))
                .collect(),
            devices: device_sources(pod),
            reach: None,
            absent: Vec::new(),
        }
    }

    /// Whether all facts that decide about a node are known.
    pub fn is_known(&self) -> bool {
        (self.claims.is_empty() && self.devices.is_empty()) || self.reach.is_some()
    }

    /// The rules after the change that lifts this restriction.
    pub fn without(&self, unfit: &Unfit) -> NodeRules {
        let mut rules = self.clone();
        match unfit {
            Unfit::Tainted(taint) => rules.tolerations.push(Toleration {
                key: Some(taint.key.clone()),
                value: taint.value.clone(),
                effect: Some(taint.effect.clone()),
                ..Toleration::default()
            }),
            Unfit::Selector(key) => drop(rules.selector.remove(key)),
            Unfit::Affinity => rules.required = None,
            Unfit::Volume(claim) => rules.reach.iter_mut().for_each(|all| all.retain(|reach| reach.claim != *claim)),
            Unfit::NotReady | Unfit::Cordoned | Unfit::AddedSelector(_) | Unfit::AddedAffinity => {}
        }
        rules
    }
}

fn device_sources(pod: &PodSpec) -> Vec<DeviceSource> {
    let not_ours = pod.resource_claims.iter().flatten().filter(|claim| claim.name != DEVICES);
    let sources = not_ours.filter_map(|claim| {
        let by_name = claim.resource_claim_name.clone().map(DeviceSource::Claim);
        by_name.or_else(|| claim.resource_claim_template_name.clone().map(DeviceSource::Template))
    });
    sources.collect()
}

/// Whether a pod with these rules may run on the node.
///
/// # Errors
/// The first reason why it may not.
pub fn can_run(pod: &NodeRules, node: &NodeFacts) -> Result<(), Unfit> {
    if !node.ready {
        return Err(Unfit::NotReady);
    }
    let tolerations = pod.tolerations.as_slice();
    if node.unschedulable {
        let cordon = Taint { key: CORDON.into(), effect: "NoSchedule".into(), ..Taint::default() };
        if !tolerations.iter().any(|toleration| tolerates(toleration, &cordon)) {
            return Err(Unfit::Cordoned);
        }
    }
    let hard = node.taints.iter().filter(|taint| taint.effect != "PreferNoSchedule");
    for taint in hard.filter(|taint| taint.key != CORDON) {
        if !tolerations.iter().any(|toleration| tolerates(toleration, taint)) {
            return Err(Unfit::Tainted(Taint { time_added: None, ..taint.clone() }));
        }
    }
    for (key, value) in &pod.selector {
        if node.labels.get(key) != Some(value) {
            return Err(Unfit::Selector(key.clone()));
        }
    }
    if pod.required.as_ref().is_some_and(|selector| !selects(selector, node)) {
        return Err(Unfit::Affinity);
    }
    match pod.reach.iter().flatten().find(|reach| !selects(&reach.nodes, node)) {
        Some(reach) => Err(Unfit::Volume(reach.claim.clone())),
        None => Ok(()),
    }
}

/// <https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/>
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    if !effect.is_empty() && effect != taint.effect {
        return false;
    }
    let key = toleration.key.as_deref().unwrap_or_default();
    match toleration.operator.as_deref() {
        Some("Exists") => key.is_empty() || key == taint.key,
        _ => {
            key == taint.key
                && toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default()
        }
    }
}

fn selects(selector: &NodeSelector, node: &NodeFacts) -> bool {
    selector.node_selector_terms.iter().any(|term| term_matches(term, node))
}

fn term_matches(term: &NodeSelectorTerm, node: &NodeFacts) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    // A term without requirements matches no node.
    !(expressions.is_empty() && fields.is_empty())
        && expressions
            .iter()
            .all(|requirement| matches(requirement, node.labels.get(&requirement.key).map(String::as_str)))
        && fields.iter().all(|requirement| requirement.key == "metadata.name" && matches(requirement, Some(&node.name)))
}

fn matches(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let number = |text: &str| text.parse::<i64>().ok();
    let compare = |is: fn(i64, i64) -> bool| {
        value
            .and_then(number)
            .zip(values.first().and_then(|wanted| number(wanted)))
            .is_some_and(|(value, wanted)| is(value, wanted))
    };
    match requirement.operator.as_str() {
        "In" => value.is_some_and(|value| values.iter().any(|wanted| wanted == value)),
        "NotIn" => value.is_none_or(|value| values.iter().all(|wanted| wanted != value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compare(|value, wanted| value > wanted),
        "Lt" => compare(|value, wanted| value < wanted),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn node(change: impl FnOnce(&mut NodeFacts)) -> NodeFacts {
        let labels = [("zone", "a"), ("gpus", "8")].map(|(key, value)| (key.to_string(), value.to_string()));
        let mut node =
            NodeFacts { name: "n1".into(), labels: Arc::new(labels.into()), ready: true, ..NodeFacts::default() };
        change(&mut node);
        node
    }

    fn pod(spec: Value) -> NodeRules {
        NodeRules::of(&serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn state_of_the_node() {
        assert_eq!(can_run(&pod(json!({})), &node(|_| {})), Ok(()));
        assert_eq!(can_run(&pod(json!({})), &node(|n| n.ready = false)), Err(Unfit::NotReady));
        assert_eq!(can_run(&pod(json!({})), &node(|n| n.unschedulable = true)), Err(Unfit::Cordoned));
    }

    #[test]
    fn taints_need_a_toleration() {
        let taint = |effect: &str| {
            let taint =
                Taint { key: "gpu".into(), value: Some("yes".into()), effect: effect.into(), ..Taint::default() };
            node(|n| n.taints = vec![taint])
        };
        assert_eq!(can_run(&pod(json!({})), &taint("PreferNoSchedule")), Ok(()));
        for effect in ["NoSchedule", "NoExecute"] {
            let refused = can_run(&pod(json!({})), &taint(effect)).unwrap_err();
            assert_eq!(refused.to_string(), format!("taint gpu=yes:{effect} is not tolerated"));
            let change = format!("template.spec.tolerations: {{key: gpu, value: yes, effect: {effect}}}");
            assert_eq!(refused.change(), Some(change));
            assert_eq!(can_run(&pod(json!({})).without(&refused), &taint(effect)), Ok(()));
            for toleration in [
                json!({"operator": "Exists"}),
                json!({"key": "gpu", "operator": "Exists"}),
                json!({"key": "gpu", "value": "yes"}),
                json!({"key": "gpu", "value": "yes", "effect": effect}),
            ] {
                assert_eq!(can_run(&pod(json!({"tolerations": [toleration]})), &taint(effect)), Ok(()), "{toleration}");
            }
            let wrong = json!({"tolerations": [{"key": "gpu", "value": "no"}, {"key": "other", "operator": "Exists"}]});
            assert!(can_run(&pod(wrong), &taint(effect)).is_err());
        }
    }

    #[test]
    fn selector_and_affinity() {
        assert_eq!(can_run(&pod(json!({"nodeSelector": {"zone": "a"}})), &node(|_| {})), Ok(()));
        assert_eq!(
            can_run(&pod(json!({"nodeSelector": {"zone": "b"}})), &node(|_| {})),
            Err(Unfit::Selector("zone".into()))
        );
        let affinity = |terms: Value| {
            pod(
                json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}}),
            )
        };
        let one = |key: &str, operator: &str, values: Value| json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]);
        for (term, fits) in [
            (one("zone", "In", json!(["a", "b"])), true),
            (one("zone", "In", json!(["b"])), false),
            (one("zone", "NotIn", json!(["b"])), true),
            (one("absent", "NotIn", json!(["b"])), true),
            (one("zone", "Exists", json!([])), true),
            (one("absent", "Exists", json!([])), false),
            (one("absent", "DoesNotExist", json!([])), true),
            (one("gpus", "Gt", json!(["4"])), true),
            (one("gpus", "Lt", json!(["4"])), false),
            (one("zone", "Gt", json!(["4"])), false),
            (json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]), true),
            (json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]), false),
            (json!([{}]), false),
            (
                json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]},
                {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]),
                true,
            ),
        ] {
            assert_eq!(can_run(&affinity(term.clone()), &node(|_| {})).is_ok(), fits, "{term}");
        }
    }
}
