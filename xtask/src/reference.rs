//! Generates the API reference, `docs/api.md`: every field of the CRDs with its type, constraints
//! and meaning.

use crate::workspace::crds;
use anyhow::{Context, Result};
use serde_json::Value as Json;
use std::fmt::Write;
use std::path::PathBuf;

/// Kinds in reading order.
const KINDS: [&str; 3] = ["TrainJob", "PlacementSlice", "GPUTopology"];

/// Fields whose schema is Kubernetes' own and documented there, and the text in its place.
const FOREIGN: [(&str, &str); 2] = [
    (
        "TrainJob.spec.template",
        "A Kubernetes PodTemplateSpec. `containers` is optional; what you set is merged by name with what Switchyard sets.",
    ),
    (
        "TrainJob.status.conditions",
        "Standard Kubernetes conditions; their types and reasons: [troubleshooting.md](troubleshooting.md).",
    ),
];

const HEAD: &str = "# API reference

<!-- generated from the CRDs by `cargo xtask gen` -->

The fields of the three kinds in the API group `training.switchyard.dev`, version `v1alpha1`. Each object has its own \
table, required fields first. `[]` is an item of a list, `*` a key of a map. Rules are the messages that the API server \
returns when they are broken. What the fields of `spec.engine` do: [engine.md](engine.md).
";

/// The file and its text.
///
/// # Errors
/// A CRD has no kind or no schema.
pub(crate) fn generated() -> Result<(PathBuf, String)> {
    let mut kinds = Vec::new();
    for (_, crd) in crds()? {
        let crd: Json = serde_saphyr::from_str(&crd)?;
        let kind = crd["spec"]["names"]["kind"].as_str().context("a CRD without a kind")?.to_owned();
        let schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
        anyhow::ensure!(schema["properties"].is_object(), "{kind} has no schema");
        kinds.push((kind, schema));
    }
    kinds.sort_by_key(|(kind, _)| KINDS.iter().position(|known| known == kind).unwrap_or(KINDS.len()));
    let mut text = HEAD.to_owned();
    for (kind, schema) in &kinds {
        let _ = write!(text, "\n## {kind}\n\n{}\n", sentence(schema));
        for part in ["spec", "status"] {
            object(&format!("{kind}.{part}"), &schema["properties"][part], &mut text);
        }
    }
    Ok((PathBuf::from("docs/api.md"), text))
}

/// Writes the rules and the field table of an object, then the objects in it. Writes nothing for
/// other types.
fn object(path: &str, schema: &Json, text: &mut String) {
    let fields = fields(schema);
    if fields.is_empty() {
        return;
    }
    let _ = writeln!(text, "\n### {path}\n");
    let rules: Vec<String> = self::rules(schema).iter().map(|rule| format!("- {rule}\n")).collect();
    if !rules.is_empty() {
        let _ = writeln!(text, "Rules:\n\n{}", rules.concat());
    }
    text.push_str("| field | type | constraints | meaning |\n|---|---|---|---|\n");
    let mut inner_objects = Vec::new();
    for (name, field, is_required) in fields {
        let full = format!("{path}.{name}");
        let foreign = FOREIGN.iter().find(|(end, _)| *end == full).map(|(_, words)| *words);
        let (below, inner) = match field["type"].as_str() {
            Some("array") => (format!("{full}[]"), &field["items"]),
            _ if field["additionalProperties"].is_object() => (format!("{full}.*"), &field["additionalProperties"]),
            _ => (full, field),
        };
        let has_table = foreign.is_none() && inner["properties"].is_object();
        let name = if has_table { format!("[`{name}`](#{})", anchor(&below)) } else { format!("`{name}`") };
        let mut constraints: Vec<String> = is_required.then(|| "required".to_owned()).into_iter().collect();
        constraints.extend(bounds(field));
        constraints.extend(default(field));
        // The rules of an object are above its table.
        if !(has_table && std::ptr::eq(inner, field)) {
            constraints.extend(self::rules(field));
        }
        let meaning = foreign.map_or_else(|| sentence(field), str::to_owned);
        let _ = writeln!(text, "| {name} | {} | {} | {meaning} |", kind(field), constraints.join("; "));
        if has_table {
            inner_objects.push((below, inner));
        }
    }
    for (path, schema) in inner_objects {
        object(&path, schema, text);
    }
}

/// Fields of an object by name, required ones first.
fn fields(schema: &Json) -> Vec<(&str, &Json, bool)> {
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Json::as_str).collect();
    let all = schema["properties"].as_object().into_iter().flatten();
    let mut fields: Vec<_> =
        all.map(|(name, field)| (name.as_str(), field, required.contains(&name.as_str()))).collect();
    fields.sort_by_key(|(_, _, is_required)| !is_required);
    fields
}

/// The link target that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    heading.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_lowercase()
}

/// Name of a field's type.
fn kind(field: &Json) -> String {
    if let Some(words) = field["enum"].as_array() {
        let words: Vec<String> = words.iter().filter_map(Json::as_str).map(|word| format!("`{word}`")).collect();
        return words.join(", ");
    }
    if field["x-kubernetes-int-or-string"] == true {
        return if field["maximum"].is_null() { "quantity".into() } else { "integer or string".into() };
    }
    match (field["type"].as_str(), field["format"].as_str()) {
        (Some("array"), _) => format!("list of {}", kind(&field["items"])),
        (Some("object"), _) if field["additionalProperties"].is_object() => {
            format!("map to {}", kind(&field["additionalProperties"]))
        }
        (Some("string"), Some("date-time")) => "time".into(),
        (Some(kind), _) => kind.into(),
        (None, _) => "any".into(),
    }
}

/// Description of a field, on one line.
fn sentence(field: &Json) -> String {
    let text = field["description"].as_str().unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Bounds of a field's value, length or number of items.
fn bounds(field: &Json) -> Vec<String> {
    let pairs =
        [("minimum", "maximum", ""), ("minLength", "maxLength", " characters"), ("minItems", "maxItems", " items")];
    let parts = pairs.iter().filter_map(|(min, max, unit)| match (&field[*min], &field[*max]) {
        (Json::Null, Json::Null) => None,
        (min, Json::Null) => Some(format!("at least {}{unit}", number(min))),
        (Json::Null, max) => Some(format!("at most {}{unit}", number(max))),
        (min, max) => Some(format!("{} to {}{unit}", number(min), number(max))),
    });
    parts.collect()
}

/// A bound. All are whole, but the schema's type stores floats.
fn number(bound: &Json) -> String {
    bound.as_f64().map_or_else(|| bound.to_string(), |bound| bound.to_string())
}

/// Default of a field. Omitted for an object, whose fields have their own, and where the
/// description explains it.
fn default(field: &Json) -> Option<String> {
    let is_described = sentence(field).contains("Default");
    let value = Some(&field["default"]).filter(|value| !value.is_null() && !value.is_object() && !is_described)?;
    Some(format!("default `{}`", value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
}

/// Messages of the CEL rules of a field.
fn rules(field: &Json) -> Vec<String> {
    let rules = field["x-kubernetes-validations"].as_array().into_iter().flatten();
    rules.filter_map(|rule| rule["message"].as_str()).map(|message| message.replace('|', "\\|")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_matches_the_crds() {
        let (path, text) = generated().unwrap();
        let committed = std::fs::read_to_string(crate::workspace::root().join(&path)).unwrap();
        assert!(committed == text, "{} differs: run `cargo xtask gen`", path.display());
        for part in [
            "### TrainJob.spec.engine.optimizer\n",
            "| `steps` | integer |",
            "| `framework` | `Switchyard`",
            "| required; ",
            "### GPUTopology.status.gpus[].nvlinks\n",
        ] {
            assert!(text.contains(part), "{part}");
        }
        for (name, line) in text.lines().filter_map(|line| Some((line.split_once("](#")?.1, line))) {
            let anchor = name.split_once(')').map(|(anchor, _)| anchor).unwrap();
            assert!(text.lines().any(|line| line.starts_with('#') && super::anchor(line) == anchor), "{line}");
        }
        assert!(text.find("## TrainJob") < text.find("## PlacementSlice"), "reading order");
        assert!(!text.contains("spec.template.spec"), "the schema of pods is documented by others");
    }
}
