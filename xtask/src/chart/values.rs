//! Parses `values.yaml` with its comments.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value as Json};

/// A chart value.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Path of names from the root.
    pub path: Vec<String>,
    /// The comment above it, as one line.
    pub description: String,
    /// Schema additions from `@schema`.
    pub schema: Map<String, Json>,
    /// The default; `None` for one of our own objects, in block style, whose entries follow
    /// separately.
    pub default: Option<Json>,
}

/// Every value, in file order.
///
/// # Errors
/// The file is not valid YAML, has a value without a comment, or uses an unsupported form; each
/// with its line.
pub(crate) fn entries(text: &str) -> Result<Vec<Entry>> {
    let document: Json = serde_saphyr::from_str(text).context("no YAML")?;
    let mut entries: Vec<Entry> = Vec::new();
    let mut comment: Vec<&str> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let location = || format!("line {}: `{}`", index + 1, line.trim());
        let words = line.trim_start();
        let indent = line.len() - words.len();
        if words.is_empty() {
            comment.clear();
        } else if let Some(words) = words.strip_prefix('#') {
            comment.push(words.trim());
        } else {
            let (key, value) = words.split_once(':').with_context(|| format!("{}: expected KEY: VALUE", location()))?;
            ensure!(!key.starts_with('-'), "{}: expected a list in flow style ([])", location());
            ensure!(indent % 2 == 0, "{}: expected two spaces for each level", location());
            let above: Vec<String> = match entries.iter().rev().find(|entry| entry.path.len() == indent / 2) {
                Some(parent) if parent.default.is_none() => parent.path.clone(),
                None if indent == 0 => Vec::new(),
                _ => bail!("{}: expected a key below an object", location()),
            };
            let path: Vec<String> = above.into_iter().chain([key.to_string()]).collect();
            let (description, schema) = parse_comment(&comment).with_context(location)?;
            ensure!(
                !description.is_empty(),
                "{}: got no comment; expected a description of {}",
                location(),
                path.join(".")
            );
            let default =
                if value.trim().is_empty() { None } else { document.pointer(&format!("/{}", path.join("/"))).cloned() };
            entries.push(Entry { path, description, schema, default });
            comment.clear();
        }
    }
    Ok(entries)
}

/// Splits a comment into its text and its schema additions.
fn parse_comment(comment: &[&str]) -> Result<(String, Map<String, Json>)> {
    let (mut words, mut schema) = (Vec::new(), Map::new());
    for line in comment {
        match line.strip_prefix("@schema") {
            Some(text) => {
                let more: Map<String, Json> =
                    serde_json::from_str(text.trim()).context("@schema: expected an object in JSON")?;
                schema.extend(more);
            }
            None => words.push(*line),
        }
    }
    Ok((words.join(" "), schema))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_reported_with_their_line() {
        for (text, words) in [
            ("a: 1\n", "line 1: `a: 1`: got no comment; expected a description of a"),
            ("# About the file.\n\na: 1\n", "line 3: `a: 1`: got no comment"),
            ("# A.\na:\n  b: 1\n", "line 3: `b: 1`: got no comment; expected a description of a.b"),
            ("# A.\na:\n  - b: 1\n", "line 3: `- b: 1`: expected a list in flow style"),
            ("# A.\n# @schema x\na: 1\n", "@schema: expected an object in JSON"),
            ("a: [\n", "no YAML"),
        ] {
            let error = format!("{:#}", entries(text).unwrap_err());
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }

    #[test]
    fn values_have_descriptions_and_defaults() {
        let found =
            entries("# An object.\na:\n  # A value,\n  # in two lines.\n  b: \"x\"\n# Another.\nc: []\n").unwrap();
        let reported: Vec<_> = found
            .iter()
            .map(|entry| (entry.path.join("."), entry.description.as_str(), entry.default.clone()))
            .collect();
        assert_eq!(
            reported,
            [
                ("a".to_string(), "An object.", None),
                ("a.b".to_string(), "A value, in two lines.", Some(Json::from("x"))),
                ("c".to_string(), "Another.", Some(Json::Array(Vec::new()))),
            ]
        );
    }
}
