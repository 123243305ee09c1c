//! Selects the GPUs of each pod on nodes that are already chosen.

use super::fleet::Fleet;
use super::request::{Pod, Request};
use super::shape::subsets;
use std::collections::BTreeMap;

/// Requested GPUs, node shape, and free GPUs. Nodes with the same key get the same selection.
type Kind = (u8, u32, u32);
/// The best GPU set for each set of rails: highest packing score first, then nearest, then lowest
/// mask.
type ByRails = BTreeMap<u64, (u64, u32, u32)>;

/// Selects the GPUs for each (group, node position). Every set must carry at least the gang's
/// bandwidth; more would not help. Among those, it prefers sets that use the same rails on as many
/// nodes as possible, then those that leave the most GPUs usable together, then the nearest ones.
pub(super) fn devices(fleet: &Fleet, request: &Request, level: Option<usize>, chosen: &[(usize, usize)]) -> Vec<Pod> {
    let level = level.map(|level| fleet.levels[level]);
    let kind = |group: usize, position: usize| {
        let site = &fleet.sites[position];
        (request.groups[group].gpus, site.shape, site.free)
    };
    // For each kind, the number of its pods and the value of each of its sets.
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
    // For each set of rails, the number of nodes that can use it, and the total packing score and
    // nearness of their sets. All kinds use this one ranking.
    let mut votes: BTreeMap<(u8, u64), (u32, u64, u64)> = BTreeMap::new();
    for (kind, (pods, sets)) in &kinds {
        let shape = &fleet.shapes[kind.1 as usize];
        let by_rails = choices.entry(*kind).or_default();
        for (_, set) in sets.iter().filter(|(value, _)| *value >= enough) {
            let candidate = (shape.packing_score(kind.2, *set), shape.nearness(*set), u32::MAX - *set);
            let best = by_rails.entry(shape.rails[*set as usize]).or_insert(candidate);
            *best = candidate.max(*best);
        }
        for (rails, (packing_score, nearness, _)) in by_rails {
            let (nodes, packing, near) = votes.entry((kind.0, *rails)).or_default();
            *nodes += pods;
            *packing += u64::from(*pods) * *packing_score;
            *near += u64::from(*pods) * u64::from(*nearness);
        }
    }
    let set_of = |(kind, by_rails): (&Kind, &ByRails)| {
        let best = by_rails.iter().max_by_key(|(rails, _)| (votes[&(kind.0, **rails)], u64::MAX - **rails));
        (*kind, best.map_or(0, |(_, (_, _, inverse))| u32::MAX - inverse))
    };
    let sets: BTreeMap<Kind, u32> = choices.iter().map(set_of).collect();
    let pod = |(group, position): &(usize, usize)| {
        let site = &fleet.sites[*position];
        let shape = &fleet.shapes[site.shape as usize];
        let set = sets[&kind(*group, *position)];
        let (ring, outward) = (shape.ring[set as usize], shape.outward(set, level));
        Pod { group: *group, node: site.node, set, gpus: shape.by_rail(set), ring, outward }
    };
    chosen.iter().map(pod).collect()
}
