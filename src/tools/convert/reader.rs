//! Tracks which fields of a document were converted.

use super::Note;
use super::advice;
use serde_json::Value;
use std::collections::BTreeSet;
use switchyard_fabric::lint::{Cursor, Path, Step};

/// Most characters of a value shown in a note.
const SHOWN: usize = 80;

/// A document whose fields are being converted.
pub(super) struct Reader<'a> {
    document: &'a Value,
    done: BTreeSet<Path>,
    notes: Vec<(Path, Note)>,
}

impl<'a> Reader<'a> {
    pub(super) fn new(document: &'a Value) -> Reader<'a> {
        Reader { document, done: BTreeSet::new(), notes: Vec::new() }
    }

    /// Takes this field with everything in it, because the TrainJob now contains it.
    pub(super) fn take(&mut self, from: &Cursor<'a>, key: &str) -> Option<Value> {
        let field = from.get(key)?;
        self.done(&field);
        Some(field.value.clone())
    }

    /// Whether the field, or an enclosing one, was taken or noted.
    pub(super) fn is_done(&self, field: &Cursor<'_>) -> bool {
        self.done.contains(&field.path)
    }

    /// Marks the field as contained in the TrainJob.
    pub(super) fn done(&mut self, field: &Cursor<'_>) {
        self.done.insert(field.path.clone());
    }

    /// Notes that the field is missing from the TrainJob or has changed.
    pub(super) fn note(&mut self, field: &Cursor<'_>, what: impl Into<String>) {
        self.done(field);
        let note = Note { path: field.path.to_string(), value: words(field.value), what: what.into() };
        self.notes.push((field.path.clone(), note));
    }

    /// All notes, including one for each field that was not taken.
    pub(super) fn finish(mut self) -> Vec<Note> {
        self.walk(&Cursor::new(self.document));
        self.notes.sort_by(|(one, _), (other, _)| one.cmp(other));
        self.notes.into_iter().map(|(_, note)| note).collect()
    }

    fn walk(&mut self, at: &Cursor<'_>) {
        if self.is_done(at) {
            return;
        }
        let key = match at.path.steps().last() {
            Some(Step::Key(key)) => key.as_str(),
            _ => "",
        };
        let known = advice::of(key);
        match at.value {
            Value::Null => {}
            Value::Object(fields) if known.is_none() => {
                fields.keys().filter_map(|key| at.get(key)).for_each(|field| self.walk(&field));
            }
            Value::Array(_) if known.is_none() => at.items().iter().for_each(|item| self.walk(item)),
            Value::Object(fields) if fields.is_empty() => {}
            Value::Array(items) if items.is_empty() => {}
            _ => self.note(at, known.unwrap_or(advice::DEFAULT)),
        }
    }
}

/// A value on one line.
pub(super) fn words(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned).replace('\n', " ");
    if text.chars().count() <= SHOWN {
        return text;
    }
    let head: String = text.chars().take(SHOWN).collect();
    format!("{head}…")
}
