//! Plots wait times: one curve per rule with the share of jobs that waited longer.

use std::fmt::Write;

/// Wait times under one rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    pub name: String,
    /// Seconds, in any order.
    pub waits: Vec<f64>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 52.0;
const TOP: f64 = 34.0;
/// Height of a row of the legend.
const ROW: f64 = 18.0;
/// Ticks of the logarithmic axis.
const TICKS: [(f64, &str); 8] = [
    (60.0, "1 min"),
    (600.0, "10 min"),
    (3600.0, "1 h"),
    (14_400.0, "4 h"),
    (86_400.0, "1 d"),
    (259_200.0, "3 d"),
    (864_000.0, "10 d"),
    (2_592_000.0, "30 d"),
];
/// Colours that are distinguishable with colour blindness (Okabe, Ito 2008); further curves are
/// also dashed.
const COLOURS: [&str; 6] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];

/// Draws the curves as a self-contained SVG.
pub fn picture(title: &str, curves: &[Curve]) -> String {
    let longest = curves.iter().flat_map(|curve| &curve.waits).copied().fold(0.0, f64::max);
    let most = TICKS.iter().map(|(time, _)| *time).find(|time| *time >= longest).unwrap_or(longest);
    let least = TICKS[0].0;
    // At least one tick, so that the axis has a length.
    let most = most.max(TICKS[1].0);
    let across = |wait: f64| LEFT + WIDTH * (wait.max(least) / least).ln() / (most / least).ln();
    let down = |share: f64| TOP + HEIGHT * (1.0 - share);
    let height = TOP + HEIGHT + 46.0 + ROW * curves.len() as f64;
    let mut svg = String::new();
    let mut line = |text: String| {
        // Writing into a `String` cannot fail.
        let _ = writeln!(svg, "{text}");
    };
    line(format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {height}" font-family="sans-serif" font-size="12" fill="currentColor">"#,
        LEFT + WIDTH + 28.0
    ));
    line(format!(r#"<text x="{LEFT}" y="18" font-size="14">{}: share that waited longer</text>"#, escaped(title)));
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let y = down(share);
        line(format!(
            r#"<path d="M{LEFT} {y:.1}H{:.1}" stroke="currentColor" stroke-opacity="0.15"/><text x="{:.1}" y="{:.1}" text-anchor="end">{:.0} %</text>"#,
            LEFT + WIDTH,
            LEFT - 6.0,
            y + 4.0,
            100.0 * share
        ));
    }
    for (time, name) in TICKS.iter().filter(|(time, _)| *time <= most) {
        let x = across(*time);
        line(format!(
            r#"<path d="M{x:.1} {TOP}v{HEIGHT}" stroke="currentColor" stroke-opacity="0.15"/><text x="{x:.1}" y="{:.1}" text-anchor="middle">{name}</text>"#,
            TOP + HEIGHT + 18.0
        ));
    }
    for (number, curve) in curves.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let dash = if number < COLOURS.len() { "" } else { r#" stroke-dasharray="5 4""# };
        line(format!(
            r#"<path d="{}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>"#,
            path(&curve.waits, across, down)
        ));
        let y = TOP + HEIGHT + 42.0 + ROW * number as f64;
        line(format!(
            r#"<path d="M{LEFT} {:.1}h24" stroke="{colour}" stroke-width="2"{dash}/><text x="{:.1}" y="{y:.1}">{}</text>"#,
            y - 4.0,
            LEFT + 32.0,
            escaped(&curve.name)
        ));
    }
    line("</svg>".into());
    svg
}

/// A step curve.
fn path(waits: &[f64], across: impl Fn(f64) -> f64, down: impl Fn(f64) -> f64) -> String {
    let mut waits = waits.to_vec();
    waits.sort_by(f64::total_cmp);
    let (mut path, mut last) = (String::new(), None);
    for (at, wait) in waits.iter().enumerate() {
        let x = across(*wait);
        let y = down((waits.len() - at - 1) as f64 / waits.len() as f64);
        // Merge points that would be drawn at the same pixel.
        match last {
            None => path = format!("M{LEFT} {:.1}H{x:.1}V{y:.1}", down(1.0)),
            Some((before, above)) if x - before < 0.5 && y - above < 0.5 && at + 1 < waits.len() => continue,
            Some(_) => {
                let _ = write!(path, "H{x:.1}V{y:.1}");
            }
        }
        last = Some((x, y));
    }
    path
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_fall_from_all_jobs_to_none() {
        let curve = |name: &str, waits: &[f64]| Curve { name: name.into(), waits: waits.to_vec() };
        let svg = picture("a < b", &[curve("ours", &[0.0, 3600.0, 0.0, 60.0]), curve("no jobs", &[])]);
        // Three of the four jobs waited no longer than the first tick.
        assert!(svg.contains("M52 34.0H52.0V109.0H52.0V184.0H52.0V259.0H"), "{svg}");
        assert!(svg.contains("V334.0\" fill=\"none\" stroke=\"#0072b2\""), "{svg}");
        assert!(
            svg.contains("a &lt; b: share that waited longer") && svg.contains(">1 h<") && !svg.contains(">4 h<"),
            "{svg}"
        );
        assert!(svg.contains(r##"<path d="" fill="none" stroke="#e69f00""##), "{svg}");
    }
}
