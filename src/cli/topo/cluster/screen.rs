//! Formats the cluster as a tree.

use super::super::devices::gigabytes;
use super::{ClusterTopology, LevelRow, NodeRow, Use};
use crate::text::{NARROWEST, Screen, Table, length, plain, truncate};
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::units::{counted, three_digits};
use switchyard_plan::cluster::Excluded;

/// With more nodes than this, only domains are shown unless everything is requested.
const MAX_NODES: usize = 40;
/// Letters for users; later users share [`LATER`].
const LETTERS: &[u8] = b"abcdefghijklmnopqrstuvwxyz";
const LATER: char = '*';
/// The screen; every line ends with a newline.
pub(super) fn render(cluster: &ClusterTopology, width: usize, full: bool) -> String {
    let mut screen = Screen::new(width.max(NARROWEST));
    let all: Vec<&NodeRow> = cluster.nodes.iter().collect();
    let count = |count: usize, word: &str| counted(count as u64, word);
    let (free, gpus) = sums(&all);
    let between =
        cluster.levels.last().and_then(share).map_or(String::new(), |share| format!(", {share} between domains"));
    if all.is_empty() {
        screen.line(&format!("CLUSTER {} without GPUs", count(cluster.without_gpus, "node")));
        return screen.into_text();
    }
    screen.line(&format!("CLUSTER {}, {free}/{gpus} GPUs free{between}", count(all.len(), "node")));
    let shows_nodes = full || all.len() <= MAX_NODES;
    let mut tree = Tree { cluster, shows_nodes, rows: Vec::new(), named: BTreeSet::new() };
    tree.branch(&all, cluster.levels.len().saturating_sub(1), "");
    let heading: &[&str] =
        if shows_nodes { &["", "FREE", "GPUS", "NIC", "GB/s OUT"] } else { &["", "FREE", "WHOLE NODES FREE"] };
    let mut table = Table::new(heading);
    table.rows.extend(tree.rows.iter().map(|row| row.cells[..heading.len()].to_vec()));
    // Remarks get the remaining width, so that the numbers stay. Users whose names do not fit are
    // listed below.
    let left = screen.width.saturating_sub(table.width() + table.gap);
    table.rows[0].push(String::new());
    let mut below = Vec::new();
    for (cells, row) in table.rows[1..].iter_mut().zip(tree.rows) {
        let together = [row.faults.as_slice(), &row.users].concat().join("; ");
        if length(&together) <= left {
            cells.push(together);
        } else {
            cells.push(truncate(&row.faults.join("; "), left));
            below.extend(row.users);
        }
    }
    if table.rows.len() > 1 {
        screen.table(vec![table]);
    }
    screen.phrases(&below);
    legend(&mut screen, cluster, shows_nodes);
    screen.into_text()
}

/// A domain or a node.
struct Row {
    /// Tree, free GPUs, letters of GPUs or whole nodes, NICs, GB/s.
    cells: [String; 5],
    /// Faults, or the bandwidth share of a domain.
    faults: Vec<String>,
    /// Letters explained in this row.
    users: Vec<String>,
}

struct Tree<'a> {
    cluster: &'a ClusterTopology,
    shows_nodes: bool,
    rows: Vec<Row>,
    /// Users whose letters are already explained.
    named: BTreeSet<usize>,
}

impl Tree<'_> {
    /// Adds the domains below `level` among these nodes, each with its nodes, followed by nodes
    /// without a domain.
    fn branch(&mut self, nodes: &[&NodeRow], level: usize, indent: &str) {
        let Some(level) = level.checked_sub(1) else {
            if self.shows_nodes {
                for (number, node) in nodes.iter().enumerate() {
                    let branch = if number + 1 == nodes.len() { "`-" } else { "+-" };
                    self.node(node, &format!("{indent}{branch} "));
                }
            }
            return;
        };
        let mut domains: BTreeMap<&str, Vec<&NodeRow>> = BTreeMap::new();
        let mut others = Vec::new();
        for node in nodes {
            match node.domains.get(level).and_then(Option::as_deref) {
                Some(domain) => domains.entry(domain).or_default().push(node),
                None => others.push(*node),
            }
        }
        let count = domains.len();
        for (number, (domain, members)) in domains.into_iter().enumerate() {
            let is_last = number + 1 == count && (others.is_empty() || !self.shows_nodes);
            let (branch, below) = if is_last { ("`-", "   ") } else { ("+-", "|  ") };
            let row = &self.cluster.levels[level];
            let name = format!("{indent}{branch} {} {}", short_key(&row.key), plain(domain));
            let (free, gpus) = sums(&members);
            let whole = members.iter().filter(|node| node.free > 0 && node.free == node.gpus.len()).count();
            let whole = if self.shows_nodes { String::new() } else { format!("{whole} of {}", members.len()) };
            let faults = share(row).into_iter().collect();
            let cells = [name, format!("{free}/{gpus}"), whole, String::new(), String::new()];
            self.rows.push(Row { cells, faults, users: Vec::new() });
            self.branch(&members, level, &format!("{indent}{below}"));
        }
        if !others.is_empty() {
            self.branch(&others, level, indent);
        }
    }

    fn node(&mut self, node: &NodeRow, branch: &str) {
        let letters: String = node.gpus.iter().map(|(_, used)| letter(*used)).collect();
        let nics = node.nics.map_or("-".to_owned(), |(up, all)| format!("{up}/{all}"));
        let outward = node.outward.map_or("-".to_owned(), gigabytes);
        let name = format!("{branch}{}", plain(&node.name));
        let cells = [name, format!("{}/{}", node.free, node.gpus.len()), letters, nics, outward];
        let mut faults: Vec<String> = node.excluded.iter().map(reason).collect();
        let faulty: Vec<String> =
            node.gpus.iter().filter(|(_, used)| *used == Use::NotUsable).map(|(gpu, _)| gpu.to_string()).collect();
        if !faulty.is_empty() {
            faults.push(format!("! = GPU{} not usable", faulty.join(",")));
        }
        if node.excluded.is_none() && !node.unlinked.is_empty() {
            let gpus: Vec<String> = node.unlinked.iter().map(ToString::to_string).collect();
            faults.push(format!("GPU{} not joined by NVLink", gpus.join(",")));
        }
        if !node.nics_down.is_empty() {
            faults.push(format!("{} down", plain(&node.nics_down.join(", "))));
        }
        let mut users = Vec::new();
        for (_, used) in &node.gpus {
            let (Use::By(user) | Use::Counted(user)) = used else { continue };
            if self.named.insert(*user) {
                let which = if matches!(used, Use::Counted(_)) { " (not known which)" } else { "" };
                users.push(format!("{} = {}{which}", letter(*used), plain(&self.cluster.users[*user])));
            }
        }
        self.rows.push(Row { cells, faults, users });
    }
}

/// Why a node accepts no job, in a few words.
fn reason(why: &Excluded) -> String {
    match why {
        Excluded::NoReport => "no GPUTopology".to_owned(),
        Excluded::Stale(observed) => format!("stale: GPUTopology of {observed}"),
        other => plain(&other.to_string()),
    }
}

/// Free GPUs, and all GPUs.
fn sums(nodes: &[&NodeRow]) -> (usize, usize) {
    (nodes.iter().map(|node| node.free).sum(), nodes.iter().map(|node| node.gpus.len()).sum())
}

fn letter(used: Use) -> char {
    match used {
        Use::Free => '.',
        Use::NotUsable => '!',
        Use::Unknown => '?',
        Use::By(user) | Use::Counted(user) => LETTERS.get(user).map_or(LATER, |letter| char::from(*letter)),
    }
}

/// `1:2`, or a note that NVLink connects the nodes.
fn share(row: &LevelRow) -> Option<String> {
    match row.level.share {
        _ if row.level.nvlink => Some("NVLink".to_owned()),
        1000.. => None,
        share => Some(format!("1:{}", three_digits(1000.0 / f64::from(share.max(1))))),
    }
}

/// A label without the prefix before the slash, which all labels of its kind share.
fn short_key(key: &str) -> &str {
    key.rsplit_once('/').map_or(key, |(_, name)| name)
}

fn legend(screen: &mut Screen, cluster: &ClusterTopology, shows_nodes: bool) {
    let uses: BTreeSet<char> =
        cluster.nodes.iter().flat_map(|node| &node.gpus).map(|(_, used)| letter(*used)).collect();
    let signs =
        [('.', ". free"), ('!', "! not usable"), ('?', "? in use, not known by whom"), (LATER, "* other users")];
    let mut phrases: Vec<String> = signs
        .into_iter()
        .filter(|(sign, _)| shows_nodes && uses.contains(sign))
        .map(|(_, meaning)| meaning.to_owned())
        .collect();
    if !shows_nodes {
        phrases.push("--full for all nodes".to_owned());
    }
    if cluster.without_gpus > 0 {
        phrases.push(format!("not shown: {} without GPUs", counted(cluster.without_gpus as u64, "node")));
    }
    screen.phrases(&phrases);
}
