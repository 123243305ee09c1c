//! Charts drawn by pure functions: plots over steps, heat maps, bars.
//!
//! Colours are CSS classes, so that charts follow light and dark mode; series also differ by dash
//! or hatch. Every chart has a title and a description, and its figures are in a table next to it.

mod bars;
mod heat;
mod plot;
mod scale;
mod stack;

pub(super) use bars::{Bar, bars, split_bar};
pub(super) use heat::{Heat, heat};
pub(super) use plot::{Plot, Series};
pub(super) use stack::Layer;

use super::markup::escaped;
use std::fmt::Write;
use switchyard_core::units::{grouped, three_digits};

/// Width of every chart in view box units (about a pixel): a chart fits a telephone, and its texts
/// stay legible there.
const WIDTH: f64 = 440.0;
/// Approximate width of a letter in a label.
const LETTER: f64 = 6.1;
/// Most points of a line.
const MAX_POINTS: usize = 600;

/// Hatch patterns, shared by all charts of a page.
pub(super) const PATTERNS: &str = include_str!("patterns.svg");

/// Wraps a drawing in a frame with size, title and description.
fn frame(height: f64, title: &str, description: &str, body: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH:.0} {height:.0}\" role=\"img\"><title>{}</title><desc>{}</desc>{body}</svg>",
        escaped(title),
        escaped(description)
    )
}

/// A text at a position; `anchor` is `start`, `middle` or `end`.
fn text(out: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let _ = write!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(words));
}

/// A name that fits a label of this many letters.
fn fitted(name: &str, letters: usize) -> String {
    match name.char_indices().nth(letters) {
        Some(_) => name.chars().take(letters - 1).chain(['…']).collect(),
        None => name.to_owned(),
    }
}

/// Draws swatches with names, wrapped over as many lines as needed; returns the height.
fn legend(out: &mut String, entries: &[(String, &str)]) -> f64 {
    let (mut x, mut y) = (0.0, 11.0);
    for (swatch, name) in entries {
        let width = 24.0 + name.chars().count() as f64 * LETTER + 12.0;
        if x > 0.0 && x + width > WIDTH {
            (x, y) = (0.0, y + 17.0);
        }
        let _ = write!(out, "<g transform=\"translate({x:.1} {:.1})\">{swatch}</g>", y - 9.0);
        text(out, (x + 22.0, y), "start", name);
        x += width;
    }
    y + 9.0
}

/// A filled swatch of 16 x 10.
fn area_swatch(class: &str) -> String {
    format!("<rect class=\"{class}\" width=\"16\" height=\"10\"/>")
}

/// A line swatch.
fn line_swatch(class: &str) -> String {
    format!("<path class=\"{class}\" d=\"M0 5H16\"/>")
}

/// Reduces points to at most this many: the smallest and the largest of each segment.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let piece = points.len().div_ceil(MAX_POINTS / 2);
    let ends = points.chunks(piece).flat_map(|piece| {
        let by = |a: &&(f64, f64), b: &&(f64, f64)| a.1.total_cmp(&b.1);
        let mut ends = [piece.iter().min_by(by), piece.iter().max_by(by)];
        ends.sort_by(|a, b| {
            a.map(|point| point.0).unwrap_or_default().total_cmp(&b.map(|point| point.0).unwrap_or_default())
        });
        ends
    });
    ends.flatten().copied().collect()
}

/// About `count` round numbers from at most `low` to at least `high`.
fn ticks(low: f64, high: f64, count: f64) -> Vec<f64> {
    let span = (high - low).max(high.abs() * 1e-9).max(1e-12);
    let power = 10_f64.powf((span / count).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| span / step <= count);
    let step = step.unwrap_or(10.0 * power);
    let first = (low / step).floor();
    let last = (high / step).ceil();
    let count = ((last - first).clamp(1.0, 50.0)) as i32;
    (0..=count).map(|index| (first + f64::from(index)) * step).collect()
}

/// Formats the label of a tick.
fn label(value: f64) -> String {
    if value.abs() >= 1e6 {
        let thousands = ((value.abs().log10() / 3.0).floor() as usize).min(4);
        let unit = ["", "k", "M", "G", "T"][thousands];
        let scaled = value / 1000_f64.powi(thousands as i32);
        return if scaled.abs() < 1e4 { format!("{}{unit}", three_digits(scaled)) } else { format!("{value:.0e}") };
    }
    if value.abs() >= 1000.0 && value >= 0.0 {
        return grouped(value.round() as u64);
    }
    if value != 0.0 && value.abs() < 0.01 { format!("{value:.0e}") } else { three_digits(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_enclose_the_values() {
        assert_eq!(ticks(0.0, 97.0, 5.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks(1.8, 5.6, 4.0), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        for (low, high) in [(0.0, 0.0), (3.0, 3.0), (-1e30, 1e30), (1e12, 1e12 + 1.0), (0.0, 1e-30)] {
            let ticks = ticks(low, high, 5.0);
            assert!(ticks.len() >= 2 && ticks.len() <= 51 && ticks[0] <= low && ticks.iter().all(|t| t.is_finite()));
        }
    }

    #[test]
    fn thinning_keeps_the_least_and_the_greatest() {
        let points: Vec<(f64, f64)> =
            (0..100_000).map(|x| (f64::from(x), if x == 77_777 { 9.0 } else { f64::from(x % 3) })).collect();
        let thin = thinned(&points);
        assert!(thin.len() <= MAX_POINTS && thin.contains(&(77_777.0, 9.0)));
        assert!(thin.windows(2).all(|pair| pair[0].0 <= pair[1].0), "in order");
    }

    #[test]
    fn labels_are_short() {
        assert_eq!([0.0, 0.25, 20.0, 12_000.0, 2.5e6, 1e30].map(label), ["0", "0.25", "20", "12,000", "2.5M", "1e30"]);
    }
}
