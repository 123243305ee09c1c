//! The checks that an API server derives from the CRD, without an API server.
//!
//! Three passes read the same generated schema, so that `switchyard run` rejects exactly what
//! `kubectl apply` with strict field validation would reject: structure (types, ranges, unknown
//! fields), then schema defaults, then the CEL rules. Every pass reports all faults that it finds,
//! each with the field path, the actual and the expected value.

mod rules;
mod words;

use crate::labels::API_VERSION;
use crate::{TrainJob, generate};
use kube::core::cel;
use serde_json::Value;
use std::sync::LazyLock;
pub use words::nearest;
use words::{describe, is_quantity, type_words};

/// Kind of a fault. The code is stable and documented in `docs/errors.md`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// Not a TrainJob document.
    WrongDocument,
    /// A field that the API does not have.
    UnknownField,
    /// A value of the wrong type.
    WrongType,
    /// A string that is not one of the field's allowed values.
    NotAllowed,
    /// A number, length or count outside its bounds.
    OutOfRange,
    /// A missing required field.
    Missing,
    /// A string that does not match the required format.
    WrongForm,
    /// Incompatible fields.
    Rule,
}

impl FaultKind {
    /// The code printed before the message.
    pub fn code(self) -> &'static str {
        match self {
            FaultKind::WrongDocument => "SY0002",
            FaultKind::UnknownField => "SY0003",
            FaultKind::WrongType => "SY0004",
            FaultKind::NotAllowed => "SY0005",
            FaultKind::OutOfRange => "SY0006",
            FaultKind::Missing => "SY0007",
            FaultKind::WrongForm => "SY0008",
            FaultKind::Rule => "SY0100",
        }
    }
}

/// A fault in a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the fault; its code is stable.
    pub kind: FaultKind,
    /// Path of the field: keys and list indices from the top of the document.
    pub path: Vec<String>,
    /// The problem, as a phrase.
    pub message: String,
    /// The actual value; empty if there is none.
    pub got: String,
    /// The expected value; empty if the message contains it.
    pub expected: String,
    /// What to write instead, if known.
    pub help: String,
}

impl Fault {
    /// The path in the usual notation: `spec.engine.data.include[0]`.
    pub fn field(&self) -> String {
        join_path(&self.path)
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.field(), self.message)?;
        if !self.got.is_empty() {
            write!(f, "; got {}", self.got)?;
        }
        if !self.expected.is_empty() {
            write!(f, "; expected {}", self.expected)?;
        }
        Ok(())
    }
}

/// Formats the path of a field.
fn join_path(path: &[String]) -> String {
    let mut text = String::new();
    for part in path {
        if part.parse::<usize>().is_ok() {
            text.push_str(&format!("[{part}]"));
        } else {
            if !text.is_empty() {
                text.push('.');
            }
            text.push_str(part);
        }
    }
    text
}

/// The schema, including the envelope of every object.
static SCHEMA: LazyLock<Value> = LazyLock::new(train_job_schema);

/// The compiled rules of the schema. Compiling takes far longer than checking a job.
static RULES: LazyLock<cel::CompiledSchema> = LazyLock::new(|| cel::compile_schema(&SCHEMA));

/// Checks the name and spec of a job from an API server, which can have stored it before this
/// schema and these rules existed.
///
/// # Errors
/// See [`train_job`].
pub fn stored(job: &TrainJob) -> Result<TrainJob, Vec<Fault>> {
    let spec = serde_json::to_value(&job.spec).expect("invariant: a spec serialises to JSON");
    let metadata = serde_json::json!({"name": job.metadata.name, "namespace": job.metadata.namespace});
    train_job(&serde_json::json!({"apiVersion": API_VERSION, "kind": "TrainJob", "metadata": metadata, "spec": spec}))
}

/// Checks a document as the API server would and fills in the defaults.
///
/// # Errors
/// All faults of the first pass that finds any, in document order.
pub fn train_job(document: &Value) -> Result<TrainJob, Vec<Fault>> {
    let schema: &Value = &SCHEMA;
    let mut faults = Vec::new();
    check_envelope(document, &mut faults);
    if !faults.is_empty() {
        return Err(faults);
    }
    let mut document = document.clone();
    prune_nulls(schema, &mut document);
    check(schema, &document, &mut Vec::new(), &mut faults);
    if !faults.is_empty() {
        return Err(faults);
    }
    let complete = cel::apply_defaults(schema, &document);
    if let Err(errors) = cel::Validator::new().validate_compiled(&RULES, &complete, None) {
        return Err(errors.into_vec().into_iter().map(|error| rules::fault(error, &complete)).collect());
    }
    serde_json::from_value(complete).map_err(|error| {
        vec![Fault {
            kind: FaultKind::WrongForm,
            path: Vec::new(),
            message: format!("cannot be parsed as a TrainJob: {error}"),
            got: String::new(),
            expected: String::new(),
            help: String::new(),
        }]
    })
}

/// The structural schema of a TrainJob with the envelope that the API server adds to every kind.
fn train_job_schema() -> Value {
    let crd = serde_json::to_value(generate::train_job()).expect("invariant: a CRD serialises to JSON");
    let mut schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
    let properties = &mut schema["properties"];
    properties["apiVersion"] = serde_json::json!({"type": "string"});
    properties["kind"] = serde_json::json!({"type": "string"});
    properties["metadata"] = serde_json::json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 253},
            "namespace": {"type": "string", "maxLength": 63},
            "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}},
            "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
            // Set by the server; accepted so that the output of `kubectl get -o yaml` can be run
            // again.
            "creationTimestamp": {"type": "string"},
            "generation": {"type": "integer"},
            "managedFields": {"type": "array", "items": {"x-kubernetes-preserve-unknown-fields": true}},
            "resourceVersion": {"type": "string"},
            "uid": {"type": "string"},
        },
    });
    schema["required"] = serde_json::json!(["metadata", "spec"]);
    schema
}

/// Checks that the document is a Switchyard TrainJob.
fn check_envelope(document: &Value, faults: &mut Vec<Fault>) {
    let mut fault = |path: &str, message: String, got: String, expected: &str, help: &str| {
        faults.push(Fault {
            kind: FaultKind::WrongDocument,
            path: if path.is_empty() { Vec::new() } else { vec![path.to_string()] },
            message,
            got,
            expected: expected.to_string(),
            help: help.to_string(),
        });
    };
    let Some(object) = document.as_object() else {
        return fault("", "not a manifest".into(), describe(document), "a TrainJob", "");
    };
    match object.get("apiVersion").and_then(Value::as_str) {
        Some(API_VERSION) => {}
        Some("trainer.kubeflow.org/v1alpha1") => fault(
            "apiVersion",
            "this is a TrainJob of Kubeflow Trainer, another product's kind of the same name".into(),
            "`trainer.kubeflow.org/v1alpha1`".into(),
            &format!("`{API_VERSION}`"),
            "",
        ),
        Some(other) => {
            fault("apiVersion", "wrong API version".into(), format!("`{other}`"), &format!("`{API_VERSION}`"), "");
        }
        None => fault(
            "apiVersion",
            "missing".into(),
            object.get("apiVersion").map_or_else(String::new, describe),
            &format!("`{API_VERSION}`"),
            &format!("apiVersion: {API_VERSION}"),
        ),
    }
    match object.get("kind").and_then(Value::as_str) {
        Some("TrainJob") => {}
        Some(other) => fault("kind", "wrong kind".into(), format!("`{other}`"), "`TrainJob`", ""),
        None => fault("kind", "missing".into(), String::new(), "`TrainJob`", "kind: TrainJob"),
    }
}

/// Removes null fields, as the API server does. Its rules also treat them as absent where the
/// schema says `nullable`.
fn prune_nulls(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(object) => {
            let of = |name: &str| schema["properties"].get(name).or_else(|| schema.get("additionalProperties"));
            object.retain(|name, item| !item.is_null() || of(name).is_none_or(|property| property["type"].is_null()));
            for (name, item) in object.iter_mut() {
                if let Some(property) = of(name) {
                    prune_nulls(property, item);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| prune_nulls(&schema["items"], item)),
        _ => {}
    }
}

/// Walks the value together with its structural schema. The schema is our own and uses only the
/// structural subset, so this is simpler than a general JSON Schema library, and the messages can
/// say what to do.
fn check(schema: &Value, value: &Value, path: &mut Vec<String>, faults: &mut Vec<Fault>) {
    let mut report = |kind, message: &str, got: String, expected: String, help: String| {
        faults.push(Fault { kind, path: path.clone(), message: message.to_string(), got, expected, help });
    };
    if schema["x-kubernetes-int-or-string"] == true {
        // Only our own fields bound the value; Kubernetes fields are quantities.
        let is_bounded = !schema["maximum"].is_null();
        if !(value.is_string() || value.is_i64() || value.is_u64()) {
            report(FaultKind::WrongType, "wrong type", describe(value), "an integer or a string".into(), String::new());
        } else if let (true, Value::Number(number)) = (is_bounded, value) {
            check_number(schema, number, &mut report);
        } else if let (true, Value::String(text)) = (is_bounded, value) {
            check_string(schema, text, &mut report);
        } else if value.as_str().is_some_and(|text| !is_quantity(text)) {
            report(
                FaultKind::WrongForm,
                "not a quantity",
                describe(value),
                "a quantity such as 2, 500m or 4Gi".into(),
                String::new(),
            );
        }
        return;
    }
    let Some(wanted) = schema["type"].as_str() else { return };
    let fits = match wanted {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        _ => true,
    };
    if !fits {
        if let ("string", Value::Number(number)) = (wanted, value) {
            // Suggest quotes only if the string would be accepted.
            let mut fault = None;
            check_string(schema, &number.to_string(), &mut |kind, message, _, expected, help| {
                fault = Some((kind, message.to_string(), expected, help));
            });
            if let Some((kind, message, expected, help)) = fault {
                return report(kind, &message, describe(value), expected, help);
            }
        }
        let help = match (wanted, value) {
            ("string", Value::Number(number)) => format!("write it in quotes: \"{number}\""),
            ("string", Value::Bool(word)) => format!("write it in quotes: \"{word}\""),
            ("array", Value::String(text)) => format!("write a list: [\"{text}\"]"),
            _ => String::new(),
        };
        return report(FaultKind::WrongType, "wrong type", describe(value), type_words(schema), help);
    }
    match value {
        Value::String(text) => check_string(schema, text, &mut report),
        Value::Number(number) => check_number(schema, number, &mut report),
        Value::Array(items) => {
            if let Some(most) = schema["maxItems"].as_u64().filter(|most| items.len() as u64 > *most) {
                let got = format!("{} items", items.len());
                report(FaultKind::OutOfRange, "too many items", got, format!("at most {most}"), String::new());
            }
            if let Some(least) = schema["minItems"].as_u64().filter(|least| (items.len() as u64) < *least) {
                let got = format!("{} items", items.len());
                report(FaultKind::OutOfRange, "too few items", got, format!("at least {least}"), String::new());
            }
            check_distinct(schema, items, &mut report);
            for (index, item) in items.iter().enumerate() {
                path.push(index.to_string());
                check(&schema["items"], item, path, faults);
                path.pop();
            }
        }
        Value::Object(object) => check_object(schema, object, path, faults),
        _ => {}
    }
}

/// Checks that items of a list of type `set` differ, and items of type `map` differ in their keys,
/// as an API server does.
fn check_distinct(schema: &Value, items: &[Value], report: &mut Report<'_>) {
    let keys: Vec<&str> =
        schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let same = |a: &Value, b: &Value| match schema["x-kubernetes-list-type"].as_str() {
        Some("set") => a == b,
        Some("map") => keys.iter().all(|key| a[key] == b[key]),
        _ => false,
    };
    for (index, item) in items.iter().enumerate() {
        if let Some(first) = items[..index].iter().position(|earlier| same(earlier, item)) {
            let key = keys.first().map_or(item, |key| &item[*key]);
            let got = format!("{} in items {first} and {index}", describe(key));
            report(FaultKind::Rule, "the same item twice", got, "every item once".into(), String::new());
        }
    }
}

type Report<'a> = dyn FnMut(FaultKind, &str, String, String, String) + 'a;

fn check_string(schema: &Value, text: &str, report: &mut Report<'_>) {
    if let Some(words) = schema["enum"].as_array() {
        let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
        if !words.contains(&text) {
            let help = nearest(text, words.iter().copied()).map(|word| format!("did you mean `{word}`?"));
            let expected = format!("one of {}", words.join(", "));
            report(
                FaultKind::NotAllowed,
                "not an allowed value",
                format!("`{text}`"),
                expected,
                help.unwrap_or_default(),
            );
        }
        return;
    }
    let length = text.chars().count() as u64;
    if let Some(least) = schema["minLength"].as_u64().filter(|least| length < *least) {
        let expected = format!("at least {least} character{}", if least == 1 { "" } else { "s" });
        report(FaultKind::OutOfRange, "too short", format!("{text:?}"), expected, String::new());
    }
    if let Some(most) = schema["maxLength"].as_u64().filter(|most| length > *most) {
        report(
            FaultKind::OutOfRange,
            "too long",
            format!("{length} characters"),
            format!("at most {most}"),
            String::new(),
        );
    } else if let Some(pattern) = schema["pattern"].as_str() {
        let matches = regex::Regex::new(pattern).is_ok_and(|expression| expression.is_match(text));
        if !matches {
            let expected = if pattern.starts_with("^[0-9]{1,12}") {
                "a decimal number that is not negative, such as \"0.001\"".to_string()
            } else if pattern.starts_with("^-?[0-9]{1,12}") {
                "a decimal number, such as \"-0.5\"".to_string()
            } else {
                format!("text that matches {pattern}")
            };
            report(FaultKind::WrongForm, "wrong form", format!("{text:?}"), expected, String::new());
        }
    }
}

fn check_number(schema: &Value, number: &serde_json::Number, report: &mut Report<'_>) {
    let (least, most) = (schema["minimum"].as_f64(), schema["maximum"].as_f64());
    let Some(value) = number.as_f64() else { return };
    if least.is_some_and(|least| value < least) || most.is_some_and(|most| value > most) {
        report(FaultKind::OutOfRange, "out of range", number.to_string(), type_words(schema), String::new());
    }
}

fn check_object(
    schema: &Value,
    object: &serde_json::Map<String, Value>,
    path: &mut Vec<String>,
    faults: &mut Vec<Fault>,
) {
    let empty = serde_json::Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&empty);
    if let Some(most) = schema["maxProperties"].as_u64().filter(|most| object.len() as u64 > *most) {
        faults.push(Fault {
            kind: FaultKind::OutOfRange,
            path: path.clone(),
            message: "too many entries".into(),
            got: format!("{}", object.len()),
            expected: format!("at most {most}"),
            help: String::new(),
        });
    }
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !object.contains_key(name) {
            path.push(name.to_string());
            faults.push(Fault {
                kind: FaultKind::Missing,
                path: path.clone(),
                message: "missing".into(),
                got: String::new(),
                expected: type_words(&properties.get(name).cloned().unwrap_or_default()),
                help: String::new(),
            });
            path.pop();
        }
    }
    for (name, item) in object {
        path.push(name.clone());
        if let Some(property) = properties.get(name) {
            check(property, item, path, faults);
        } else if schema["additionalProperties"].is_object() {
            check(&schema["additionalProperties"], item, path, faults);
        } else if schema["x-kubernetes-preserve-unknown-fields"] != true {
            let help = match nearest(name, properties.keys().map(String::as_str)) {
                Some(word) => format!("did you mean `{word}`?"),
                None => format!("known here: {}", properties.keys().cloned().collect::<Vec<_>>().join(", ")),
            };
            faults.push(Fault {
                kind: FaultKind::UnknownField,
                path: path.clone(),
                message: format!("unknown field `{name}`"),
                got: String::new(),
                expected: String::new(),
                help,
            });
        }
        path.pop();
    }
}
