//! The placement algorithm. README.md states the problem.

use super::model::{Assignment, Mode, NumaBinding, Place, Reason, Request, Warning};
use crate::model::{Cluster, Core, Node, NodeOrd};

/// Finds a place for every process of `request`.
///
/// # Errors
/// The first requirement that cannot be met, with numbers.
pub fn solve(cluster: &Cluster, request: &Request) -> Result<Assignment, Reason> {
    let present = cluster.nodes.len() as u32;
    let mut warnings = Vec::new();
    if present == 0 || (request.nodes > present && request.mode == Mode::Required) {
        return Err(Reason::TooFewNodes { need: request.nodes, have: present });
    }
    if request.nodes > present {
        warnings.push(Warning::NodesShared { requested: request.nodes, present });
    }
    let mut places = Vec::with_capacity((request.nodes * request.processes_per_node) as usize);
    for (ord, node) in cluster.nodes.iter().enumerate() {
        // Keeps consecutive groups of ranks together when several nodes of the job share a machine.
        let groups =
            (0..request.nodes).filter(|group| group * present.min(request.nodes) / request.nodes == ord as u32);
        let processes = groups.count() as u32 * request.processes_per_node;
        if processes > 0 {
            let first_rank = places.len() as u32;
            let on_node = OnNode { ord: NodeOrd(ord as u32), node, processes, first_rank, request };
            places.extend(on_node.place(&mut warnings)?);
        }
    }
    Ok(Assignment { places, warnings })
}

/// The processes placed on one machine.
struct OnNode<'a> {
    ord: NodeOrd,
    node: &'a Node,
    processes: u32,
    first_rank: u32,
    request: &'a Request,
}

impl OnNode<'_> {
    fn place(&self, warnings: &mut Vec<Warning>) -> Result<Vec<Place>, Reason> {
        let usable = self.usable_cores();
        let threads = self.request.threads.unwrap_or_else(|| self.max_threads(usable));
        if self.request.mode == Mode::Ignored {
            let place = Place { node: self.ord, cpus: Vec::new(), cores: 0, numa_nodes: Vec::new(), threads };
            return Ok(vec![place; self.processes as usize]);
        }
        if self.processes * threads > usable {
            if self.request.mode == Mode::Required {
                return Err(Reason::TooFewCores { node: self.ord, processes: self.processes, threads, have: usable });
            }
            warnings.push(Warning::Oversubscribed { processes: self.processes, threads, cores: usable });
            return Ok(self.share_cores(threads, usable));
        }
        let room = self.room(threads, usable);
        let have: u32 = room.iter().sum();
        if have >= self.processes && self.request.numa_binding != NumaBinding::None {
            return Ok(self.bind(threads, &room));
        }
        if self.request.numa_binding == NumaBinding::Required {
            return Err(Reason::NoNumaNodeFits { node: self.ord, processes: self.processes, threads, have });
        }
        let places = self.in_order(threads);
        if self.request.numa_binding == NumaBinding::Preferred {
            for (index, place) in places.iter().enumerate().filter(|(_, place)| place.numa_nodes.len() > 1) {
                let rank = self.first_rank + index as u32;
                warnings.push(Warning::SpansNuma { rank, threads, numa_nodes: place.numa_nodes.clone() });
            }
        }
        Ok(places)
    }

    /// Usable cores: those present, limited by the container's quota and the job's own limit.
    fn usable_cores(&self) -> u32 {
        let present = self.node.cores() as u32;
        // A quota below one core still runs one thread.
        let quota =
            self.node.quota_millicores.map_or(u32::MAX, |milli| u32::try_from(milli / 1000).unwrap_or(u32::MAX));
        present.min(quota.max(1)).min(self.request.core_limit.unwrap_or(u32::MAX).max(1))
    }

    /// Largest number of threads for which every process gets its own cores; 1 if there are too few
    /// cores.
    fn max_threads(&self, usable: u32) -> u32 {
        let share = (usable / self.processes).max(1);
        let numa_nodes = self.node.numa_nodes.len() as u32;
        let bind = match self.request.numa_binding {
            NumaBinding::Required => true,
            NumaBinding::Preferred => self.processes >= numa_nodes,
            NumaBinding::None => false,
        };
        if !bind || self.request.mode == Mode::Ignored {
            return share;
        }
        (1..=share)
            .rev()
            .find(|threads| self.room(*threads, usable).iter().sum::<u32>() >= self.processes)
            .unwrap_or(share)
    }

    /// Number of processes with `threads` cores that fit into each NUMA node, within the usable
    /// cores.
    fn room(&self, threads: u32, usable: u32) -> Vec<u32> {
        let mut left = usable / threads;
        let fits = |cores: usize| cores as u32 / threads;
        // The limit counts cores of the whole node. `bind` decides which NUMA nodes they come from.
        let mut room: Vec<u32> = self.node.numa_nodes.iter().map(|numa| fits(numa.cores.len())).collect();
        let total: u32 = room.iter().sum();
        left = left.min(total);
        let mut excess = total - left;
        while excess > 0 {
            let fullest =
                (0..room.len()).max_by_key(|index| (room[*index], *index)).expect("invariant: there is excess");
            room[fullest] -= 1;
            excess -= 1;
        }
        room
    }

    /// Binds every process to one NUMA node, spread in proportion to the free capacity. Consecutive
    /// ranks stay together.
    fn bind(&self, threads: u32, room: &[u32]) -> Vec<Place> {
        let mut counts = vec![0_u32; room.len()];
        for _ in 0..self.processes {
            let widest = (0..room.len()).max_by_key(|index| (room[*index] - counts[*index], std::cmp::Reverse(*index)));
            counts[widest.expect("invariant: there is room for all processes")] += 1;
        }
        let mut places = Vec::with_capacity(self.processes as usize);
        for (numa, count) in self.node.numa_nodes.iter().zip(&counts) {
            for process in 0..*count {
                let first = (process * threads) as usize;
                let cores: Vec<(u32, &Core)> =
                    numa.cores[first..first + threads as usize].iter().map(|core| (numa.id, core)).collect();
                places.push(self.at(&cores, threads));
            }
        }
        places
    }

    /// Takes cores in order, ignoring NUMA boundaries.
    fn in_order(&self, threads: u32) -> Vec<Place> {
        let cores = self.all_cores();
        cores.chunks(threads as usize).take(self.processes as usize).map(|cores| self.at(cores, threads)).collect()
    }

    /// Oversubscribed: assigns the usable cores to processes round-robin.
    fn share_cores(&self, threads: u32, usable: u32) -> Vec<Place> {
        let cores = &self.all_cores()[..usable as usize];
        let width = threads.min(usable) as usize;
        (0..self.processes as usize)
            .map(|process| {
                let mut own: Vec<(u32, &Core)> =
                    (0..width).map(|index| cores[(process * width + index) % cores.len()]).collect();
                own.sort();
                self.at(&own, threads)
            })
            .collect()
    }

    fn all_cores(&self) -> Vec<(u32, &Core)> {
        self.node.numa_nodes.iter().flat_map(|numa| numa.cores.iter().map(|core| (numa.id, core))).collect()
    }

    fn at(&self, cores: &[(u32, &Core)], threads: u32) -> Place {
        let mut cpus: Vec<u32> = cores.iter().flat_map(|(_, core)| core.cpus.iter().copied()).collect();
        cpus.sort_unstable();
        let mut numa_nodes: Vec<u32> = cores.iter().map(|(numa, _)| *numa).collect();
        numa_nodes.sort_unstable();
        numa_nodes.dedup();
        Place { node: self.ord, cpus, cores: cores.len() as u32, numa_nodes, threads }
    }
}
