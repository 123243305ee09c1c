//! Which job comes first when there is no room for all.
//!
//! 1. **Order**: by priority, then by age. The first job that waits and could be placed at all is the head of the queue.
//! 2. **Reservation**: the head holds the nodes that it would have if as few busy nodes as possible were emptied. Jobs behind it take what
//!    is left. It holds them until it is placed or gives up, or until one of them can no longer be used. So a large gang waits for the jobs
//!    that run on those nodes, and never for the ones that come later.
//! 3. **Preemption**: only the head preempts, only jobs of lower priority, only if its policy says so, and only if it fits then.
//! 4. **Holes**: a gang that starts again after a failure keeps the GPUs of the nodes that it still has, unless it finds no place: gangs
//!    that hold parts of what they need and wait for each other would wait forever.
//!
//! Gangs are placed as a whole or not at all, so nothing else is ever reserved.

use super::find::find;
use super::question::Question;
use super::view::NodeView;
use jiff::Timestamp;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use switchyard_crds::{PlacedNode, TrainJob};

/// Place in the queue; the smallest comes first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    priority: Reverse<i32>,
    created: Option<Timestamp>,
    /// Namespace and name, so that no two are equal.
    name: String,
}

impl Turn {
    /// The turn of a job whose pods have this priority.
    pub fn of(job: &TrainJob, priority: i32) -> Turn {
        let created = job.metadata.creation_timestamp.as_ref().map(|time| time.0);
        let part = |part: &Option<String>| part.clone().unwrap_or_default();
        let name = format!("{}/{}", part(&job.metadata.namespace), part(&job.metadata.name));
        Turn { priority: Reverse(priority), created, name }
    }

    pub fn priority(&self) -> i32 {
        self.priority.0
    }

    /// Namespace and name of the job.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// The nodes, and the GPUs on them, that a job which finds no room would have if as few busy nodes as possible were emptied. `None`: it
/// would not fit into the empty cluster either.
pub fn reserve(question: &Question<'_>, nodes: &BTreeMap<String, NodeView>) -> Option<Vec<PlacedNode>> {
    let used = |node: &NodeView| {
        let share = |name: &str| {
            let all = node.allocatable.get(name);
            if all == 0 { 0 } else { (all - node.free.get(name)).saturating_mul(1000) / all }
        };
        (node.taken.count_ones(), node.allocatable.names().map(share).max().unwrap_or(0))
    };
    let mut busy: Vec<&NodeView> = nodes.values().collect();
    busy.sort_by_key(|node| (used(node), node.facts.name.clone()));
    let mut tried = nodes.clone();
    let mut place = |emptied: usize| {
        for (number, was) in busy.iter().enumerate() {
            let Some(node) = tried.get_mut(&was.facts.name) else { continue };
            let is_empty = number < emptied;
            node.free.clone_from(if is_empty { &was.allocatable } else { &was.free });
            (node.taken, node.in_use) = if is_empty { (0, 0) } else { (was.taken, was.in_use) };
        }
        find(question, &tried).ok().map(|found| found.placed.status.nodes)
    };
    let mut found = place(busy.len())?;
    // With more nodes emptied it still fits.
    let (mut few, mut enough) = (0, busy.len());
    while enough - few > 1 {
        let middle = few.midpoint(enough);
        match place(middle) {
            Some(nodes) => (enough, found) = (middle, nodes),
            None => few = middle,
        }
    }
    Some(found)
}

/// The fewest candidates without which something fits, in the order given: none of them can be left out. `None`: it does not fit without
/// all of them either.
pub fn fewest(candidates: usize, mut fits_without: impl FnMut(&[usize]) -> bool) -> Option<Vec<usize>> {
    let all: Vec<usize> = (0..candidates).collect();
    if !fits_without(&all) {
        return None;
    }
    let (mut few, mut enough) = (0, candidates);
    if fits_without(&[]) {
        return Some(Vec::new());
    }
    while enough - few > 1 {
        let middle = few.midpoint(enough);
        if fits_without(&all[..middle]) { enough = middle } else { few = middle }
    }
    let mut chosen = all[..enough].to_vec();
    // The last ones first: they are the ones of the highest priority.
    for candidate in (0..enough).rev() {
        let rest: Vec<usize> = chosen.iter().copied().filter(|other| *other != candidate).collect();
        if fits_without(&rest) {
            chosen = rest;
        }
    }
    Some(chosen)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_victim_can_be_left_out(sizes in prop::collection::vec(0_u32..9, 0..10), need in 0_u32..30) {
            let freed = |chosen: &[usize]| chosen.iter().map(|index| sizes[*index]).sum::<u32>();
            match fewest(sizes.len(), |chosen| freed(chosen) >= need) {
                None => prop_assert!(sizes.iter().sum::<u32>() < need),
                Some(chosen) => {
                    prop_assert!(freed(&chosen) >= need);
                    for left_out in &chosen {
                        let rest: Vec<usize> = chosen.iter().copied().filter(|other| other != left_out).collect();
                        prop_assert!(freed(&rest) < need);
                    }
                }
            }
        }
    }

    #[test]
    fn priority_comes_before_age_and_age_before_the_name() {
        let job = |name: &str, created: i64| {
            let spec = serde_json::json!({"trainer": {"framework": "Plain", "image": "i"}});
            let mut job = TrainJob::new(name, serde_json::from_value(spec).unwrap());
            let time = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(Timestamp::from_second(created).unwrap());
            job.metadata.creation_timestamp = Some(time);
            job
        };
        let mut turns = [
            Turn::of(&job("young", 9), 0),
            Turn::of(&job("b", 3), 0),
            Turn::of(&job("a", 3), 0),
            Turn::of(&job("high", 10), 5),
            Turn::of(&job("low", 1), -1),
        ];
        turns.sort();
        assert_eq!(turns.iter().map(Turn::name).collect::<Vec<_>>(), ["/high", "/a", "/b", "/young", "/low"]);
    }
}
