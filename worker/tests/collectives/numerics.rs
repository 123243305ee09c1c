//! Sums are right, and bit-identical on all ranks and from run to run.

use crate::collective_support::{Rank, group, group_with, number, try_group, try_group_with};
use std::hash::{DefaultHasher, Hash, Hasher};
use switchyard_worker::comm::{Algorithm, Force, GroupConfig, Options, Wire};
use switchyard_worker_contract::config::Transport;

const LENS: [usize; 12] = [0, 1, 3, 15, 16, 17, 256, 257, 1000, 4096, 65_537, 200_003];

fn digest(bits: &mut DefaultHasher, values: &[f32]) {
    for value in values {
        value.to_bits().hash(bits);
    }
}

fn run(world: u32, transport: Transport, change: impl Fn(&mut GroupConfig) + Sync) -> u64 {
    run_in_lanes(1, world, transport, change)
}

/// Reduces all sizes twice, checks every value, and returns a digest of all bits.
fn run_in_lanes(lanes: u32, world: u32, transport: Transport, change: impl Fn(&mut GroupConfig) + Sync) -> u64 {
    let options = Options { lanes, ..Options::default() };
    let digests = group_with(world, options, change, &LENS, |mut comm| {
        assert_eq!((comm.reducer.transport(), comm.reducer.lanes()), (transport, lanes as usize));
        let mut bits = DefaultHasher::new();
        for round in 0..2 {
            for (b, len) in LENS.into_iter().enumerate() {
                let rank = comm.group.rank();
                assert_eq!(comm.reducer.bucket(b).len(), len);
                assert_eq!(comm.reducer.bucket(b).as_ptr() as usize % 64, 0);
                comm.reducer.bucket_mut(b).iter_mut().enumerate().for_each(|(i, x)| *x = number(rank, round, i));
                // The first round reduces one by one, the second all at once.
                if round == 0 {
                    comm.reducer.all_reduce(b).unwrap();
                } else {
                    comm.reducer.start(b);
                }
            }
            for b in (0..LENS.len()).rev() {
                comm.reducer.wait(b).unwrap();
            }
            for b in 0..LENS.len() {
                for (i, sum) in comm.reducer.bucket(b).iter().enumerate() {
                    let parts = (0..world).map(|rank| f64::from(number(rank, round, i)));
                    let exact: f64 = parts.clone().sum();
                    let size: f64 = parts.map(f64::abs).sum();
                    let error = (f64::from(*sum) - exact).abs();
                    assert!(error <= f64::from(world) * f64::from(f32::EPSILON) * size, "bucket {b}[{i}]: {error}");
                }
                digest(&mut bits, comm.reducer.bucket(b));
            }
        }
        comm.leave().unwrap();
        bits.finish()
    });
    assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "ranks differ: {digests:x?}");
    digests[0]
}

#[test]
fn one_rank_needs_no_peers() {
    run(1, Transport::None, |_| {});
}

#[test]
fn shared_memory() {
    for world in 2..=5 {
        let once = run(world, Transport::Shm, |_| {});
        assert_eq!(once, run(world, Transport::Shm, |c| c.transport = Force::Shm), "runs differ");
    }
}

#[test]
fn tcp_ring() {
    for world in 2..=5 {
        let once = run(world, Transport::Tcp, |c| c.transport = Force::Tcp);
        let hosts = run(world, Transport::Tcp, |c| c.host_id = format!("host-{}", c.rank()));
        assert_eq!(once, hosts, "runs differ");
    }
}

/// Values that every sum of up to nine of them holds exactly, in every format.
fn small_integer(rank: u32, i: usize) -> f32 {
    ((i as u32).wrapping_mul(2_654_435_761) >> 28) as f32 - 8.0 + rank as f32
}

#[test]
fn every_algorithm_between_hosts_reduces_in_every_format() {
    for world in 2..=9 {
        for algorithm in [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling, Algorithm::Tree] {
            for wire in [Wire::F32, Wire::F16, Wire::Bf16] {
                let options = Options { lanes: 2, wire, algorithm: Some(algorithm), ..Options::default() };
                let host = |c: &mut GroupConfig| c.host_id = format!("host-{}", c.rank());
                let results = try_group_with(
                    world,
                    |_| options,
                    host,
                    &LENS,
                    |comm| {
                        let mut comm = comm.map_err(|error| error.to_string())?;
                        for (b, len) in LENS.into_iter().enumerate() {
                            let rank = comm.group.rank();
                            (0..len).for_each(|i| comm.reducer.bucket_mut(b)[i] = small_integer(rank, i));
                        }
                        // Some alone, some together.
                        comm.reducer.start_all(0..5, 0);
                        (5..LENS.len()).for_each(|b| comm.reducer.start(b));
                        for b in 0..LENS.len() {
                            comm.reducer.wait(b).unwrap();
                            assert_eq!(comm.reducer.algorithm(b), Some(algorithm));
                            for (i, sum) in comm.reducer.bucket(b).iter().enumerate() {
                                let want = (0..world).map(|rank| small_integer(rank, i)).sum::<f32>();
                                assert_eq!(
                                    *sum, want,
                                    "{algorithm} {wire:?} with {world} ranks, bucket {b}, element {i}"
                                );
                            }
                        }
                        comm.leave().unwrap();
                        Ok::<(), String>(())
                    },
                );
                // All ranks reduce a sum of their own, and would round differently.
                let refused = algorithm == Algorithm::RecursiveDoubling && wire != Wire::F32;
                for result in results {
                    let error = result.err().unwrap_or_default();
                    assert_eq!(
                        error.contains("got recursive-doubling, expected one that all-reduces"),
                        refused,
                        "{error}"
                    );
                }
            }
        }
    }
}

#[test]
fn shared_memory_inside_hosts_and_a_ring_between_them() {
    for (world, per_host) in [(3, 2), (4, 2), (5, 2), (5, 3)] {
        let host = |c: &mut GroupConfig| c.host_id = format!("host-{}", c.rank() / per_host);
        assert_eq!(run(world, Transport::Hierarchical, host), run(world, Transport::Hierarchical, host));
    }
    // Ranks of a host need not be adjacent.
    run(4, Transport::Hierarchical, |c| c.host_id = format!("host-{}", c.rank() % 2));
}

/// A transport and how to force it.
type Path = (Transport, fn(&mut GroupConfig));

#[test]
fn lanes_do_not_change_any_bit() {
    run_in_lanes(3, 1, Transport::None, |_| {});
    for world in 2..=5 {
        let mut paths: Vec<Path> = vec![(Transport::Shm, |_| {}), (Transport::Tcp, |c| c.transport = Force::Tcp)];
        if world > 2 {
            paths.push((Transport::Hierarchical, |c| c.host_id = format!("host-{}", c.rank() / 2)));
        }
        for (transport, change) in paths {
            let one = run_in_lanes(1, world, transport, change);
            for lanes in [2, 3, 8] {
                assert_eq!(one, run_in_lanes(lanes, world, transport, change), "{lanes} lanes, {world} ranks");
            }
        }
    }
}

#[test]
fn special_values_arrive_everywhere() {
    let cases = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
    for force in [Force::Shm, Force::Tcp] {
        group(
            3,
            |c| c.transport = force,
            &[4000],
            |mut comm| {
                let rank = comm.group.rank();
                let bucket = comm.reducer.bucket_mut(0);
                bucket.fill(if rank == 0 { -0.0 } else { 1.0 });
                if rank == 1 {
                    for (i, value) in cases.iter().enumerate() {
                        bucket[i * 1000] = *value;
                    }
                }
                comm.reducer.all_reduce(0).unwrap();
                let sum = comm.reducer.bucket(0);
                assert!(sum[0].is_nan());
                assert_eq!((sum[1000], sum[2000], sum[3000], sum[1]), (f32::INFINITY, f32::NEG_INFINITY, 1.0, 2.0));
                comm.leave().unwrap();
            },
        );
    }
}

#[test]
fn many_operations_of_every_size_in_sequence() {
    for hosts in [1, 2, 3] {
        group(
            3,
            |c| c.host_id = format!("host-{}", c.rank() % hosts),
            &[5, 3000, 256, 70_000],
            |mut comm| {
                for step in 0..300u32 {
                    for b in 0..4 {
                        comm.reducer.bucket_mut(b).fill((step % 17) as f32);
                        comm.reducer.start(b);
                        if step % 3 == 0 {
                            comm.reducer.wait(b).unwrap();
                        }
                    }
                    for b in 0..4 {
                        comm.reducer.wait(b).unwrap();
                        assert!(
                            comm.reducer.bucket(b).iter().all(|x| *x == 3.0 * (step % 17) as f32),
                            "step {step} bucket {b}"
                        );
                    }
                }
                comm.leave().unwrap();
            },
        );
    }
}

#[test]
fn agreement_names_the_ranks_and_both_values() {
    group(
        4,
        |_| {},
        &[8],
        |mut comm| {
            comm.group.agree("the configuration", b"same").unwrap();
            let mine: &[u8] = if comm.group.rank() == 2 { b"bert" } else { b"gpt" };
            let text = comm.group.agree("the model", mine).unwrap_err().to_string();
            assert_eq!(text, "the ranks disagree on the model: ranks 0, 1, 3 have \"gpt\"; rank 2 has \"bert\"");
            // A disagreement is not a failure of the group.
            comm.group.agree("bytes", &[0, 255]).unwrap();
            let rank = comm.group.rank();
            let own = vec![rank as u8; rank as usize];
            let all: Vec<Vec<u8>> = (0..4).map(|rank| vec![rank as u8; rank]).collect();
            assert_eq!(comm.group.all_gather("names", &own).unwrap(), all);
            assert_eq!(comm.group.gather("names", &own).unwrap(), if rank == 0 { all } else { Vec::new() });
            let long = vec![rank as u8; 1 << 20];
            assert_eq!(comm.group.gather("long ones", &long).unwrap().len(), if rank == 0 { 4 } else { 0 });
            assert_eq!(comm.group.sum("two numbers", [f64::from(rank), 0.5]).unwrap(), [6.0, 2.0]);
            comm.group.barrier().unwrap();
            comm.reducer.all_reduce(0).unwrap();
            let what = if comm.group.rank() == 3 { "b" } else { "a" };
            let text = comm.group.agree(what, b"").unwrap_err().to_string();
            assert!(text.contains("rank 3 asks for agreement on b"), "{text}");
            assert!(comm.group.agree("too much", &[0; 5000]).is_err());
            comm.leave().unwrap();
        },
    );
}

#[test]
fn shared_memory_cannot_be_forced_across_hosts() {
    let errors = try_group(
        2,
        |c| {
            c.transport = Force::Shm;
            c.host_id = format!("host-{}", c.rank());
        },
        &[8],
        |result| result.err().map(|e| e.to_string()).unwrap(),
    );
    assert!(errors.iter().all(|text| text.contains("2 hosts")), "{errors:?}");
}

#[test]
fn ranks_with_different_options_are_named() {
    for (odd, expected) in [
        (
            Options { lanes: 3, wire: Wire::F16, ..Options::default() },
            "asks for 3 lanes of communication with f16 on the wire, rank 0 for 2 with f16",
        ),
        (
            Options { lanes: 2, wire: Wire::Bf16, ..Options::default() },
            "2 lanes of communication with bf16 on the wire, rank 0 for 2 with f16",
        ),
    ] {
        let options = |rank| if rank == 1 { odd } else { Options { lanes: 2, wire: Wire::F16, ..Options::default() } };
        let errors = try_group_with(3, options, |_| {}, &[8, 8], |result| result.err().map(|e| e.to_string()).unwrap());
        assert!(errors.iter().all(|text| text.contains("rank 1") && text.contains(expected)), "{errors:?}");
    }
    for lanes in [0, 9] {
        let options = Options { lanes, ..Options::default() };
        let text =
            Rank::connect(&crate::collective_support::config(0, 1, 1), &[8], &options).err().unwrap().to_string();
        assert!(text.contains(&format!("got {lanes} lanes")) && text.contains("expected 1 to 8 lanes"), "{text}");
    }
}

#[test]
fn ranks_with_different_buckets_are_named() {
    let port = crate::collective_support::free_port();
    let errors: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn(move || {
                    let lens: &[usize] = if rank == 2 { &[10, 20] } else { &[10, 21] };
                    let config = crate::collective_support::config(rank, 3, port);
                    let result = Rank::connect(&config, lens, &Options::default());
                    result.err().map(|e| e.to_string()).unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(errors.iter().all(|text| text.contains("rank 2") && text.contains("of 30 numbers")), "{errors:?}");
}

#[test]
#[should_panic(expected = "in flight")]
fn a_bucket_in_flight_cannot_be_touched() {
    let config = crate::collective_support::config(0, 1, 1);
    let mut comm = Rank::connect(&config, &[8], &Options::default()).unwrap();
    comm.reducer.start(0);
    comm.reducer.bucket_mut(0)[0] = 1.0;
}

/// A scatter followed by a gather, for buckets alone and together.
#[test]
fn a_scatter_and_a_gather_are_an_all_reduce_bit_for_bit() {
    let algorithms = [None, Some(Algorithm::Ring), Some(Algorithm::HalvingDoubling), Some(Algorithm::Tree)];
    let host = |hosts: u32| move |c: &mut GroupConfig| c.host_id = format!("host-{}", c.rank() % hosts);
    for world in 1..=6 {
        // All ranks on one host, some on each of two, one on each.
        for hosts in [1, 2, world] {
            for (algorithm, wire) in algorithms.into_iter().flat_map(|one| [(one, Wire::F32), (one, Wire::Bf16)]) {
                let options = Options { lanes: 2, wire, algorithm, ..Options::default() };
                let digests = group_with(world, options, host(hosts), &LENS, |mut comm| {
                    let rank = comm.group.rank();
                    let fill = |comm: &mut Rank| {
                        for b in 0..LENS.len() {
                            comm.reducer
                                .bucket_mut(b)
                                .iter_mut()
                                .enumerate()
                                .for_each(|(i, x)| *x = number(rank, 0, i));
                        }
                    };
                    let wait = |comm: &mut Rank| (0..LENS.len()).for_each(|b| comm.reducer.wait(b).unwrap());
                    let parts = |comm: &Rank| {
                        let mut bits = DefaultHasher::new();
                        (0..LENS.len()).for_each(|b| digest(&mut bits, comm.reducer.bucket(b)));
                        bits.finish()
                    };
                    fill(&mut comm);
                    (0..LENS.len()).for_each(|b| comm.reducer.start(b));
                    wait(&mut comm);
                    let (expected, sums) = (parts(&comm), (0..LENS.len()).map(|b| comm.reducer.bucket(b).to_vec()));
                    let sums: Vec<Vec<f32>> = sums.collect();
                    let whole = comm.reducer.bytes_sent();
                    for together in [false, true] {
                        let before = comm.reducer.bytes_sent();
                        fill(&mut comm);
                        if together {
                            comm.reducer.scatter_all(0..LENS.len(), 1);
                        } else {
                            (0..LENS.len()).for_each(|b| comm.reducer.scatter_all(b..b + 1, b));
                        }
                        wait(&mut comm);
                        for (b, sum) in sums.iter().enumerate() {
                            let own = comm.reducer.shard(b, rank);
                            assert_eq!(comm.reducer.bucket(b)[own.clone()], sum[own.clone()], "bucket {b}");
                            // What others own must come from them.
                            let bucket = comm.reducer.bucket_mut(b);
                            bucket[..own.start].fill(f32::NAN);
                            bucket[own.end..].fill(f32::NAN);
                        }
                        if together {
                            comm.reducer.gather_all(0..LENS.len(), 0);
                        } else {
                            (0..LENS.len()).for_each(|b| comm.reducer.gather_all(b..b + 1, b));
                        }
                        wait(&mut comm);
                        assert_eq!(parts(&comm), expected, "{world} ranks on {hosts} hosts, {algorithm:?}, {wire:?}");
                        let sent = comm.reducer.bytes_sent() - before;
                        if algorithm == Some(Algorithm::Ring) && wire == Wire::F32 && together {
                            assert!(20 * sent <= 21 * whole, "{sent} bytes instead of {whole}");
                        }
                    }
                    comm.leave().unwrap();
                    expected
                });
                assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "ranks differ: {digests:x?}");
            }
        }
    }
}

#[test]
fn a_scatter_and_an_all_reduce_of_the_same_bucket_are_out_of_step() {
    for hosts in [1, 2] {
        let host = |c: &mut GroupConfig| c.host_id = format!("host-{}", c.rank() % hosts);
        let texts = group(2, host, &[1000], |mut comm| {
            match comm.group.rank() {
                0 => comm.reducer.start_all(0..1, 0),
                _ => comm.reducer.scatter_all(0..1, 0),
            }
            comm.reducer.wait(0).unwrap_err().to_string()
        });
        for text in texts {
            assert!(text.contains("the all_reduce of bucket 0") || text.contains("reduce_scatter"), "{text}");
            assert!(text.contains("out of step"), "{text}");
        }
    }
}
