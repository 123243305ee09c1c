//! Generates the API reference, `docs/api.md`: every field of the CRDs with its type, bounds,
//! default and description.

use crate::workspace::crds;
use anyhow::{Context, Result};
use serde_json::Value as Json;
use std::fmt::Write;
use std::path::PathBuf;

/// Field suffixes where Kubernetes' own schema begins, and the text that replaces it.
const KUBERNETES_SCHEMAS: [(&str, &str); 2] = [
    (
        "spec.template",
        "A PodTemplateSpec of Kubernetes; `containers` may be left out, and what is given is merged by name with what Switchyard sets.",
    ),
    (
        "status.conditions",
        "Standard Kubernetes conditions; their types and reasons: [troubleshooting.md](troubleshooting.md).",
    ),
];

const HEAD: &str = "# Fields of the API\n\n<!-- generated from the CRDs by `cargo xtask gen` -->\n\nEvery field of the three kinds in the group \
`training.switchyard.dev`, version `v1alpha1`. `[]` is an item of a list, `*` a key of a map. Fields are optional unless *required*. A rule is the \
message that the API server returns when it is broken. What the fields of `spec.engine` do: [trainjob.md](trainjob.md).\n";

/// The generated file with its text.
///
/// # Errors
/// A CRD has no schema.
pub(crate) fn generated() -> Result<(PathBuf, String)> {
    let mut text = HEAD.to_owned();
    for (_, crd) in crds()? {
        let crd: Json = serde_saphyr::from_str(&crd)?;
        let kind = crd["spec"]["names"]["kind"].as_str().context("a CRD without a kind")?;
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        anyhow::ensure!(schema["properties"].is_object(), "{kind} has no schema");
        let _ = write!(text, "\n## {kind}\n\n{}\n", sentence(schema));
        for part in ["spec", "status"] {
            let fields = &schema["properties"][part];
            if fields["properties"].is_object() {
                let _ = write!(text, "\n### {kind}: {part}\n\n| field | type | meaning |\n|---|---|---|\n");
                rows(part, fields, &mut text);
            }
        }
    }
    Ok((PathBuf::from("docs/api.md"), text))
}

/// Adds a row for each field below `path`, in name order.
fn rows(path: &str, schema: &Json, text: &mut String) {
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Json::as_str).collect();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let full = format!("{path}.{name}");
        let others = KUBERNETES_SCHEMAS.iter().find(|(end, _)| *end == full).map(|(_, words)| *words);
        let mut meaning = others.map_or_else(|| sentence(field), str::to_owned);
        if required.contains(&name.as_str()) {
            meaning.insert_str(0, "*Required.* ");
        }
        for part in [bounds(field), default(field), rules(field)].into_iter().flatten() {
            let _ = write!(meaning, " {part}");
        }
        let _ = writeln!(text, "| `{full}` | {} | {} |", kind(field), meaning.trim());
        if others.is_some() {
            continue;
        }
        let (below, inner) = match field["type"].as_str() {
            Some("array") => (format!("{full}[]"), &field["items"]),
            _ if field["additionalProperties"].is_object() => (format!("{full}.*"), &field["additionalProperties"]),
            _ => (full, field),
        };
        rows(&below, inner, text);
    }
}

/// The type as text.
fn kind(field: &Json) -> String {
    if let Some(words) = field["enum"].as_array() {
        let words: Vec<String> = words.iter().filter_map(Json::as_str).map(|word| format!("`{word}`")).collect();
        return words.join(", ");
    }
    if field["x-kubernetes-int-or-string"] == true {
        return "quantity".into();
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

/// The description on one line.
fn sentence(field: &Json) -> String {
    let text = field["description"].as_str().unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Minimum and maximum.
fn bounds(field: &Json) -> Option<String> {
    let pairs =
        [("minimum", "maximum", ""), ("minLength", "maxLength", " characters"), ("minItems", "maxItems", " items")];
    let parts = pairs.iter().filter_map(|(least, most, unit)| match (&field[*least], &field[*most]) {
        (Json::Null, Json::Null) => None,
        (least, Json::Null) => Some(format!("At least {}{unit}.", number(least))),
        (Json::Null, most) => Some(format!("At most {}{unit}.", number(most))),
        (least, most) => Some(format!("{} to {}{unit}.", number(least), number(most))),
    });
    let all: Vec<String> = parts.collect();
    (!all.is_empty()).then(|| all.join(" "))
}

/// Formats a bound. All bounds are whole numbers, but the schema has them as floats.
fn number(bound: &Json) -> String {
    bound.as_f64().map_or_else(|| bound.to_string(), |bound| bound.to_string())
}

fn default(field: &Json) -> Option<String> {
    // An object's default repeats its fields' defaults; most descriptions mention theirs, some with
    // a reason.
    let is_said = sentence(field).contains("Default");
    let value = Some(&field["default"]).filter(|value| !value.is_null() && !value.is_object() && !is_said)?;
    Some(format!("Default `{}`.", value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
}

/// Messages of the field's validation rules.
fn rules(field: &Json) -> Option<String> {
    let rules = field["x-kubernetes-validations"].as_array()?;
    let words: Vec<&str> = rules.iter().filter_map(|rule| rule["message"].as_str()).collect();
    (!words.is_empty()).then(|| format!("Rules: {}.", words.join("; ").replace('|', "\\|")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_matches_the_crds() {
        let (path, text) = generated().unwrap();
        let committed = std::fs::read_to_string(crate::workspace::root().join(&path)).unwrap();
        assert!(committed == text, "{} differs: run `cargo xtask gen`", path.display());
        for row in [
            "| `spec.engine.steps` | integer |",
            "| `spec.trainer.framework` | `Switchyard`",
            "*Required.*",
            "`status.gpus[].uuid`",
        ] {
            assert!(text.contains(row), "{row}");
        }
        assert!(!text.contains("spec.template.spec"), "the schema of pods is documented by others");
    }
}
