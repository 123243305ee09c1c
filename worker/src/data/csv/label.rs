//! The column with the class.

use super::super::error::DataError;
use super::super::rows::MAX_CLASSES;
use std::collections::HashMap;
use switchyard_worker_contract::config::{Column, Csv};

pub(super) const LABEL: &str = "spec.engine.data.labelColumn";
/// Usual names of the column with the class.
const USUAL: [&str; 4] = ["label", "class", "target", "y"];
/// Classes of a column that neither the job nor the header declares as the class: more look like
/// pixels, measurements or identifiers.
const MAX_UNDECLARED: u32 = 100;
/// Maximum bytes of a class name, because every checkpoint contains all names.
const MAX_NAME: usize = 200;

pub(super) fn is_usual(name: &str) -> bool {
    USUAL.iter().any(|usual| name.eq_ignore_ascii_case(usual))
}

/// The column with the class.
pub(super) struct LabelColumn {
    /// From 0.
    pub index: usize,
    /// For messages, for example ``column 1 (`label`)``.
    words: String,
    /// Whether the job or its name declares it as the class.
    is_declared: bool,
}

impl LabelColumn {
    pub fn choose(csv: &Csv, names: Option<&[String]>, columns: usize) -> Result<LabelColumn, DataError> {
        let usual = |index: usize| names.and_then(|names| names.get(index)).is_some_and(|name| is_usual(name));
        let (index, is_declared) = match (&csv.label, names) {
            (Some(Column::Position(position)), _) => {
                let from = position.unsigned_abs() as usize;
                let index = if *position > 0 { from.checked_sub(1) } else { columns.checked_sub(from) };
                let index = index.filter(|index| *index < columns).ok_or_else(|| {
                    let expected = format!("a column from 1 to {columns}, or from -1 to -{columns} from the last");
                    DataError::value(LABEL, position, expected)
                })?;
                (index, true)
            }
            (Some(Column::Name(name)), Some(names)) => {
                let index = names.iter().position(|other| other == name);
                let list = || names.iter().take(8).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
                (index.ok_or_else(|| DataError::value(LABEL, format!("`{name}`"), format!("one of {}", list())))?, true)
            }
            (Some(Column::Name(name)), None) => {
                let expected = "a position, such as 1 for the first column: the file has no header";
                return Err(DataError::value(LABEL, format!("`{name}`"), expected));
            }
            (None, _) if usual(columns - 1) => (columns - 1, true),
            (None, _) if usual(0) => (0, true),
            (None, _) => (columns - 1, false),
        };
        let mut words = format!("column {}", index + 1);
        if let Some(name) = names.and_then(|names| names.get(index)) {
            words.push_str(&format!(" (`{name}`)"));
        }
        Ok(LabelColumn { index, words, is_declared })
    }

    /// Checks that the column can be the class. `names` is empty if the labels are numbers.
    pub fn check(&self, labels: &[u32], names: &[String]) -> Result<(), DataError> {
        let (words, count) = (&self.words, labels.len());
        let expected = "the column with the class, by name or position: 1 is the first, -1 the last";
        let most = labels.iter().max().copied().unwrap_or_default();
        if count > 1 && labels.iter().all(|label| *label == labels[0]) {
            let value = names.first().map_or_else(|| most.to_string(), |name| format!("`{name}`"));
            let got = format!("{words}, which is {value} in all {count} samples, so there is nothing to learn");
            return Err(DataError::value(LABEL, got, expected));
        }
        if !self.is_declared && most >= MAX_UNDECLARED {
            let content = match names.len() {
                0 => format!("numbers up to {most}, like pixels or measurements"),
                names => format!("{names} different texts, like identifiers"),
            };
            return Err(DataError::value(LABEL, format!("nothing, and the last, {words}, has {content}"), expected));
        }
        Ok(())
    }
}

/// How the label column becomes classes.
pub(super) enum Labels {
    /// Each number is a class.
    Numbers,
    /// Each text is the name of a class, here with its number in order of appearance.
    Names(HashMap<String, u32>),
}

impl Labels {
    /// The labels are names if most of them are not numbers. The rest of a numeric column is bad
    /// data.
    pub fn of<'a>(labels: impl Iterator<Item = &'a [u8]>) -> Labels {
        let (mut names, mut numbers) = (0_u64, 0_u64);
        for label in labels.filter(|label| !label.is_empty()) {
            *(if super::number(label).is_some() { &mut numbers } else { &mut names }) += 1;
        }
        if names > numbers { Labels::Names(HashMap::new()) } else { Labels::Numbers }
    }

    /// The class of a label, or what was expected instead.
    pub fn class(&mut self, label: &[u8]) -> Result<u32, String> {
        let names = match self {
            Labels::Numbers => {
                let expected = || format!("a whole number from 0 to {}, or another {LABEL}", MAX_CLASSES - 1);
                let is_class = |value: &f64| value.fract() == 0.0 && (0.0..f64::from(MAX_CLASSES)).contains(value);
                return super::number(label).filter(is_class).map(|value| value as u32).ok_or_else(expected);
            }
            Labels::Names(names) => names,
        };
        // A quote is doubled inside quotes, so a single one at the start was never closed.
        let is_closed = |name: &str| !name.starts_with('"') || name.starts_with("\"\"");
        let is_name = |name: &&str| (1..=MAX_NAME).contains(&name.len()) && is_closed(name);
        let name = std::str::from_utf8(label).ok().filter(is_name);
        let expected = || format!("a class name with 1 to {MAX_NAME} bytes of UTF-8, with both quotes or none");
        let name = name.ok_or_else(expected)?;
        let name = name.replace("\"\"", "\"");
        let next = names.len() as u32;
        match names.get(&name) {
            Some(class) => Ok(*class),
            None if next >= MAX_CLASSES => Err(format!("at most {MAX_CLASSES} class names, or another {LABEL}")),
            None => Ok(*names.entry(name).or_insert(next)),
        }
    }

    /// Sorts the names by their bytes, so that a class has the same number wherever it appears
    /// first, and renumbers the labels. Empty if the labels are numbers.
    pub fn into_names(self, labels: &mut [u32]) -> Vec<String> {
        let Labels::Names(names) = self else { return Vec::new() };
        let mut names: Vec<(String, u32)> = names.into_iter().collect();
        names.sort_unstable();
        let mut classes = vec![0; names.len()];
        names.iter().enumerate().for_each(|(class, (_, label))| classes[*label as usize] = class as u32);
        labels.iter_mut().for_each(|label| *label = classes[*label as usize]);
        names.into_iter().map(|(name, _)| name).collect()
    }
}
