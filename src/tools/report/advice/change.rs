//! The action in a piece of advice: manifest fields to set, as a patch that can be applied, or
//! something outside the manifest.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt::Display;
use switchyard_worker_contract::config::Length;

/// How reliable an estimated gain is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Basis {
    /// The run shows this time directly.
    Measured,
    /// Computed from measured figures.
    Modelled,
    /// From experience.
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

/// A change with its expected gain.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Change {
    /// What to set or do.
    pub what: String,
    /// The change as a JSON merge patch of the TrainJob; absent if it is not in the manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch: Option<Value>,
    /// Minimum saving per step, ms; absent if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gain_ms: Option<f64>,
    /// How reliable the gain is.
    pub basis: Basis,
}

impl Change {
    /// A change outside the manifest.
    pub(super) fn outside_manifest(what: impl Into<String>, gain_ms: impl Into<Option<f64>>, basis: Basis) -> Change {
        Change { what: what.into(), patch: None, gain_ms: gain_ms.into(), basis }
    }

    /// A change of manifest fields.
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

    /// Appends a remark for people.
    pub(super) fn with_remark(self, remark: impl Display) -> Change {
        Change { what: format!("{}{remark}", self.what), ..self }
    }
}

/// Remark on changes that alter the mathematics of the training.
pub(super) const LOSS_MAY_CHANGE: &str = "; loss may change";

/// A manifest field with its advised value.
pub(super) struct Field {
    /// Dotted path below `spec`.
    path: &'static str,
    from: Option<String>,
    to: Value,
}

impl Field {
    /// A numeric field with its current value. `None` if that is already the maximum.
    pub fn number(path: &'static str, from: impl Into<u64>, to: impl Into<u64>, most: u64) -> Option<Field> {
        let (from, to) = (from.into(), to.into().min(most));
        (from != to).then(|| Field { path, from: Some(from.to_string()), to: json!(to) })
    }

    /// `engine.steps` for twice the batch, so that the job trains on as many samples as before.
    /// `None` if its length is given in epochs.
    pub fn steps_for_twice_the_batch(length: Length) -> Option<Field> {
        match length {
            Length::Steps(steps) => Field::number("engine.steps", steps, steps.div_ceil(2), u64::MAX),
            Length::Epochs(_) => None,
        }
    }

    /// A number that the API represents as a decimal string.
    pub fn decimal(path: &'static str, from: f64, to: f64) -> Field {
        // The API accepts at most 18 digits after the point.
        let text = |value: f64| Some(value.to_string()).filter(|text| text.len() <= 12).unwrap_or(format!("{value:e}"));
        Field { path, from: Some(text(from)), to: json!(text(to)) }
    }

    pub fn word(path: &'static str, to: &str) -> Field {
        Field { path, from: None, to: json!(to) }
    }

    /// Any value; `from` is only displayed.
    pub fn value(path: &'static str, from: impl Display, to: Value) -> Field {
        Field { path, from: Some(from.to_string()), to }
    }

    /// As displayed, relative to `engine`, where most fields are.
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
