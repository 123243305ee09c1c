//! Table tests, then properties checked against a brute-force count.

use super::{Mode, NumaBinding, Reason, Request, Warning, solve};
use crate::model::{Cluster, Core, Node, NumaNode};
use proptest::prelude::*;

/// A node with the given cores per NUMA node and SMT siblings per core.
fn node(cores: &[usize], smt: u32) -> Node {
    let total: usize = cores.iter().sum();
    let mut next = 0_u32;
    let numa_nodes = cores
        .iter()
        .enumerate()
        .map(|(id, count)| {
            let own = (0..*count)
                .map(|_| {
                    next += 1;
                    // Siblings are numbered as Linux does on x86: the second thread of core i is i
                    // + total.
                    Core { cpus: (0..smt).map(|thread| next - 1 + thread * total as u32).collect() }
                })
                .collect();
            NumaNode { id: id as u32, cores: own, distances: Vec::new() }
        })
        .collect();
    Node { numa_nodes, quota_millicores: None, memory_bytes: None }
}

fn request(processes: u32) -> Request {
    Request {
        nodes: 1,
        processes_per_node: processes,
        threads: None,
        core_limit: None,
        mode: Mode::Preferred,
        numa_binding: NumaBinding::Preferred,
    }
}

fn one(node: Node) -> Cluster {
    Cluster { nodes: vec![node] }
}

fn cpus(cluster: &Cluster, request: &Request) -> Vec<Vec<u32>> {
    solve(cluster, request).unwrap().places.into_iter().map(|place| place.cpus).collect()
}

#[test]
fn two_processes_on_two_cores() {
    assert_eq!(cpus(&one(node(&[2], 1)), &request(2)), [vec![0], vec![1]]);
}

#[test]
fn smt_siblings_stay_with_their_core() {
    assert_eq!(cpus(&one(node(&[2, 2], 2)), &request(2)), [vec![0, 1, 4, 5], vec![2, 3, 6, 7]]);
}

#[test]
fn three_processes_on_two_numa_nodes_of_eight_get_four_cores_each() {
    let answer = solve(&one(node(&[8, 8], 1)), &request(3)).unwrap();
    assert!(answer.places.iter().all(|place| place.threads == 4 && place.numa_nodes.len() == 1));
    assert_eq!(answer.places.iter().map(|place| place.numa_nodes[0]).collect::<Vec<_>>(), [0, 0, 1]);
}

#[test]
fn one_process_spanning_numa_nodes_warns() {
    let answer = solve(&one(node(&[4, 4], 1)), &request(1)).unwrap();
    assert_eq!(answer.places[0].threads, 8);
    assert_eq!(answer.warnings, [Warning::SpansNuma { rank: 0, threads: 8, numa_nodes: vec![0, 1] }]);
}

#[test]
fn required_binding_keeps_one_process_inside_a_numa_node() {
    let asked = Request { numa_binding: NumaBinding::Required, ..request(1) };
    assert_eq!(solve(&one(node(&[4, 4], 1)), &asked).unwrap().places[0].cpus, [0, 1, 2, 3]);
    let too_wide = Request { threads: Some(5), ..asked };
    assert!(matches!(solve(&one(node(&[4, 4], 1)), &too_wide), Err(Reason::NoNumaNodeFits { have: 0, .. })));
}

#[test]
fn oversubscription_is_a_warning_with_the_numbers_or_a_reason() {
    let asked = Request { threads: Some(2), ..request(3) };
    let answer = solve(&one(node(&[2], 1)), &asked).unwrap();
    assert_eq!(answer.warnings, [Warning::Oversubscribed { processes: 3, threads: 2, cores: 2 }]);
    assert!(answer.warnings[0].to_string().contains("want 6 cores, 2 can be used"));
    let required = Request { mode: Mode::Required, ..asked };
    let reason = solve(&one(node(&[2], 1)), &required).unwrap_err();
    assert_eq!(reason.remedy(), "trainer.numProcPerNode: 2, or topologyPolicy.mode: Preferred to share cores");
}

#[test]
fn nodes_share_a_machine_unless_required() {
    let asked = Request { nodes: 2, ..request(2) };
    let answer = solve(&one(node(&[4], 1)), &asked).unwrap();
    assert_eq!(answer.places.len(), 4);
    assert_eq!(answer.warnings, [Warning::NodesShared { requested: 2, present: 1 }]);
    let required = Request { mode: Mode::Required, ..asked };
    assert_eq!(solve(&one(node(&[4], 1)), &required).unwrap_err(), Reason::TooFewNodes { need: 2, have: 1 });
}

#[test]
fn quota_and_limit_cap_the_cores() {
    let mut small = node(&[8], 1);
    small.quota_millicores = Some(2500);
    assert_eq!(solve(&one(small.clone()), &request(1)).unwrap().places[0].threads, 2);
    let limited = Request { core_limit: Some(1), ..request(1) };
    assert_eq!(solve(&one(small.clone()), &limited).unwrap().places[0].cpus, [0]);
    small.quota_millicores = Some(300);
    assert_eq!(solve(&one(small), &request(1)).unwrap().places[0].threads, 1);
}

#[test]
fn ignored_does_not_pin() {
    let asked = Request { mode: Mode::Ignored, ..request(2) };
    let answer = solve(&one(node(&[4], 1)), &asked).unwrap();
    assert!(answer.places.iter().all(|place| place.cpus.is_empty() && place.threads == 2));
}

#[test]
fn an_empty_cluster_is_unplaceable() {
    assert_eq!(solve(&Cluster::default(), &request(1)).unwrap_err(), Reason::TooFewNodes { need: 1, have: 0 });
}

/// Returns whether `processes` sets of `threads` cores fit inside NUMA nodes. Tries every
/// distribution.
fn brute_force_fits(room: &[usize], processes: u32, threads: usize) -> bool {
    match room.split_first() {
        None => processes == 0,
        Some((first, rest)) => (0..=(first / threads) as u32)
            .any(|here| here <= processes && brute_force_fits(rest, processes - here, threads)),
    }
}

proptest! {
    #[test]
    fn placements_are_sound(
        cores in prop::collection::vec(1_usize..9, 1..4),
        smt in 1_u32..3,
        nodes in 1_u32..4,
        machines in 1_usize..4,
        processes in 1_u32..9,
        threads in prop::option::of(1_u32..10),
        limit in prop::option::of(1_u32..20),
        mode in prop::sample::select(vec![Mode::Required, Mode::Preferred]),
        numa_binding in prop::sample::select(vec![NumaBinding::Required, NumaBinding::Preferred, NumaBinding::None]),
    ) {
        let cluster = Cluster { nodes: vec![node(&cores, smt); machines] };
        let asked = Request { nodes, processes_per_node: processes, threads, core_limit: limit, mode, numa_binding };
        let answer = solve(&cluster, &asked);
        prop_assert_eq!(&answer, &solve(&cluster, &asked), "deterministic");
        let total: usize = cores.iter().sum();
        let usable = total.min(limit.unwrap_or(u32::MAX) as usize);
        match answer {
            Ok(answer) => {
                prop_assert_eq!(answer.places.len() as u32, nodes * processes, "all or nothing");
                let oversubscribed = answer.warnings.iter().any(|warning| matches!(warning, Warning::Oversubscribed { .. }));
                for ord in 0..machines as u32 {
                    let here: Vec<_> = answer.places.iter().filter(|place| place.node.0 == ord).collect();
                    let mut used: Vec<u32> = here.iter().flat_map(|place| place.cpus.clone()).collect();
                    let claimed = used.len();
                    used.sort_unstable();
                    used.dedup();
                    prop_assert!(used.len() <= usable * smt as usize, "within the limit");
                    if !oversubscribed {
                        prop_assert_eq!(used.len(), claimed, "no CPU twice");
                        prop_assert!(here.iter().all(|place| place.cores == place.threads), "a core per thread");
                    }
                }
                if mode == Mode::Required {
                    prop_assert!(!oversubscribed && nodes as usize <= machines);
                }
                if numa_binding == NumaBinding::Required && !oversubscribed {
                    prop_assert!(answer.places.iter().all(|place| place.numa_nodes.len() == 1), "inside a NUMA node");
                }
                let order: Vec<(u32, Vec<u32>)> = answer.places.iter().map(|place| (place.node.0, place.numa_nodes.clone())).collect();
                if numa_binding != NumaBinding::None && !oversubscribed {
                    prop_assert!(order.is_sorted(), "consecutive ranks are neighbours");
                }
            }
            Err(Reason::TooFewNodes { .. }) => prop_assert!(mode == Mode::Required && nodes as usize > machines),
            Err(Reason::TooFewCores { processes, threads, have, .. }) => {
                prop_assert!(mode == Mode::Required && processes * threads > have);
                prop_assert_eq!(have as usize, usable);
            }
            Err(Reason::NoNumaNodeFits { processes, threads, .. }) => {
                prop_assert!(!brute_force_fits(&cores, processes, threads as usize)
                    || (processes * threads) as usize > usable, "brute force found a fit");
            }
        }
    }
}
