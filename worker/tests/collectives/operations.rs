//! Every operation, element type and algorithm, against f64 or exact integers.

use crate::collective_support::{config, free_port};
use half::{bf16, f16};
use std::hash::{DefaultHasher, Hash, Hasher};
use switchyard_worker::comm::{
    Algorithm, Collectives, CommError, Force, Group, GroupConfig, Number, Options, Reducer, Reduction,
};
use switchyard_worker_contract::config::Transport;

const LENS: [usize; 7] = [0, 1, 3, 17, 63, 257, 1021];

/// Two of [`LENS`]. Successive rounds go through all of them, because every length in every round
/// would triple the time and run no other plan.
fn lens(round: usize) -> [usize; 2] {
    [round, round + 3].map(|i| LENS[i % LENS.len()])
}

/// Runs one thread per rank, each with its own collectives.
fn ranks<T: Send>(
    world: u32,
    algorithm: impl Fn(u32) -> Option<Algorithm> + Sync,
    change: impl Fn(&mut GroupConfig) + Sync,
    body: impl Fn(&mut Group, Result<Collectives, CommError>) -> T + Sync,
) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let (algorithm, change, body) = (&algorithm, &change, &body);
                scope.spawn(move || {
                    let mut config = config(rank, world, port);
                    change(&mut config);
                    let mut group = Group::join(&config).unwrap();
                    let collectives = Collectives::connect(&mut group, algorithm(rank));
                    body(&mut group, collectives)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A type with test values and a reference.
trait Value: Number + PartialEq + std::fmt::Debug {
    fn of(seed: u32) -> Self;
    fn real(self) -> f64;
    /// The exact sum, wrapped around; `None` for floats.
    fn exact_sum(values: &[Self]) -> Option<Self>;
    /// The quotient, truncated; of integers only.
    fn quotient(self, ranks: u32) -> Self;
    /// Relative rounding error of an addition.
    const ROUNDING: f64;
}

macro_rules! integer {
    ($type:ty) => {
        impl Value for $type {
            const ROUNDING: f64 = 0.0;

            fn of(seed: u32) -> Self {
                (i64::from(seed).wrapping_mul(0x9e37_79b9_7f4a) >> 3) as $type
            }

            fn real(self) -> f64 {
                self as f64
            }

            fn exact_sum(values: &[Self]) -> Option<Self> {
                Some(values.iter().map(|value| i128::from(*value)).sum::<i128>() as $type)
            }

            fn quotient(self, ranks: u32) -> Self {
                (i128::from(self) / i128::from(ranks)) as $type
            }
        }
    };
}

macro_rules! float {
    ($type:ty, $from:expr, $rounding:expr) => {
        impl Value for $type {
            const ROUNDING: f64 = $rounding;

            fn of(seed: u32) -> Self {
                $from((seed.wrapping_mul(0x85eb_ca6b) >> 8) as f32 / 65_536.0 - 128.0)
            }

            fn real(self) -> f64 {
                f64::from(self)
            }

            fn exact_sum(_: &[Self]) -> Option<Self> {
                None
            }

            fn quotient(self, _: u32) -> Self {
                self
            }
        }
    };
}

integer!(i32);
integer!(i64);
integer!(u8);
float!(f32, |x| x, f32::EPSILON as f64);
float!(f16, f16::from_f32, 1.0 / 2048.0);
float!(bf16, bf16::from_f32, 1.0 / 256.0);

fn value<T: Value>(rank: u32, i: usize) -> T {
    T::of((i as u32).wrapping_mul(2_654_435_761) ^ rank.wrapping_mul(0x9e37_79b9) ^ 0x5bd1)
}

fn own<T: Value>(rank: u32, len: usize) -> Vec<T> {
    (0..len).map(|i| value(rank, i)).collect()
}

/// Checks element `i` of a reduction over all ranks.
fn check<T: Value>(got: T, world: u32, i: usize, reduction: Reduction) {
    let values: Vec<T> = (0..world).map(|rank| value(rank, i)).collect();
    let reals = || values.iter().map(|value| value.real());
    let what = format!("{} {} of {values:?}, element {i}", T::DATA_TYPE.name(), reduction.name());
    match (reduction, T::exact_sum(&values)) {
        (Reduction::Min, _) => assert_eq!(got.real(), reals().fold(f64::INFINITY, f64::min), "{what}"),
        (Reduction::Max, _) => assert_eq!(got.real(), reals().fold(f64::NEG_INFINITY, f64::max), "{what}"),
        (Reduction::Sum, Some(sum)) => assert_eq!(got, sum, "{what}"),
        (Reduction::Average, Some(sum)) => assert_eq!(got, sum.quotient(world), "{what}"),
        (_, None) => {
            let scale = if reduction == Reduction::Average { f64::from(world) } else { 1.0 };
            let (want, size) = (reals().sum::<f64>() / scale, reals().map(f64::abs).sum::<f64>() / scale);
            let most = f64::from(world + 1) * T::ROUNDING * size;
            assert!((got.real() - want).abs() <= most, "{what}: got {got:?}, expected {want} within {most}");
        }
    }
}

fn hash<T: Value>(hasher: &mut DefaultHasher, values: &[T]) {
    bytemuck::cast_slice::<T, u8>(values).hash(hasher);
}

/// Runs every operation on this type. Returns a digest of the results that are equal on all ranks.
fn exercise<T: Value>(comm: &mut Collectives, rank: u32, world: u32, lens: [usize; 2]) -> u64 {
    let mut bits = DefaultHasher::new();
    let junk = || T::of(0xdead_beef);
    for len in lens {
        for reduction in Reduction::ALL {
            let mut data = own::<T>(rank, len);
            comm.all_reduce(&mut data, reduction).unwrap();
            data.iter().enumerate().for_each(|(i, got)| check(*got, world, i, reduction));
            hash(&mut bits, &data);

            let mut scattered = own::<T>(rank, len);
            let mine = comm.reduce_scatter(&mut scattered, reduction).unwrap();
            assert_eq!(mine, comm.shard(len, rank));
            mine.clone().for_each(|i| check(scattered[i], world, i, reduction));
        }

        let mut gathered = vec![junk(); len];
        let mine = comm.shard(len, rank);
        gathered[mine.clone()].copy_from_slice(&own::<T>(rank, len)[mine]);
        comm.all_gather(&mut gathered).unwrap();
        for other in 0..world {
            let part = comm.shard(len, other);
            assert_eq!(gathered[part.clone()], own::<T>(other, len)[part], "all-gather, shard {other}");
        }
        hash(&mut bits, &gathered);

        for root in [0, world / 2, world - 1] {
            let mut data = if rank == root { own::<T>(root, len) } else { vec![junk(); len] };
            comm.broadcast(&mut data, root).unwrap();
            assert_eq!(data, own::<T>(root, len), "broadcast from {root}");
        }

        let block = |from: u32, to: u32| (0..len).map(move |i| value::<T>(from * 16 + to, i));
        let mut blocks: Vec<T> = (0..world).flat_map(|to| block(rank, to)).collect();
        comm.all_to_all(&mut blocks).unwrap();
        let want: Vec<T> = (0..world).flat_map(|from| block(from, rank)).collect();
        assert_eq!(blocks, want, "all-to-all");

        if world > 1 {
            let (left, right) = ((rank + world - 1) % world, (rank + 1) % world);
            let mut got = vec![junk(); len];
            // Even ranks send first; two even neighbours at the end of an odd ring send in turn.
            if rank.is_multiple_of(2) {
                comm.send(&own::<T>(rank, len), right).unwrap();
                comm.receive(&mut got, left).unwrap();
            } else {
                comm.receive(&mut got, left).unwrap();
                comm.send(&own::<T>(rank, len), right).unwrap();
            }
            assert_eq!(got, own::<T>(left, len), "message");
        }
        let partner = rank ^ 1;
        if partner < world {
            let mut halves = [own::<T>(rank, len), vec![junk(); len]].concat();
            comm.exchange(&mut halves, partner).unwrap();
            assert_eq!(halves, [own::<T>(rank, len), own::<T>(partner, len)].concat(), "exchange");
        }
        comm.barrier().unwrap();
    }
    bits.finish()
}

type Exercise = fn(&mut Collectives, u32, u32, [usize; 2]) -> u64;

const TYPES: [[Exercise; 2]; 3] =
    [[exercise::<f32>, exercise::<i64>], [exercise::<f16>, exercise::<i32>], [exercise::<bf16>, exercise::<u8>]];

/// Runs every operation on a type of floats and one of integers. Successive numbers of ranks go
/// through all types, because plans do not depend on them.
fn exercise_types(world: u32, algorithm: Option<Algorithm>, change: impl Fn(&mut GroupConfig) + Sync) -> [u64; 2] {
    let first = world as usize + algorithm.map_or(0, |algorithm| 1 + algorithm as usize);
    let digests = ranks(
        world,
        |_| algorithm,
        change,
        |group, comm| {
            let mut comm = comm.unwrap();
            let mut on = |exercise: Exercise, lens| exercise(&mut comm, group.rank(), world, lens);
            let [floats, integers] = TYPES[world as usize % TYPES.len()];
            let digests = [on(floats, lens(first)), on(integers, lens(first + 1))];
            group.barrier().unwrap();
            digests
        },
    );
    assert!(digests.iter().all(|bits| *bits == digests[0]), "{algorithm:?}: ranks differ: {digests:x?}");
    digests[0]
}

fn choices() -> impl Iterator<Item = Option<Algorithm>> {
    Algorithm::ALL.into_iter().map(Some).chain([None])
}

#[test]
fn every_operation_over_tcp_and_with_the_same_bits_through_shared_memory() {
    // The other algorithms cannot all-reduce on one host, so the cost model would choose.
    let on_one_host = [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling, Algorithm::Tree];
    for world in 1..=9 {
        for algorithm in choices() {
            let bits = exercise_types(world, algorithm, |c| c.transport = Force::Tcp);
            if algorithm.is_some_and(|algorithm| on_one_host.contains(&algorithm)) {
                // All ranks are on one host both times, so the plans are the same.
                assert_eq!(bits, exercise_types(world, algorithm, |_| {}), "{algorithm:?}");
            }
        }
    }
}

#[test]
fn every_operation_on_several_hosts_gives_the_same_bits_in_every_run() {
    for (world, hosts) in [(4, 2), (5, 2), (7, 3), (9, 4)] {
        for algorithm in choices() {
            let change = |c: &mut GroupConfig| c.host_id = format!("host-{}", c.rank() % hosts);
            assert_eq!(exercise_types(world, algorithm, change), exercise_types(world, algorithm, change));
        }
    }
}

#[test]
fn long_buffers_pass_through_short_channels() {
    for hosts in [1, 2, 5] {
        for algorithm in choices() {
            let change = |c: &mut GroupConfig| c.host_id = format!("host-{}", c.rank() % hosts);
            ranks(
                5,
                |_| algorithm,
                change,
                |group, comm| {
                    let (mut comm, rank) = (comm.unwrap(), group.rank() as i64);
                    let len = 400_003;
                    let mut data: Vec<i64> = (0..len).map(|i| i * (rank + 1)).collect();
                    comm.all_reduce(&mut data, Reduction::Sum).unwrap();
                    assert!((0..len).zip(&data).all(|(i, got)| *got == 15 * i));
                    let mut data: Vec<i64> = (0..5 * len).map(|i| i * 5 + rank).collect();
                    comm.all_to_all(&mut data).unwrap();
                    assert!((0..5 * len).zip(&data).all(|(i, got)| *got == (rank * len + i % len) * 5 + i / len));
                    group.barrier().unwrap();
                },
            );
        }
    }
}

#[test]
fn the_choice_and_the_transport_are_visible() {
    for (hosts, transport) in [(1, Transport::Shm), (2, Transport::Hierarchical), (4, Transport::Tcp)] {
        let change = |c: &mut GroupConfig| c.host_id = format!("host-{}", c.rank() % hosts);
        let seen = ranks(
            4,
            |_| None,
            change,
            |group, comm| {
                let mut comm = comm.unwrap();
                assert_eq!((comm.transport(), comm.last_algorithm()), (transport, None));
                comm.all_reduce(&mut [1.0f32], Reduction::Sum).unwrap();
                let short = comm.last_algorithm().unwrap();
                comm.all_reduce(&mut vec![1.0f32; 1 << 20], Reduction::Sum).unwrap();
                group.barrier().unwrap();
                (short, comm.last_algorithm().unwrap())
            },
        );
        assert!(seen.iter().all(|choice| *choice == seen[0]), "{seen:?}");
        let (short, long) = seen[0];
        assert_ne!(short, Algorithm::Ring, "{hosts} hosts");
        assert_ne!(long, Algorithm::RecursiveDoubling, "{hosts} hosts");
    }
}

#[test]
fn ranks_that_start_different_operations_are_named() {
    type Start = fn(&mut Collectives) -> Result<(), CommError>;
    let odd: [(Start, &str); 4] = [
        (|comm| comm.barrier(), "all-reduce 2 of 1 u8 values (max"),
        (|comm| comm.broadcast(&mut [0.0f32; 100], 0), "broadcast 2 of 100 f32 values from rank 0"),
        (|comm| comm.all_reduce(&mut [0.0f32; 99], Reduction::Sum), "all-reduce 2 of 99 f32 values (sum"),
        (|comm| comm.all_reduce(&mut [0.0f32; 100], Reduction::Min), "all-reduce 2 of 100 f32 values (min"),
    ];
    for (start, text) in odd {
        for transport in [Force::Auto, Force::Tcp] {
            let errors = ranks(
                4,
                |_| None,
                |c| c.transport = transport,
                |group, comm| {
                    let mut comm = comm.unwrap();
                    // A slow rank learns of the failure while it is still in the first barrier.
                    let result = comm.barrier().and_then(|()| match group.rank() {
                        2 => start(&mut comm),
                        _ => comm.all_reduce(&mut [0.0f32; 100], Reduction::Sum),
                    });
                    // A rank without work left finds the failure at its next call.
                    let result = result.and_then(|()| comm.barrier()).and_then(|()| comm.barrier());
                    result.unwrap_err().to_string()
                },
            );
            assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
            assert!(errors[0].contains("out of step") && errors[0].contains(text), "{}", errors[0]);
        }
    }
}

#[test]
fn a_rank_that_ends_in_the_middle_is_the_root_cause_on_all_others() {
    for transport in [Force::Auto, Force::Tcp] {
        for algorithm in choices() {
            let errors = ranks(
                5,
                |_| algorithm,
                |c| c.transport = transport,
                |group, comm| {
                    let mut comm = comm.unwrap();
                    let mut data = vec![1.0f32; 100_000];
                    comm.all_reduce(&mut data, Reduction::Average).unwrap();
                    group.barrier().unwrap();
                    if group.rank() == 3 {
                        return None;
                    }
                    let error = (0..).find_map(|_| comm.all_reduce(&mut data, Reduction::Average).err());
                    error.and_then(|error| error.cause().map(|cause| cause.origin_rank))
                },
            );
            assert_eq!(errors, [Some(3), Some(3), Some(3), None, Some(3)], "{algorithm:?}");
        }
    }
}

#[test]
fn invalid_arguments_are_named() {
    ranks(
        2,
        |_| None,
        |_| {},
        |group, comm| {
            let mut comm = comm.unwrap();
            let text = comm.broadcast(&mut [0u8], 2).unwrap_err().to_string();
            assert_eq!(text, "root: got 2, expected a rank below 2");
            let text = comm.all_to_all(&mut [0i32; 3]).unwrap_err().to_string();
            assert_eq!(text, "all-to-all: got 3 elements, expected a multiple of 2");
            let rank = group.rank();
            let text = comm.send(&[0i64], rank).unwrap_err().to_string();
            assert_eq!(text, format!("receiver: got {rank}, expected a rank below 2, other than {rank}"));
            // Nothing has been started.
            comm.barrier().unwrap();
            group.barrier().unwrap();
        },
    );
}

#[test]
fn ranks_with_different_algorithms_are_named() {
    let algorithm = |rank| (rank == 1).then_some(Algorithm::Tree);
    let errors = ranks(3, algorithm, |_| {}, |_, comm| comm.err().unwrap().to_string());
    assert!(
        errors.iter().all(|text| text.contains("rank 1") && text.contains("asks for tree over auto")),
        "{errors:?}"
    );
}

/// More than any buffer between two ranks holds: with two sends, both would wait for room.
#[test]
fn two_ranks_exchange_more_than_their_buffers_hold() {
    const LEN: usize = 8 << 20;
    for transport in [Force::Auto, Force::Tcp] {
        let received = ranks(
            2,
            |_| None,
            |config| config.transport = transport,
            |group, comm| {
                let mut halves = vec![group.rank() as u8 + 1; 2 * LEN];
                comm.unwrap().exchange(&mut halves, 1 - group.rank()).unwrap();
                (halves[..LEN].iter().all(|own| *own == group.rank() as u8 + 1), halves.split_off(LEN))
            },
        );
        for (rank, (is_kept, other)) in received.into_iter().enumerate() {
            assert!(is_kept && other.iter().all(|value| usize::from(*value) == 2 - rank), "rank {rank}");
        }
    }
}

/// Two groups of ranks reduce different buckets at the same time: in one process's memory, over
/// TCP, and with the ranks of a group on different hosts.
#[test]
fn some_ranks_reduce_among_themselves() {
    let on_hosts = |config: &mut GroupConfig| config.host_id = format!("host-{}", config.rank() / 2);
    let over_tcp = |config: &mut GroupConfig| config.transport = Force::Tcp;
    let changes: [&(dyn Fn(&mut GroupConfig) + Sync); 3] = [&|_| (), &over_tcp, &on_hosts];
    for change in changes {
        for members in [[vec![0, 2, 3], vec![1]], [vec![0, 2], vec![1, 3]], [vec![0, 1], vec![2, 3]]] {
            let sums = ranks(
                4,
                |_| None,
                change,
                |group, _| {
                    let rank = group.rank();
                    let own = members.iter().find(|members| members.contains(&rank)).unwrap();
                    let lens = [3, 1000 * own.len()];
                    let mut reducer = Reducer::connect_among(group, own, &lens, &Options::default()).unwrap();
                    for bucket in [0, 1] {
                        reducer.bucket_mut(bucket).fill((1 << rank) as f32);
                        reducer.start(bucket);
                    }
                    let expected: f32 = own.iter().map(|rank| (1 << rank) as f32).sum();
                    for bucket in [0, 1] {
                        reducer.wait(bucket).unwrap();
                        assert!(reducer.bucket(bucket).iter().all(|sum| *sum == expected), "rank {rank} of {own:?}");
                    }
                    group.barrier().unwrap();
                    expected
                },
            );
            assert_eq!(sums.len(), 4);
        }
    }
}
