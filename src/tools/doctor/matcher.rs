//! Searches a line for all known errors in one pass.

use super::known::{KnownError, Role, known};
use aho_corasick::{AhoCorasick, BuildError};

/// A search for all known errors. Its size depends only on the table.
#[derive(Debug)]
pub(super) struct Matcher {
    texts: AhoCorasick,
    count: usize,
    /// The alternatives of each error, as positions in the search.
    errors: Vec<(&'static KnownError, Vec<Vec<usize>>)>,
    found: Vec<bool>,
}

impl Matcher {
    /// # Errors
    /// The table is too large for the search; a test rules this out.
    pub(super) fn new() -> Result<Matcher, BuildError> {
        Matcher::of(known())
    }

    /// Searches for a part of the table.
    ///
    /// # Errors
    /// As [`Matcher::new`].
    pub(super) fn of(errors: impl Iterator<Item = &'static KnownError>) -> Result<Matcher, BuildError> {
        let errors: Vec<&'static KnownError> = errors.collect();
        let texts = errors.iter().flat_map(|known| known.texts.iter().copied().flatten().copied());
        let mut all: Vec<&str> = texts.collect();
        all.sort_unstable();
        all.dedup();
        let place = |text: &&str| all.binary_search(text).unwrap_or_default();
        let errors = errors
            .iter()
            .map(|known| (*known, known.texts.iter().map(|group| group.iter().map(place).collect()).collect()))
            .collect();
        let texts = AhoCorasick::new(&all)?;
        Ok(Matcher { texts, count: all.len(), errors, found: vec![false; all.len()] })
    }

    /// The error in a line, with its position in the table. If several match, a cause wins, then a
    /// lost peer, which is more specific than its symptom; among equals, the first in the table.
    pub(super) fn find(&mut self, line: &[u8]) -> Option<(usize, &'static KnownError)> {
        let mut any = false;
        for hit in self.texts.find_overlapping_iter(line) {
            if !any {
                self.found.clear();
                self.found.resize(self.count, false);
                any = true;
            }
            self.found[hit.pattern().as_usize()] = true;
        }
        if !any {
            return None;
        }
        let fits = |groups: &[Vec<usize>]| groups.iter().any(|group| group.iter().all(|text| self.found[*text]));
        let fitting = self.errors.iter().enumerate().filter(|(_, (_, groups))| fits(groups));
        fitting
            .min_by_key(|(index, (known, _))| (precedence(known.role), *index))
            .map(|(index, (known, _))| (index, *known))
    }

    /// The position of an error in the table.
    pub(super) fn position(&self, id: &str) -> Option<(usize, &'static KnownError)> {
        self.errors.iter().position(|(known, _)| known.id == id).map(|index| (index, self.errors[index].0))
    }
}

fn precedence(role: Role) -> u8 {
    match role {
        Role::Cause => 0,
        Role::Follower => 1,
        Role::Symptom => 2,
        Role::General => 3,
        Role::Remark => 4,
    }
}
