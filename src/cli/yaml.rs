//! YAML with the position of each part, so that errors can be shown in the user's file.

use crate::failure::Failure;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::DuplicateKeyPolicy;
use serde_saphyr::{Spanned, options};
use std::fmt;
use std::ops::Range;

/// Parses the documents in a text. `name` is the file's name for error messages.
///
/// # Errors
/// The text is not YAML, or a key is duplicated.
pub(super) fn documents(name: &str, text: &str) -> Result<Vec<Spanned<Node>>, Failure> {
    let documents = lenient(name, text)?;
    match documents.iter().flat_map(duplicates).next() {
        Some(duplicate) => {
            let text =
                format!("error[SY0001]: {name} is not valid YAML\n{duplicate}; expected each key once in a mapping");
            Err(Failure::usage(text))
        }
        None => Ok(documents),
    }
}

/// The same for texts with duplicate keys, of which the last one counts.
///
/// # Errors
/// The text is not YAML.
pub(super) fn lenient(name: &str, text: &str) -> Result<Vec<Spanned<Node>>, Failure> {
    let options = options! { strict_booleans: true, duplicate_keys: DuplicateKeyPolicy::LastWins };
    serde_saphyr::from_multiple_with_options(text, options).map_err(|error| {
        let hint = if text.contains("{{") { TEMPLATE } else { "" };
        Failure::usage(format!("error[SY0001]: {name} is not valid YAML\n{error}{hint}"))
    })
}

/// What to do with a template.
const TEMPLATE: &str = "\nwith {{ … }} it is a template: render it first, as `helm template` does";

/// A key that a mapping has twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Duplicate {
    /// The mapping and the key, from the top of the document.
    pub path: Vec<String>,
    /// Line of the first one, and of the one that counts.
    lines: (u64, u64),
}

impl fmt::Display for Duplicate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.path.last().map_or("", String::as_str);
        write!(f, "`{key}` appears twice (lines {} and {})", self.lines.0, self.lines.1)
    }
}

/// All duplicate keys of a document, in its order.
pub(super) fn duplicates(document: &Spanned<Node>) -> Vec<Duplicate> {
    fn walk(node: &Spanned<Node>, path: &mut Vec<String>, found: &mut Vec<Duplicate>) {
        match &node.value {
            Node::Scalar(_) => {}
            Node::List(items) => {
                for (index, item) in items.iter().enumerate() {
                    path.push(index.to_string());
                    walk(item, path, found);
                    path.pop();
                }
            }
            Node::Map(entries) => {
                for (index, (key, value)) in entries.iter().enumerate() {
                    path.push(key.value.clone());
                    if let Some((first, _)) = entries[..index].iter().rfind(|(known, _)| known.value == key.value) {
                        let lines = (first.referenced.line(), key.referenced.line());
                        found.push(Duplicate { path: path.clone(), lines });
                    }
                    walk(value, path, found);
                    path.pop();
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(document, &mut Vec::new(), &mut found);
    found
}

/// A YAML value with the position of each part.
#[derive(Debug)]
pub(super) enum Node {
    Scalar(serde_json::Value),
    List(Vec<Spanned<Node>>),
    Map(Vec<(Spanned<String>, Spanned<Node>)>),
}

impl Node {
    /// The value without positions.
    pub(super) fn to_json(&self) -> serde_json::Value {
        match self {
            Node::Scalar(value) => value.clone(),
            Node::List(items) => items.iter().map(|item| item.value.to_json()).collect(),
            Node::Map(entries) => entries
                .iter()
                .map(|(key, value)| (key.value.clone(), value.value.to_json()))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NodeVisitor;
        impl<'de> Visitor<'de> for NodeVisitor {
            type Value = Node;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a value")
            }
            fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
                Ok(Node::Scalar(value.into()))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
                Ok(Node::Scalar(value.into()))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
                Ok(Node::Scalar(value.into()))
            }
            fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Node, E> {
                let number = serde_json::Number::from_f64(value).ok_or_else(|| E::custom("not a finite number"))?;
                Ok(Node::Scalar(number.into()))
            }
            fn visit_str<E>(self, value: &str) -> Result<Node, E> {
                Ok(Node::Scalar(value.into()))
            }
            fn visit_unit<E>(self) -> Result<Node, E> {
                Ok(Node::Scalar(serde_json::Value::Null))
            }
            fn visit_none<E>(self) -> Result<Node, E> {
                Ok(Node::Scalar(serde_json::Value::Null))
            }
            fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
                Node::deserialize(deserializer)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = access.next_element()? {
                    items.push(item);
                }
                Ok(Node::List(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
                let mut entries: Vec<(Spanned<String>, Spanned<Node>)> = Vec::new();
                while let Some((key, value)) = access.next_entry::<Spanned<String>, Spanned<Node>>()? {
                    entries.push((key, value));
                }
                Ok(Node::Map(entries))
            }
        }
        deserializer.deserialize_any(NodeVisitor)
    }
}

/// The part of a field to point at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    /// Its key.
    Key,
    /// Its value if it is a scalar, otherwise its key.
    Value,
}

/// Position of a field in the text, or of its nearest parent if it is missing.
pub(super) fn locate<'a>(
    document: &Spanned<Node>,
    path: impl IntoIterator<Item = &'a str>,
    shown: Shown,
) -> Option<Range<usize>> {
    let mut node = document;
    let mut key: Option<&Spanned<String>> = None;
    for part in path {
        let next = match &node.value {
            Node::Map(entries) => {
                entries.iter().rfind(|(name, _)| name.value == *part).map(|(name, value)| (Some(name), value))
            }
            Node::List(items) => part.parse::<usize>().ok().and_then(|index| items.get(index)).map(|item| (key, item)),
            Node::Scalar(_) => None,
        };
        match next {
            Some((name, value)) => {
                key = name;
                node = value;
            }
            None => break,
        }
    }
    let show_key = shown == Shown::Key || !matches!(node.value, Node::Scalar(_));
    match key.filter(|_| show_key) {
        Some(key) => bytes(key.referenced.span()),
        None if matches!(node.value, Node::Scalar(_)) => bytes(node.referenced.span()),
        None => None,
    }
}

fn bytes(span: serde_saphyr::Span) -> Option<Range<usize>> {
    let start = usize::try_from(span.byte_offset()?).ok()?;
    let length = usize::try_from(span.byte_len()?).ok()?;
    Some(start..start + length.max(1))
}
