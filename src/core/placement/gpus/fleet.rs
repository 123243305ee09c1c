//! The nodes of a cluster in tree order and the values of their free GPUs, updated as nodes change.

use super::ring::MinLink;
use super::shape::{Level, MAX_GPUS, Shape};
use crate::devices::Devices;
use crate::model::NodeOrd;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of domain levels, including the whole cluster.
pub const MAX_LEVELS: usize = 8;

/// A node of a [`Fleet`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Site {
    /// Index of its shape in the list of devices.
    pub shape: u32,
    /// Free GPUs, one bit each.
    pub free: u32,
    /// Whether the node can be used at all.
    pub open: bool,
    /// Its domain at each level except the largest, from small to large. At a level where it is
    /// `None` (unknown), the smaller domain forms a domain of its own. Neighbours share this list.
    pub domains: Arc<[Option<u32>]>,
}

/// Why the input does not form a fleet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// Number of levels out of range.
    #[error("{0} levels of domains: expected 1 (the cluster) to {MAX_LEVELS}")]
    Levels(usize),
    /// A share that is out of range, or larger than the share of the level below.
    #[error(
        "level {level}: {share} thousandths of the injection: expected 1 to {most}, that of the level below: \
         a larger domain cannot carry more than the smaller ones in it"
    )]
    Share {
        /// Index of the level, from the smallest.
        level: usize,
        /// Value given.
        share: u32,
        /// Maximum allowed.
        most: u32,
    },
    /// More GPUs than the subset enumeration supports.
    #[error("shape {shape}: {gpus} GPUs: expected at most {MAX_GPUS}")]
    Gpus {
        /// Index of the shape.
        shape: usize,
        /// Number of its GPUs.
        gpus: usize,
    },
    /// A node that does not match the rest.
    #[error("node {0}: its shape or its number of domains does not match this fleet")]
    Site(u32),
}

/// The nodes of a cluster by position. Neighbours in the tree are neighbours in the list, so every
/// domain is a range.
#[derive(Debug)]
pub struct Fleet {
    pub(super) levels: Vec<Level>,
    pub(super) shapes: Vec<Arc<Shape>>,
    pub(super) sites: Vec<FleetNode>,
    /// Position of each node.
    pub(super) positions: Vec<u32>,
    /// Domains of each level, as ranges of positions.
    pub(super) domains: Vec<Vec<Range<usize>>>,
    views: BTreeMap<(u8, MinLink), View>,
}

/// A node at its position.
#[derive(Debug, Clone)]
pub(super) struct FleetNode {
    pub node: NodeOrd,
    pub shape: u32,
    pub free: u32,
    pub open: bool,
    /// Index of its domain at each level.
    pub domain: [u32; MAX_LEVELS],
}

/// Values for pods of one size: for every spread of the gang (the last is a single node), the best
/// value of each node, as a rank.
#[derive(Debug)]
pub(super) struct View {
    pub spreads: Vec<Spread>,
}

/// Values for gangs whose smallest common domain is of one level.
#[derive(Debug)]
pub(super) struct Spread {
    /// All distinct values, ascending; the first is 0.
    pub values: Vec<u32>,
    /// For each shape and each set of free GPUs, the rank of the best value.
    tables: Vec<Vec<u32>>,
    /// Rank of each node, by position.
    pub ranks: Vec<u32>,
    /// Number of nodes by rank in each domain of the level, row-major.
    pub counts: Vec<u32>,
}

impl Fleet {
    /// Sorts nodes into the tree and computes the values of their shapes.
    ///
    /// # Errors
    /// The levels, shapes or nodes contradict each other.
    pub fn new(levels: Vec<Level>, shapes: &[Devices], sites: &[Site]) -> Result<Fleet, FleetError> {
        if let Some((shape, devices)) = shapes.iter().enumerate().find(|(_, devices)| devices.gpus.len() > MAX_GPUS) {
            return Err(FleetError::Gpus { shape, gpus: devices.gpus.len() });
        }
        Fleet::of(levels, shapes.iter().map(|devices| Arc::new(Shape::new(devices))).collect(), sites)
    }

    /// Like [`Fleet::new`], with precomputed shapes.
    ///
    /// # Errors
    /// The levels or nodes contradict each other.
    pub fn of(levels: Vec<Level>, shapes: Vec<Arc<Shape>>, sites: &[Site]) -> Result<Fleet, FleetError> {
        if levels.is_empty() || levels.len() > MAX_LEVELS {
            return Err(FleetError::Levels(levels.len()));
        }
        let mut most = 1000;
        for (level, Level { share, .. }) in levels.iter().enumerate() {
            if *share == 0 || *share > most {
                return Err(FleetError::Share { level, share: *share, most });
            }
            most = *share;
        }
        let fits = |site: &Site| (site.shape as usize) < shapes.len() && site.domains.len() + 1 == levels.len();
        if let Some(wrong) = sites.iter().position(|site| !fits(site)) {
            return Err(FleetError::Site(wrong as u32));
        }
        let (sites, domains) = tree(levels.len(), &shapes, sites);
        let mut positions = vec![0; sites.len()];
        sites.iter().enumerate().for_each(|(position, site)| positions[site.node.0 as usize] = position as u32);
        Ok(Fleet { levels, shapes, sites, positions, domains, views: BTreeMap::new() })
    }

    /// Updates the free GPUs of a node and whether it can be used.
    pub fn set(&mut self, node: NodeOrd, free: u32, open: bool) {
        let position = self.positions[node.0 as usize] as usize;
        let site = &mut self.sites[position];
        site.free = free & self.shapes[site.shape as usize].all();
        site.open = open;
        for spread in self.views.values_mut().flat_map(|view| view.spreads.iter_mut().enumerate()) {
            let (level, spread) = spread;
            let rank = spread.rank(site);
            let before = std::mem::replace(&mut spread.ranks[position], rank);
            if level < self.levels.len() && before != rank {
                let row = site.domain[level] as usize * spread.values.len();
                spread.counts[row + before as usize] -= 1;
                spread.counts[row + rank as usize] += 1;
            }
        }
    }

    /// Position of a node; `None` if it is not in this fleet.
    pub(super) fn position(&self, node: NodeOrd) -> Option<usize> {
        self.positions.get(node.0 as usize).map(|position| *position as usize)
    }

    /// Level of the smallest domain that contains all these nodes; `None` for a single node.
    pub fn spread_of(&self, nodes: &[NodeOrd]) -> Option<usize> {
        let nodes: Vec<&FleetNode> =
            nodes.iter().map(|node| &self.sites[self.positions[node.0 as usize] as usize]).collect();
        let [first, others @ ..] = nodes.as_slice() else { return None };
        if others.is_empty() {
            return None;
        }
        (0..self.levels.len()).find(|level| others.iter().all(|site| site.domain[*level] == first.domain[*level]))
    }

    /// Computes and caches the values for pods of this size.
    pub(super) fn prepare(&mut self, gpus: u8, min_link: MinLink) {
        if self.views.contains_key(&(gpus, min_link)) {
            return;
        }
        let spreads = self.levels.iter().copied().map(Some).chain([None]).enumerate();
        let spreads = spreads.map(|(level, spread)| self.spread(level, spread, gpus, min_link)).collect();
        self.views.insert((gpus, min_link), View { spreads });
    }

    /// The values cached by [`Fleet::prepare`].
    pub(super) fn view(&self, gpus: u8, min_link: MinLink) -> &View {
        &self.views[&(gpus, min_link)]
    }

    fn spread(&self, number: usize, level: Option<Level>, gpus: u8, min_link: MinLink) -> Spread {
        let best: Vec<Vec<u32>> = self.shapes.iter().map(|shape| shape.best(gpus, level, min_link)).collect();
        let mut values: Vec<u32> = best.iter().flatten().copied().chain([0]).collect();
        values.sort_unstable();
        values.dedup();
        let rank = |value: &u32| values.binary_search(value).unwrap_or(0) as u32;
        let tables = best.iter().map(|best| best.iter().map(rank).collect()).collect();
        let mut spread = Spread { values, tables, ranks: Vec::new(), counts: Vec::new() };
        spread.ranks = self.sites.iter().map(|site| spread.rank(site)).collect();
        if number < self.levels.len() {
            spread.counts = vec![0; self.domains[number].len() * spread.values.len()];
            for (site, rank) in self.sites.iter().zip(&spread.ranks) {
                spread.counts[site.domain[number] as usize * spread.values.len() + *rank as usize] += 1;
            }
        }
        spread
    }
}

impl Spread {
    fn rank(&self, site: &FleetNode) -> u32 {
        if site.open { self.tables[site.shape as usize][site.free as usize] } else { 0 }
    }

    /// Highest rank that at least `pods` nodes of a domain reach; 0 if the domain has too few
    /// nodes.
    pub fn best_rank(&self, domain: usize, pods: u32) -> u32 {
        let width = self.values.len();
        let counts = &self.counts[domain * width..(domain + 1) * width];
        let mut left = pods;
        for rank in (1..width).rev() {
            if counts[rank] >= left {
                return rank as u32;
            }
            left -= counts[rank];
        }
        0
    }
}

/// Sorts the nodes in tree order and returns the domains as ranges.
fn tree(levels: usize, shapes: &[Arc<Shape>], sites: &[Site]) -> (Vec<FleetNode>, Vec<Vec<Range<usize>>>) {
    /// Larger than any domain number.
    const OWN: u64 = 1 << 32;
    // Sort key: domains from the largest down. A node whose domain is unknown is alone with its
    // smaller domain.
    let key = |(number, site): (usize, &Site)| {
        let mut key = [0_u64; MAX_LEVELS];
        let mut below = OWN | number as u64;
        for (level, domain) in site.domains.iter().enumerate() {
            below = domain.map_or(below | OWN, u64::from);
            key[levels - 1 - level] = below;
        }
        (key, number)
    };
    let mut keys: Vec<([u64; MAX_LEVELS], usize)> = sites.iter().enumerate().map(key).collect();
    keys.sort_unstable();
    let mut domains = vec![Vec::new(); levels];
    let mut nodes = Vec::with_capacity(sites.len());
    for (position, (key, number)) in keys.iter().enumerate() {
        let site = &sites[*number];
        let mut domain = [0; MAX_LEVELS];
        for level in 0..levels {
            let known: &mut Vec<Range<usize>> = &mut domains[level];
            let is_new = position == 0 || keys[position - 1].0[..levels - level] != key[..levels - level];
            match known.last_mut().filter(|_| !is_new) {
                Some(last) => last.end = position + 1,
                None => known.push(position..position + 1),
            }
            domain[level] = known.len() as u32 - 1;
        }
        let free = site.free & shapes[site.shape as usize].all();
        let node = NodeOrd(*number as u32);
        nodes.push(FleetNode { node, shape: site.shape, free, open: site.open, domain });
    }
    (nodes, domains)
}
