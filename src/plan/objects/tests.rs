//! Golden objects: what is created in a cluster, reviewed as YAML in `snapshots/`.

use super::*;
use crate::plan::validate;
use proptest::prelude::*;
use serde_json::Value;
use switchyard_crds::{DeviceAllocation, PlacedNode};

fn job(name: &str, spec: Value) -> (TrainJob, ValidJob) {
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name}, "spec": spec,
    });
    let mut job = switchyard_crds::validate::train_job(&document).unwrap_or_else(|faults| panic!("{faults:?}"));
    job.metadata.namespace = Some("team".into());
    job.metadata.uid = Some("5d3f8a52-4a44-4d2a-9d0e-0123456789ab".into());
    let valid = validate(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
    (job, valid)
}

fn engine() -> Value {
    json!({"model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 8, "heads": 2, "contextLength": 4}}, "data": {"path": "/data"}, "steps": 9})
}

fn defaults() -> Defaults {
    Defaults { worker_image: "switchyard-worker:1".into(), ..Defaults::default() }
}

/// Everything of one attempt; of the pods the first.
fn all(job: &(TrainJob, ValidJob)) -> Vec<Value> {
    let mut objects = shared(&job.0, &job.1);
    objects.extend(config_map(&job.0, &job.1, 1).map(Object::ConfigMap));
    objects.push(Object::Pod(Box::new(pod(&job.0, &job.1, &defaults(), 1, 0))));
    objects.iter().map(|object| json!({"kind": object.kind(), "object": object.content()})).collect()
}

#[test]
fn one_pod_of_the_engine() {
    insta::assert_yaml_snapshot!(all(&job("one", json!({"engine": engine()}))));
}

#[test]
fn two_nodes_of_the_engine_with_everything() {
    let spec = json!({"trainer": {"numNodes": 2, "numProcPerNode": 4, "resourcesPerNode": {"limits": {"cpu": "8", "memory": "16Gi"}}}, "engine": engine()});
    insta::assert_yaml_snapshot!(all(&job("two", spec)));
}

#[test]
fn another_program() {
    let trainer =
        json!({"framework": "Plain", "image": "torch:2", "command": ["python"], "args": ["train.py"], "numNodes": 2});
    let job = job("torch", json!({"trainer": trainer}));
    insta::assert_yaml_snapshot!(pod(&job.0, &job.1, &defaults(), 3, 1));
}

#[test]
fn a_template_is_merged_by_name() {
    let template = json!({
        "metadata": {"labels": {"team": "vision", "training.switchyard.dev/rank": "7"}, "annotations": {"note": "kept"}},
        "spec": {
            "restartPolicy": "OnFailure", "hostname": "mine", "priorityClassName": "high",
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "switchyard-run", "persistentVolumeClaim": {"claimName": "models"}}],
            "schedulingGates": [{"name": "example.com/mine"}],
            "containers": [
                {"name": "trainer", "image": "mine:1", "command": ["sh"], "env": [{"name": "SWITCHYARD_JOB", "value": "x"}, {"name": "MINE", "value": "1"}],
                 "volumeMounts": [{"name": "data", "mountPath": "/data"}], "securityContext": {"runAsUser": 1000}},
                {"name": "side", "image": "side:1"},
            ],
        },
    });
    let job =
        job("merge", json!({"trainer": {"numNodes": 2, "image": "ours:1"}, "template": template, "engine": engine()}));
    insta::assert_yaml_snapshot!(pod(&job.0, &job.1, &defaults(), 1, 1));
    let conflicts: Vec<String> = conflicts(&job.0, &job.1, &defaults()).iter().map(ToString::to_string).collect();
    insta::assert_yaml_snapshot!(conflicts);
}

fn on(node: &str) -> PlacedNode {
    PlacedNode { node_name: node.into(), ..PlacedNode::default() }
}

#[test]
fn gpus_by_claim_and_cores_near_them() {
    let limits = json!({"limits": {"nvidia.com/gpu": 2, "cpu": 8}});
    let mut job = job("gpus", json!({"trainer": {"framework": "Plain", "image": "i", "resourcesPerNode": limits}}));
    job.0.status.get_or_insert_default().device_allocation = Some(DeviceAllocation::Claims);
    let placed = PlacedNode {
        gpus: vec!["GPU-a".into(), "GPU-b".into()],
        cpus: vec!["0-3".into(), "4-7".into()],
        ..on("node-7")
    };
    let made = pod(&job.0, &job.1, &defaults(), 1, 0);
    insta::assert_yaml_snapshot!(made);
    insta::assert_yaml_snapshot!(claim(&job.0, &job.1, &defaults(), 1, 0, &placed));
    assert_eq!(placement_patch(&made, &placed)["metadata"]["annotations"][labels::RANK_CPUS], "0-3;4-7");
}

#[test]
fn a_gate_is_lifted_and_every_term_of_an_affinity_is_pinned() {
    let free = job("free", json!({"engine": engine()}));
    insta::assert_yaml_snapshot!(placement_patch(&pod(&free.0, &free.1, &defaults(), 1, 0), &on("node-7")));
    let terms = json!([
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-1"]}]},
    ]);
    let affinity =
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
    let bound = job("bound", json!({"template": {"spec": {"affinity": affinity}}, "engine": engine()}));
    let patch = placement_patch(&pod(&bound.0, &bound.1, &defaults(), 1, 0), &on("node-7"));
    let fields = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
    let terms = patch.pointer(fields).unwrap().as_array().unwrap();
    assert!(
        terms.iter().all(|term| term["matchFields"]
            .as_array()
            .unwrap()
            .iter()
            .any(|field| field["values"] == json!(["node-7"])))
    );
    assert_eq!((terms.len(), &terms[0]["matchExpressions"][0]["key"]), (2, &json!("zone")));
}

#[test]
fn what_cannot_be_merged_is_named() {
    let template = json!({"spec": {"nodeName": "n", "initContainers": [{"name": "trainer", "image": "i"}],
        "containers": [{"name": "side"}, {"name": "side", "image": "i"}], "volumes": [{"name": "v"}, {"name": "v"}]}});
    let document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "a"},
        "spec": {"trainer": {"framework": "Plain"}, "template": template},
    });
    let job = switchyard_crds::validate::train_job(&document).unwrap();
    let text: Vec<String> = faults(&job).iter().map(ToString::to_string).collect();
    insta::assert_yaml_snapshot!(text);
}

#[test]
fn our_own_objects_cover_themselves() {
    let job = job("two", json!({"trainer": {"numNodes": 2}, "engine": engine()}));
    for object in shared(&job.0, &job.1) {
        let mut stored = object.content();
        stored["status"] = json!({"added": "by the server"});
        let view = crate::plan::cluster::view::ObjectView {
            uid: String::new(),
            owned: true,
            deleting: false,
            content: observed_content(&stored),
        };
        assert!(view.covers(&object.content()), "{}", object.kind());
        let mut changed = view.clone();
        changed.content["metadata"]["labels"] = json!({});
        assert!(!changed.covers(&object.content()), "{}: the labels are gone", object.kind());
    }
}

proptest! {
    // The whole schema is walked for every case.
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// Names of pods are host names: at most 63 characters.
    #[test]
    fn names_stay_within_their_limits(name in "[a-z][-a-z0-9]{0,48}[a-z0-9]", attempt in 1_u32..100_000, rank in 0_u32..1024) {
        let spec = json!({"trainer": {"numNodes": 1024}, "engine": engine()});
        let job = job(&name, spec);
        let pod = pod(&job.0, &job.1, &defaults(), attempt, rank);
        prop_assert!(pod.metadata.name.unwrap().len() <= 63);
        for object in shared(&job.0, &job.1) {
            prop_assert!(object.name().len() <= 63, "{}", object.name());
        }
        let labels = pod.metadata.labels.unwrap();
        prop_assert!(labels.values().all(|value| value.len() <= 63));
    }
}
