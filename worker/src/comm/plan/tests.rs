//! Every algorithm, symbolically, for up to 64 ranks; and plans with injected faults.

use super::*;
use verify::{Fault, Measured, verify};

fn layout(hosts: &[usize], rank: usize) -> Layout {
    Layout { rank, hosts: hosts.to_vec() }
}

fn programs(algorithm: Algorithm, hosts: &[usize], collective: Collective) -> Option<Vec<Program>> {
    (0..hosts.len()).map(|rank| algorithm.program(&layout(hosts, rank), collective)).collect()
}

/// All ranks on one host.
fn flat(n: usize) -> Vec<usize> {
    vec![0; n]
}

fn collectives(n: usize) -> Vec<Collective> {
    let roots = [0, n / 2, n - 1].map(|root| Collective::Broadcast { root });
    let others = [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, Collective::AllToAll];
    others.into_iter().chain(roots).collect()
}

#[test]
fn every_plan_up_to_64_ranks_is_correct() {
    let mut checked = 0;
    for n in 2..=64 {
        for collective in collectives(n) {
            for algorithm in Algorithm::ALL {
                let Some(programs) = programs(algorithm, &flat(n), collective) else { continue };
                if let Err(fault) = verify(&programs, collective) {
                    panic!("{algorithm} {collective:?} with {n} ranks: {fault:?}");
                }
                checked += 1;
            }
        }
    }
    // Ring: 6 of 7; tree: 4; pairwise: 3; recursive doubling and halving-doubling: 1, and 2 each
    // for the 6 powers of two.
    assert_eq!(checked, 63 * (6 + 4 + 3 + 2) + 6 * 2);
}

#[test]
fn hierarchical_plans_are_correct_for_even_and_uneven_hosts() {
    let mut layouts: Vec<Vec<usize>> = vec![
        vec![0, 0, 0, 1],
        vec![0, 1, 1, 1, 2],
        // Ranks of a host need not be consecutive.
        vec![0, 1, 0, 1, 2, 2, 0],
    ];
    for hosts in [2, 3, 5, 8] {
        layouts.extend([2, 3, 8].map(|ranks| (0..hosts).flat_map(|host| vec![host; ranks]).collect()));
    }
    for hosts in layouts {
        let programs = programs(Algorithm::Hierarchical, &hosts, Collective::AllReduce).unwrap();
        verify(&programs, Collective::AllReduce).unwrap_or_else(|fault| panic!("{hosts:?}: {fault:?}"));
    }
    for hosts in [vec![0, 0, 0], vec![0, 1, 2]] {
        assert_eq!(programs(Algorithm::Hierarchical, &hosts, Collective::AllReduce), None, "{hosts:?}");
    }
}

#[test]
fn every_collective_has_an_algorithm_for_every_number_of_ranks() {
    let model = CostModel { local: Path::MEMORY, remote: Path::NETWORK };
    for n in 1..=64 {
        for collective in collectives(n) {
            assert!(model.choose(&layout(&flat(n), 0), collective, 1000, |_| true).is_some(), "{collective:?} {n}");
        }
    }
}

#[test]
fn predicted_steps_and_bytes_are_those_of_the_plans() {
    for n in [2, 3, 4, 6, 7, 8, 16, 31, 64] {
        for collective in collectives(n) {
            for definition in DEFINITIONS {
                let Some(programs) = programs(definition.algorithm, &flat(n), collective) else { continue };
                let Measured { steps, bytes } = verify(&programs, collective).unwrap();
                let cost = (definition.cost)(&layout(&flat(n), 0), collective);
                let what =
                    format!("{} {collective:?} {n}: {cost:?}, measured {steps} and {bytes}", definition.algorithm);
                // A fold to a power of two adds two steps for some ranks only, and the price of
                // many receivers at once is not a number of steps.
                let most = if n.is_power_of_two() { 0.0 } else { 1.0 };
                if definition.algorithm != Algorithm::Pairwise {
                    assert!((0.0..=most).contains(&(cost.steps - steps as f64)), "{what}");
                }
                assert!((cost.bytes - bytes).abs() < 1e-9, "{what}");
            }
        }
    }
}

#[test]
fn definitions_are_in_the_order_of_the_variants() {
    let listed: Vec<Algorithm> = DEFINITIONS.iter().map(|definition| definition.algorithm).collect();
    assert_eq!(listed, Algorithm::ALL);
    for algorithm in Algorithm::ALL {
        assert_eq!(algorithm.name().parse(), Ok(algorithm));
    }
    let text = "nccl".parse::<Algorithm>().unwrap_err();
    assert!(text.contains("\"nccl\"") && text.contains("ring, recursive-doubling"), "{text}");
}

/// The programs of an all-reduce around a ring, with rank 1's replaced.
fn altered(change: impl FnOnce(&mut Vec<Step>)) -> Vec<Program> {
    let mut programs = programs(Algorithm::Ring, &flat(4), Collective::AllReduce).unwrap();
    let mut steps = programs[1].steps.clone();
    change(&mut steps);
    let mut program = Program::new(programs[1].chunks);
    for Step { peer, chunk, action } in steps {
        if action == Action::Send { program.send(peer, chunk) } else { program.receive(peer, chunk, action) }
    }
    programs[1] = program;
    programs
}

#[test]
fn a_dropped_step_is_found() {
    let mut found = 0;
    for step in 0..12 {
        let drop = |steps: &mut Vec<Step>| {
            steps.remove(step);
        };
        let fault = verify(&altered(drop), Collective::AllReduce).unwrap_err();
        assert!(matches!(fault, Fault::Mismatch { .. }), "step {step}: {fault:?}");
        found += 1;
    }
    assert_eq!(found, 12);
}

#[test]
fn a_doubled_contribution_is_found() {
    // The first received copy is added instead.
    let fault = verify(&altered(|steps| steps[7].action = Action::Reduce), Collective::AllReduce).unwrap_err();
    assert_eq!(fault, Fault::Doubled { rank: 1, step: 7 });
    // And a contribution that is lost.
    let fault = verify(&altered(|steps| steps[1].action = Action::Copy), Collective::AllReduce).unwrap_err();
    assert!(matches!(fault, Fault::Completion { .. } | Fault::Wrong { .. }), "{fault:?}");
    let fault = verify(&altered(|steps| steps[5].action = Action::Reduce), Collective::AllReduce).unwrap_err();
    assert_eq!(fault, Fault::Completion { rank: 1, step: 5 });
}

#[test]
fn a_cycle_is_found() {
    // Every rank waits for the left before it sends to the right.
    let n = 4;
    let cycle = |p: usize| {
        let mut program = Program::new(1);
        program.reduce((p + n - 1) % n, 0, false);
        program.send((p + 1) % n, 0);
        program
    };
    let programs: Vec<Program> = (0..n).map(cycle).collect();
    let fault = verify(&programs, Collective::AllReduce).unwrap_err();
    assert!(matches!(&fault, Fault::Deadlock(waiting) if waiting.len() == 2 * n), "{fault:?}");
}

#[test]
fn a_buffer_that_is_reused_early_is_found() {
    let mut programs = programs(Algorithm::Ring, &flat(4), Collective::AllReduce).unwrap();
    let (step, earlier) =
        (0..programs[2].steps.len()).find_map(|step| Some((step, *programs[2].after(step).first()?))).unwrap();
    programs[2].forget_order();
    assert_eq!(verify(&programs, Collective::AllReduce), Err(Fault::Unordered { rank: 2, step, earlier }));
}

#[test]
fn memory_without_a_value_is_not_sent() {
    let mut programs = programs(Algorithm::Ring, &flat(3), Collective::Broadcast { root: 0 }).unwrap();
    let mut early = Program::new(1);
    early.send(2, 0);
    early.copy(0, 0);
    programs[1] = early;
    assert_eq!(verify(&programs, Collective::Broadcast { root: 0 }), Err(Fault::Empty { rank: 1, step: 0 }));
}

#[test]
fn the_cost_model_prefers_few_steps_for_short_and_little_traffic_for_long_messages() {
    let model = CostModel { local: Path::MEMORY, remote: Path::NETWORK };
    let choose =
        |hosts: &[usize], bytes| model.choose(&layout(hosts, 0), Collective::AllReduce, bytes, |_| true).unwrap();
    let eight_hosts: Vec<usize> = (0..8).collect();
    assert_eq!(choose(&eight_hosts, 4), Algorithm::RecursiveDoubling);
    assert_eq!(choose(&eight_hosts, 512 << 10), Algorithm::HalvingDoubling);
    // The steps that halving saves take less time than the bandwidth that it loses.
    assert_eq!(choose(&eight_hosts, 4 << 20), Algorithm::Ring);
    assert_eq!(choose(&[0, 1, 2], 64 << 20), Algorithm::Ring);
    // Six ranks are folded to four, which costs two transfers of everything.
    assert_eq!(choose(&[0, 1, 2, 3, 4, 5], 64 << 20), Algorithm::Ring);
    let two_hosts: Vec<usize> = (0..16).map(|rank| rank / 8).collect();
    assert_eq!(choose(&two_hosts, 64 << 20), Algorithm::Hierarchical);
    assert_eq!(choose(&[0, 1], 1 << 20), Algorithm::Ring);
}

#[test]
fn a_noisy_measurement_does_not_change_the_choice() {
    let rates = [1.10e8, 1.15e8, 1.20e8].map(|rate| Path::NETWORK.with_rate(rate));
    assert!(rates.windows(2).all(|pair| pair[0] == pair[1]), "{rates:?}");
    assert_eq!(Path::NETWORK.with_rate(f64::NAN), Path::NETWORK);
}
