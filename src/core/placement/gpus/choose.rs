//! The GPUs of each pod, on nodes that have been chosen.

use super::fleet::Fleet;
use super::request::{Pod, Request};
use super::shape::subsets;
use std::collections::BTreeMap;

/// GPUs asked for, kind of node, free GPUs: nodes that are equal in these get the same choice.
type Kind = (u8, u32, u32);
/// For every choice of rails the best set, by its wholeness and then the lowest.
type ByRails = BTreeMap<u64, (u64, u32)>;

/// Chooses the GPUs for each (group, position of the node). Every set must carry at least the bandwidth of the gang; more would gain nothing.
/// Among those, sets are preferred that use the same rails on as many nodes as possible, then those that leave the most GPUs usable together.
pub(super) fn devices(fleet: &Fleet, request: &Request, level: Option<usize>, chosen: &[(usize, usize)]) -> Vec<Pod> {
    let level = level.map(|level| fleet.levels[level]);
    let kind = |group: usize, position: usize| {
        let place = &fleet.sites[position];
        (request.groups[group].gpus, place.shape, place.free)
    };
    // How many pods have this choice, and what each of its sets is worth.
    let mut kinds: BTreeMap<Kind, (u32, Vec<(u32, u32)>)> = BTreeMap::new();
    for (group, position) in chosen {
        kinds.entry(kind(*group, *position)).or_default().0 += 1;
    }
    let mut enough = u32::MAX;
    for ((gpus, shape, free), (_, sets)) in &mut kinds {
        let shape = &fleet.shapes[*shape as usize];
        let value = |set: u32| (shape.value(set, level, request.min_link), set);
        *sets = subsets(*free, *gpus).map(value).filter(|(value, _)| *value > 0).collect();
        enough = enough.min(sets.iter().map(|(value, _)| *value).max().unwrap_or(0));
    }
    let mut choices: BTreeMap<Kind, ByRails> = BTreeMap::new();
    // On how many nodes these rails can be used, and how whole that leaves them all together: the same order for all.
    let mut votes: BTreeMap<(u8, u64), (u32, u64)> = BTreeMap::new();
    for (kind, (pods, sets)) in &kinds {
        let shape = &fleet.shapes[kind.1 as usize];
        let by_rails = choices.entry(*kind).or_default();
        for (_, set) in sets.iter().filter(|(value, _)| *value >= enough) {
            let candidate = (shape.wholeness(kind.2, *set), u32::MAX - *set);
            let best = by_rails.entry(shape.rails[*set as usize]).or_insert(candidate);
            *best = candidate.max(*best);
        }
        for (rails, (wholeness, _)) in by_rails {
            let (nodes, sum) = votes.entry((kind.0, *rails)).or_default();
            (*nodes, *sum) = (*nodes + pods, *sum + u64::from(*pods) * *wholeness);
        }
    }
    let set_of = |(kind, by_rails): (&Kind, &ByRails)| {
        let best = by_rails.iter().max_by_key(|(rails, _)| (votes[&(kind.0, **rails)], u64::MAX - **rails));
        (*kind, best.map_or(0, |(_, (_, inverse))| u32::MAX - inverse))
    };
    let sets: BTreeMap<Kind, u32> = choices.iter().map(set_of).collect();
    let pod = |(group, position): &(usize, usize)| {
        let place = &fleet.sites[*position];
        let shape = &fleet.shapes[place.shape as usize];
        let set = sets[&kind(*group, *position)];
        let (ring, outward) = (shape.ring[set as usize], shape.outward(set, level));
        Pod { group: *group, node: place.node, set, gpus: shape.by_rail(set), ring, outward }
    };
    chosen.iter().map(pod).collect()
}
