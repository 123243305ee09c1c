//! What advice tells people to do: fields of the manifest to set, as a patch that can be applied, or something outside of it.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt::Display;

/// How reliable a gain is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Basis {
    /// The run shows the time itself.
    Measured,
    /// Computed from measured figures.
    Modelled,
    /// From what is usual.
    Guess,
}

impl Basis {
    /// The word printed for people.
    pub fn word(self) -> &'static str {
        match self {
            Basis::Measured => "measured",
            Basis::Modelled => "modelled",
            Basis::Guess => "guess",
        }
    }
}

/// A change, and what it would bring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    /// What to set or do.
    pub what: String,
    /// The same as a JSON merge patch of the TrainJob; absent if it is nothing that a manifest says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch: Option<Value>,
    /// What it saves per step at least, ms; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain_ms: Option<f64>,
    /// How reliable the gain is.
    pub basis: Basis,
}

impl Change {
    /// Something outside of the manifest.
    pub(super) fn act(what: impl Into<String>, gain_ms: impl Into<Option<f64>>, basis: Basis) -> Change {
        Change { what: what.into(), patch: None, gain_ms: gain_ms.into(), basis }
    }

    /// Fields of the manifest.
    pub(super) fn set(
        fields: impl IntoIterator<Item = Field>,
        gain_ms: impl Into<Option<f64>>,
        basis: Basis,
    ) -> Change {
        let (mut words, mut patch) = (Vec::new(), json!({}));
        for field in fields {
            words.push(field.words());
            field.put(&mut patch["spec"]);
        }
        Change { what: words.join(" with "), patch: Some(patch), gain_ms: gain_ms.into(), basis }
    }

    /// Adds a remark for people.
    pub(super) fn noting(self, remark: impl Display) -> Change {
        Change { what: format!("{}{remark}", self.what), ..self }
    }
}

/// A field of the manifest with the value that is advised.
pub(super) struct Field {
    /// From `spec` on, with dots.
    path: &'static str,
    from: Option<String>,
    to: Value,
}

impl Field {
    /// A number, and what it is now. `None` if that is the most the field takes.
    pub fn number(path: &'static str, from: impl Into<u64>, to: impl Into<u64>, most: u64) -> Option<Field> {
        let (from, to) = (from.into(), to.into().min(most));
        (from != to).then(|| Field { path, from: Some(from.to_string()), to: json!(to) })
    }

    /// A number that the API takes as a decimal string.
    pub fn decimal(path: &'static str, from: f64, to: f64) -> Field {
        // The API takes at most 18 digits after the point.
        let text = |value: f64| Some(value.to_string()).filter(|text| text.len() <= 12).unwrap_or(format!("{value:e}"));
        Field { path, from: Some(text(from)), to: json!(text(to)) }
    }

    pub fn word(path: &'static str, to: &str) -> Field {
        Field { path, from: None, to: json!(to) }
    }

    /// Any value; `from` is for people.
    pub fn value(path: &'static str, from: impl Display, to: Value) -> Field {
        Field { path, from: Some(from.to_string()), to }
    }

    /// As people write it below `engine`, where most fields are.
    fn words(&self) -> String {
        let path = self.path.strip_prefix("engine.").unwrap_or(self.path);
        let to = match &self.to {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        match &self.from {
            Some(from) if self.to.is_null() => format!("`{path}: {from}` removed"),
            Some(from) => format!("`{path}: {from} -> {to}`"),
            None => format!("`{path}: {to}`"),
        }
    }

    fn put(self, spec: &mut Value) {
        let place = self.path.split('.').fold(spec, |place, name| &mut place[name]);
        *place = self.to;
    }
}
