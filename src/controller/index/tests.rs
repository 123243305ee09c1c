//! What the index makes of changes in the order in which watches show them.
#![allow(clippy::unwrap_used)]

use super::*;
use serde_json::json;

const UID: &str = "11111111-1111-1111-1111-111111111111";

/// A job in this attempt, with a place or without.
fn job(attempt: i32, is_placed: bool) -> TrainJob {
    let condition = json!({
        "type": "Placed", "status": if is_placed { "True" } else { "False" }, "reason": "Placed", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let placement = json!({"reason": "", "nodes": [{"firstRank": 0, "nodeName": "n", "gpus": ["GPU-1", "GPU-2"]}]});
    serde_json::from_value(json!({
        "apiVersion": labels::API_VERSION, "kind": "TrainJob", "metadata": {"name": "a", "namespace": "t", "uid": UID},
        "spec": {"trainer": {"framework": "Plain", "image": "i"}},
        "status": {"attempt": attempt, "conditions": [condition], "placement": if is_placed { placement } else { json!(null) }},
    }))
    .unwrap()
}

fn pod(node: Option<&str>) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "a-1-0", "namespace": "t", "uid": "p", "ownerReferences": [
            {"apiVersion": labels::API_VERSION, "kind": "TrainJob", "name": "a", "uid": UID, "controller": true},
        ]},
        "spec": {"nodeName": node, "containers": [{"name": "trainer"}]},
    }))
    .unwrap()
}

/// Its claim says so too, but may not have been seen yet: then the next gang would get what still runs.
#[test]
fn a_pod_of_an_attempt_that_is_over_has_its_gpus_until_it_is_gone() {
    let mut index = Index::default();
    let gpus = |index: &Index| index.usage.share("p").map(|share| share.gpus.clone());
    index.apply_job(job(1, true));
    index.apply_pod(&pod(None));
    let planned = Some(vec!["GPU-1".to_string(), "GPU-2".to_string()]);
    assert_eq!(gpus(&index), planned, "from the decision on");
    index.apply_pod(&pod(Some("n")));
    index.apply_job(job(2, false));
    assert_eq!(gpus(&index), planned);
    index.delete_pod(&pod(Some("n")).metadata);
    assert_eq!(gpus(&index), None);
}

#[test]
fn a_pod_that_was_taken_back_before_it_was_bound_has_nothing() {
    let mut index = Index::default();
    index.apply_job(job(1, true));
    index.apply_pod(&pod(None));
    index.apply_job(job(2, false));
    assert_eq!(index.usage.share("p"), None);
}
