//! Reading of manifests, and rejected ones.

use super::Invalid;
use crate::validate;
use serde_json::{Value, json};
use switchyard_crds::{TrainJob, validate as schema};

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

/// The CRD cannot refer to the contract's constants, so its rule and the list must agree.
#[test]
fn the_reserved_name_rule_covers_every_user_setting() {
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
fn the_engine_accepts_as_many_ranks_as_a_group_allows() {
    let trainer = |trainer: Value| validate(&job("many", json!({"trainer": trainer})));
    let by_gpus = |nodes: u32| json!({"numNodes": nodes, "resourcesPerNode": {"limits": {"nvidia.com/gpu": "8"}}});
    for accepted in [json!({"numNodes": 4096}), json!({"numNodes": 64, "numProcPerNode": 64}), by_gpus(512)] {
        assert!(trainer(accepted.clone()).is_ok(), "{accepted}");
    }
    for rejected in
        [json!({"numNodes": 4096, "numProcPerNode": 2}), json!({"numNodes": 65, "numProcPerNode": 64}), by_gpus(513)]
    {
        assert!(trainer(rejected.clone()).is_err(), "{rejected}");
    }
    assert_eq!(
        trainer(by_gpus(513)).unwrap_err()[0].to_string(),
        "spec.trainer.numNodes: got 513 with 8 processes each, 4104 ranks in all; expected at most 512 nodes: framework Switchyard has at most \
         4096 ranks, other frameworks have no limit"
    );
    let engine = include_str!("../../../worker/src/comm/config.rs");
    assert!(engine.contains(&format!("MAX_WORLD: u32 = {};", super::MAX_RANKS)), "the engine has another limit");
}

#[test]
fn a_bandwidth_check_reaches_the_engine_and_needs_two_processes() {
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
    // Between CPUs the engine supports only TCP: a job that must not use it is rejected instead of
    // left waiting.
    let required = |trainer: Value| job("required", json!({"fabric": {"mode": "Required"}, "trainer": trainer}));
    let refused = validate(&required(json!({"numNodes": 2}))).map_err(text).unwrap_err();
    assert!(refused.starts_with("spec.fabric.mode: got Required with framework Switchyard on CPUs"), "{refused}");
    let gpus = json!({"numNodes": 2, "resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}}});
    assert!(validate(&required(gpus)).is_ok(), "NCCL carries the gradients of GPUs");
}
