//! NUMA nodes with their CPUs, memory and distances, and the machine's total memory.

use crate::Roots;
use crate::read::{self, Notes};
use switchyard_crds::gpu_topology::NumaNode;
use switchyard_worker_contract::CpuList;

/// Parses a node's `distance`: a row of positive numbers.
pub fn parse_distances(text: &str) -> Result<Vec<u32>, String> {
    text.split_whitespace()
        .map(|word| match word.parse::<u32>() {
            Ok(distance) if distance > 0 => Ok(distance),
            _ => Err(format!("`{word}` is not a distance: expected a positive number")),
        })
        .collect()
}

/// Total memory in bytes from `/proc/meminfo` (`MemTotal: 8 kB`) or a node's `meminfo` (`Node 0
/// MemTotal: 8 kB`).
pub fn parse_total_memory(text: &str) -> Result<u64, &'static str> {
    text.lines()
        .find_map(|line| {
            let rest = line.split_once("MemTotal:")?.1.trim();
            rest.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        })
        .ok_or("no line `MemTotal: NUMBER kB`")
}

/// Nodes in ascending order. `None` if the kernel exposes no NUMA nodes, as in containers and with
/// small kernels.
pub(crate) fn read_nodes(roots: &Roots, notes: &mut Notes) -> Option<Vec<NumaNode>> {
    let directory = roots.sysfs.join("devices/system/node");
    let entries = match read::entries(&directory) {
        Ok(entries) => entries,
        Err(error) => {
            notes.add(format!("{}: {error}", directory.display()));
            return None;
        }
    };
    let mut nodes: Vec<NumaNode> = entries
        .iter()
        .filter_map(|(name, path)| {
            let id = name.strip_prefix("node")?.parse().ok()?;
            Some(NumaNode {
                id,
                cpus: notes.parsed(&path.join("cpulist"), str::parse::<CpuList>).map(|list| list.to_string()),
                memory_bytes: notes.parsed(&path.join("meminfo"), parse_total_memory),
                distances: notes.parsed(&path.join("distance"), parse_distances).unwrap_or_default(),
            })
        })
        .collect();
    nodes.sort_by_key(|node| node.id);
    let count = nodes.len();
    for node in &mut nodes {
        // The kernel prints one distance per online node. With any other count, the distances
        // cannot be assigned to nodes.
        if !node.distances.is_empty() && node.distances.len() != count {
            notes.add(format!("node {}: {} distances for {count} nodes", node.id, node.distances.len()));
            node.distances.clear();
        }
    }
    if nodes.is_empty() {
        notes.add(format!("{}: no directory nodeN", directory.display()));
        return None;
    }
    Some(nodes)
}

/// Total memory of the machine in bytes.
pub(crate) fn read_total_memory(roots: &Roots, notes: &mut Notes) -> Option<u64> {
    notes.parsed(&roots.procfs.join("meminfo"), parse_total_memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(parse_distances("10 21\n"), Ok(vec![10, 21]));
        assert_eq!(parse_distances(""), Ok(vec![]));
        assert!(parse_distances("10 x").is_err());
        assert!(parse_distances("10 0").is_err());
    }

    #[test]
    fn memory() {
        assert_eq!(parse_total_memory("MemTotal:       8 kB\nMemFree: 1 kB\n"), Ok(8192));
        assert_eq!(parse_total_memory("\nNode 1 MemTotal:  16 kB\nNode 1 MemFree: 1 kB\n"), Ok(16_384));
        assert!(parse_total_memory("MemTotal: many kB").is_err());
        assert!(parse_total_memory("").is_err());
    }
}
