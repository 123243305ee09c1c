//! The last uses of all bytes, and whether a new use is ordered after them.

use crate::clock::Clock;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Identifies an operation by stream and position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub(crate) stream: usize,
    pub(crate) index: u64,
    pub(crate) name: Arc<str>,
}

/// Bytes with a common history.
#[derive(Debug, Clone)]
struct Piece {
    end: u64,
    writer: Option<Stamp>,
    /// The last reader of each stream since the write.
    readers: Vec<Stamp>,
}

/// Pieces by first address.
#[derive(Debug, Default)]
pub(crate) struct Shadow(BTreeMap<u64, Piece>);

impl Shadow {
    /// Records a use, or returns an earlier one that it is unordered with, and whether that one was
    /// a write.
    pub(crate) fn touch(
        &mut self,
        range: &Range<u64>,
        writes: bool,
        stamp: &Stamp,
        clock: &Clock,
    ) -> Option<(Stamp, bool)> {
        if range.is_empty() {
            return None;
        }
        self.split(range.start);
        self.split(range.end);
        let apart = |other: &Stamp| clock.get(other.stream) < other.index;
        for piece in self.0.range(range.clone()).map(|(_, piece)| piece) {
            if let Some(writer) = piece.writer.iter().find(|writer| apart(writer)) {
                return Some((writer.clone(), true));
            }
            if writes && let Some(reader) = piece.readers.iter().find(|reader| apart(reader)) {
                return Some((reader.clone(), false));
            }
        }
        if writes {
            self.forget(range);
            self.0.insert(range.start, Piece { end: range.end, writer: Some(stamp.clone()), readers: Vec::new() });
            return None;
        }
        let mut at = range.start;
        let mut gaps = Vec::new();
        for (start, piece) in self.0.range_mut(range.clone()) {
            if at < *start {
                gaps.push(at..*start);
            }
            piece.readers.retain(|reader| reader.stream != stamp.stream);
            piece.readers.push(stamp.clone());
            at = piece.end;
        }
        gaps.push(at..range.end);
        for gap in gaps.into_iter().filter(|gap| !gap.is_empty()) {
            self.0.insert(gap.start, Piece { end: gap.end, writer: None, readers: vec![stamp.clone()] });
        }
        None
    }

    /// Clears the history of freed memory.
    pub(crate) fn forget(&mut self, range: &Range<u64>) {
        self.split(range.start);
        self.split(range.end);
        let starts: Vec<u64> = self.0.range(range.clone()).map(|(start, _)| *start).collect();
        starts.iter().for_each(|start| drop(self.0.remove(start)));
    }

    /// Makes an address a piece boundary.
    fn split(&mut self, at: u64) {
        if let Some((start, piece)) = self.0.range_mut(..at).next_back()
            && piece.end > at
        {
            debug_assert!(*start < at);
            let rest = piece.clone();
            piece.end = at;
            self.0.insert(at, rest);
        }
    }
}
