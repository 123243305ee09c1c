//! The nodes of a cluster in the order of its tree, and what they can give, kept up to date with every change of a node.

use super::ring::MinLink;
use super::shape::{Level, MOST_GPUS, Shape};
use crate::devices::Devices;
use crate::model::NodeOrd;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Most levels of domains, the whole cluster included.
pub const MOST_LEVELS: usize = 8;

/// A node of a [`Fleet`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Site {
    /// Position of its kind in the list of devices.
    pub shape: u32,
    /// GPUs that may be taken, one bit each.
    pub free: u32,
    /// Whether the node may be used at all.
    pub open: bool,
    /// Its domain of each level but the largest, small to large; `None`: not known, then its smaller domain is one of its own there.
    /// Neighbours share it.
    pub domains: Arc<[Option<u32>]>,
}

/// Why no fleet can be built from the input.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// The number of levels.
    #[error("{0} levels of domains: expected 1 (the cluster) to {MOST_LEVELS}")]
    Levels(usize),
    /// A factor out of range, or larger than that of the level below.
    #[error(
        "level {level}: {share} thousandths of the injection: expected 1 to {most}, that of the level below: \
         a larger domain cannot carry more than the smaller ones in it"
    )]
    Share {
        /// Its position, from the smallest.
        level: usize,
        /// What was given.
        share: u32,
        /// The most it can be.
        most: u32,
    },
    /// More GPUs than sets can be enumerated for.
    #[error("shape {shape}: {gpus} GPUs: expected at most {MOST_GPUS}")]
    Gpus {
        /// Its position.
        shape: usize,
        /// How many it has.
        gpus: usize,
    },
    /// A node that does not match the rest.
    #[error("node {0}: its shape or its number of domains is not of this fleet")]
    Site(u32),
}

/// Nodes of a cluster, by position: neighbours in the tree are neighbours in the list, so that every domain is a range.
#[derive(Debug)]
pub struct Fleet {
    pub(super) levels: Vec<Level>,
    pub(super) shapes: Vec<Arc<Shape>>,
    pub(super) sites: Vec<Slot>,
    /// Position of each node.
    pub(super) positions: Vec<u32>,
    /// Domains of each level, as ranges of positions.
    pub(super) domains: Vec<Vec<Range<usize>>>,
    views: BTreeMap<(u8, MinLink), View>,
}

/// A node in its position.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub node: NodeOrd,
    pub shape: u32,
    pub free: u32,
    pub open: bool,
    /// Position of its domain of each level.
    pub domain: [u32; MOST_LEVELS],
}

/// What the nodes can give to pods of one size: for every spread of the gang (and alone, last) their best values as ranks.
#[derive(Debug)]
pub(super) struct View {
    pub spreads: Vec<Spread>,
}

/// Values for gangs whose smallest common domain is of one level.
#[derive(Debug)]
pub(super) struct Spread {
    /// All values there are, ascending; the first is 0.
    pub values: Vec<u32>,
    /// For each shape and each set of free GPUs the rank of the best value.
    tables: Vec<Vec<u32>>,
    /// Of each node, by position.
    pub ranks: Vec<u32>,
    /// Nodes of each domain of the level by rank, row by row.
    pub counts: Vec<u32>,
}

impl Fleet {
    /// Sorts nodes into the tree and computes the values of their shapes.
    ///
    /// # Errors
    /// Levels, shapes or nodes that contradict each other.
    pub fn new(levels: Vec<Level>, shapes: &[Devices], sites: &[Site]) -> Result<Fleet, FleetError> {
        if let Some((shape, devices)) = shapes.iter().enumerate().find(|(_, devices)| devices.gpus.len() > MOST_GPUS) {
            return Err(FleetError::Gpus { shape, gpus: devices.gpus.len() });
        }
        Fleet::of(levels, shapes.iter().map(|devices| Arc::new(Shape::new(devices))).collect(), sites)
    }

    /// The same with shapes that were computed before.
    ///
    /// # Errors
    /// Levels or nodes that contradict each other.
    pub fn of(levels: Vec<Level>, shapes: Vec<Arc<Shape>>, sites: &[Site]) -> Result<Fleet, FleetError> {
        if levels.is_empty() || levels.len() > MOST_LEVELS {
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
        sites.iter().enumerate().for_each(|(position, place)| positions[place.node.0 as usize] = position as u32);
        Ok(Fleet { levels, shapes, sites, positions, domains, views: BTreeMap::new() })
    }

    /// Updates the free GPUs of a node, and whether it may be used.
    pub fn set(&mut self, node: NodeOrd, free: u32, open: bool) {
        let position = self.positions[node.0 as usize] as usize;
        let place = &mut self.sites[position];
        place.free = free & self.shapes[place.shape as usize].all();
        place.open = open;
        for spread in self.views.values_mut().flat_map(|view| view.spreads.iter_mut().enumerate()) {
            let (level, spread) = spread;
            let rank = spread.rank(place);
            let before = std::mem::replace(&mut spread.ranks[position], rank);
            if level < self.levels.len() && before != rank {
                let row = place.domain[level] as usize * spread.values.len();
                spread.counts[row + before as usize] -= 1;
                spread.counts[row + rank as usize] += 1;
            }
        }
    }

    /// Position of a node; `None`: it is not in this fleet.
    pub(super) fn position(&self, node: NodeOrd) -> Option<usize> {
        self.positions.get(node.0 as usize).map(|position| *position as usize)
    }

    /// Level of the smallest domain with all these nodes; `None` for a single one.
    pub fn spread_of(&self, nodes: &[NodeOrd]) -> Option<usize> {
        let places: Vec<&Slot> =
            nodes.iter().map(|node| &self.sites[self.positions[node.0 as usize] as usize]).collect();
        let [first, others @ ..] = places.as_slice() else { return None };
        if others.is_empty() {
            return None;
        }
        (0..self.levels.len()).find(|level| others.iter().all(|place| place.domain[*level] == first.domain[*level]))
    }

    /// Computes what the nodes can give to pods of this size, once.
    pub(super) fn prepare(&mut self, gpus: u8, min_link: MinLink) {
        if self.views.contains_key(&(gpus, min_link)) {
            return;
        }
        let spreads = self.levels.iter().copied().map(Some).chain([None]).enumerate();
        let spreads = spreads.map(|(level, spread)| self.spread(level, spread, gpus, min_link)).collect();
        self.views.insert((gpus, min_link), View { spreads });
    }

    /// The view of [`Fleet::prepare`].
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
        spread.ranks = self.sites.iter().map(|place| spread.rank(place)).collect();
        if number < self.levels.len() {
            spread.counts = vec![0; self.domains[number].len() * spread.values.len()];
            for (place, rank) in self.sites.iter().zip(&spread.ranks) {
                spread.counts[place.domain[number] as usize * spread.values.len() + *rank as usize] += 1;
            }
        }
        spread
    }
}

impl Spread {
    fn rank(&self, place: &Slot) -> u32 {
        if place.open { self.tables[place.shape as usize][place.free as usize] } else { 0 }
    }

    /// The best rank that `pods` nodes of a domain have; 0: there are not so many.
    pub fn reached(&self, domain: usize, pods: u32) -> u32 {
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

/// Nodes in the order of the tree, and the domains as ranges.
fn tree(levels: usize, shapes: &[Arc<Shape>], sites: &[Site]) -> (Vec<Slot>, Vec<Vec<Range<usize>>>) {
    /// Larger than any number of a domain.
    const OWN: u64 = 1 << 32;
    // Domains from the largest down; a node whose domain is not known is alone with its smaller domain.
    let key = |(number, site): (usize, &Site)| {
        let mut key = [0_u64; MOST_LEVELS];
        let mut below = OWN | number as u64;
        for (level, domain) in site.domains.iter().enumerate() {
            below = domain.map_or(below | OWN, u64::from);
            key[levels - 1 - level] = below;
        }
        (key, number)
    };
    let mut keys: Vec<([u64; MOST_LEVELS], usize)> = sites.iter().enumerate().map(key).collect();
    keys.sort_unstable();
    let mut domains = vec![Vec::new(); levels];
    let mut places = Vec::with_capacity(sites.len());
    for (position, (key, number)) in keys.iter().enumerate() {
        let site = &sites[*number];
        let mut domain = [0; MOST_LEVELS];
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
        places.push(Slot { node, shape: site.shape, free, open: site.open, domain });
    }
    (places, domains)
}
