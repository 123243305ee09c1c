//! Formats text of limited width: paragraphs, tables, numbers.

use unicode_width::UnicodeWidthStr;

/// Narrowest row width, even on narrower terminals.
pub(crate) const NARROWEST: usize = 40;
/// Longer CPU lists (interleaved numbering) are shown as a count, to leave room for the rest.
const LONGEST_CPU_LIST: usize = 28;

/// Text of limited width.
pub(crate) struct Screen {
    pub(crate) width: usize,
    text: String,
}

impl Screen {
    /// An empty screen with rows of at most `width` characters.
    pub(crate) fn new(width: usize) -> Self {
        Self { width, text: String::new() }
    }

    pub(crate) fn into_text(self) -> String {
        self.text
    }

    pub(crate) fn line(&mut self, line: &str) {
        self.text.push_str(truncate(line.trim_end(), self.width).trim_end());
        self.text.push('\n');
    }

    /// A label, padded to at least six characters, followed by a wrapped text with a hanging
    /// indent.
    pub(crate) fn paragraph(&mut self, label: &str, text: &str) {
        let indent = label.len().max(6) + 2;
        let mut line = format!("{label:<width$}", width = indent);
        let mut empty = true;
        for word in text.split_whitespace() {
            let space = usize::from(!empty);
            if !empty && length(&line) + space + length(word) > self.width {
                self.line(&line);
                line = " ".repeat(indent);
                empty = true;
            }
            if !empty {
                line.push(' ');
            }
            line.push_str(word);
            empty = false;
        }
        self.line(&line);
    }

    /// A label and a text on one line, followed by a hint if there is room.
    pub(crate) fn labelled(&mut self, label: &str, text: &str, hint: &str) {
        let line = format!("{label}  {text}");
        if length(&line) <= self.width {
            let hint = if length(&line) + length(hint) <= self.width { hint } else { "" };
            self.line(&format!("{line}{hint}"));
        } else {
            self.paragraph(label, text);
        }
    }

    /// A wrapped text.
    pub(crate) fn sentence(&mut self, text: &str) {
        let (first, rest) = text.split_once(' ').unwrap_or((text, ""));
        let mut line = first.to_owned();
        for word in rest.split_whitespace() {
            if length(&line) + 1 + length(word) > self.width {
                self.line(&line);
                line = format!("  {word}");
            } else {
                line.push(' ');
                line.push_str(word);
            }
        }
        self.line(&line);
    }

    /// Phrases separated by three spaces, as many per line as fit.
    pub(crate) fn phrases(&mut self, phrases: &[String]) {
        let mut line = String::new();
        for phrase in phrases {
            if !line.is_empty() && length(&line) + 3 + length(phrase) > self.width {
                self.line(&line);
                line.clear();
            }
            if !line.is_empty() {
                line.push_str("   ");
            }
            line.push_str(phrase);
        }
        if !line.is_empty() {
            self.line(&line);
        }
    }

    /// The widest of these tables that fits; otherwise all columns of the last one, split into
    /// several tables that repeat the first column.
    pub(crate) fn whole(&mut self, mut variants: Vec<Table>) {
        let last = variants.len().saturating_sub(1);
        let chosen = variants.iter().position(|table| table.width() <= self.width).unwrap_or(last);
        let table = variants.swap_remove(chosen);
        let widths = table.widths();
        let mut next = 1;
        while next < widths.len() || next == 1 {
            let mut used = widths.first().copied().unwrap_or(0);
            let fits = widths[next.min(widths.len())..].iter().take_while(|width| {
                used += **width + table.gap;
                used <= self.width
            });
            let end = next + fits.count().max(1);
            let part = |row: &Vec<String>| -> Vec<String> {
                row.iter().take(1).chain(row.iter().take(end).skip(next)).cloned().collect()
            };
            self.table(vec![Table { rows: table.rows.iter().map(part).collect(), gap: table.gap }]);
            next = end;
        }
    }

    /// The widest of these tables that fits; otherwise the last one without the rightmost columns
    /// that do not fit.
    pub(crate) fn table(&mut self, mut variants: Vec<Table>) {
        let chosen = variants.iter().position(|table| table.width() <= self.width).unwrap_or(variants.len() - 1);
        let table = variants.swap_remove(chosen);
        let shown = table.columns_within(self.width);
        for row in &table.rows {
            let cells: Vec<String> = row[..shown]
                .iter()
                .zip(table.widths())
                .map(|(cell, width)| format!("{cell}{}", " ".repeat(width - length(cell))))
                .collect();
            self.line(&cells.join(&" ".repeat(table.gap)));
        }
        let dropped = table.rows.first().map_or(0, Vec::len) - shown;
        if dropped > 0 {
            self.line(&format!("(columns that a wider window shows: {dropped})"));
        }
    }
}

/// Rows with the same number of cells; the first row is the heading.
pub(crate) struct Table {
    pub(crate) rows: Vec<Vec<String>>,
    /// Spaces between columns.
    pub(crate) gap: usize,
}

impl Table {
    pub(crate) fn new(heading: &[&str]) -> Self {
        Self { rows: vec![heading.iter().map(|cell| (*cell).to_owned()).collect()], gap: 2 }
    }

    pub(crate) fn widths(&self) -> Vec<usize> {
        let columns = self.rows.first().map_or(0, Vec::len);
        (0..columns).map(|column| self.rows.iter().map(|row| length(&row[column])).max().unwrap_or(0)).collect()
    }

    pub(crate) fn width(&self) -> usize {
        let widths = self.widths();
        widths.iter().sum::<usize>() + self.gap * widths.len().saturating_sub(1)
    }

    /// Number of columns from the left that fit.
    pub(crate) fn columns_within(&self, width: usize) -> usize {
        let mut used = 0;
        self.widths()
            .iter()
            .take_while(|column| {
                used += **column + self.gap;
                used - self.gap <= width
            })
            .count()
    }
}

/// Columns separated by two spaces, each as wide as its widest cell, without borders or trailing
/// spaces.
pub(crate) fn columns(rows: &[Vec<String>]) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count)
        .map(|column| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.width()).max().unwrap_or(0))
        .collect();
    let line = |row: &Vec<String>| {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(cell);
            line.push_str(&" ".repeat(width.saturating_sub(cell.width()) + 2));
        }
        line.trim_end().to_string()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The list, or the number of CPUs if it is too long.
pub(crate) fn short_list(list: &str) -> String {
    if list.len() <= LONGEST_CPU_LIST {
        return list.to_owned();
    }
    let count: u64 = list
        .split(',')
        .map(|part| match part.split_once('-') {
            Some((start, end)) => match (start.parse::<u64>(), end.parse::<u64>()) {
                (Ok(start), Ok(end)) => end.saturating_sub(start).saturating_add(1),
                _ => 0,
            },
            None => 1,
        })
        .fold(0, u64::saturating_add);
    format!("{count} CPUs")
}

/// Printable ASCII only, because names come from firmware and must not control the terminal or
/// change the text direction.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter == ' ' || letter.is_ascii_graphic() { letter } else { '?' }).collect()
}

pub(crate) fn length(text: &str) -> usize {
    text.chars().count()
}

/// At most `width` characters, with `..` in the middle if it is shortened.
pub(crate) fn truncate(text: &str, width: usize) -> String {
    let letters: Vec<char> = text.chars().collect();
    if letters.len() <= width {
        return text.to_owned();
    }
    let head = (width.saturating_sub(2)).div_ceil(2);
    let tail = width.saturating_sub(2) - head;
    letters[..head].iter().chain(&['.', '.']).chain(&letters[letters.len() - tail..]).collect()
}
