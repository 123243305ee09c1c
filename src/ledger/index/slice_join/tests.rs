use super::*;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use switchyard_plan::objects::placement_slices;

const UID: &str = "11111111-1111-1111-1111-111111111111";
const NODES: i32 = 300;

/// A job placed on all its nodes, as planned: the nodes are in the status.
fn whole(version: i32, prefix: &str) -> TrainJob {
    let nodes: Vec<Value> = (0..NODES)
        .map(|node| json!({"firstRank": node, "nodeName": format!("{prefix}{node}"), "gpus": [format!("GPU-{prefix}{node}")]}))
        .collect();
    let condition = json!({"type": "Placed", "status": "True", "reason": "Placed", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let mut job: TrainJob = serde_json::from_value(json!({
        "apiVersion": labels::API_VERSION, "kind": "TrainJob",
        "metadata": {"name": "a", "namespace": "t", "uid": UID, "resourceVersion": version.to_string()},
        "spec": {"trainer": {"framework": "Plain", "image": "i", "numNodes": NODES}},
        "status": {"attempt": 1, "conditions": [condition], "placement": {"reason": "", "nodes": nodes}},
    }))
    .unwrap();
    let placement = job.status.as_mut().unwrap().placement.as_mut().unwrap();
    placement.slices = slices::named("a", 1, &placement.nodes);
    job
}

/// The job as stored in the cluster, and its slices.
fn stored(whole: &TrainJob) -> (TrainJob, Vec<PlacementSlice>) {
    let placement = whole.status.as_ref().unwrap().placement.clone().unwrap();
    let mut job = whole.clone();
    slices::set_nodes(&mut job, Vec::new());
    (job, placement_slices(whole, &placement))
}

fn key() -> Key {
    Key { namespace: "t".into(), name: "a".into() }
}

fn nodes_shown(index: &Index) -> Option<usize> {
    Some(index.jobs.get(&key())?.status.as_ref()?.placement.as_ref()?.nodes.len())
}

fn pod(node_rank: i32) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": format!("a-1-{node_rank}"), "namespace": "t", "uid": format!("p{node_rank}"), "labels": {labels::JOB_UID: UID},
            "ownerReferences": [{"apiVersion": labels::API_VERSION, "kind": "TrainJob", "name": "a", "uid": UID, "controller": true}]},
        "spec": {"schedulingGates": [{"name": labels::GANG_GATE}], "containers": [{"name": "trainer"}]},
    }))
    .unwrap()
}

#[test]
fn a_job_becomes_visible_only_with_all_its_nodes() {
    let (job, parts) = stored(&whole(1, "n"));
    for order in [[0, 1], [1, 0]] {
        let mut index = Index::default();
        index.apply_pod(&pod(299));
        assert_eq!(index.show_job(job.clone()).jobs, [key()].into(), "the job is reconciled to look for its slices");
        assert_eq!((nodes_shown(&index), index.usage.share("p299")), (None, None));
        let first = index.show_slice(parts[order[0]].clone());
        assert!(nodes_shown(&index).is_none(), "{first:?}");
        let last = index.show_slice(parts[order[1]].clone());
        assert_eq!((nodes_shown(&index), index.missing_slice(&key())), (Some(300), None));
        assert!(last.jobs.contains(&key()));
        assert_eq!(index.usage.share("p299").map(|share| share.gpus.clone()), Some(vec!["GPU-n299".to_string()]));
    }
    let mut index = Index::default();
    parts.iter().cloned().for_each(|part| drop(index.show_slice(part)));
    index.show_job(job);
    assert_eq!(nodes_shown(&index), Some(300), "a list may show the slices first");
    assert!(index.slice_join.known.values().all(BTreeMap::is_empty), "slices are not stored twice");
}

/// A deleted slice does no harm while the placement is in memory: the controller writes the slice
/// again.
#[test]
fn a_visible_job_no_longer_needs_its_slices() {
    let (job, parts) = stored(&whole(1, "n"));
    let mut index = Index::default();
    parts.iter().cloned().for_each(|part| drop(index.show_slice(part)));
    index.show_job(job);
    let gone = index.hide_slice(&parts[0].metadata);
    assert!(gone.jobs.contains(&key()), "the slice must be recreated");
    let (later, _) = stored(&whole(2, "n"));
    index.show_job(later);
    assert_eq!((nodes_shown(&index), index.missing_slice(&key())), (Some(300), None));
    assert_eq!(index.jobs[&key()].metadata.resource_version.as_deref(), Some("2"));
    let (moved, _) = stored(&whole(3, "m"));
    index.show_job(moved);
    assert!(
        index.missing_slice(&key()).is_some_and(|missing_slice| missing_slice.slice.is_some()),
        "another placement has other slices"
    );
    assert_eq!(index.jobs[&key()].metadata.resource_version.as_deref(), Some("2"), "it keeps its previous state");
}

#[test]
fn foreign_slices_are_not_part_of_the_placement() {
    let (job, parts) = stored(&whole(1, "n"));
    let forge = |change: &dyn Fn(&mut PlacementSlice)| {
        let mut forged = parts[1].clone();
        forged.spec.nodes[0].node_name = "evil".into();
        change(&mut forged);
        forged
    };
    let forged: [(&str, PlacementSlice); 6] = [
        ("another namespace", forge(&|slice| slice.metadata.namespace = Some("evil".into()))),
        ("no owner", forge(&|slice| slice.metadata.owner_references = None)),
        ("no controller", forge(&|slice| slice.metadata.owner_references.as_mut().unwrap()[0].controller = None)),
        ("another owner", forge(&|slice| slice.metadata.owner_references.as_mut().unwrap()[0].uid = "2".into())),
        ("no label", forge(&|slice| slice.metadata.labels = None)),
        ("another content", forge(&|_| ())),
    ];
    for (what, forged) in forged {
        let mut index = Index::default();
        index.show_job(job.clone());
        index.show_slice(parts[0].clone());
        index.show_slice(forged);
        assert_eq!(nodes_shown(&index), None, "{what}");
        assert!(index.missing_slice(&key()).is_some(), "{what}");
    }
}

#[test]
fn a_job_whose_slices_are_gone_is_shown_without_nodes() {
    let (job, parts) = stored(&whole(1, "n"));
    let mut index = Index::default();
    index.show_job(job.clone());
    index.show_slice(parts[0].clone());
    assert_eq!(index.missing_slice(&key()).unwrap().slice, parts[1].metadata.name);
    index.show_without_nodes(&key());
    assert_eq!((nodes_shown(&index), index.missing_slice(&key())), (Some(0), None));
    index.show_job(job);
    assert_eq!(
        (nodes_shown(&index), index.missing_slice(&key())),
        (Some(0), None),
        "the slices are not looked for again"
    );
}

#[test]
fn a_deleted_job_waits_for_nothing() {
    let (job, parts) = stored(&whole(1, "n"));
    let mut index = Index::default();
    index.show_job(job.clone());
    index.show_slice(parts[0].clone());
    index.hide_job(&job.metadata);
    assert_eq!(index.missing_slice(&key()), None);
    assert!(index.slice_join.known.is_empty() && index.slice_join.waiting.is_empty());
}
