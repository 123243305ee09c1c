//! What is wrong with a text, and where.

use std::fmt;

/// Most faults that are printed; a text with more is broken everywhere.
const MOST_SHOWN: usize = 20;
/// Longer words are cut, so that a message stays a line.
const LONGEST_WORD: usize = 60;

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixFault {
    place: Position,
    got: String,
    expected: String,
}

impl fmt::Display for MatrixFault {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.place.line.map(|line| format!("line {line}")),
            self.place.row.as_ref().map(|row| format!("row {row}")),
            self.place.column.as_ref().map(|column| format!("column {column}")),
        ];
        let place: Vec<String> = parts.into_iter().flatten().collect();
        if !place.is_empty() {
            write!(formatter, "{}: ", place.join(", "))?;
        }
        write!(formatter, "got {}; expected {}", self.got, self.expected)
    }
}

/// Everything that is wrong with a text, one line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<MatrixFault>);

impl fmt::Display for Faults {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, fault) in self.0.iter().take(MOST_SHOWN).enumerate() {
            write!(formatter, "{}{fault}", if position == 0 { "" } else { "\n" })?;
        }
        match self.0.len().saturating_sub(MOST_SHOWN) {
            0 => Ok(()),
            more => write!(formatter, "\nand {more} more"),
        }
    }
}

impl std::error::Error for Faults {}

/// Where a fault is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Position {
    line: Option<usize>,
    row: Option<String>,
    column: Option<String>,
}

impl Position {
    pub(super) fn line(line: usize) -> Self {
        Position { line: Some(line), ..Position::default() }
    }

    pub(super) fn row(self, label: &str) -> Self {
        Position { row: Some(printable(label)), ..self }
    }

    pub(super) fn column(self, label: &str) -> Self {
        Position { column: Some(printable(label)), ..self }
    }

    pub(super) fn fault(self, got: impl AsRef<str>, expected: impl Into<String>) -> MatrixFault {
        MatrixFault { place: self, got: printable(got.as_ref()), expected: expected.into() }
    }
}

/// Words of the text go to a terminal and must not control it.
fn printable(word: &str) -> String {
    word.chars().filter(|c| !c.is_control()).take(LONGEST_WORD).collect()
}
