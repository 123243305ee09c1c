//! The simulated cluster: hosts in leaves, leaves in blocks, and the capacity of the links between
//! them.

use crate::table::{self, Table, TableError};
use std::collections::BTreeMap;
use std::io::Read;

/// A host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    pub leaf: usize,
    pub block: usize,
}

/// The cluster. All hosts have the same number of GPUs and an outgoing bandwidth of 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Fabric {
    pub hosts: Vec<Host>,
    /// Hosts of each leaf.
    pub leaves: Vec<Vec<usize>>,
    /// Leaves of each block.
    pub blocks: Vec<Vec<usize>>,
    pub gpus_per_host: u32,
    /// Outgoing bandwidth of the hosts of a leaf, and of a block, ÷ the capacity of its uplinks.
    pub oversubscription: [f64; 2],
}

impl Fabric {
    /// A cluster of equal leaves in blocks of eight; the last block can be smaller.
    pub fn regular(leaves: usize, hosts_per_leaf: usize) -> Fabric {
        let host = |at: usize| (format!("host-{at:04}"), at / hosts_per_leaf, at / hosts_per_leaf / 8);
        Fabric::from_hosts((0..leaves * hosts_per_leaf).map(host))
    }

    /// Builds a cluster from hosts with their leaf and block, both numbered from 0.
    pub fn from_hosts(hosts: impl IntoIterator<Item = (String, usize, usize)>) -> Fabric {
        let (mut leaves, mut blocks): (Vec<Vec<usize>>, Vec<Vec<usize>>) = (Vec::new(), Vec::new());
        let mut all = Vec::new();
        for (at, (name, leaf, block)) in hosts.into_iter().enumerate() {
            leaves.resize(leaves.len().max(leaf + 1), Vec::new());
            blocks.resize(blocks.len().max(block + 1), Vec::new());
            leaves[leaf].push(at);
            if !blocks[block].contains(&leaf) {
                blocks[block].push(leaf);
            }
            all.push(Host { name, leaf, block });
        }
        Fabric { hosts: all, leaves, blocks, gpus_per_host: 8, oversubscription: [2.0, 4.0] }
    }

    /// Reads a table of hosts with the column `node` and, for levels that exist, `leaf` and
    /// `block`.
    ///
    /// # Errors
    /// The first invalid row, with its line.
    pub fn read(from: impl Read) -> Result<Fabric, TableError> {
        // By name: the first line with that name, and the assigned numbers.
        let mut names: BTreeMap<String, u64> = BTreeMap::new();
        let mut leaves: BTreeMap<String, (u64, usize, String)> = BTreeMap::new();
        let mut blocks: BTreeMap<String, usize> = BTreeMap::new();
        let mut hosts = Vec::new();
        Table::open(table::unpacked(from)?, b',')?.rows(&["node"], |line, record, header| {
            let wrong = |field, got: &str, expected| TableError::Field { line, field, got: got.into(), expected };
            // If the table lacks a level, all hosts share one unnamed domain of it.
            let name = |field| match header.iter().position(|name| name == field).map(|at| record.get(at)) {
                Some(None | Some("")) => Err(wrong(field, "", "a name".into())),
                known => Ok(known.flatten().unwrap_or_default()),
            };
            let (node, leaf, block) = (name("node")?, name("leaf")?, name("block")?);
            if let Some(first) = names.insert(node.into(), line) {
                return Err(wrong("node", node, format!("another name than the host of line {first} has")));
            }
            let number = leaves.len();
            let (first, leaf, within) = leaves.entry(leaf.into()).or_insert_with(|| (line, number, block.into()));
            if within != block {
                let expected = format!("`{within}`, the block of this leaf in line {first}");
                return Err(wrong("block", block, expected));
            }
            let number = blocks.len();
            hosts.push((node.to_string(), *leaf, *blocks.entry(block.into()).or_insert(number)));
            Ok(())
        })?;
        Ok(Fabric::from_hosts(hosts))
    }

    /// Returns a copy with more leaves. Each is as large as the largest one and is added to the
    /// block with the fewest.
    #[must_use]
    pub fn with_more_leaves(&self, count: usize) -> Fabric {
        let mut fabric = self.clone();
        let size = fabric.leaves.iter().map(Vec::len).max().unwrap_or(0);
        for number in 1..=count {
            let fewest = (0..fabric.blocks.len()).min_by_key(|block| fabric.blocks[*block].len());
            let (leaf, block) = (fabric.leaves.len(), fewest.unwrap_or(0));
            let hosts = fabric.hosts.len()..fabric.hosts.len() + size;
            // Node names never contain a `+`.
            fabric.hosts.extend(hosts.clone().map(|at| Host { name: format!("+{number}-{at}"), leaf, block }));
            fabric.leaves.push(hosts.collect());
            fabric.blocks[block].push(leaf);
        }
        fabric
    }

    pub fn gpus(&self) -> u32 {
        self.hosts.len() as u32 * self.gpus_per_host
    }

    /// Hosts of a block.
    pub fn in_block(&self, block: usize) -> impl Iterator<Item = usize> {
        self.blocks[block].iter().flat_map(|leaf| self.leaves[*leaf].iter().copied())
    }
}

/// The fewest equal pods of at most `most` GPUs: pods, and GPUs per pod.
pub fn pods(gpus: u32, most: u32) -> (u32, u32) {
    let pods = (gpus.div_ceil(most)..=gpus).find(|pods| gpus.is_multiple_of(*pods)).unwrap_or(gpus.max(1));
    (pods, gpus / pods)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_committed_hosts_are_complete() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/traces/lingjun-2023-hosts.csv.gz");
        let fabric = Fabric::read(std::fs::File::open(path).unwrap()).unwrap();
        let in_blocks: Vec<usize> = (0..3).map(|block| fabric.in_block(block).count()).collect();
        assert_eq!((fabric.hosts.len(), fabric.leaves.len(), in_blocks), (847, 119, vec![362, 306, 179]));
    }

    #[test]
    fn leaves_are_added_to_the_smallest_block() {
        let hosts = [("a", 0, 0), ("b", 0, 0), ("c", 1, 0), ("d", 2, 1)];
        let fabric =
            Fabric::from_hosts(hosts.map(|(name, leaf, block)| (name.to_string(), leaf, block))).with_more_leaves(2);
        assert_eq!(fabric.leaves, [vec![0, 1], vec![2], vec![3], vec![4, 5], vec![6, 7]]);
        assert_eq!(fabric.blocks, [vec![0, 1, 4], vec![2, 3]]);
        assert_eq!((fabric.hosts[4].block, fabric.hosts[6].leaf, fabric.gpus()), (1, 4, 64));
    }

    #[test]
    fn a_cluster_without_levels_is_one_leaf() {
        let fabric = Fabric::read("node\na\nb\n".as_bytes()).unwrap();
        assert_eq!((fabric.leaves, fabric.blocks), (vec![vec![0, 1]], vec![vec![0]]));
    }

    #[test]
    fn bad_hosts_are_named_by_their_line() {
        for (text, words) in [
            ("name\na\n", "the header has no column `node`; expected node"),
            ("node\n", "no rows"),
            ("node\na\nb\na\n", "line 4: node: got `a`; expected another name than the host of line 2 has"),
            ("node,leaf\na,l\nb,\n", "line 3: leaf: got ``; expected a name"),
            (
                "node,leaf,block\na,l,x\nb,l,y\n",
                "line 3: block: got `y`; expected `x`, the block of this leaf in line 2",
            ),
        ] {
            let error = Fabric::read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }
}
