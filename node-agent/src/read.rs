//! Helpers to read kernel files, and notes about what could not be read.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use switchyard_crds::gpu_topology::{FactSource, Facts, SourceState};

/// Larger than any file read here, so that a fixture or a broken driver cannot exhaust memory.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// `maxLength` of a source's message.
const MAX_MESSAGE: usize = 1024;

/// The text of a file, trimmed.
pub(crate) fn text(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&bytes(path)?).trim().to_owned())
}

pub(crate) fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A non-negative decimal number. The kernel writes -1 for "unknown", which becomes `None` like any
/// other text.
pub(crate) fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.trim().parse().ok()
}

/// The number in a file; `None` if the file is missing or holds no number.
pub(crate) fn number_in<T: std::str::FromStr>(path: &Path) -> Option<T> {
    number(&text(path).ok()?)
}

/// Names and paths in a directory, sorted by name so that descriptions are reproducible.
pub(crate) fn entries(directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string() {
            all.push((name, entry.path()));
        }
    }
    all.sort();
    Ok(all)
}

/// The first `max` characters, because the API limits the length of every string.
pub(crate) fn clip(text: &str, max: usize) -> String {
    text.chars().take(max).collect()
}

/// `ACTIVE` and `up` become `Active` and `Up`.
pub(crate) fn capitalized(text: &str) -> String {
    let mut letters = text.trim().chars();
    letters.next().map_or(String::new(), |first| {
        first.to_uppercase().chain(letters.flat_map(char::to_lowercase)).take(32).collect()
    })
}

/// Notes that form one message, for example about what could not be read in a group of facts.
#[derive(Debug, Default)]
pub struct Notes(Vec<String>);

impl Notes {
    pub fn add(&mut self, note: impl Into<String>) {
        self.0.push(note.into());
    }

    /// Whether everything could be read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads a file; adds a note and returns `None` on failure.
    pub(crate) fn text(&mut self, path: &Path) -> Option<String> {
        text(path).map_err(|error| self.add(format!("{}: {error}", path.display()))).ok()
    }

    /// Reads and parses a file; adds a note and returns `None` on failure.
    pub(crate) fn parsed<T, E: std::fmt::Display>(
        &mut self,
        path: &Path,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        let text = self.text(path)?;
        parse(&text).map_err(|error| self.add(format!("{}: {error}", path.display()))).ok()
    }

    /// The entry for `status.sources`. `found` is whether any fact was found.
    pub fn source(self, facts: Facts, source: &str, found: bool) -> FactSource {
        let state = match (found, self.is_empty()) {
            (true, true) => SourceState::Complete,
            (true, false) => SourceState::Partial,
            (false, _) => SourceState::Unavailable,
        };
        FactSource { facts, source: clip(source, 128), state, message: self.message() }
    }

    /// Joins all notes, followed by the number of notes that do not fit.
    pub fn message(self) -> Option<String> {
        let mut message = String::new();
        for (index, note) in self.0.iter().enumerate() {
            let rest = format!("; and {} more", self.0.len() - index);
            let separator = if index == 0 { "" } else { "; " };
            if message.len() + separator.len() + note.len() + rest.len() > MAX_MESSAGE {
                if index == 0 {
                    message = clip(note, MAX_MESSAGE);
                } else {
                    message.push_str(&rest);
                }
                break;
            }
            message.push_str(separator);
            message.push_str(note);
        }
        (!message.is_empty()).then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_is_not_a_number() {
        assert_eq!(number::<u32>("-1"), None);
        assert_eq!(number::<u32>(" 7\n"), Some(7));
        assert_eq!(number::<u32>(""), None);
        assert_eq!(number::<u32>("4294967296"), None);
    }

    #[test]
    fn messages_stay_within_the_limit() {
        let mut notes = Notes::default();
        assert!(Notes::default().message().is_none());
        for index in 0..200 {
            notes.add(format!("file {index} cannot be read"));
        }
        let message = notes.message().expect("there are notes");
        assert!(message.len() <= MAX_MESSAGE, "{}", message.len());
        assert!(message.ends_with("more"), "{message}");
        let mut long = Notes::default();
        long.add("é".repeat(3000));
        assert_eq!(long.message().expect("one note").chars().count(), MAX_MESSAGE);
    }
}
