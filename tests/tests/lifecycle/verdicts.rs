//! G8: valid and invalid values derived from the schema, judged by our own validation and by a real
//! API server. The verdicts must agree, so that `switchyard run` refuses exactly what `kubectl
//! apply` would refuse. Accepted values must become a job with a status.

use anyhow::{Result, ensure};
use futures::{StreamExt, TryStreamExt};
use kube::Api;
use kube::api::{DynamicObject, GroupVersionKind, PostParams};
use kube::core::ApiResource;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use switchyard_crds::validate;
use switchyard_tests::ControlPlane;

/// A job with every block, so that every field can be set.
fn base() -> Value {
    json!({
        "apiVersion": "training.switchyard.dev/v1alpha1", "kind": "TrainJob", "metadata": {"name": "base"},
        "spec": {
            "trainer": {"env": [{"name": "A", "value": "b"}], "resourcesPerNode": {"limits": {"cpu": "1"}}},
            "gangPolicy": {}, "topologyPolicy": {"nodeTopology": {}},
            "failurePolicy": {"rules": [{"action": "FailTrainJob", "onExitCodes": {"operator": "In", "values": [42]}}]},
            "engine": {
                "model": {"type": "GPT", "gpt": {"layers": 1, "hiddenSize": 8, "heads": 2, "contextLength": 4}},
                "data": {"path": "/data", "include": ["*"]}, "steps": 1000, "optimizer": {}, "schedule": {}, "overlap": {},
                "evaluation": {},
            },
        },
    })
}

/// A changed manifest and a description of the change.
struct Case {
    what: String,
    job: Value,
}

/// Values on both sides of every bound of a schema node.
fn values(schema: &Value) -> Vec<Value> {
    let mut values = Vec::new();
    if let Some(words) = schema["enum"].as_array() {
        values.extend(words.iter().cloned());
        values.push("Nope".into());
        return values;
    }
    let bound = |name: &str| schema[name].as_f64().map(|bound| bound as i64);
    match schema["type"].as_str() {
        Some("integer") => {
            values.extend(bound("minimum").into_iter().flat_map(|min| [json!(min), json!(min - 1)]));
            values.extend(bound("maximum").into_iter().flat_map(|max| [json!(max), json!(max + 1)]));
            values.extend([json!("text"), json!(1.5)]);
        }
        Some("string") => {
            let longest = schema["maxLength"].as_u64();
            values.extend(
                longest.filter(|longest| *longest < 100_000).map(|longest| json!("x".repeat(longest as usize + 1))),
            );
            values.extend(["", "0", "0.5", "a", "A_1", "1e-3", "-1", "SWITCHYARD_RANK"].map(Value::from));
            values.push(json!(7));
        }
        Some("boolean") => values.extend([json!(true), json!("true")]),
        Some("array") => values.extend([json!([]), json!("text"), json!({})]),
        Some("object") => values.extend([json!("text"), json!([]), json!({"unknownField": 1})]),
        _ => {}
    }
    values
}

/// The value at a key or index, created if missing.
fn place<'a>(at: &'a mut Value, part: &str) -> &'a mut Value {
    match part.parse::<usize>() {
        Ok(index) => {
            if at.as_array().is_none_or(|list| list.len() <= index) {
                *at = json!([null]);
            }
            &mut at[index]
        }
        Err(_) => &mut at[part],
    }
}

fn walk(schema: &Value, path: &mut Vec<String>, cases: &mut Vec<Case>) {
    // The pod template has Kubernetes' own schema.
    if path.last().is_some_and(|last| last == "template") {
        return;
    }
    if path.len() > 1 {
        let mut all: Vec<Option<Value>> = values(schema).into_iter().map(Some).collect();
        all.push(None);
        for value in all {
            let mut job = base();
            let (last, parents) = path.split_last().unwrap();
            let mut at = &mut job;
            for part in parents {
                at = place(at, part);
            }
            match &value {
                Some(value) => *place(at, last) = value.clone(),
                None => drop(at.as_object_mut().and_then(|map| map.remove(last))),
            }
            let text: String = value.map_or("removed".into(), |value| value.to_string()).chars().take(40).collect();
            cases.push(Case { what: format!("{} {text}", path.join(".")), job });
        }
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        path.push(name.clone());
        walk(property, path, cases);
        path.pop();
    }
    if schema["type"] == "array" {
        path.push("0".into());
        walk(&schema["items"], path, cases);
        path.pop();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_verdicts_match_the_servers() -> Result<()> {
    let plane = ControlPlane::shared();
    let namespace = plane.namespace("verdicts").await?;
    let kind = GroupVersionKind::gvk("training.switchyard.dev", "v1alpha1", "TrainJob");
    let resource = ApiResource::from_gvk_with_plural(&kind, "trainjobs");
    let api = Api::<DynamicObject>::namespaced_with(plane.client().await?, &namespace, &resource);
    let crd = switchyard_crds::generate::crds().into_iter().find(|(name, _)| *name == "trainjobs.yaml").unwrap().1;
    let schema =
        serde_json::to_value(crd)?["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone();
    let mut cases = Vec::new();
    walk(&schema, &mut vec!["spec".into()], &mut cases);
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let verdicts = futures::stream::iter(cases.into_iter().map(|case| {
        let (api, params) = (api.clone(), params.clone());
        tokio::spawn(async move {
            let ours = validate::train_job(&case.job).map(|_| ()).map_err(|faults| faults[0].to_string());
            let theirs = match serde_json::from_value(case.job.clone()) {
                Ok(job) => api.create(&params, &job).await.map(|_| ()).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            (case, ours, theirs)
        })
    }));
    let verdicts: Vec<_> = verdicts.buffer_unordered(8).try_collect().await?;
    let mut differences = BTreeSet::new();
    let (mut valid, mut invalid) = (0, 0);
    for (case, ours, theirs) in verdicts {
        // A server without strict field validation drops unknown fields; kubectl requests strict
        // validation.
        if case.what.contains("unknownField") {
            ensure!(ours.is_err(), "{} is accepted", case.what);
            continue;
        }
        if ours.is_ok() != theirs.is_ok() {
            differences.insert(format!("{}: ours {ours:?}; the server's {theirs:?}", case.what));
        }
        if theirs.is_ok() { valid += 1 } else { invalid += 1 }
    }
    println!("{valid} accepted, {invalid} refused");
    ensure!(
        differences.is_empty(),
        "{} differences:\n{}",
        differences.len(),
        differences.into_iter().collect::<Vec<_>>().join("\n")
    );
    ensure!(valid >= 50 && invalid >= 100, "{valid} accepted, {invalid} refused");
    Ok(())
}
