//! What becomes of a manifest, and what is refused.

use super::{Invalid, gpus, validate};
use crate::objects::{self, Defaults};
use crate::resources;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use switchyard_crds::{DeviceAllocation, FabricResource, FabricStatus, TrainJob, TrainJobStatus, validate as schema};

/// A job with `spec` merged over a small GPT.
pub(crate) fn job(name: &str, spec: Value) -> TrainJob {
    let mut document = json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": name},
        "spec": {"engine": {
            "model": {"type": "GPT", "gpt": {"layers": 4, "hiddenSize": 128, "heads": 4, "contextLength": 128}},
            "data": {"path": ".", "include": ["**/*.rs"]},
            "steps": 600,
        }},
    });
    merge(&mut document["spec"], spec);
    schema::train_job(&document).unwrap_or_else(|faults| panic!("{faults:?}"))
}

fn merge(target: &mut Value, source: Value) {
    match (target, source) {
        (Value::Object(target), Value::Object(source)) => {
            for (key, value) in source {
                if value.is_null() {
                    target.remove(&key);
                    continue;
                }
                merge(target.entry(key).or_insert(Value::Null), value);
            }
        }
        (target, source) => *target = source,
    }
}

/// The CRD cannot name the contract's constants: the rule and the list must agree.
#[test]
fn the_rule_on_reserved_names_knows_every_setting_of_users() {
    use switchyard_worker_contract::env::{ALL, USER_SETTABLE};
    for name in ALL {
        let document = json!({
            "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "names"},
            "spec": {"trainer": {"env": [{"name": name, "value": "1"}]}, "engine": {
                "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 8, "heads": 1, "contextLength": 4}},
                "data": {"path": "."},
                "steps": 1,
            }},
        });
        assert_eq!(schema::train_job(&document).is_ok(), USER_SETTABLE.contains(&name), "{name}");
    }
}

#[test]
fn a_measured_check_reaches_the_engine_and_what_cannot_be_measured_is_refused() {
    let check = |preflight: Value, trainer: Value| {
        let spec = json!({"fabric": {"preflight": preflight}, "trainer": trainer});
        validate(&job("measured", spec)).map(|valid| valid.engine.unwrap().bandwidth_check)
    };
    let asked = json!({"mode": "Enforce", "minBusBandwidth": "1500M"});
    let found = check(asked.clone(), json!({"numNodes": 2})).unwrap().unwrap();
    assert_eq!((found.least_bytes_per_second, found.enforce), (1.5e9, true));
    assert_eq!(check(json!({}), json!({"numNodes": 2})).unwrap(), None);
    let text = |faults: Vec<Invalid>| faults[0].to_string();
    let alone = check(asked, json!({})).map_err(text).unwrap_err();
    assert!(alone.starts_with("spec.fabric.preflight.minBusBandwidth: got 1500M for a job of one process"), "{alone}");
    let nothing = check(json!({"minBusBandwidth": "0"}), json!({"numNodes": 2})).map_err(text).unwrap_err();
    assert!(nothing.contains("got `0`; expected bytes per second greater than 0"), "{nothing}");
    // The engine has TCP only: a job that must not use it is refused, and not left to wait.
    let required = job("required", json!({"fabric": {"mode": "Required"}, "trainer": {"numNodes": 2}}));
    let refused = validate(&required).map_err(text).unwrap_err();
    assert!(refused.starts_with("spec.fabric.mode: got Required with framework Switchyard"), "{refused}");
}

/// Nobody builds a pod to learn what it asks for, so this must be what its pods ask for.
#[test]
fn what_is_read_from_the_manifest_is_what_the_pods_ask_for() {
    let gpus_of = |count: u32| json!({"limits": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": count}});
    let trainer = |resources: Value| json!({"name": "trainer", "resources": resources});
    let side =
        json!({"name": "side", "image": "i", "restartPolicy": "Always", "resources": {"requests": {"cpu": "250m"}}});
    let init = json!({"name": "init", "image": "i", "resources": {"requests": {"cpu": "9", "memory": "1Gi"}}});
    let templates = [
        json!({}),
        json!({"containers": [trainer(json!({"limits": {"cpu": "1", "nvidia.com/gpu": 1}}))]}),
        json!({"containers": [trainer(json!({"requests": {"cpu": "500m", "rdma/shared": "2"}}))], "initContainers": [side, init]}),
        json!({"containers": [{"name": "log", "image": "i", "resources": {"limits": {"cpu": "1"}}}], "overhead": {"memory": "64Mi"}}),
    ];
    let fabric = FabricStatus {
        resources: vec![FabricResource {
            name: "rdma/shared".into(),
            quantity: Quantity("1".into()),
            reason: "test".into(),
        }],
        ..FabricStatus::default()
    };
    let mut cases = 0;
    for (template, framework) in templates.iter().flat_map(|template| [(template, "Torch"), (template, "Plain")]) {
        for (allocation, fabric) in [
            (None, None),
            (Some(DeviceAllocation::DevicePlugin), Some(fabric.clone())),
            (Some(DeviceAllocation::Claims), Some(fabric.clone())),
        ] {
            let spec = json!({
                "engine": null, "template": {"spec": template},
                "trainer": {"framework": framework, "image": "i", "numNodes": 2, "resourcesPerNode": gpus_of(2)},
            });
            let mut job = job("asks", spec);
            job.status = Some(TrainJobStatus { device_allocation: allocation, fabric, ..TrainJobStatus::default() });
            let valid = validate(&job).unwrap_or_else(|faults| panic!("{faults:?}"));
            let made = objects::pod(&job, &valid, &Defaults::default(), 1, 0).spec.unwrap();
            assert_eq!(valid.pod.requests(job.status.as_ref()), resources::of_pod(&made), "{:?}", job.spec.template);
            assert_eq!(valid.pod.gpus, gpus(&job));
            cases += 1;
        }
    }
    assert_eq!(cases, 24);
}
