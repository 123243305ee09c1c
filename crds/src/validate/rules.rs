//! Failures of CEL rules, as faults.

use super::words::describe;
use super::{Fault, FaultKind};
use kube::core::cel;
use serde_json::Value;

/// The other fields that a rule compares with a field of `object`: `hiddenSize is 64`.
fn compared(rule: &str, object: &Value, field: &str) -> String {
    let names = rule.split("self.").skip(1).map(|rest| {
        let end = rest.find(|letter: char| !letter.is_ascii_alphanumeric()).unwrap_or(rest.len());
        &rest[..end]
    });
    let mut words: Vec<String> = Vec::new();
    for name in names.filter(|name| *name != field) {
        if let Some(value @ (Value::Number(_) | Value::String(_))) = object.get(name) {
            let word =
                format!("{name} is {}", value.as_str().map_or_else(|| value.to_string(), |text| format!("{text:?}")));
            if !words.contains(&word) {
                words.push(word);
            }
        }
    }
    words.join(", ")
}

/// Converts a CEL failure to a fault. The engine's path can begin with `self` or a dot, and names
/// the object that holds the rule.
pub(super) fn fault(error: cel::ValidationError, document: &Value) -> Fault {
    let mut path: Vec<String> = Vec::new();
    for part in error.field_path.replace('[', ".").replace(']', "").split('.') {
        let part = part.trim_matches(['"', '\'']);
        if !part.is_empty() && part != "self" {
            path.push(part.to_string());
        }
    }
    // A rule at the top of the document cannot name a field of `metadata`, whose schema is the
    // server's; its message does.
    if path.is_empty() && error.message.starts_with("metadata.name ") {
        path = vec!["metadata".into(), "name".into()];
    }
    let value_at = |path: &[String]| {
        path.iter().try_fold(document, |value, part| match part.parse::<usize>() {
            Ok(index) if value.is_array() => value.get(index),
            _ => value.get(part),
        })
    };
    let field = value_at(&path).filter(|value| !value.is_object() && !value.is_array());
    let got = field.map(describe).unwrap_or_default();
    let help = match path.split_last() {
        Some((name, parent)) if field.is_some() => {
            value_at(parent).map(|object| compared(&error.rule, object, name)).unwrap_or_default()
        }
        _ => String::new(),
    };
    Fault { kind: FaultKind::Rule, path, message: error.message, got, expected: String::new(), help }
}
