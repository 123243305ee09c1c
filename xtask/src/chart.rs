//! Generates parts of the Helm chart: the CRDs as templates, `values.schema.json`, and the table in
//! `README.md`.
//!
//! The latter two come from `values.yaml` and its comments, so each value is documented in one
//! place.

mod values;

use crate::workspace::{crds, root};
use anyhow::{Context, Result};
use serde_json::{Map, Value as Json, json};
use std::path::PathBuf;
use values::{Entry, entries};

/// Folder of the chart in the repository.
const CHART: &str = "charts/switchyard";

/// Markers in `README.md` around the table.
const BEGIN: &str = "<!-- generated from values.yaml by `cargo xtask gen` -->";
const END: &str = "<!-- end of the generated table -->";

/// Every generated file of the chart with its text; paths are relative to the repository root.
///
/// # Errors
/// `values.yaml` is not valid YAML or has a value without a comment, or the README lacks the
/// markers.
pub(crate) fn generated() -> Result<Vec<(PathBuf, String)>> {
    let chart = PathBuf::from(CHART);
    let read = |name: &str| {
        let path = root().join(CHART).join(name);
        std::fs::read_to_string(&path).with_context(|| path.display().to_string())
    };
    let values = entries(&read("values.yaml")?).context("charts/switchyard/values.yaml")?;
    let mut files = vec![
        (chart.join("values.schema.json"), schema_text(&values)?),
        (chart.join("README.md"), readme(&read("README.md")?, &values)?),
    ];
    for (name, crd) in crds()? {
        files.push((chart.join("templates/crds").join(name), crd_template(&crd)?));
    }
    Ok(files)
}

/// A CRD template that belongs to a release but survives its removal.
fn crd_template(yaml: &str) -> Result<String> {
    let (before, after) = yaml.split_once("\nspec:\n").context("a CRD without spec")?;
    anyhow::ensure!(!yaml.contains("{{"), "a CRD with braces, which Helm would take for a template");
    Ok(format!(
        "{{{{- if ne (.Values.crds).enabled false }}}}\n{before}\n  \
         labels: {{{{- include \"switchyard.labels\" (list . \"crds\") | nindent 4 }}}}\n  \
         annotations:\n    \
         {{{{- if ne (.Values.crds).keep false }}}}\n    \
         helm.sh/resource-policy: keep\n    \
         {{{{- end }}}}\n    \
         {{{{- with (.Values.crds).annotations }}}}{{{{ toYaml . | nindent 4 }}}}{{{{ end }}}}\n\
         spec:\n{after}{{{{- end }}}}\n"
    ))
}

fn schema_text(values: &[Entry]) -> Result<String> {
    let mut schema = object(values, &[]);
    schema["$schema"] = "https://json-schema.org/draft-07/schema#".into();
    schema["title"] = "Values of the switchyard chart".into();
    // Parent charts can enable this one as a subchart under this name (`condition` in their
    // Chart.yaml).
    schema["properties"]["enabled"] =
        json!({"type": "boolean", "description": "Read by charts that include this one as a subchart."});
    Ok(serde_json::to_string_pretty(&schema)? + "\n")
}

/// The schema of one of our own objects, closed to anything that `values.yaml` lacks.
fn object(values: &[Entry], path: &[String]) -> Json {
    let mut properties = Map::new();
    for entry in values.iter().filter(|entry| entry.path.len() == path.len() + 1 && entry.path.starts_with(path)) {
        let mut schema = match &entry.default {
            None => object(values, &entry.path),
            Some(default) => json!({"type": kind(default), "default": default}),
        };
        schema["description"] = entry.description.clone().into();
        for (key, value) in &entry.schema {
            schema[key] = value.clone();
        }
        if let Some(name) = entry.path.last() {
            properties.insert(name.clone(), schema);
        }
    }
    json!({"type": "object", "additionalProperties": false, "properties": properties})
}

fn kind(default: &Json) -> &'static str {
    match default {
        Json::Bool(_) => "boolean",
        Json::Number(_) => "integer",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Null | Json::Object(_) => "object",
    }
}

fn readme(text: &str, values: &[Entry]) -> Result<String> {
    let missing_markers =
        || format!("README.md: the table's markers are missing; expected the lines `{BEGIN}` and `{END}`");
    let (before, rest) = text.split_once(BEGIN).with_context(missing_markers)?;
    let (_, after) = rest.split_once(END).with_context(missing_markers)?;
    let mut table = String::from("| value | default | meaning |\n|---|---|---|\n");
    for entry in values {
        let Some(default) = &entry.default else { continue };
        let words = entry.schema.get("enum").and_then(Json::as_array).map(|words| {
            let words: Vec<String> =
                words.iter().map(|word| format!("`{}`", word.as_str().unwrap_or_default())).collect();
            format!(" One of {}.", words.join(", "))
        });
        let meaning = format!("{}{}", entry.description, words.unwrap_or_default()).replace('|', "\\|");
        table.push_str(&format!("| `{}` | `{default}` | {meaning} |\n", entry.path.join(".")));
    }
    Ok(format!("{before}{BEGIN}\n{table}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If this fails: run `cargo xtask gen`, review `git diff charts`, and commit it with the
    /// change that caused it.
    #[test]
    fn generated_files_are_committed() {
        for (path, expected) in generated().unwrap() {
            let committed = std::fs::read_to_string(root().join(&path)).unwrap_or_default();
            assert!(committed == expected, "{} differs: run `cargo xtask gen`", path.display());
        }
    }

    const VALUES: &str = "# About all of it.\n\n# A number.\n# @schema {\"minimum\": 1}\nnumber: 2\n# Of ours,\n# in two lines.\nours:\n  # Handed on.\n  \
                          open: {a: b}\n  # Which | one.\n  # @schema {\"enum\": [\"x\", \"y\"]}\n  word: x\n";

    #[test]
    fn our_objects_are_closed_and_foreign_ones_open() {
        let schema = object(&entries(VALUES).unwrap(), &[]);
        assert_eq!(schema["additionalProperties"], false);
        assert_eq!(
            schema["properties"]["number"],
            json!({"type": "integer", "default": 2, "minimum": 1, "description": "A number."})
        );
        let ours = &schema["properties"]["ours"];
        assert_eq!(
            (&ours["additionalProperties"], &ours["description"]),
            (&json!(false), &json!("Of ours, in two lines."))
        );
        assert_eq!(ours["properties"]["open"]["additionalProperties"], Json::Null);
        assert_eq!(ours["properties"]["word"]["enum"], json!(["x", "y"]));
    }

    #[test]
    fn the_table_has_every_value_in_file_order() {
        let text = readme(&format!("before\n{BEGIN}\nold\n{END}\nafter\n"), &entries(VALUES).unwrap()).unwrap();
        assert_eq!(
            text,
            format!(
                "before\n{BEGIN}\n| value | default | meaning |\n|---|---|---|\n| `number` | `2` | A number. |\n\
                 | `ours.open` | `{{\"a\":\"b\"}}` | Handed on. |\n\
                 | `ours.word` | `\"x\"` | Which \\| one. One of `x`, `y`. |\n{END}\nafter\n"
            )
        );
        assert!(readme("nothing", &[]).is_err());
    }

    #[test]
    fn a_crd_is_kept_and_can_be_omitted() {
        let template = crd_template("# Generated.\nkind: X\nmetadata:\n  name: a\nspec:\n  b: c\n").unwrap();
        assert!(template.starts_with(
            "{{- if ne (.Values.crds).enabled false }}\n# Generated.\nkind: X\nmetadata:\n  name: a\n  labels:"
        ));
        assert!(
            template.contains("    helm.sh/resource-policy: keep\n")
                && template.ends_with("spec:\n  b: c\n{{- end }}\n")
        );
        assert!(crd_template("metadata:\n  name: '{{'\nspec:\n").is_err());
    }
}
