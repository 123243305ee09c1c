use super::*;
use kube::CustomResourceExt;
use serde_json::Value;

/// Calls `visit` with the path and the schema of every property.
fn walk(path: &str, schema: &Value, visit: &mut dyn FnMut(&str, &Value)) {
    visit(path, schema);
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        for (name, property) in properties {
            walk(&format!("{path}.{name}"), property, visit);
        }
    }
    if let Some(items) = schema.get("items") {
        walk(&format!("{path}[]"), items, visit);
    }
}

fn status_schema() -> Value {
    let crd = serde_json::to_value(GPUTopology::crd()).expect("a CRD is JSON");
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"].clone()
}

#[test]
fn names_and_scope() {
    let crd = GPUTopology::crd();
    assert_eq!(crd.metadata.name.as_deref(), Some("gputopologies.training.switchyard.dev"));
    assert_eq!(crd.spec.scope, "Cluster");
    assert_eq!(crd.spec.names.short_names, Some(vec!["gputopo".to_owned()]));
    assert_eq!(crd.spec.names.categories, Some(vec!["switchyard".to_owned()]));
    assert!(crd.spec.versions[0].subresources.as_ref().is_some_and(|sub| sub.status.is_some()));
}

#[test]
fn schema_follows_the_conventions() {
    let mut faults = Vec::new();
    let mut seen = 0;
    walk("status", &status_schema(), &mut |path, schema| {
        // The Kubernetes type, unchanged.
        if path.starts_with("status.conditions[]") {
            return;
        }
        seen += 1;
        let text = |key: &str| schema.get(key).and_then(Value::as_str).unwrap_or_default();
        match text("type") {
            "string" if text("format") == "date-time" || schema.get("enum").is_some() => {}
            "string" if schema.get("maxLength").is_none() => faults.push(format!("{path}: no maxLength")),
            "array" if schema.get("maxItems").is_none() => faults.push(format!("{path}: no maxItems")),
            "number" | "boolean" => faults.push(format!("{path}: {}", text("type"))),
            "object" if schema.get("additionalProperties").is_some() => faults.push(format!("{path}: map")),
            "integer" if !["int32", "int64"].contains(&text("format")) => {
                faults.push(format!("{path}: format {}", text("format")));
            }
            "integer" if schema.get("minimum").is_none() => faults.push(format!("{path}: no minimum")),
            _ => {}
        }
        if !path.ends_with(']') && text("description").is_empty() {
            faults.push(format!("{path}: no description"));
        }
    });
    assert_eq!(faults, Vec::<String>::new());
    assert!(seen > 120, "the walk saw {seen} properties only");
}

#[test]
fn lists_of_named_objects_merge_by_key() {
    let schema = status_schema();
    for (list, keys) in [
        ("numaNodes", vec!["id"]),
        ("gpus", vec!["uuid"]),
        ("links", vec!["a", "b", "kind"]),
        ("nics", vec!["name"]),
        ("sources", vec!["facts"]),
        ("inUse", crate::device_use::IN_USE_KEYS.to_vec()),
        ("conditions", vec!["type"]),
    ] {
        let property = &schema["properties"][list];
        assert_eq!(property["x-kubernetes-list-type"], "map", "{list}");
        assert_eq!(property["x-kubernetes-list-map-keys"], serde_json::json!(keys), "{list}");
        for key in keys {
            let required = property["items"]["required"].as_array().expect("keys are required");
            assert!(required.contains(&Value::from(key)), "{list}.{key} is a key and must be required");
        }
    }
}

#[test]
fn unknown_is_absent_in_json() {
    let nic = Nic { name: "eth0".to_owned(), ..Nic::default() };
    assert_eq!(
        serde_json::to_value(nic).expect("a NIC is JSON"),
        serde_json::json!({"name": "eth0", "kind": "Physical"})
    );
    let status = serde_json::to_value(GPUTopologyStatus::default()).expect("a status is JSON");
    assert_eq!(status, serde_json::json!({}));
}
