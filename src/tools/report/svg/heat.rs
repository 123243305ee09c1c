//! A heat map with a strip of cells per row: which rank is slow, and when.

use super::{LETTER, WIDTH, area_swatch, fitted, frame, label, legend, text, ticks};
use std::fmt::Write;

/// Approximate height of all rows together.
const HEIGHT: f64 = 180.0;
/// Space for the labels on the right.
const RIGHT: f64 = 64.0;

/// Rows of cells over the steps.
pub(in crate::report) struct Heat<'a> {
    /// Title of the chart.
    pub title: &'a str,
    /// Description of its content, with figures.
    pub description: String,
    /// Name, label and cell levels of each row; `None` if unknown.
    pub rows: Vec<(String, String, Vec<Option<usize>>)>,
    /// CSS class and meaning of each level; the first level is not drawn.
    pub levels: [(&'a str, &'a str); 5],
    /// First step of the first cell, and the step after the last cell.
    pub steps: (f64, f64),
}

/// Draws the heat map.
pub(in crate::report) fn heat(heat: &Heat<'_>) -> String {
    let mut body = String::new();
    let entries: Vec<_> = heat.levels.iter().map(|(class, name)| (area_swatch(class), *name)).collect();
    let top = legend(&mut body, &entries) + 4.0;
    let count = heat.rows.len().max(1);
    let row = (HEIGHT / count as f64).clamp(6.0, 22.0);
    let longest = heat.rows.iter().map(|(name, _, _)| name.chars().count()).max().unwrap_or(0).min(22);
    let left = longest as f64 * LETTER + 10.0;
    let width = WIDTH - left - RIGHT;
    let cells = heat.rows.iter().map(|(_, _, cells)| cells.len()).max().unwrap_or(0).max(1);
    let x = |cell: usize| left + width * cell as f64 / cells as f64;
    let gap = if row > 9.0 { 2.0 } else { 1.0 };
    let every = (12.0 / row).ceil() as usize;
    for (index, (name, word, _)) in heat.rows.iter().enumerate() {
        let y = top + index as f64 * row;
        let _ = write!(
            body,
            "<rect class=\"c-slow0\" x=\"{left:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{:.1}\"/>",
            row - gap
        );
        if index % every == 0 {
            let baseline = y + row / 2.0 + 3.5;
            text(&mut body, (left - 6.0, baseline), "end", &fitted(name, 22));
            text(&mut body, (WIDTH - RIGHT + 6.0, baseline), "start", word);
        }
    }
    // Use one path per level to keep the output small.
    for (level, (class, _)) in heat.levels.iter().enumerate().skip(1) {
        let mut path = String::new();
        for (index, (_, _, cells)) in heat.rows.iter().enumerate() {
            strip(&mut path, cells, Some(level), (top + index as f64 * row, row - gap), &x);
        }
        if !path.is_empty() {
            let _ = write!(body, "<path class=\"{class}\" d=\"{path}\"/>");
        }
    }
    let mut unknown = String::new();
    for (index, (_, _, cells)) in heat.rows.iter().enumerate() {
        strip(&mut unknown, cells, None, (top + index as f64 * row, row - gap), &x);
    }
    if !unknown.is_empty() {
        let _ = write!(body, "<path class=\"nothing\" d=\"{unknown}\"/>");
    }
    let bottom = top + count as f64 * row;
    for step in ticks(heat.steps.0, heat.steps.1, 4.0) {
        let share = (step - heat.steps.0) / (heat.steps.1 - heat.steps.0).max(1e-12);
        if (0.0..=1.0).contains(&share) && step.fract() == 0.0 {
            text(&mut body, (left + share * width, bottom + 14.0), "middle", &label(step));
        }
    }
    text(&mut body, (left + width / 2.0, bottom + 29.0), "middle", "step");
    frame(bottom + 34.0, heat.title, &heat.description, &body)
}

/// Draws rectangles for runs of cells with one level in a row.
fn strip(
    path: &mut String,
    cells: &[Option<usize>],
    level: Option<usize>,
    (y, height): (f64, f64),
    x: &dyn Fn(usize) -> f64,
) {
    let mut begin = 0;
    for run in cells.chunk_by(|a, b| a == b) {
        if run[0] == level {
            let (from, to) = (x(begin), x(begin + run.len()));
            let _ = write!(path, "M{from:.1} {y:.1}H{to:.1}v{height:.1}H{from:.1}z");
        }
        begin += run.len();
    }
}
