//! Graphviz output: `switchyard topo -o dot | dot -Tsvg`.

use super::super::devices::gigabytes;
use super::{Drawing, Part};
use switchyard_crds::gpu_topology::GPUTopology;

/// The machine as an undirected graph. Identifiers are our own numbers; names from firmware are
/// only used as labels.
pub(in super::super) fn dot(topology: &GPUTopology) -> String {
    let drawing = Drawing::of(topology);
    let mut text = format!("graph {} {{\n", quoted(&drawing.name));
    text.push_str(
        "  node [shape=box, style=rounded, fontname=\"sans-serif\"]\n  edge [fontname=\"sans-serif\", fontsize=10]\n",
    );
    let mut parts = 0;
    let mut roots = Vec::new();
    for (number, numa) in drawing.numa.iter().enumerate() {
        text.push_str(&format!("  subgraph cluster_{number} {{\n    label={}\n", quoted(&numa.label)));
        roots.push(part(&mut text, &drawing, numa, &mut parts));
        text.push_str("  }\n");
    }
    if let Some(rate) = drawing.socket_rate {
        for pair in roots.windows(2) {
            let label = quoted(&format!("{} GB/s", gigabytes(rate)));
            text.push_str(&format!("  p{} -- p{} [label={label}, style=dashed]\n", pair[0], pair[1]));
        }
    }
    if drawing.nvlinks.iter().any(|link| link.b.is_none()) {
        text.push_str("  nvswitch [label=\"NVSwitch\", style=filled]\n");
    }
    for link in &drawing.nvlinks {
        let end = link.b.map_or("nvswitch".to_owned(), |b| format!("d{b}"));
        text.push_str(&format!("  d{} -- {end} [label={}, style=bold]\n", link.a, quoted(&link.meaning())));
    }
    text.push_str("}\n");
    text
}

/// Draws a part with everything below it; returns its number.
fn part(text: &mut String, drawing: &Drawing, shown: &Part, parts: &mut usize) -> usize {
    let number = *parts;
    *parts += 1;
    text.push_str(&format!("    p{number} [label={}, shape=ellipse]\n", quoted(&shown.label)));
    for below in &shown.parts {
        let below = part(text, drawing, below, parts);
        text.push_str(&format!("    p{number} -- p{below}\n"));
    }
    for device in &shown.devices {
        let found = &drawing.devices[*device];
        let style = if found.is_faulty { ", color=red" } else { "" };
        let label = quoted(&format!("{}\n{}", found.label, found.detail));
        text.push_str(&format!("    d{device} [label={label}{style}]\n    p{number} -- d{device}\n"));
    }
    number
}

/// A string of the DOT language, with quotes and backslashes escaped.
fn quoted(text: &str) -> String {
    let escaped = text.trim_end().replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{escaped}\"")
}
