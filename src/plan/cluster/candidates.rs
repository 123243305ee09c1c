//! The nodes as one job sees them: which may be used, their free resources, and why the others are
//! excluded.

use super::demand::GangDemand;
use super::excluded::Excluded;
use super::levels::{Levels, Tree};
use super::machine;
use super::view::NodeView;
use std::collections::BTreeMap;
use std::sync::Arc;
use switchyard_core::placement::gpus::{Fleet, MAX_GPUS, Request, Shape, Site};
use switchyard_crds::{self as api, DeviceAllocation, TopologyPolicy};
use switchyard_fabric::claims_channel;

/// The nodes of a cluster for one job.
pub(super) struct Candidates<'a> {
    pub nodes: Vec<&'a NodeView>,
    pub tree: Arc<Tree>,
    pub excluded: Vec<Option<Excluded>>,
    shapes: Vec<Arc<Shape>>,
    sites: Vec<Site>,
    /// GPUs are allocated by claims: only GPUs that a driver offers count.
    by_claim: bool,
}

impl<'a> Candidates<'a> {
    pub fn of(
        nodes: &'a BTreeMap<String, NodeView>,
        levels: &Levels,
        policy: &TopologyPolicy,
        demand: &GangDemand<'_>,
    ) -> Candidates<'a> {
        let nodes: Vec<&NodeView> = nodes.values().collect();
        let tree = levels.tree(policy, &nodes, claims_channel(&demand.request.valid.pod.spec));
        let mut shapes = Kinds::default();
        let mut sites = Vec::with_capacity(nodes.len());
        let mut excluded = Vec::with_capacity(nodes.len());
        for (node, domains) in nodes.iter().zip(&tree.domains) {
            let (shape, free) = (shapes.of(node), node.free_gpus(demand.pod.allocation));
            let why = exclude(node, demand, free);
            // A node with too few GPUs stays open, because the fleet may be queried for fewer.
            let is_counted = matches!(why, Some(Excluded::Gpus { .. })) && free.count_ones() < demand.gpus();
            sites.push(Site { shape, free, open: why.is_none() || is_counted, domains: domains.clone() });
            excluded.push(why);
        }
        let by_claim = demand.pod.allocation == Some(DeviceAllocation::Claims);
        Candidates { nodes, tree, excluded, shapes: shapes.list, sites, by_claim }
    }

    /// The fleet in its current state.
    pub fn fleet(&self) -> Fleet {
        self.make(&self.sites)
    }

    /// The fleet if nothing ran: every node that the job could ever use, with all its GPUs.
    pub fn empty(&self) -> Fleet {
        let emptied = |(site, (node, why)): (&Site, (&&NodeView, &Option<Excluded>))| {
            let open = match why {
                None | Some(Excluded::Gpus { .. }) => true,
                Some(Excluded::Short { name, requested, .. }) => node.allocatable.get(name) >= *requested,
                Some(_) => false,
            };
            let usable = node.described().map_or(self.shapes[site.shape as usize].all(), |machine| machine.usable);
            let free = usable & if self.by_claim { node.offered.unwrap_or(0) } else { u32::MAX };
            Site { free, open, ..site.clone() }
        };
        let sites: Vec<Site> = self.sites.iter().zip(self.nodes.iter().zip(&self.excluded)).map(emptied).collect();
        self.make(&sites)
    }

    fn make(&self, sites: &[Site]) -> Fleet {
        let fleet = Fleet::of(self.tree.levels.clone(), self.shapes.clone(), sites);
        fleet.expect("invariant: candidates use the shapes and levels they were built with")
    }

    pub fn shape(&self, node: usize) -> &Shape {
        &self.shapes[self.sites[node].shape as usize]
    }

    /// Records nodes that a request excludes because of the links between their free GPUs.
    pub fn note_links(&mut self, fleet: &mut Fleet, solver_request: &Request, min_link: api::MinLink) {
        for node in fleet.below_min_link(solver_request.groups[0].gpus, solver_request.min_link) {
            self.excluded[node.0 as usize].get_or_insert(Excluded::Links(min_link));
        }
    }

    /// Nodes that may be used.
    pub fn open(&self) -> impl Iterator<Item = usize> {
        let open =
            self.sites.iter().zip(&self.excluded).enumerate().filter(|(_, (site, why))| site.open && why.is_none());
        open.map(|(node, _)| node)
    }

    /// Excluded nodes, with reasons.
    pub fn excluded_nodes(&self) -> Vec<(String, Excluded)> {
        let nodes = self.nodes.iter().zip(&self.excluded);
        nodes.filter_map(|(node, why)| Some((node.facts.name.clone(), why.clone()?))).collect()
    }

    /// The fleet restricted to these nodes. `nodes` must be in ascending order.
    pub fn only(&self, nodes: &[usize]) -> Fleet {
        let closed = |(node, site): (usize, &Site)| Site {
            open: site.open && nodes.binary_search(&node).is_ok(),
            ..site.clone()
        };
        self.make(&self.sites.iter().enumerate().map(closed).collect::<Vec<_>>())
    }

    /// The fleet without GPU nodes.
    pub fn without_gpus(&self) -> Fleet {
        let plain = |(site, node): (&Site, &&NodeView)| Site { open: site.open && node.gpus() == 0, ..site.clone() };
        self.make(&self.sites.iter().zip(&self.nodes).map(plain).collect::<Vec<_>>())
    }
}

/// Distinct kinds of nodes.
#[derive(Default)]
struct Kinds {
    list: Vec<Arc<Shape>>,
    /// Index of the kind of nodes without a report, by number of GPUs.
    unreported: BTreeMap<usize, u32>,
}

impl Kinds {
    fn of(&mut self, node: &NodeView) -> u32 {
        let Some(machine) = node.described() else {
            let all = (node.gpus() as usize).min(MAX_GPUS);
            return *self.unreported.entry(all).or_insert_with(|| {
                self.list.push(Arc::new(machine::unreported(all)));
                self.list.len() as u32 - 1
            });
        };
        let shape = self.list.iter().position(|shape| Arc::ptr_eq(shape, &machine.shape)).unwrap_or_else(|| {
            self.list.push(machine.shape.clone());
            self.list.len() - 1
        });
        shape as u32
    }
}

fn exclude(node: &NodeView, demand: &GangDemand<'_>, free: u32) -> Option<Excluded> {
    let avoided =
        || demand.request.avoided_nodes.get(&node.facts.name).map(|avoided| Excluded::Avoided(avoided.reason.clone()));
    let missing = || demand.pod.missing_on(node, free, demand.request.rules.now);
    demand.pod.refused_by(node).or_else(avoided).or_else(missing)
}
