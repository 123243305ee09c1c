//! Stacked areas, which show the distribution of time in each window.

use super::scale::Scale;
use std::fmt::Write;

/// A layer of a stack.
pub(in crate::report) struct Layer<'a> {
    /// Name in the legend.
    pub name: &'a str,
    /// CSS class.
    pub class: &'a str,
    /// First step and value of each window. All layers have the same steps, plus one at the end.
    pub points: Vec<(f64, f64)>,
}

/// Total heights of the stack.
pub(super) fn sums(layers: &[Layer<'_>]) -> Vec<(f64, f64)> {
    let Some(first) = layers.first() else { return Vec::new() };
    let mut sums = first.points.clone();
    for layer in &layers[1..] {
        sums.iter_mut().zip(&layer.points).for_each(|(sum, (_, value))| sum.1 += value);
    }
    sums
}

/// Draws the layers from bottom to top as step functions over the windows.
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
                // Values of the windows before and after this step; the last step only ends a
                // window.
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
