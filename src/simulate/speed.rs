//! How fast a job runs where it was placed. Shares no code with the planner that it judges.
//!
//! `duration(place) = duration · (1 − c + c · B_best / B(place))`, where c is the share of a step
//! spent on communication at the best placement.

use crate::fabric::Fabric;
use crate::rng::mix;

/// What determines a gang's bandwidth. The truth lies in between, so a claim about a rule must hold
/// under both models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Model {
    /// The smallest domain that holds all its hosts: the bandwidth is divided by its
    /// oversubscription. The planner assumes this, too.
    Levels,
    /// Flows: a gang is a ring over its hosts in rank order, and all gangs share the links between
    /// leaves max-min fairly.
    Flows,
}

/// Share of a step spent on communication, derived from the job number: 0.05, 0.15, 0.30 or 0.45
/// for 25, 30, 30 and 15 % of the multi-host gangs. The traces do not record what was trained; the
/// values span measurements on A800s and T4s (Morphling, Pollux).
pub fn communication(job: u64) -> f64 {
    match mix(job) % 100 {
        0..25 => 0.05,
        25..55 => 0.15,
        55..85 => 0.30,
        _ => 0.45,
    }
}

/// Speed of a gang with this share of communication and this share of the best bandwidth.
pub fn speed(communication: f64, share: f64) -> f64 {
    1.0 / (1.0 - communication + communication / share)
}

/// The hosts of a ring, one entry per pod in rank order, without consecutive repetitions.
fn ring(pods: &[usize]) -> Vec<usize> {
    let mut ring = pods.to_vec();
    ring.dedup();
    if ring.len() > 1 && ring.first() == ring.last() {
        ring.pop();
    }
    ring
}

/// Levels model: the share of the bandwidth that the smallest common domain of these hosts
/// provides.
pub fn level_share(fabric: &Fabric, pods: &[usize]) -> f64 {
    let common = |of: fn(&Fabric, usize) -> usize| pods.windows(2).all(|two| of(fabric, two[0]) == of(fabric, two[1]));
    let [leaf, block] = fabric.oversubscription;
    match () {
        () if common(|fabric, host| fabric.hosts[host].leaf) => 1.0,
        () if common(|fabric, host| fabric.hosts[host].block) => 1.0 / leaf,
        () => 1.0 / block,
    }
}

/// Levels model: the share of the bandwidth at the best placement of `pods` pods of `gpus` GPUs in
/// the empty cluster.
pub fn best_level_share(fabric: &Fabric, pods: u32, gpus: u32) -> f64 {
    let each = (fabric.gpus_per_host / gpus) as usize;
    let [leaf, block] = fabric.oversubscription;
    let fits = |hosts: usize| hosts * each >= pods as usize;
    match () {
        () if fabric.leaves.iter().any(|leaf| fits(leaf.len())) => 1.0,
        () if (0..fabric.blocks.len()).any(|block| fits(fabric.in_block(block).count())) => 1.0 / leaf,
        () => 1.0 / block,
    }
}

/// Flows model: how often a gang's ring crosses each link, by link number.
pub fn crossings(fabric: &Fabric, pods: &[usize]) -> Vec<(usize, f64)> {
    let ring = ring(pods);
    let mut uses: Vec<usize> = Vec::new();
    for (at, from) in ring.iter().enumerate() {
        let (from, to) = (&fabric.hosts[*from], &fabric.hosts[ring[(at + 1) % ring.len()]]);
        if from.leaf != to.leaf {
            uses.extend([2 * from.leaf, 2 * to.leaf + 1]);
        }
        if from.block != to.block {
            let first = 2 * fabric.leaves.len();
            uses.extend([first + 2 * from.block, first + 2 * to.block + 1]);
        }
    }
    uses.sort_unstable();
    let mut counted: Vec<(usize, f64)> = Vec::new();
    for link in uses {
        match counted.last_mut() {
            Some((last, times)) if *last == link => *times += 1.0,
            _ => counted.push((link, 1.0)),
        }
    }
    counted
}

/// Flows model: max-min fair bandwidths of gangs with these link crossings, each at most 1.
pub fn fair(fabric: &Fabric, gangs: &[&[(usize, f64)]]) -> Vec<f64> {
    let [of_leaf, of_block] = fabric.oversubscription;
    let leaves = fabric.leaves.iter().map(|leaf| leaf.len() as f64 / of_leaf);
    let blocks = (0..fabric.blocks.len()).map(|block| fabric.in_block(block).count() as f64 / of_block);
    // One uplink and one downlink each.
    let mut left: Vec<f64> = leaves.chain(blocks).flat_map(|capacity| [capacity; 2]).collect();
    let mut weight = vec![0.0; left.len()];
    gangs.iter().flat_map(|gang| gang.iter()).for_each(|(link, times)| weight[*link] += times);
    let mut rates: Vec<f64> = gangs.iter().map(|gang| if gang.is_empty() { 1.0 } else { f64::NAN }).collect();
    while rates.iter().any(|rate| rate.is_nan()) {
        let shares = left.iter().zip(&weight).filter(|(_, weight)| **weight > 0.5).map(|(left, weight)| left / weight);
        let share = shares.fold(1.0_f64, f64::min).max(0.0);
        let is_full = |link: usize| share >= 1.0 || left[link] / weight[link] <= share * (1.0 + 1e-9);
        let through = |gang: &[(usize, f64)]| gang.iter().any(|(link, _)| is_full(*link));
        let ended: Vec<usize> =
            (0..gangs.len()).filter(|at| rates[*at].is_nan() && (share >= 1.0 || through(gangs[*at]))).collect();
        for at in ended {
            rates[at] = share;
            for (link, times) in gangs[at] {
                left[*link] -= times * share;
                weight[*link] -= times;
            }
        }
    }
    rates
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two blocks of eight leaves of eight hosts.
    fn fabric() -> Fabric {
        Fabric::regular(16, 8)
    }

    #[test]
    fn levels_divide_by_the_oversubscription_of_the_smallest_common_domain() {
        let fabric = fabric();
        assert_eq!(level_share(&fabric, &[0, 1, 7]), 1.0);
        assert_eq!(level_share(&fabric, &[0, 8]), 0.5);
        assert_eq!(level_share(&fabric, &[0, 64]), 0.25);
        assert_eq!((best_level_share(&fabric, 8, 8), best_level_share(&fabric, 9, 8)), (1.0, 0.5));
        assert_eq!((best_level_share(&fabric, 32, 2), best_level_share(&fabric, 65, 8)), (1.0, 0.25));
    }

    #[test]
    fn an_ordered_ring_crosses_a_leaf_once_each_way_and_an_unordered_one_at_every_host() {
        let fabric = fabric();
        let ordered: Vec<usize> = (0..16).collect();
        let unordered: Vec<usize> = (0..8).flat_map(|at| [at, 8 + at]).collect();
        assert_eq!(crossings(&fabric, &ordered), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]);
        assert_eq!(crossings(&fabric, &unordered), [(0, 8.0), (1, 8.0), (2, 8.0), (3, 8.0)]);
        let (ordered, unordered) = (crossings(&fabric, &ordered), crossings(&fabric, &unordered));
        assert_eq!(fair(&fabric, &[&ordered]), [1.0]);
        // Eight edges share a leaf capacity of four hosts.
        assert_eq!(fair(&fabric, &[&unordered]), [0.5]);
        assert_eq!(crossings(&fabric, &[3, 3, 3]), []);
    }

    #[test]
    fn unused_bandwidth_of_a_gang_goes_to_the_others() {
        let fabric = fabric();
        // Five rings over leaves 0 and 1. Only some of the four that share a link of leaf 2 share
        // it with each other.
        let narrow: Vec<(usize, f64)> = vec![(0, 8.0)];
        let wide: Vec<(usize, f64)> = vec![(0, 1.0), (2, 1.0)];
        let rates = fair(&fabric, &[&narrow, &wide, &wide]);
        assert!((rates[0] - 0.4).abs() < 1e-9 && (rates[1] - 0.4).abs() < 1e-9, "{rates:?}");
        // A gang limited by another link leaves its remainder to the others.
        let held: Vec<(usize, f64)> = vec![(0, 1.0), (4, 16.0)];
        let rates = fair(&fabric, &[&held, &[(0, 5.0)]]);
        assert!((rates[0] - 0.25).abs() < 1e-9 && (rates[1] - 0.75).abs() < 1e-9, "{rates:?}");
    }

    #[test]
    fn slower_communication_only_slows_its_share_of_a_step() {
        assert_eq!(speed(0.0, 0.25), 1.0);
        assert!((1.0 / speed(0.3, 0.5) - 1.3).abs() < 1e-12);
        let all: Vec<f64> = (0..10_000).map(communication).collect();
        assert!((all.iter().sum::<f64>() / 1e4 - 0.215).abs() < 0.01);
    }
}
