//! YAML with the position of each part, so that errors can be shown in the user's file.

use crate::failure::Failure;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{Spanned, options};
use std::fmt;
use std::ops::Range;

/// Parses the documents in a text. `name` is the file's name for error messages.
///
/// # Errors
/// The text is not YAML, or a key is duplicated.
pub(super) fn documents(name: &str, text: &str) -> Result<Vec<Spanned<Node>>, Failure> {
    let options = options! { strict_booleans: true };
    serde_saphyr::from_multiple_with_options(text, options)
        .map_err(|error| Failure::usage(format!("error[SY0001]: {name} is not valid YAML\n{error}")))
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
                    if entries.iter().any(|(known, _)| known.value == key.value) {
                        return Err(A::Error::custom(format!("the key `{}` appears twice", key.value)));
                    }
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
                entries.iter().find(|(name, _)| name.value == *part).map(|(name, value)| (Some(name), value))
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
