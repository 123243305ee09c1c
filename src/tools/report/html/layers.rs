//! The section about layers.

use super::elements::{Body, paragraph, table};
use crate::report::model::{LayerRow, Report};
use switchyard_core::units::{counted, grouped, three_digits};

pub(super) fn layers(report: &Report) -> Body {
    let Some(layers) = &report.layers else {
        return Err("no layer was timed: runs on CPUs time layers in the steps of `engine.profile`");
    };
    let mut page = paragraph(&format!(
        "Rank {}, mean of {}. The all-reduce of a layer is its share of the bytes, of the time measured without other work. A ratio \
         below 1 means that the layer's gradients travel longer than it computes: convolutions have high ratios, fully connected \
         layers low ones.",
        layers.rank,
        counted(layers.profiled_steps, "profiled step")
    ));
    page.push_str(&rows("Kinds of layers", &layers.kinds));
    page.push_str(&rows("Layers", &layers.rows));
    if layers.left_out > 0 {
        page.push_str(&paragraph(&format!(
            "{} with less computation are left out.",
            counted(layers.left_out, "layer")
        )));
    }
    Ok(page)
}

fn rows(title: &str, rows: &[LayerRow]) -> String {
    let known = |value: Option<f64>| value.map_or_else(|| "-".into(), three_digits);
    let cells = |row: &LayerRow| {
        vec![
            row.name.clone().unwrap_or_else(|| counted(row.layers, "layer")),
            row.kind.clone(),
            grouped(row.parameters),
            three_digits(row.compute_ms),
            format!("{:.0} %", row.percent),
            known(row.all_reduce_ms),
            known(row.ratio),
        ]
    };
    let columns = ["layer", "kind", "parameters", "computation ms", "share", "all-reduce ms", "ratio"];
    table(title, &columns, &rows.iter().map(cells).collect::<Vec<_>>())
}
