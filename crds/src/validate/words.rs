//! Describes values and schemas as text.

use serde_json::Value;

/// The known word closest to a mistyped one, if it is close enough.
pub fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known
        .map(|candidate| (strsim::damerau_levenshtein(&word.to_lowercase(), &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 5)
        .min()
        .map(|(_, candidate)| candidate)
}

/// Describes a value, short enough for one line.
pub(super) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing (null)".into(),
        Value::Bool(word) => format!("boolean {word}"),
        Value::Number(number) if number.is_f64() => format!("number {number}"),
        Value::Number(number) => format!("integer {number}"),
        Value::String(text) if text.chars().count() > 60 => {
            format!("text of {} characters", text.chars().count())
        }
        Value::String(text) => format!("text {text:?}"),
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".into(),
    }
}

/// Describes the values that a schema accepts.
pub(super) fn type_words(schema: &Value) -> String {
    if let Some(words) = schema["enum"].as_array() {
        return format!("one of {}", words.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "));
    }
    let kind =
        if schema["x-kubernetes-int-or-string"] == true { "integer" } else { schema["type"].as_str().unwrap_or("") };
    match Some(kind) {
        Some("object") => "an object".into(),
        Some("array") => "a list".into(),
        Some(kind @ ("integer" | "number")) => {
            let kind = if kind == "integer" { "an integer" } else { "a number" };
            match (schema["minimum"].as_f64(), schema["maximum"].as_f64()) {
                (Some(least), Some(most)) => format!("{kind} from {least} to {most}"),
                (Some(least), None) => format!("{kind} of at least {least}"),
                (None, Some(most)) => format!("{kind} of at most {most}"),
                (None, None) => kind.into(),
            }
        }
        Some("string") if schema["pattern"].as_str().is_some_and(|p| p.starts_with("^[0-9]{1,12}")) => {
            "a decimal string, such as \"0.001\"".into()
        }
        Some("string") => "a string".into(),
        Some("boolean") => "a boolean".into(),
        _ => String::new(),
    }
}

/// Whether text is a Kubernetes quantity: a decimal number with an optional suffix.
pub(super) fn is_quantity(text: &str) -> bool {
    regex::Regex::new(r"^[+-]?([0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$")
        .is_ok_and(|expression| expression.is_match(text))
}
