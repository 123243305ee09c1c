//! Every CEL rule of the TrainJob accepts what it should and rejects what it should, without an API
//! server.

#![allow(missing_docs, clippy::unwrap_used)]

#[path = "cel_rules/engine.rs"]
mod engine;
#[path = "cel_rules/roles.rs"]
mod roles;

use kube::CustomResourceExt;
use kube::core::cel::{CompiledSchema, ValidationErrors, Validator, compile_schema};
use serde_json::{Value, json};
use std::sync::LazyLock;
use switchyard_crds::TrainJob;

/// The schema of a TrainJob with its rules, compiled once for all cases.
static RULES: LazyLock<CompiledSchema> = LazyLock::new(|| {
    let crd = serde_json::to_value(TrainJob::crd()).unwrap();
    compile_schema(&crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
});

/// Applies the rules to a new job, or to a change of `old`.
fn validate(job: &TrainJob, old: Option<&TrainJob>) -> Result<(), ValidationErrors> {
    let old = old.map(|old| serde_json::to_value(old).unwrap());
    Validator::new().validate_compiled(&RULES, &serde_json::to_value(job).unwrap(), old.as_ref())
}

fn base() -> Value {
    json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "job"},
        "spec": {"engine": {
            "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 8, "heads": 2, "contextLength": 4}},
            "data": {"path": "."},
            "steps": 10,
        }},
    })
}

/// The base manifest with the value at a JSON pointer replaced or added; `null` removes it.
fn with(changes: &[(&str, Value)]) -> Value {
    let mut document = base();
    for (pointer, value) in changes {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let mut target = &mut document;
        for part in parent.split('/').skip(1) {
            target = &mut target[part];
        }
        if value.is_null() {
            target.as_object_mut().unwrap().remove(key);
        } else {
            target[key] = value.clone();
        }
    }
    document
}

fn read(document: &Value) -> TrainJob {
    serde_json::from_value(document.clone()).unwrap()
}

/// Message of the rule, a similar accepted manifest, a rejected manifest.
type Case = (&'static str, Value, Value);

/// All cases except those of the block `engine`.
fn outer_cases() -> Vec<Case> {
    let env = |name: &str| with(&[("/spec/trainer", json!({"env": [{"name": name, "value": "1"}]}))]);
    let limits = |name: &str| with(&[("/spec/trainer", json!({"resourcesPerNode": {"limits": {name: "2"}}}))]);
    let gpu = |device: &str| {
        let mut job = limits("nvidia.com/gpu");
        job["spec"]["engine"]["device"] = device.into();
        job
    };
    let plain = |more: Value| {
        let mut job = with(&[("/spec/trainer", more), ("/spec/engine", Value::Null)]);
        job["spec"]["trainer"]["framework"] = "Plain".into();
        job
    };
    let of = |framework: &str, more: Value| {
        let mut job = plain(more);
        job["spec"]["trainer"]["framework"] = framework.into();
        job
    };
    let checkpoint = |block: Value| with(&[("/spec/checkpoint", block)]);
    let rule = |more: Value| {
        let mut rule = more;
        rule["action"] = "FailTrainJob".into();
        with(&[("/spec/failurePolicy", json!({"rules": [rule]}))])
    };
    let fabric = |block: Value| with(&[("/spec/fabric", block)]);
    vec![
        (
            "onFallback: Fail needs mode: Required",
            fabric(json!({"mode": "Required", "onFallback": "Fail"})),
            fabric(json!({"mode": "Auto", "onFallback": "Fail"})),
        ),
        (
            "minBusBandwidth is a check",
            fabric(json!({"preflight": {"mode": "Enforce", "minBusBandwidth": "1G"}})),
            fabric(json!({"preflight": {"mode": "None", "minBusBandwidth": "1G"}})),
        ),
        ("minBusBandwidth is measured by our own engine", fabric(json!({"preflight": {"minBusBandwidth": "1G"}})), {
            let mut job = plain(json!({}));
            job["spec"]["fabric"] = json!({"preflight": {"minBusBandwidth": "1G"}});
            job
        }),
        (
            "metadata.name must have",
            with(&[("/metadata/name", json!("a-1"))]),
            with(&[("/metadata/name", json!("A_1"))]),
        ),
        ("names that begin with SWITCHYARD_", env("SWITCHYARD_KERNEL"), env("SWITCHYARD_RANK")),
        ("only cpu, memory and nvidia.com/gpu are supported", limits("nvidia.com/gpu"), limits("amd.com/gpu")),
        ("with engine.device Cpu the GPUs", gpu("Cuda"), gpu("Cpu")),
        (
            "frameworks JAX and TensorFlow have one process",
            of("JAX", json!({"numProcPerNode": 1})),
            of("TensorFlow", json!({"numProcPerNode": 2})),
        ),
        ("engine must be set with", plain(json!({})), with(&[("/spec/trainer", json!({"framework": "Plain"}))])),
        (
            "trainer.command and trainer.args",
            plain(json!({"command": ["python"], "args": ["train.py"]})),
            with(&[("/spec/trainer", json!({"command": ["python"]}))]),
        ),
        (
            "path must begin with / when volumeName",
            checkpoint(json!({"volumeName": "v", "path": "/ckpt"})),
            checkpoint(json!({"volumeName": "v", "path": "ckpt"})),
        ),
        ("checkpoint is for framework Switchyard", checkpoint(json!({"path": "ckpt"})), {
            let mut job = plain(json!({}));
            job["spec"]["checkpoint"] = json!({"path": "ckpt"});
            job
        }),
        (
            "queue.preemptible Always needs",
            with(&[("/spec/queue", json!({"preemptible": "Always"}))]),
            with(&[
                ("/spec/queue", json!({"preemptible": "Always"})),
                ("/spec/failurePolicy", json!({"maxPreemptionRestarts": 0})),
            ]),
        ),
        (
            "set exactly one of onExitCodes",
            rule(json!({"onExitCodes": {"operator": "In", "values": [42]}})),
            rule(json!({"onExitCodes": {"operator": "In", "values": [42]}, "onPodCondition": {"type": "A"}})),
        ),
    ]
}

#[test]
fn every_rule_accepts_and_rejects() {
    for (message, accepted, rejected) in [outer_cases(), engine::cases(), roles::cases()].concat() {
        if let Err(errors) = validate(&read(&accepted), None) {
            panic!("{message}: the neighbour was rejected: {errors}");
        }
        let errors = validate(&read(&rejected), None).expect_err(message).to_string();
        assert!(errors.contains(message), "expected `{message}`, got: {errors}");
    }
}

#[test]
fn spec_is_immutable() {
    let old = read(&base());
    assert!(validate(&old, Some(&old)).is_ok());
    let mut labelled = old.clone();
    labelled.metadata.labels = Some([("team".to_string(), "a".to_string())].into());
    assert!(validate(&labelled, Some(&old)).is_ok(), "metadata stays free");
    let free = [
        ("/spec/suspend", json!(true)),
        ("/spec/activeDeadlineSeconds", json!(9)),
        ("/spec/ttlSecondsAfterFinished", json!(9)),
    ];
    assert!(validate(&read(&with(&free)), Some(&old)).is_ok());
    for fixed in [
        ("/spec/engine/steps", json!(11)),
        ("/spec/trainer", json!({"numNodes": 2})),
        ("/spec/template", json!({"spec": {"hostNetwork": true}})),
        ("/spec/gangPolicy", json!({"scheduleTimeoutSeconds": 9})),
        ("/spec/failurePolicy", json!({"maxRestarts": 9})),
        ("/spec/checkpoint", json!({"path": "ckpt"})),
        ("/spec/queue", json!({"preemptible": "Never"})),
        ("/spec/topologyPolicy", json!({"mode": "Required"})),
        ("/spec/fabric", json!({"mode": "Required"})),
        ("/spec/managedBy", json!("kueue.x-k8s.io/multikueue")),
        ("/spec/engine", Value::Null),
    ] {
        let new = read(&with(std::slice::from_ref(&fixed)));
        let errors = validate(&new, Some(&old)).expect_err(fixed.0).to_string();
        assert!(errors.contains("spec is immutable"), "{fixed:?}: {errors}");
    }
}

/// Every framework except ours takes a command and no engine.
#[test]
fn every_framework_is_accepted_with_a_command() {
    for framework in ["Torch", "Paddle", "Horovod", "MPI", "JAX", "TensorFlow", "Plain"] {
        let trainer = json!({"framework": framework, "image": "image", "command": ["python"], "args": ["train.py"], "numNodes": 2});
        let job = with(&[("/spec/trainer", trainer.clone()), ("/spec/engine", Value::Null)]);
        assert!(validate(&read(&job), None).is_ok(), "{framework}");
        let both = validate(&read(&with(&[("/spec/trainer", trainer)])), None).expect_err(framework).to_string();
        assert!(both.contains("engine must be set with"), "{framework}: {both}");
    }
}

/// Detects rules without a case above.
#[test]
fn every_rule_has_a_case() {
    fn messages(schema: &Value, found: &mut Vec<String>) {
        match schema {
            Value::Object(object) => {
                for rule in object.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
                    found.push(
                        rule["message"].as_str().expect("every rule has a message that says what to do").to_string(),
                    );
                }
                object.values().for_each(|value| messages(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| messages(value, found)),
            _ => {}
        }
    }
    let mut found = Vec::new();
    messages(&serde_json::to_value(TrainJob::crd()).unwrap(), &mut found);
    let cases = [outer_cases(), engine::cases(), roles::cases()].concat();
    for message in &found {
        let covered =
            message.starts_with("spec is immutable") || cases.iter().any(|(case, ..)| message.starts_with(case));
        assert!(covered, "no case for the rule: {message}");
    }
    // Besides the immutable spec: a variable of a role has the same rule as one of the trainer.
    assert_eq!(found.len(), cases.len() + 2, "{found:#?}");
}
