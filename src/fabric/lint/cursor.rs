//! A value in a document together with its path.

use super::path::Path;
use serde_json::Value;

/// A value and its path. A missing value has no cursor.
#[derive(Debug, Clone)]
pub struct Cursor<'a> {
    pub value: &'a Value,
    pub path: Path,
}

impl<'a> Cursor<'a> {
    pub fn new(value: &'a Value) -> Self {
        Cursor { value, path: Path::default() }
    }

    /// The field of this name, unless it is null.
    pub fn get(&self, key: &str) -> Option<Cursor<'a>> {
        let value = self.value.as_object()?.get(key).filter(|value| !value.is_null())?;
        Some(Cursor { value, path: self.path.key(key) })
    }

    /// The nested field at this path.
    pub fn at(&self, keys: &[&str]) -> Option<Cursor<'a>> {
        keys.iter().try_fold(self.clone(), |cursor, key| cursor.get(key))
    }

    /// The items of a list; empty for any other value.
    pub fn items(&self) -> Vec<Cursor<'a>> {
        let items = self.value.as_array().into_iter().flatten().enumerate();
        items.map(|(index, value)| Cursor { value, path: self.path.index(index) }).collect()
    }

    /// The items of the list of this name.
    pub fn list(&self, key: &str) -> Vec<Cursor<'a>> {
        self.get(key).map(|list| list.items()).unwrap_or_default()
    }

    /// The fields of a map; empty for any other value.
    pub fn fields(&self) -> Vec<(&'a str, Cursor<'a>)> {
        let fields = self.value.as_object().into_iter().flatten();
        fields.map(|(key, value)| (key.as_str(), Cursor { value, path: self.path.key(key) })).collect()
    }

    /// The string of this name.
    pub fn text(&self, key: &str) -> Option<&'a str> {
        self.value.as_object()?.get(key)?.as_str()
    }

    /// The number of this name, even if it is written as a string.
    pub fn number(&self, key: &str) -> Option<u64> {
        let value = self.value.as_object()?.get(key)?;
        value.as_u64().or_else(|| value.as_str()?.trim().parse().ok())
    }
}
