//! Faults in a matrix text and their positions.

use std::fmt;

/// Maximum number of faults printed. A text with more is broken everywhere.
const MAX_SHOWN: usize = 20;
/// Words are cut at this length to keep every message on one line.
const MAX_WORD_LEN: usize = 60;

/// One fault.
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

/// All faults in a text, one per line when displayed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Faults(pub Vec<MatrixFault>);

impl fmt::Display for Faults {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, fault) in self.0.iter().take(MAX_SHOWN).enumerate() {
            write!(formatter, "{}{fault}", if position == 0 { "" } else { "\n" })?;
        }
        match self.0.len().saturating_sub(MAX_SHOWN) {
            0 => Ok(()),
            more => write!(formatter, "\nand {more} more"),
        }
    }
}

impl std::error::Error for Faults {}

/// Position of a fault.
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

/// Strips control characters, because words of the text are printed to a terminal.
fn printable(word: &str) -> String {
    word.chars().filter(|c| !c.is_control()).take(MAX_WORD_LEN).collect()
}
