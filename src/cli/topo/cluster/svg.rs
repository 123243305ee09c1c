//! Draws a gang in the domains of a cluster: a column per domain, a row per node, a square per GPU.

use super::super::devices::gigabytes;
use super::{ClusterTopology, NodeRow, Use};
use crate::text::{length, truncate};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::units::counted;
use switchyard_crds::PlacementStatus;
use switchyard_plan::resources::gigabytes_per_second;
use switchyard_tools::report::escaped;

/// With more nodes than this, only the gang's domains are drawn.
const MAX_NODES: usize = 40;
/// Width of a column and height of a node, in view box units (about a pixel).
const COLUMN: usize = 350;
const ROW: usize = 44;
/// Most parts of the reason shown, one per line.
const REASONS: usize = 4;
/// Edge length of a GPU including its margin, and without it.
const GPU: (usize, usize) = (18, 14);
const MARGIN: usize = 12;
/// Greatest width of a letter.
const LETTER: usize = 7;
/// Left edge of the GPUs in a column, after the node's name.
const GPUS_AT: usize = 84;

/// Follows the reader's dark mode. GPUs also differ by outline and mark, not only by colour.
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#1b1f24}.t{font-size:14px;font-weight:600}.s{font-size:10px}\
rect{stroke:#57606a;fill:#f6f8fa}.d{fill:none}.f{fill:#ffffff}.u{fill:#c9d1d9}.j{fill:#2da44e;stroke:#116329;stroke-width:2}\
.w{stroke:#cf222e;stroke-width:2}.r{stroke:#2da44e;stroke-width:3;fill:none}@media(prefers-color-scheme:dark){text{fill:#e6edf3}\
rect{stroke:#8b949e;fill:#161b22}.d{fill:none}.f{fill:#0d1117}.u{fill:#484f58}.j{fill:#3fb950;stroke:#aff5b4}.w{stroke:#ff7b72}\
.r{stroke:#3fb950}}";

/// A gang with its placement.
pub(super) struct Gang<'a> {
    /// Namespace and name of its job.
    pub name: &'a str,
    pub status: &'a PlacementStatus,
    /// GPU numbers of the gang on each of its nodes.
    pub gpus: BTreeMap<&'a str, BTreeSet<u32>>,
}

impl Gang<'_> {
    /// `192 GB/s`, if known.
    fn rate(&self) -> Option<String> {
        let rate = gigabytes_per_second(self.status.predicted_bus_bandwidth.as_ref()?)?;
        Some(format!("{rate} GB/s"))
    }

    fn title(&self) -> String {
        let best = self.status.best_possible.as_ref().and_then(gigabytes_per_second);
        let nodes = counted(self.status.nodes.len() as u64, "node");
        match (self.rate(), best) {
            (Some(rate), Some(best)) => format!("{} on {nodes}: {rate} predicted, best possible {best}", self.name),
            (Some(rate), None) => format!("{} on {nodes}: {rate} predicted", self.name),
            _ => format!("{} on {nodes}", self.name),
        }
    }
}

/// The drawing. It scales to any width.
pub(super) fn svg(cluster: &ClusterTopology, gang: &Gang<'_>) -> String {
    let columns = columns(cluster, gang);
    let rows = columns.iter().map(|(_, nodes)| nodes.len()).max().unwrap_or(0);
    let mut body = String::new();
    let mut top = MARGIN + 20;
    for part in gang.status.reason.split("; ").take(REASONS) {
        top += 14;
        body.push_str(&format!("<text class=\"s\" x=\"{MARGIN}\" y=\"{}\">{}</text>\n", top - 4, escaped(part)));
    }
    top += 8;
    for (number, (domain, nodes)) in columns.iter().enumerate() {
        let x = MARGIN + number * (COLUMN + MARGIN);
        let height = rows * ROW + 34;
        let shown = escaped(&truncate(domain, COLUMN / LETTER - 2));
        body.push_str(&format!(
            "<rect class=\"d\" x=\"{x}\" y=\"{top}\" width=\"{COLUMN}\" height=\"{height}\" rx=\"6\"/>\
             <text x=\"{}\" y=\"{}\">{shown}</text>\n",
            x + 10,
            top + 20
        ));
        ring(&mut body, nodes, gang, (x, top + 34));
        for (row, node) in nodes.iter().enumerate() {
            draw_node(&mut body, cluster, node, gang, (x + 24, top + 34 + row * ROW));
        }
    }
    let width = (MARGIN + columns.len() * (COLUMN + MARGIN)).max(2 * COLUMN);
    let bottom = top + rows * ROW + 34 + 32;
    legend(&mut body, gang, bottom - 12);
    let title = escaped(&gang.title());
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {bottom}\" width=\"100%\" style=\"max-width:{width}px\" \
         role=\"img\">\n<title>{title}</title>\n<desc>{}</desc>\n<style>{STYLE}</style>\n\
         <text class=\"t\" x=\"{MARGIN}\" y=\"{}\">{title}</text>\n{body}</svg>\n",
        escaped(&gang.status.reason),
        MARGIN + 12,
    )
}

/// Nodes by domain of the smallest level that divides them, or the whole cluster if none does.
fn columns<'a>(cluster: &'a ClusterTopology, gang: &Gang<'_>) -> Vec<(String, Vec<&'a NodeRow>)> {
    let domains = |level: usize| {
        let mut domains: BTreeMap<Option<&str>, Vec<&NodeRow>> = BTreeMap::new();
        for node in &cluster.nodes {
            domains.entry(node.domains.get(level).and_then(Option::as_deref)).or_default().push(node);
        }
        domains
    };
    let last = cluster.levels.len().saturating_sub(1);
    let level =
        (0..last).find(|level| domains(*level).len() > 1 && !domains(*level).contains_key(&None)).unwrap_or(last);
    let key = cluster.levels.get(level).map_or("", |row| row.key.as_str());
    let named = |domain: Option<&str>| domain.map_or_else(|| key.to_owned(), |domain| format!("{key} {domain}"));
    let mut columns: Vec<(String, Vec<&NodeRow>)> =
        domains(level).into_iter().map(|(domain, nodes)| (named(domain), nodes)).collect();
    if cluster.nodes.len() > MAX_NODES {
        columns.retain(|(_, nodes)| nodes.iter().any(|node| gang.gpus.contains_key(node.name.as_str())));
    }
    columns
}

/// A line that connects the gang's nodes in a column, with the gang's rate.
fn ring(body: &mut String, nodes: &[&NodeRow], gang: &Gang<'_>, (x, top): (usize, usize)) {
    let middle = |row: usize| top + row * ROW + GPU.1 / 2 + 2;
    let of_gang = nodes.iter().enumerate().filter(|(_, node)| gang.gpus.contains_key(node.name.as_str()));
    let heights: Vec<usize> = of_gang.map(|(row, _)| middle(row)).collect();
    let (Some(first), Some(last)) = (heights.first(), heights.last()) else { return };
    let x = x + 12;
    body.push_str(&format!("<path class=\"r\" d=\"M{x} {first}V{last}"));
    for height in &heights {
        body.push_str(&format!("M{x} {height}h8"));
    }
    body.push_str("\"/>\n");
}

fn draw_node(body: &mut String, cluster: &ClusterTopology, node: &NodeRow, gang: &Gang<'_>, (x, y): (usize, usize)) {
    let name = escaped(&truncate(&node.name, GPUS_AT / LETTER - 1));
    body.push_str(&format!("<text x=\"{x}\" y=\"{}\">{name}</text>", y + 13));
    let of_gang = gang.gpus.get(node.name.as_str());
    for (number, (index, used)) in node.gpus.iter().enumerate() {
        let (class, what) = match used {
            _ if of_gang.is_some_and(|gpus| gpus.contains(index)) => ("j", gang.name.to_owned()),
            Use::Free => ("f", "free".to_owned()),
            Use::NotUsable => ("w", "not usable".to_owned()),
            Use::Unknown => ("u", "in use".to_owned()),
            Use::By(user) | Use::Counted(user) => ("u", cluster.users[*user].clone()),
        };
        body.push_str(&format!(
            "<g><title>{}</title><rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"{edge}\" height=\"{edge}\" rx=\"2\"/></g>",
            escaped(&format!("GPU {index}: {what}")),
            x + GPUS_AT + number * GPU.0,
            y + 2,
            edge = GPU.1
        ));
    }
    let right = x + GPUS_AT + node.gpus.len().max(8) * GPU.0 + 6;
    if let Some(placed) = gang.status.nodes.iter().find(|placed| placed.node_name == node.name) {
        body.push_str(&format!("<text x=\"{right}\" y=\"{}\">from rank {}</text>", y + 13, placed.first_rank));
    }
    let rate = |word: &str, rate: Option<u32>| rate.map(|rate| format!("{word} {} GB/s", gigabytes(rate)));
    let nics = node.nics.map(|(up, all)| format!("{up} of {all} NICs"));
    let facts: Vec<String> =
        [rate("ring", node.inside), rate("out", node.outward), nics].into_iter().flatten().collect();
    let facts = node.excluded.as_ref().map_or_else(|| facts.join(", "), ToString::to_string);
    let shown = escaped(&truncate(&facts, (COLUMN - GPUS_AT) / 5));
    body.push_str(&format!("<text class=\"s\" x=\"{}\" y=\"{}\">{shown}</text>\n", x + GPUS_AT, y + 28));
}

fn legend(body: &mut String, gang: &Gang<'_>, y: usize) {
    let mut x = MARGIN;
    for (class, word) in [("j", gang.name), ("u", "in use"), ("f", "free"), ("w", "not usable")] {
        body.push_str(&format!(
            "<rect class=\"{class}\" x=\"{x}\" y=\"{}\" width=\"{edge}\" height=\"{edge}\" rx=\"2\"/><text x=\"{}\" y=\"{y}\">{}</text>\n",
            y - 12,
            x + GPU.0 + 4,
            escaped(word),
            edge = GPU.1
        ));
        x += GPU.0 + 24 + length(word) * LETTER;
    }
}
