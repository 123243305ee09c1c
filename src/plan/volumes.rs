//! Determines from which nodes a pod's volumes can be used, before scheduling: zonal volumes, local
//! volumes, and volumes that are created or bound once their first pod has a node.

use crate::eligible::Reach;
use k8s_openapi::api::core::v1::{
    NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, PersistentVolumeClaimSpec, PersistentVolumeSpec,
    TopologySelectorTerm,
};
pub use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim};
pub use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;
use switchyard_core::quantity::parse_quantity;

/// Provisioner of classes whose volumes are created in advance by an administrator.
const NO_PROVISIONER: &str = "kubernetes.io/no-provisioner";
/// Default volume mode.
const FILESYSTEM: &str = "Filesystem";

/// Name of the volume that a claim is bound to.
pub fn bound(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref()?.volume_name.as_deref().filter(|name| !name.is_empty())
}

/// Name of the class of a claim that has no volume yet.
pub fn class(claim: &PersistentVolumeClaim) -> Option<&str> {
    claim.spec.as_ref()?.storage_class_name.as_deref().filter(|name| !name.is_empty())
}

/// Whether a claim of this class gets one of the existing volumes once its pod has a node.
pub fn selects_existing_volume(class: &StorageClass) -> bool {
    binds_on_first_consumer(class) && class.provisioner == NO_PROVISIONER
}

fn binds_on_first_consumer(class: &StorageClass) -> bool {
    class.volume_binding_mode.as_deref() == Some("WaitForFirstConsumer")
}

/// Nodes from which a claim can be used. No node while an immediately bound claim still lacks its
/// volume. `None` if it can be used everywhere, or if that is unknown. `volumes` is the volume it
/// is bound to, or the candidates it may get.
pub fn reach(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    volumes: &[PersistentVolume],
) -> Option<Reach> {
    let nodes = match (bound(claim), class) {
        (Some(name), _) => {
            let volume = volumes.iter().find(|volume| volume.metadata.name.as_deref() == Some(name))?;
            affinity(volume.spec.as_ref()?)?.clone()
        }
        (None, Some(class)) if selects_existing_volume(class) => {
            let fits = |spec: &&PersistentVolumeSpec| fits(claim, spec);
            let candidates = volumes.iter().filter(|volume| is_selected(claim, volume));
            let candidates = candidates.filter_map(|volume| volume.spec.as_ref()).filter(fits);
            let terms: Option<Vec<_>> =
                candidates.map(|spec| Some(affinity(spec)?.node_selector_terms.clone())).collect();
            // No matching volume means no node.
            NodeSelector { node_selector_terms: terms?.concat() }
        }
        (None, Some(class)) if binds_on_first_consumer(class) => {
            let terms = class.allowed_topologies.as_ref().filter(|terms| !terms.is_empty())?;
            NodeSelector { node_selector_terms: terms.iter().map(term).collect() }
        }
        // The class does not exist: the scheduler reports that.
        (None, None) if self::class(claim).is_some() => return None,
        // The scheduler rejects its pods until the volume controller has bound a volume.
        (None, _) => NodeSelector { node_selector_terms: Vec::new() },
    };
    Some(Reach { claim: claim.metadata.name.clone().unwrap_or_default(), nodes })
}

/// Says that a PersistentVolumeClaim named by the pods does not exist.
pub fn absent_claim(name: &str) -> String {
    absent("PersistentVolumeClaim", name, "spec.template.spec.volumes")
}

/// Says that a device source named by the pods does not exist.
pub fn absent_device(kind: &str, name: &str) -> String {
    absent(kind, name, "spec.template.spec.resourceClaims")
}

fn absent(kind: &str, name: &str, field: &str) -> String {
    format!("{kind} {name} does not exist: create it in the job's namespace, or correct its name in {field}")
}

fn affinity(volume: &PersistentVolumeSpec) -> Option<&NodeSelector> {
    volume.node_affinity.as_ref()?.required.as_ref()
}

fn term(allowed: &TopologySelectorTerm) -> NodeSelectorTerm {
    let labels = allowed.match_label_expressions.iter().flatten();
    let is_in = labels.map(|label| NodeSelectorRequirement {
        key: label.key.clone(),
        operator: "In".into(),
        values: Some(label.values.clone()),
    });
    NodeSelectorTerm { match_expressions: Some(is_in.collect()), match_fields: None }
}

fn is_selected(claim: &PersistentVolumeClaim, volume: &PersistentVolume) -> bool {
    let wanted = claim.spec.as_ref().and_then(|spec| spec.selector.as_ref()?.match_labels.as_ref());
    let labels = volume.metadata.labels.as_ref();
    wanted.into_iter().flatten().all(|(key, value)| labels.and_then(|labels| labels.get(key)) == Some(value))
}

/// Whether a claim may get a volume: same class, unbound or reserved for the claim, large enough,
/// and with the required modes.
fn fits(claim: &PersistentVolumeClaim, volume: &PersistentVolumeSpec) -> bool {
    let PersistentVolumeClaimSpec { storage_class_name, access_modes, volume_mode, resources, .. } =
        claim.spec.clone().unwrap_or_default();
    let is_available = volume.claim_ref.as_ref().is_none_or(|holder| {
        (&holder.name, &holder.namespace) == (&claim.metadata.name, &claim.metadata.namespace)
            && holder.uid.as_ref().is_none_or(|uid| Some(uid) == claim.metadata.uid.as_ref())
    });
    let mode = |mode: &Option<String>| mode.clone().unwrap_or_else(|| FILESYSTEM.into());
    let size = |amounts: Option<&BTreeMap<String, Quantity>>| {
        amounts.and_then(|amounts| parse_quantity(&amounts.get("storage")?.0)).unwrap_or(0.0)
    };
    let modes = volume.access_modes.clone().unwrap_or_default();
    is_available
        && volume.storage_class_name == storage_class_name
        && mode(&volume.volume_mode) == mode(&volume_mode)
        && access_modes.unwrap_or_default().iter().all(|wanted| modes.contains(wanted))
        && size(volume.capacity.as_ref()) >= size(resources.unwrap_or_default().requests.as_ref())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::{Value, json};

    fn claim(volume: &str) -> PersistentVolumeClaim {
        let spec = json!({"volumeName": volume, "storageClassName": "local", "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "10Gi"}}});
        serde_json::from_value(json!({"metadata": {"name": "data", "namespace": "team", "uid": "1"}, "spec": spec}))
            .unwrap()
    }

    fn volume(name: &str, node: &str, change: Value) -> PersistentVolume {
        let is_in = json!({"key": "kubernetes.io/hostname", "operator": "In", "values": [node]});
        let mut spec = json!({"storageClassName": "local", "accessModes": ["ReadWriteOnce", "ReadOnlyMany"], "capacity": {"storage": "20Gi"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [is_in]}]}}});
        for (key, value) in change.as_object().unwrap() {
            spec[key] = value.clone();
        }
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
    }

    fn class(provisioner: &str, mode: &str, more: Value) -> StorageClass {
        let mut class = json!({"provisioner": provisioner, "volumeBindingMode": mode});
        class["allowedTopologies"] = more;
        serde_json::from_value(class).unwrap()
    }

    /// Values of all terms.
    fn nodes(reach: Option<Reach>) -> Option<Vec<String>> {
        let terms = reach?.nodes.node_selector_terms;
        Some(
            terms
                .into_iter()
                .flat_map(|term| term.match_expressions.unwrap())
                .flat_map(|one| one.values.unwrap())
                .collect(),
        )
    }

    #[test]
    fn a_bound_claim_is_reachable_where_its_volume_is() {
        let volumes = [volume("pv-1", "n1", json!({})), volume("pv-2", "n2", json!({}))];
        assert_eq!(nodes(reach(&claim("pv-2"), None, &volumes)), Some(vec!["n2".into()]));
        assert_eq!(nodes(reach(&claim("gone"), None, &volumes)), None);
        assert_eq!(nodes(reach(&claim("pv-1"), None, &[volume("pv-1", "n1", json!({"nodeAffinity": null}))])), None);
    }

    #[test]
    fn a_claim_that_waits_for_its_pod_can_use_any_matching_volume() {
        let by_hand = class(NO_PROVISIONER, "WaitForFirstConsumer", json!(null));
        let holder = |name: &str| json!({"claimRef": {"name": name, "namespace": "team"}});
        let volumes = [
            volume("fits", "n1", json!({})),
            volume("small", "n2", json!({"capacity": {"storage": "1Gi"}})),
            volume("taken", "n3", holder("other")),
            volume("kept", "n4", holder("data")),
            volume("block", "n5", json!({"volumeMode": "Block"})),
            volume("class", "n6", json!({"storageClassName": "other"})),
            volume("shared", "n7", json!({"accessModes": ["ReadOnlyMany"]})),
        ];
        assert_eq!(nodes(reach(&claim(""), Some(&by_hand), &volumes)), Some(vec!["n1".into(), "n4".into()]));
        assert_eq!(nodes(reach(&claim(""), Some(&by_hand), &volumes[1..3])), Some(vec![]), "nowhere");
        let everywhere = volume("nfs", "-", json!({"nodeAffinity": null}));
        assert_eq!(nodes(reach(&claim(""), Some(&by_hand), &[volumes[0].clone(), everywhere])), None);
        let mut picky = claim("");
        picky.spec.as_mut().unwrap().selector =
            Some(serde_json::from_value(json!({"matchLabels": {"disk": "fast"}})).unwrap());
        assert_eq!(nodes(reach(&picky, Some(&by_hand), &volumes)), Some(vec![]));
    }

    #[test]
    fn a_volume_provisioned_later_stays_within_its_class_topologies() {
        let zones = json!([{"matchLabelExpressions": [{"key": "zone", "values": ["a", "b"]}]}]);
        let made = class("csi.example.com", "WaitForFirstConsumer", zones.clone());
        assert_eq!(nodes(reach(&claim(""), Some(&made), &[])), Some(vec!["a".into(), "b".into()]));
        assert_eq!(
            nodes(reach(&claim(""), Some(&class("csi.example.com", "WaitForFirstConsumer", json!(null))), &[])),
            None
        );
        assert_eq!(nodes(reach(&claim(""), None, &[])), None, "a missing class");
    }

    /// Regression test: the scheduler rejects its pods until the volume is bound. On a busy control
    /// plane that twice took longer than the 10 s for which a refusal is tolerated.
    #[test]
    fn an_unbound_immediate_claim_is_usable_nowhere() {
        let at_once = class("csi.example.com", "Immediate", json!(null));
        assert_eq!(nodes(reach(&claim(""), Some(&at_once), &[])), Some(vec![]));
        let mut without_class = claim("");
        without_class.spec.as_mut().unwrap().storage_class_name = None;
        assert_eq!(nodes(reach(&without_class, None, &[])), Some(vec![]));
        let volume = volume("pv-1", "n1", json!({}));
        assert_eq!(nodes(reach(&claim("pv-1"), Some(&at_once), &[volume])), Some(vec!["n1".into()]));
    }
}
