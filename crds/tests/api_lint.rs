//! API conventions, checked on the generated schemas (the kube-api-linter rules that JobSet and
//! Kueue use): no floats, no booleans, no free-form maps, every string and list bounded, lists with
//! a declared type, everything described, no abbreviated units.

#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::{Value, json};

/// Exceptions: Kubernetes' own types, maps whose keys Kubernetes or a user's program defines, and
/// two fields named as in `batch/v1` Job.
const EXEMPT: [&str; 9] = [
    ".status.conditions",
    ".spec.trainer.resourcesPerNode.limits",
    ".spec.template",
    ".spec.roles[].resourcesPerNode.limits",
    ".spec.roles[].nodeSelector",
    ".spec.roles[].tolerations",
    ".spec.engine.model.custom.parameters",
    ".spec.suspend",
    ".spec.managedBy",
];

fn lint(schema: &Value, path: &str, faults: &mut Vec<String>) {
    if EXEMPT.contains(&path) {
        return;
    }
    let mut fault = |text: &str| faults.push(format!("{path}: {text}"));
    if path.matches('.').count() > 1
        && !path.ends_with("[]")
        && schema["description"].as_str().is_none_or(|text| text.len() < 10)
    {
        fault("has no description");
    }
    match schema["type"].as_str() {
        Some("number") => fault("is a float: use a decimal string"),
        Some("boolean") => fault("is a boolean: use an enum, which can grow"),
        Some("string")
            if schema["enum"].is_null() && schema["maxLength"].is_null() && schema["format"] != "date-time" =>
        {
            fault("is a string without maxLength");
        }
        Some("string") => {
            for word in schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if !word.starts_with(|first: char| first.is_ascii_uppercase()) || word.contains(['-', '_']) {
                    fault(&format!("has the enum value {word}, which is not CamelCase"));
                }
            }
        }
        Some("integer") => {
            if schema["minimum"].is_null() && !path.ends_with("observedGeneration") {
                fault("is an integer without minimum");
            }
            if !matches!(schema["format"].as_str(), Some("int32" | "int64")) {
                fault("has an integer format that the API server does not know");
            }
        }
        Some("array") => {
            if schema["maxItems"].is_null() {
                fault("is a list without maxItems");
            }
            if schema["x-kubernetes-list-type"].is_null() {
                fault("is a list without x-kubernetes-list-type");
            }
            lint(&schema["items"], &format!("{path}[]"), faults);
        }
        Some("object") if !schema["additionalProperties"].is_null() => fault("is a free map"),
        _ => {}
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let lower = name.to_lowercase();
        if lower.ends_with("secs") || lower.ends_with("ms") || lower.ends_with("timeout") || lower.ends_with("duration")
        {
            faults.push(format!("{path}.{name}: the unit of a duration belongs in the name, as Seconds"));
        }
        lint(property, &format!("{path}.{name}"), faults);
    }
}

#[test]
fn every_crd_follows_the_conventions() {
    for (name, crd) in switchyard_crds::generate::crds() {
        let crd = serde_json::to_value(crd).unwrap();
        let version = &crd["spec"]["versions"][0];
        let mut faults = Vec::new();
        lint(&version["schema"]["openAPIV3Schema"], "", &mut faults);
        assert!(faults.is_empty(), "{name}:\n{}", faults.join("\n"));
        let has_status = !version["schema"]["openAPIV3Schema"]["properties"]["status"].is_null();
        assert_eq!(!version["subresources"]["status"].is_null(), has_status, "{name}: status is a subresource");
        for column in version["additionalPrinterColumns"].as_array().into_iter().flatten() {
            let path = column["jsonPath"].as_str().unwrap();
            assert!(
                !path.contains("conditions[") || path.contains("[?(@.type"),
                "{name}: column {path} indexes conditions by position"
            );
        }
    }
}

/// Paths of the enums below a schema, with their values.
fn enums(schema: &Value, path: &str, found: &mut Vec<(String, Vec<String>)>) {
    if path.contains(".conditions") {
        return;
    }
    let words = schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).map(String::from);
    let words: Vec<String> = words.collect();
    if !words.is_empty() {
        found.push((path.to_string(), words));
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        enums(property, &format!("{path}.{name}"), found);
    }
    if schema["items"].is_object() {
        enums(&schema["items"], &format!("{path}[]"), found);
    }
}

/// Regression: after a rollback, a status written by the newer version made its job unreadable.
#[test]
fn status_enums_accept_values_from_newer_versions() {
    let crd = serde_json::to_value(
        &switchyard_crds::generate::crds().into_iter().find(|(file, _)| *file == "trainjobs.yaml").unwrap().1,
    )
    .unwrap();
    let status = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"];
    let mut found = Vec::new();
    enums(status, ".status", &mut found);
    assert!(found.len() >= 10, "{found:?}");
    for (path, words) in found {
        assert!(words.iter().any(|word| word == "Unknown"), "{path} has no value Unknown: {words:?}");
    }
    let status = json!({
        "deviceAllocation": "Telepathy", "trainerStatus": {"step": 1, "totalSteps": 2, "progressPercentage": 50, "throughputUnit": "Songs"},
        "placement": {"reason": "", "nodes": [], "limitedBy": "Budget"},
    });
    let status: switchyard_crds::TrainJobStatus = serde_json::from_value(status).unwrap();
    assert_eq!(status.device_allocation, Some(switchyard_crds::DeviceAllocation::Unknown));
    assert_eq!(status.placement.unwrap().limited_by, Some(switchyard_crds::Limit::Unknown));
}

#[test]
fn the_lint_catches_injected_faults() {
    let schema = json!({"type": "object", "properties": {"spec": {"type": "object", "description": "long enough text", "properties": {
        "ratio": {"type": "number", "description": "long enough text"},
        "fast": {"type": "boolean", "description": "long enough text"},
        "name": {"type": "string", "description": "long enough text"},
        "list": {"type": "array", "description": "long enough text", "items": {"type": "string", "maxLength": 3}},
        "map": {"type": "object", "description": "long enough text", "additionalProperties": {"type": "string"}},
        "count": {"type": "integer", "format": "uint32", "description": "long enough text"},
        "mode": {"type": "string", "enum": ["on-off"], "description": "long enough text"},
        "waitTimeout": {"type": "integer", "format": "int32", "minimum": 0},
    }}}});
    let mut faults = Vec::new();
    lint(&schema, "", &mut faults);
    let text = faults.join("\n");
    for expected in [
        ".spec.ratio: is a float",
        ".spec.fast: is a boolean",
        ".spec.name: is a string without maxLength",
        ".spec.list: is a list without maxItems",
        ".spec.list: is a list without x-kubernetes-list-type",
        ".spec.map: is a free map",
        ".spec.count: is an integer without minimum",
        ".spec.count: has an integer format",
        ".spec.mode: has the enum value on-off",
        ".spec.waitTimeout: has no description",
        ".spec.waitTimeout: the unit of a duration",
    ] {
        assert!(text.contains(expected), "the lint missed: {expected}\n{text}");
    }
}
