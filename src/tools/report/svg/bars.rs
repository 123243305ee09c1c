//! Bar charts: a bar per amount, or one bar divided into parts.

use super::{LETTER, WIDTH, area_swatch, fitted, frame, legend, text};
use std::fmt::Write;

/// Height of a row.
const ROW: f64 = 24.0;
/// Longest name, which leaves half of the width to the bars.
const LONGEST: usize = 26;

/// An amount.
pub(in crate::report) struct Bar<'a> {
    pub name: &'a str,
    /// The amount, at least 0.
    pub value: f64,
    /// The amount as text.
    pub words: String,
    /// CSS class.
    pub class: &'a str,
}

fn share(value: f64, of: f64) -> f64 {
    let share = value / of;
    if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 }
}

/// A bar per amount.
pub(in crate::report) fn bars(title: &str, description: &str, bars: &[Bar<'_>]) -> String {
    let mut body = String::new();
    let names: Vec<String> = bars.iter().map(|bar| fitted(bar.name, LONGEST)).collect();
    let letters = |words: &mut dyn Iterator<Item = usize>| words.max().unwrap_or(0) as f64 * LETTER;
    let left = letters(&mut names.iter().map(|name| name.chars().count())) + 10.0;
    let right = letters(&mut bars.iter().map(|bar| bar.words.chars().count())) + 10.0;
    let most = bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    for (index, (bar, name)) in bars.iter().zip(&names).enumerate() {
        let y = index as f64 * ROW;
        let width = share(bar.value, most) * (WIDTH - left - right).max(40.0);
        text(&mut body, (left - 8.0, y + 16.0), "end", name);
        let _ = write!(
            body,
            "<rect class=\"{}\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"16\"/>",
            bar.class,
            y + 4.0
        );
        text(&mut body, (left + width + 6.0, y + 16.0), "start", &bar.words);
    }
    frame(bars.len().max(1) as f64 * ROW + 4.0, title, description, &body)
}

/// One bar divided among the amounts.
pub(in crate::report) fn split_bar(title: &str, description: &str, parts: &[Bar<'_>]) -> String {
    let mut body = String::new();
    let names: Vec<String> = parts.iter().map(|part| format!("{} {}", part.name, part.words)).collect();
    let entries: Vec<_> =
        parts.iter().zip(&names).map(|(part, name)| (area_swatch(part.class), name.as_str())).collect();
    let top = legend(&mut body, &entries) + 2.0;
    let sum: f64 = parts.iter().map(|part| part.value).sum();
    let mut x = 0.0;
    for part in parts {
        let width = share(part.value, sum) * WIDTH;
        let _ = write!(
            body,
            "<rect class=\"{}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"26\"/>",
            part.class
        );
        x += width;
    }
    frame(top + 30.0, title, description, &body)
}
