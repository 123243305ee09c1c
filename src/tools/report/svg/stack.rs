//! Areas on top of each other: where the time of each window goes.

use super::scale::Scale;
use std::fmt::Write;

/// An area of a stack.
pub(in crate::report) struct Layer<'a> {
    /// Name in the legend.
    pub name: &'a str,
    /// Class of the style.
    pub class: &'a str,
    /// Step at which a window begins and the value in it; the same steps in all layers, and one more step at the end.
    pub points: Vec<(f64, f64)>,
}

/// The heights of the whole stack.
pub(super) fn sums(layers: &[Layer<'_>]) -> Vec<(f64, f64)> {
    let Some(first) = layers.first() else { return Vec::new() };
    let mut sums = first.points.clone();
    for layer in &layers[1..] {
        sums.iter_mut().zip(&layer.points).for_each(|(sum, (_, value))| sum.1 += value);
    }
    sums
}

/// Draws the layers from the bottom to the top, as steps: each window is as wide as it is.
pub(super) fn draw(body: &mut String, scale: &Scale, layers: &[Layer<'_>]) {
    let mut below: Vec<f64> = layers.first().map(|layer| vec![0.0; layer.points.len()]).unwrap_or_default();
    for layer in layers {
        let above: Vec<f64> = below.iter().zip(&layer.points).map(|(below, (_, value))| below + value).collect();
        if layer.points.len() < 2 || layer.points.iter().all(|(_, value)| *value <= 0.0) {
            continue;
        }
        let _ = write!(body, "<path class=\"{}\" d=\"", layer.class);
        let edge = |body: &mut String, values: &[f64], order: &mut dyn Iterator<Item = usize>, first: char| {
            let mut command = first;
            for index in order {
                // Of the window before this step and of the one after it; the last step only ends a window.
                let (x, before) = (scale.x(layer.points[index].0), values[index.saturating_sub(1)]);
                let after = values[if index + 1 == values.len() { index.saturating_sub(1) } else { index }];
                let pair = if first == 'M' { [before, after] } else { [after, before] };
                for y in pair {
                    let _ = write!(body, "{command}{x:.1} {:.1}", scale.y(y));
                    command = 'L';
                }
            }
        };
        edge(body, &above, &mut (0..above.len()), 'M');
        edge(body, &below, &mut (0..below.len()).rev(), 'L');
        body.push_str("Z\"/>");
        below = above;
    }
}
