//! Pipelines of a gang: their nodes share the smallest domains, and the reason says what each link
//! carries.
//!
//! The configuration decides before the placement which ranks share a node, from the bytes that
//! leave nodes. Here each of these groups of ranks gets its node, from the bytes that leave
//! domains.

use crate::cluster::candidates::Candidates;
use crate::job::Traffic;
use std::collections::{BTreeMap, BTreeSet};
use switchyard_core::placement::gpus::{Level, Placement, Pod};
use switchyard_core::rates::gigabytes;
use switchyard_core::units::{binary, plural, rank_list, three_digits};
use switchyard_worker_contract::config::{EngineConfig, Pipeline, RankOrder};

/// Nodes up to which the order is improved by swaps.
const SMALL: usize = 16;

/// Orders the pods so that the bytes of a step take the least time, summed over all transfers, each
/// at the share of the smallest domain of both nodes. Keeps the order if it is as good.
///
/// Blocks of stages and pipelines of every size are tried: whole pipelines, whole stages, and those
/// between them. As many blocks as possible are in one domain, on every level.
pub(super) fn order(config: &EngineConfig, processes: u32, candidates: &Candidates<'_>, placement: &mut Placement) {
    let Some(pipeline) = config.pipeline else { return };
    let nodes = placement.pods.len();
    // Without known sizes, pipelines are kept together.
    let traffic = Traffic::of(config).unwrap_or(Traffic { activations: 1, micro_batches: 1, gradients: 0 });
    let tree = &candidates.tree;
    let domains: Vec<&[Option<u32>]> = placement.pods.iter().map(|pod| &*tree.domains[pod.node.0 as usize]).collect();
    let pairs = traffic.of_pairs(pipeline, (nodes as u32, processes));
    let cost = Cost { pairs: &pairs, domains: &domains, levels: &tree.levels };
    let best = best_order(pipeline, processes, &cost);
    if best.iter().enumerate().any(|(position, pod)| position != *pod) {
        placement.pods = best.into_iter().map(|pod| placement.pods[pod].clone()).collect();
    }
}

/// What an order of nodes costs.
struct Cost<'a> {
    /// Bytes between positions.
    pairs: &'a BTreeMap<[usize; 2], u64>,
    /// Of each node, from the smallest level up.
    domains: &'a [&'a [Option<u32>]],
    /// The last one is the cluster.
    levels: &'a [Level],
}

impl Cost<'_> {
    /// Relative time of all transfers, if each position has this node.
    fn of(&self, order: &[usize]) -> u128 {
        let weight = |[one, other]: [usize; 2]| {
            let [one, other] = [order[one], order[other]].map(|node| self.domains[node]);
            let at = shared_level(one, other).unwrap_or(self.levels.len() - 1);
            let level = self.levels[at];
            // NVLink is so much faster than a network that its time does not count.
            let time = if level.nvlink { 0 } else { 1_000_000 / u128::from(level.share.clamp(1, 1000)) };
            // Of levels with one rate, the smallest.
            time + at as u128
        };
        self.pairs.iter().map(|(pair, bytes)| u128::from(*bytes) * weight(*pair)).sum()
    }

    /// Swaps nodes as long as that helps.
    fn improve(&self, order: &mut [usize]) {
        let mut least = self.of(order);
        let mut is_better = true;
        while std::mem::take(&mut is_better) {
            for one in 0..order.len() {
                for other in 0..one {
                    order.swap(one, other);
                    let cost = self.of(order);
                    if cost < least {
                        (least, is_better) = (cost, true);
                    } else {
                        order.swap(one, other);
                    }
                }
            }
        }
    }
}

/// The smallest level on which two nodes share a domain.
fn shared_level(one: &[Option<u32>], other: &[Option<u32>]) -> Option<usize> {
    one.iter().zip(other).position(|(one, other)| one.is_some() && one == other)
}

/// The node of each position.
fn best_order(pipeline: Pipeline, processes: u32, cost: &Cost<'_>) -> Vec<usize> {
    let nodes = cost.domains.len();
    let mut best: Vec<usize> = (0..nodes).collect();
    for blocks in blocks_of_nodes(pipeline, nodes as u32, processes) {
        let mut grouped = group(cost.domains, blocks[0].len());
        // Swaps end in the nearest optimum, so they have several starts.
        for _ in 0..if nodes <= SMALL { nodes } else { 1 } {
            let mut order = vec![0; nodes];
            blocks.iter().flatten().zip(&grouped).for_each(|(position, node)| order[*position] = *node);
            if nodes <= SMALL {
                cost.improve(&mut order);
            }
            if cost.of(&order) < cost.of(&best) {
                best = order;
            }
            grouped.rotate_left(1);
        }
    }
    best
}

/// For each size of blocks that consist of whole nodes: the positions of the nodes of each block.
fn blocks_of_nodes(pipeline: Pipeline, nodes: u32, processes: u32) -> Vec<Vec<Vec<usize>>> {
    let world = nodes * processes;
    let divisors = |number: u32| (1..=number).filter(move |part| number.is_multiple_of(*part));
    let sizes = divisors(pipeline.stages)
        .flat_map(|stages| divisors(world / pipeline.stages).map(move |pipelines| (stages, pipelines)));
    let blocks = |(stages, pipelines): (u32, u32)| {
        let block_of = |rank: u32| {
            let place = pipeline.place(rank, world);
            (place.replica / pipelines, place.stage / stages)
        };
        let mut blocks: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
        for node in 0..nodes {
            let block = block_of(node * processes);
            let is_whole = (0..processes).all(|process| block_of(node * processes + process) == block);
            is_whole.then(|| blocks.entry(block).or_default().push(node as usize))?;
        }
        Some(blocks.into_values().collect())
    };
    sizes.filter_map(blocks).collect()
}

/// Positions of the nodes in an order with the most undivided groups on every level. `domains`: of
/// each node, from the smallest level up.
///
/// A domain of n nodes has at most n / `nodes` undivided groups. Grouping the smallest domains
/// first reaches that on every level, because the next level groups the nodes that are left over.
fn group(domains: &[&[Option<u32>]], nodes: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..domains.len()).collect();
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for level in 0..domains.iter().map(|levels| levels.len()).max().unwrap_or(0) {
        let mut by_domain: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for node in &left {
            if let Some(domain) = domains[*node].get(level).copied().flatten() {
                by_domain.entry(domain).or_default().push(*node);
            }
        }
        groups.extend(by_domain.values().flat_map(|own| own.chunks_exact(nodes)).map(<[usize]>::to_vec));
        let taken: BTreeSet<usize> = groups.iter().flatten().copied().collect();
        left.retain(|node| !taken.contains(node));
    }
    groups.extend(left.chunks(nodes).map(<[usize]>::to_vec));
    groups.sort_unstable();
    groups.into_iter().flatten().collect()
}

/// A link that several transfers take at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Link {
    WithinNodes,
    /// The rate of each transfer, in MB/s; `None` if a report is missing.
    BetweenNodes(Option<u32>),
}

/// What the links of the pipelines carry, one sentence each, if the size of the tensors between
/// stages is known.
pub(super) fn sentences(
    config: &EngineConfig,
    processes: u32,
    candidates: &Candidates<'_>,
    placement: &Placement,
) -> Vec<String> {
    let Some((pipeline, traffic)) = config.pipeline.zip(Traffic::of(config)) else { return Vec::new() };
    let pods = placement.pods.as_slice();
    let replicas = config.replicas(pods.len() as u32 * processes);
    let links = Links { pipeline, traffic, processes, replicas, pods, candidates };
    links.order().into_iter().chain(links.boundaries()).chain(links.rings()).collect()
}

/// The links between the pods of pipelines.
struct Links<'a> {
    pipeline: Pipeline,
    traffic: Traffic,
    /// Per pod.
    processes: u32,
    replicas: u32,
    pods: &'a [Pod],
    candidates: &'a Candidates<'a>,
}

impl Links<'_> {
    /// Which ranks follow each other, and why.
    fn order(&self) -> Option<String> {
        let shape = (self.pods.len() as u32, self.processes);
        let sent = |order| binary(self.traffic.between_nodes(Pipeline { order, ..self.pipeline }, shape));
        let [by_pipeline, by_stage] = [(RankOrder::ByPipeline, "pipeline"), (RankOrder::ByStage, "stage")];
        let (own, others) = match self.pipeline.order {
            RankOrder::ByPipeline => ("by pipeline".to_owned(), vec![by_stage]),
            RankOrder::ByStage => ("by stage".to_owned(), vec![by_pipeline]),
            RankOrder::Blocks { stages, pipelines } => {
                (format!("in blocks of {stages} stages of {pipelines} pipelines"), vec![by_pipeline, by_stage])
            }
        };
        let others = others.into_iter().map(|(order, name)| format!("by {name} {}", sent(order)));
        let others = others.collect::<Vec<_>>().join(", ");
        (shape.0 > 1 && self.replicas > 1)
            .then(|| format!("ranks ordered {own}: nodes send about {} a step, {others}", sent(self.pipeline.order)))
    }

    /// What passes from each stage to the next one.
    fn boundaries(&self) -> Vec<String> {
        let mut by_link: BTreeMap<Link, Vec<u32>> = BTreeMap::new();
        for stage in 0..self.pipeline.stages - 1 {
            let pairs = (0..self.replicas).map(|replica| [self.pod(stage, replica), self.pod(stage + 1, replica)]);
            let crossing: Vec<[usize; 2]> = pairs.filter(|[from, to]| from != to).collect();
            let mut transfers = vec![0; self.pods.len()];
            crossing.iter().flatten().for_each(|pod| transfers[*pod] += 1);
            by_link.entry(self.slowest(&crossing, &transfers)).or_default().push(stage);
        }
        let sentence = |(link, stages): (Link, Vec<u32>)| {
            let activations = binary(self.traffic.activations);
            let carries = carries(link, self.traffic.of_boundary() as f64);
            format!(
                "after {}: activations of {activations} per micro-batch, and as much back, {carries}",
                named(stages)
            )
        };
        by_link.into_iter().map(sentence).collect()
    }

    /// What the rings of the stages reduce. They reduce at the same time, at the end of a step.
    fn rings(&self) -> Vec<String> {
        let ring = |stage: u32| {
            let mut pods: Vec<usize> = (0..self.replicas).map(|replica| self.pod(stage, replica)).collect();
            pods.dedup();
            pods
        };
        let rings: Vec<Vec<usize>> = (0..self.pipeline.stages).map(ring).collect();
        let mut transfers = vec![0; self.pods.len()];
        rings.iter().filter(|ring| ring.len() > 1).flatten().for_each(|pod| transfers[*pod] += 1);
        let mut by_link: BTreeMap<(Link, usize), Vec<u32>> = BTreeMap::new();
        for (stage, ring) in (0..).zip(&rings).filter(|_| self.replicas > 1) {
            let pairs = ring.iter().zip(ring.iter().cycle().skip(1)).map(|(from, to)| [*from, *to]);
            let crossing: Vec<[usize; 2]> = pairs.filter(|[from, to]| from != to).collect();
            by_link.entry((self.slowest(&crossing, &transfers), ring.len())).or_default().push(stage);
        }
        let sentence = |((link, nodes), stages): ((Link, usize), Vec<u32>)| {
            let gradients = binary(self.traffic.gradients);
            let carries = carries(link, self.traffic.of_ring(nodes as u64) as f64 / nodes as f64);
            let ring = if stages.len() == 1 { "ring" } else { "rings" };
            format!("{ring} of {}: gradients of about {gradients} {carries}", named(stages))
        };
        by_link.into_iter().map(sentence).collect()
    }

    /// Position of the pod with the rank of a stage.
    fn pod(&self, stage: u32, replica: u32) -> usize {
        (self.pipeline.order.rank(stage, replica, (self.pipeline.stages, self.replicas)) / self.processes) as usize
    }

    /// The slowest of several transfers. Those of a pod share its rate: `transfers` counts them.
    fn slowest(&self, crossing: &[[usize; 2]], transfers: &[u32]) -> Link {
        let share = |pod: usize, pair: [usize; 2]| Some(self.rate(pod, pair)? / transfers[pod].max(1));
        let rate = |pair: &[usize; 2]| Some(share(pair[0], *pair)?.min(share(pair[1], *pair)?));
        let rates: Option<Vec<u32>> = crossing.iter().map(rate).collect();
        match rates.map(|rates| rates.into_iter().min()) {
            Some(None) => Link::WithinNodes,
            Some(rate) => Link::BetweenNodes(rate),
            None => Link::BetweenNodes(None),
        }
    }

    /// Rate out of a pod within the smallest domain of two, in MB/s; `None` if its node has no
    /// report.
    fn rate(&self, pod: usize, pair: [usize; 2]) -> Option<u32> {
        let tree = &self.candidates.tree;
        let [one, other] = pair.map(|pod| &tree.domains[self.pods[pod].node.0 as usize]);
        let level = tree.levels.get(shared_level(one, other).unwrap_or(tree.levels.len() - 1)).copied();
        let node = self.pods[pod].node.0 as usize;
        self.candidates.nodes[node].described()?;
        Some(self.candidates.shape(node).outward(self.pods[pod].set, level))
    }
}

/// `stages 0-2, 5`.
fn named(stages: Vec<u32>) -> String {
    format!("stage{} {}", plural(stages.len() as u64), rank_list(stages))
}

/// Where bytes pass, and how long all of a step's take there.
fn carries(link: Link, bytes: f64) -> String {
    match link {
        Link::WithinNodes => "within nodes".into(),
        Link::BetweenNodes(None) => "between nodes, at an unknown rate".into(),
        Link::BetweenNodes(Some(rate)) => {
            // A megabyte per second is a byte per microsecond.
            let microseconds = bytes / f64::from(rate.max(1));
            let time = match microseconds {
                ..1e3 => format!("{} µs", three_digits(microseconds)),
                _ => format!("{} ms", three_digits(microseconds / 1e3)),
            };
            format!("at {} GB/s, {time} a step", gigabytes(rate))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Groups of consecutive nodes that are in one domain, for each level.
    fn undivided(domains: &[&[Option<u32>]], nodes: usize) -> Vec<usize> {
        let levels = domains.iter().map(|levels| levels.len()).max().unwrap_or(0);
        let is_in_one = |group: &&[&[Option<u32>]], level: usize| {
            group.iter().all(|node| node[level].is_some() && node[level] == group[0][level])
        };
        (0..levels).map(|level| domains.chunks(nodes).filter(|group| is_in_one(group, level)).count()).collect()
    }

    /// The most undivided groups of any order, on a level.
    fn most(domains: &[&[Option<u32>]], nodes: usize, level: usize) -> usize {
        fn search(left: &mut Vec<Option<u32>>, nodes: usize) -> usize {
            let Some(first) = left.pop() else { return 0 };
            // The first node is in no undivided group, or in one with others of its domain.
            let mut best = search(&mut left.clone(), nodes);
            let same: Vec<usize> = (0..left.len()).filter(|other| left[*other] == first).collect();
            if first.is_some() && same.len() + 1 >= nodes {
                let mut without = left.clone();
                same.iter().rev().take(nodes - 1).for_each(|other| {
                    without.remove(*other);
                });
                best = best.max(1 + search(&mut without, nodes));
            }
            best
        }
        search(&mut domains.iter().map(|levels| levels[level]).collect(), nodes)
    }

    proptest! {
        #[test]
        fn as_many_groups_are_undivided_as_possible(
            nodes in 1_usize..4,
            groups in 1_usize..5,
            racks in prop::collection::vec((0_u32..4, prop::option::weighted(0.9, 0_u32..3)), 12),
        ) {
            // Racks 2 b and 2 b + 1 are in block b.
            let levels = |(rack, port): &(u32, Option<u32>)| [port.map(|port| 3 * rack + port), Some(*rack), Some(rack / 2)];
            let mut nodes_of: Vec<[Option<u32>; 3]> = racks.iter().take(nodes * groups).map(levels).collect();
            nodes_of.sort_unstable_by_key(|levels| [levels[2], levels[1], levels[0]]);
            let domains: Vec<&[Option<u32>]> = nodes_of.iter().map(|levels| levels.as_slice()).collect();
            let order = group(&domains, nodes);
            let mut all = order.clone();
            all.sort_unstable();
            prop_assert_eq!(all, (0..domains.len()).collect::<Vec<_>>());
            let grouped: Vec<&[Option<u32>]> = order.iter().map(|node| domains[*node]).collect();
            for (level, count) in undivided(&grouped, nodes).into_iter().enumerate() {
                prop_assert_eq!(count, most(&domains, nodes, level), "level {} of {:?}", level, domains);
            }
        }
    }

    /// The least cost of any order, by trying all of them.
    fn least(cost: &Cost<'_>) -> u128 {
        fn search(order: &mut Vec<usize>, fixed: usize, cost: &Cost<'_>) -> u128 {
            if fixed == order.len() {
                return cost.of(order);
            }
            let all = (fixed..order.len()).map(|other| {
                order.swap(fixed, other);
                let least = search(order, fixed + 1, cost);
                order.swap(fixed, other);
                least
            });
            all.min().unwrap_or(u128::MAX)
        }
        search(&mut (0..cost.domains.len()).collect(), 0, cost)
    }

    proptest! {
        /// Racks of any size, whose uplinks carry a share of their nodes' bandwidth.
        #[test]
        fn no_other_order_of_nodes_takes_less_time(
            (stages, replicas, processes) in prop::sample::select(vec![
                (2, 2, 1), (2, 3, 1), (3, 2, 1), (6, 1, 1), (4, 2, 2), (2, 4, 2), (6, 2, 2), (4, 6, 4), (4, 4, 4), (3, 4, 2),
            ]),
            racks in prop::collection::vec(prop::option::weighted(0.9, 0_u32..3), 6),
            share in prop::sample::select(vec![1000_u32, 500, 250]),
            activations in 1_u64..20,
            gradients in 1_u64..60,
        ) {
            let traffic = Traffic { activations, micro_batches: 2, gradients };
            let shape = (stages * replicas / processes, processes);
            let pipeline = Pipeline { stages, order: traffic.best_order(stages, shape) };
            let domains: Vec<[Option<u32>; 1]> = racks.iter().take(shape.0 as usize).map(|rack| [*rack]).collect();
            let domains: Vec<&[Option<u32>]> = domains.iter().map(<[_; 1]>::as_slice).collect();
            let levels = [1000, share].map(|share| Level { share, nvlink: false });
            let pairs = traffic.of_pairs(pipeline, shape);
            let cost = Cost { pairs: &pairs, domains: &domains, levels: &levels };
            let order = best_order(pipeline, processes, &cost);
            prop_assert_eq!(cost.of(&order), least(&cost), "{:?} for {:?}, {:?}", order, domains, pairs);
        }
    }

    #[test]
    fn blocks_consist_of_whole_nodes() {
        let blocks = |stages, order, nodes, processes| blocks_of_nodes(Pipeline { stages, order }, nodes, processes);
        // Two nodes for each of two pipelines.
        assert_eq!(
            blocks(4, RankOrder::ByPipeline, 4, 2),
            [
                vec![vec![0], vec![1], vec![2], vec![3]],
                vec![vec![0, 2], vec![1, 3]],
                vec![vec![0, 1], vec![2, 3]],
                vec![vec![0, 1, 2, 3]],
            ]
        );
        // Three nodes for every two pipelines.
        assert_eq!(
            blocks(6, RankOrder::ByPipeline, 6, 4),
            [vec![vec![0, 1, 2], vec![3, 4, 5]], vec![vec![0, 1, 2, 3, 4, 5]]]
        );
    }
}
