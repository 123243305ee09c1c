//! Changes in the orders in which watches can report them, and their effect on the index.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::job::changes_placement;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use switchyard_plan::cluster::view::Waiting;

const UID: &str = "11111111-1111-1111-1111-111111111111";

/// A job in this attempt that is placed, or was placed before.
fn job(attempt: i32, is_placed: bool) -> TrainJob {
    let condition = json!({
        "type": "Placed", "status": if is_placed { "True" } else { "False" }, "reason": "Placed", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let placement = json!({"reason": "", "nodes": [{"firstRank": 0, "nodeName": "n", "gpus": ["GPU-1", "GPU-2"]}]});
    serde_json::from_value(json!({
        "apiVersion": labels::API_VERSION, "kind": "TrainJob", "metadata": {"name": "a", "namespace": "t", "uid": UID},
        "spec": {"trainer": {"framework": "Plain", "image": "i"}},
        "status": {"attempt": attempt, "conditions": [condition], "placement": placement},
    }))
    .unwrap()
}

fn pod(node: Option<&str>, is_gated: bool) -> Pod {
    let gates = if is_gated { json!([{"name": labels::GANG_GATE}]) } else { json!([]) };
    serde_json::from_value(json!({
        "metadata": {"name": "a-1-0", "namespace": "t", "uid": "p", "labels": {labels::JOB_UID: UID}, "ownerReferences": [
            {"apiVersion": labels::API_VERSION, "kind": "TrainJob", "name": "a", "uid": UID, "controller": true},
        ]},
        "spec": {"nodeName": node, "schedulingGates": gates, "restartPolicy": "Never", "containers": [{"name": "trainer"}]},
    }))
    .unwrap()
}

/// The pod may still be bound or run before the cache shows it, so the next gang would get GPUs in
/// use.
#[test]
fn a_pod_of_an_ended_attempt_keeps_its_gpus_until_deleted() {
    for seen in [None, Some("n")] {
        let mut index = Index::default();
        let taken = |index: &Index| index.usage.share("p").map(|share| (share.node.clone(), share.gpus.clone()));
        index.apply_job(job(1, true));
        index.apply_pod(&pod(None, true));
        let planned = Some(("n".to_string(), vec!["GPU-1".to_string(), "GPU-2".to_string()]));
        assert_eq!(taken(&index), planned, "counted from the decision on");
        index.apply_pod(&pod(seen, false));
        index.apply_job(job(2, false));
        assert_eq!(taken(&index), planned);
        index.delete_pod(&pod(seen, false).metadata);
        assert_eq!(taken(&index), None);
    }
}

/// Regression test: the watch of jobs was ahead of the watch of pods. The cache showed the job
/// deleted while its pod was still gated, and the next gang got its GPUs although the pod ran.
#[test]
fn a_released_pod_keeps_its_gpus_even_if_the_cache_shows_it_gated() {
    for released in [false, true] {
        let mut index = Index::default();
        index.apply_job(job(1, true));
        index.apply_pod(&pod(None, true));
        if released {
            index.job_states.values_mut().for_each(|state| state.writes.record_release("p".into()));
        }
        index.delete_job(&job(1, true).metadata);
        index.apply_pod(&pod(None, false));
        let gpus = index.usage.share("p").map(|share| share.gpus.clone());
        assert_eq!(gpus, released.then(|| vec!["GPU-1".to_string(), "GPU-2".to_string()]));
        index.delete_pod(&pod(None, false).metadata);
        assert_eq!(index.usage.share("p"), None);
        assert!(index.job_states.is_empty());
    }
}

#[test]
fn a_pod_that_was_never_released_frees_its_gpus_at_once() {
    let mut index = Index::default();
    index.apply_job(job(1, true));
    index.apply_pod(&pod(None, true));
    index.apply_job(job(2, false));
    assert_eq!(index.usage.share("p"), None);
}

/// The controller assumes a decision only if it changes the placement. Comparing the nodes is not
/// enough, because a gang that restarts on the same nodes is placed again.
#[test]
fn a_gang_that_restarts_on_its_nodes_gets_a_placement() {
    let (waits, placed) = (job(2, false), job(2, true));
    assert!(changes_placement(&waits, placed.status.as_ref().unwrap()));
    assert!(changes_placement(&placed, waits.status.as_ref().unwrap()));
    assert!(!changes_placement(&placed, job(2, true).status.as_ref().unwrap()));
}

/// Otherwise users who can create pods in one namespace could end the attempts of a job in another
/// one, and block it permanently.
#[test]
fn a_pod_that_only_claims_to_belong_to_a_job_is_ignored() {
    let forged = |name: &str, namespace: &str, label: Option<&str>| {
        let mut pod = pod(None, false);
        (pod.metadata.name, pod.metadata.namespace) = (Some(name.into()), Some(namespace.into()));
        pod.metadata.uid = Some(format!("forged-{name}"));
        pod.metadata.labels = label.map(|uid| [(labels::JOB_UID.to_string(), uid.to_string())].into());
        pod
    };
    for (name, namespace, label) in [
        ("a-7-0", "evil", None),
        ("a-7-0", "evil", Some(UID)),
        ("a-2147483647-0", "evil", Some(UID)),
        ("a-7-0", "t", None),
        ("a-7-0", "t", Some("another")),
        ("a-2147483648-0", "t", Some(UID)),
        ("a-4294967295-0", "t", Some(UID)),
        ("a-0-0", "t", Some(UID)),
        ("a-07-0", "t", Some(UID)),
        ("a-+7-0", "t", Some(UID)),
        ("a-b-7-0", "t", Some(UID)),
        ("b-7-0", "t", Some(UID)),
        ("a", "t", Some(UID)),
    ] {
        let mut index = Index::default();
        let id = JobId { namespace: "t".into(), uid: UID.into() };
        let pods =
            |index: &Index| index.job_states[&id].pods.keys().map(|pod_key| pod_key.name.clone()).collect::<Vec<_>>();
        // In both orders, because the watch of pods may be ahead of the watch of jobs.
        index.apply_pod(&forged(name, namespace, label));
        index.apply_job(job(1, true));
        index.apply_pod(&pod(Some("n"), false));
        let effect = index.apply_pod(&forged(name, namespace, label));
        assert_eq!(pods(&index), ["a-1-0"], "{namespace}/{name} {label:?}");
        let mine = Key { namespace: "t".into(), name: "a".into() };
        assert!(!effect.jobs.contains(&mine), "{namespace}/{name} {label:?} wakes the job");
        index.delete_pod(&forged(name, namespace, label).metadata);
        assert_eq!(pods(&index), ["a-1-0"], "{namespace}/{name} {label:?}");
    }
}

/// Regression test: the pod stayed in its job in its last known state forever, and its GPUs went to
/// the next gang.
#[test]
fn a_pod_that_loses_its_label_is_tracked_and_keeps_its_gpus() {
    let id = JobId { namespace: "t".into(), uid: UID.into() };
    let mut stripped = pod(Some("n"), false);
    stripped.metadata.labels = None;
    let mut index = Index::default();
    index.apply_job(job(1, true));
    index.apply_pod(&pod(Some("n"), false));
    let taken = index.usage.share("p").cloned();
    assert_eq!(taken.as_ref().map(|share| share.gpus.len()), Some(2));
    let mine = Key { namespace: "t".into(), name: "a".into() };
    assert!(index.apply_pod(&stripped).jobs.contains(&mine));
    assert!(!index.apply_pod(&stripped).jobs.contains(&mine), "reported only once");
    let state = &index.job_states[&id];
    assert_eq!((state.pods.len(), state.unlabelled.get("a-1-0").map(String::as_str)), (0, Some("p")));
    assert_eq!(index.usage.share("p"), taken.as_ref());
    index.apply_pod(&pod(Some("n"), false));
    assert_eq!((index.job_states[&id].pods.len(), index.job_states[&id].unlabelled.len()), (1, 0));
    assert_eq!(index.usage.share("p"), taken.as_ref());
    // A new leader sees the pod without its label from the start.
    let mut index = Index::default();
    index.apply_pod(&stripped);
    index.apply_job(job(1, true));
    assert_eq!(index.job_states[&id].unlabelled.len(), 1);
    index.delete_pod(&stripped.metadata);
    assert!(index.job_states[&id].unlabelled.is_empty() && index.usage.share("p").is_none());
}

/// Regression test: the object replaced the real one in the index, and the real one was never
/// created.
#[test]
fn an_object_of_another_namespace_is_ignored() {
    let mut index = Index::default();
    index.apply_job(job(1, true));
    let theirs = ObjectMeta {
        name: Some("a".into()),
        namespace: Some("evil".into()),
        uid: Some("o".into()),
        labels: Some([(labels::JOB_UID.to_string(), UID.to_string())].into()),
        owner_references: pod(None, false).metadata.owner_references,
        ..ObjectMeta::default()
    };
    let effect = index.apply_object(Kind::NetworkPolicy, &theirs, json!({}));
    assert!(index.job_states[&JobId { namespace: "t".into(), uid: UID.into() }].objects.is_empty());
    assert!(effect.jobs.is_empty());
}

/// Regression test: each change of a pod replaced its view, which lost the kubelet's warning.
#[test]
fn a_kubelet_warning_stays_until_the_pod_makes_progress_or_is_replaced() {
    let warning = Waiting { container: String::new(), reason: "FailedMount".into(), message: "no".into() };
    let warned = |pod: &Pod| {
        let mut index = Index::default();
        index.apply_job(job(1, true));
        index.apply_pod(&super::tests::pod(Some("n"), false));
        let state = index.job_states.values_mut().next().unwrap();
        state.pods.values_mut().for_each(|pod| pod.warning = Some(warning.clone()));
        index.apply_pod(pod);
        let state = index.job_states.values().next().unwrap();
        state.pods.values().next().unwrap().warning.clone()
    };
    let mut next = pod(Some("n"), false);
    let state = |state: serde_json::Value| {
        let status =
            json!({"name": "trainer", "state": state, "image": "", "imageID": "", "ready": false, "restartCount": 0});
        serde_json::from_value(json!({"phase": "Pending", "containerStatuses": [status]})).unwrap()
    };
    next.status = Some(state(json!({"waiting": {"reason": "ContainerCreating"}})));
    assert_eq!(warned(&next), Some(warning.clone()));
    next.status = Some(state(json!({"waiting": {"reason": "ErrImagePull"}})));
    assert_eq!(warned(&next), None, "its container state is more specific");
    next.status = Some(serde_json::from_value(json!({"phase": "Running"})).unwrap());
    assert_eq!(warned(&next), None);
    let mut other = pod(Some("n"), false);
    other.metadata.uid = Some("another".into());
    assert_eq!(warned(&other), None);
}
