//! Plots of lines, areas and marks over the steps of a run.

use super::scale::{ABOVE, BELOW, HEIGHT, LEFT, RIGHT, Scale};
use super::{Layer, WIDTH, area_swatch, frame, label, legend, line_swatch, stack, text, thinned, ticks};
use std::fmt::Write;

/// A series of points, as a line or as dots.
pub(in crate::report) struct Series<'a> {
    /// Name in the legend.
    pub name: &'a str,
    /// CSS classes.
    pub class: &'a str,
    /// Step and value.
    pub points: Vec<(f64, f64)>,
    /// Whether to draw dots instead of a line.
    pub dots: bool,
}

/// A chart over steps.
#[derive(Default)]
pub(in crate::report) struct Plot<'a> {
    /// Title of the chart.
    pub title: &'a str,
    /// Description of its content, with figures.
    pub description: String,
    /// Quantity and unit of the values, the name of their axis.
    pub values: &'a str,
    /// Stacked areas.
    pub layers: Vec<Layer<'a>>,
    /// Lines and dots.
    pub series: Vec<Series<'a>>,
    /// Horizontal lines: value and name.
    pub levels: Vec<(f64, &'a str)>,
    /// Marked steps: name, CSS class, steps.
    pub marks: Vec<(&'a str, &'a str, Vec<f64>)>,
    /// Whether the value axis starts at 0.
    pub from_zero: bool,
    /// End of the value axis, above which values are drawn at the edge. Default: the largest value.
    pub end: Option<f64>,
}

impl Plot<'_> {
    /// Draws the plot.
    pub(in crate::report) fn draw(&self) -> String {
        let mut body = String::new();
        let top = self.legend(&mut body) + ABOVE;
        text(&mut body, (0.0, top - 8.0), "start", self.values);
        let (scale, values) = self.scale(top);
        for value in &values {
            let y = scale.y(*value);
            let _ = write!(body, "<path class=\"grid\" d=\"M{LEFT:.1} {y:.1}H{:.1}\"/>", WIDTH - RIGHT);
            text(&mut body, (LEFT - 6.0, y + 4.0), "end", &label(*value));
        }
        let bottom = top + HEIGHT;
        for step in ticks(scale.x.0, scale.x.1, 5.0) {
            let at = scale.x(step);
            if step >= scale.x.0 && step <= scale.x.1 && step.fract() == 0.0 {
                let _ = write!(body, "<path class=\"axis\" d=\"M{at:.1} {bottom:.1}v4\"/>");
                text(&mut body, (at, bottom + 16.0), "middle", &label(step));
            }
        }
        text(&mut body, ((LEFT + WIDTH - RIGHT) / 2.0, bottom + 31.0), "middle", "step");
        stack::draw(&mut body, &scale, &self.layers);
        for (_, class, steps) in &self.marks {
            for step in steps {
                let x = scale.x(*step);
                let _ = write!(body, "<path class=\"{class}\" d=\"M{x:.1} {top:.1}V{bottom:.1}\"/>");
            }
        }
        for (value, name) in &self.levels {
            let y = scale.y(*value);
            let _ = write!(body, "<path class=\"level\" d=\"M{LEFT:.1} {y:.1}H{:.1}\"/>", WIDTH - RIGHT);
            text(&mut body, (WIDTH - RIGHT - 4.0, y - 4.0), "end", name);
        }
        for series in &self.series {
            draw(&mut body, &scale, series);
        }
        let _ = write!(body, "<path class=\"axis\" d=\"M{LEFT:.1} {bottom:.1}H{:.1}\"/>", WIDTH - RIGHT);
        frame(bottom + BELOW, self.title, &self.description, &body)
    }

    fn legend(&self, body: &mut String) -> f64 {
        let layers = self.layers.iter().rev().map(|layer| (area_swatch(layer.class), layer.name));
        let series = self.series.iter().map(|series| {
            let dot = format!("<circle class=\"{}\" cx=\"8\" cy=\"5\" r=\"3\"/>", series.class);
            (if series.dots { dot } else { line_swatch(series.class) }, series.name)
        });
        let marks = self.marks.iter().filter(|(_, _, steps)| !steps.is_empty());
        let marks = marks.map(|(name, class, _)| (format!("<path class=\"{class}\" d=\"M8 0V10\"/>"), *name));
        let entries: Vec<_> = series.chain(marks).chain(layers).collect();
        legend(body, &entries)
    }

    /// The scale, and the labelled values.
    fn scale(&self, top: f64) -> (Scale, Vec<f64>) {
        let sums = stack::sums(&self.layers);
        let points = || {
            self.series
                .iter()
                .flat_map(|series| &series.points)
                .chain(&sums)
                .filter(|(x, y)| x.is_finite() && y.is_finite())
        };
        let least = |values: &mut dyn Iterator<Item = f64>| values.reduce(f64::min);
        let most = |values: &mut dyn Iterator<Item = f64>| values.reduce(f64::max);
        let x = (
            least(&mut points().map(|point| point.0)).unwrap_or(0.0),
            most(&mut points().map(|point| point.0)).unwrap_or(1.0),
        );
        let levels = || self.levels.iter().map(|(value, _)| *value);
        let low = least(&mut points().map(|point| point.1).chain(levels())).unwrap_or(0.0);
        let high = most(&mut points().map(|point| point.1).chain(levels())).unwrap_or(1.0);
        let low = if self.from_zero { low.min(0.0) } else { low };
        let high = self.end.map_or(high, |end| high.min(end));
        let values = ticks(low, if high > low { high } else { low + low.abs().max(1e-9) }, 4.0);
        let y = (values.first().copied().unwrap_or(0.0), values.last().copied().unwrap_or(1.0));
        (Scale { x, y, top }, values)
    }
}

fn draw(body: &mut String, scale: &Scale, series: &Series<'_>) {
    let points = thinned(&series.points);
    if series.dots {
        for (x, y) in points {
            let (x, y, class) = (scale.x(x), scale.y(y), series.class);
            let _ = write!(body, "<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        }
        return;
    }
    if points.is_empty() {
        return;
    }
    let _ = write!(body, "<path class=\"{}\" d=\"", series.class);
    for (index, (x, y)) in points.iter().enumerate() {
        let _ = write!(body, "{}{:.1} {:.1}", if index == 0 { 'M' } else { 'L' }, scale.x(*x), scale.y(*y));
    }
    if let [(x, _)] = points.as_slice() {
        // A line with a single point would be invisible.
        let _ = write!(body, "H{:.1}", scale.x(*x) + 3.0);
    }
    body.push_str("\"/>");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_beyond_the_end_are_drawn_at_the_edge() {
        let points = vec![(0.0, 10.0), (1.0, 10.0), (2.0, 900.0)];
        let series = || vec![Series { name: "p99", class: "p99", points: points.clone(), dots: false }];
        let path = |end: Option<f64>| {
            let drawn = Plot { values: "ms", series: series(), from_zero: true, end, ..Plot::default() }.draw();
            drawn.split("class=\"p99\" d=\"M").nth(2).unwrap().split('"').next().unwrap().to_owned()
        };
        // The legend is 20 high, the name of the axis 20, the plot 170.
        assert_eq!(path(Some(20.0)), "54.0 125.0L238.0 125.0L422.0 40.0");
        assert_eq!(path(None), "54.0 208.3L238.0 208.3L422.0 57.0");
    }
}
