//! Traffic between hosts: rounded exactly where requested, equal on all ranks, and no more bytes
//! than needed.

use crate::collective_support::{group_with, number};
use half::{bf16, f16};
use std::{ops::Range, time::Duration};
use switchyard_worker::comm::{Algorithm, Force, GroupConfig, Options, Wire};

const LENS: [usize; 6] = [1, 17, 1000, 4099, 70_001, 150_000];
const WIRES: [Wire; 3] = [Wire::F32, Wire::F16, Wire::Bf16];

/// Ordinary values with some special ones: infinities, NaNs, subnormals of all formats, sums that
/// overflow f16 although their addends fit.
fn input(rank: u32, i: usize) -> f32 {
    match (i % 1009, rank) {
        (3, 1) => f32::INFINITY,
        (5, 0) => f32::NEG_INFINITY,
        (7, 1) => f32::NAN,
        (9, _) => -0.0,
        (11, _) => 1e-40,
        (13, _) => 3e-8 * (rank + 1) as f32,
        (15, _) => 40_000.0,
        (17, 0) => 1e30,
        (19, _) => 2e38,
        _ => number(rank, 0, i),
    }
}

fn rounded(wire: Wire, x: f32) -> f32 {
    match wire {
        Wire::F32 => x,
        Wire::F16 => f16::from_f32(x).to_f32(),
        Wire::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Segment `i` of `m`: a multiple of 16 values.
fn segment(len: usize, m: usize, i: usize) -> Range<usize> {
    let each = len.div_ceil(m).next_multiple_of(16);
    (each * i).min(len)..(each * (i + 1)).min(len)
}

/// The documented behaviour of the ring: segment `i` starts at member `i + 1`, is rounded before
/// each hop, and finally by member `i`, its owner.
fn ring_model(members: &[Vec<f32>], wire: Wire) -> Vec<f32> {
    let (m, len) = (members.len(), members[0].len());
    let mut sum = vec![0.0; len];
    for i in 0..m {
        for at in segment(len, m, i) {
            sum[at] = rounded(wire, members[(i + 1) % m][at]);
            for hop in 2..=m {
                sum[at] = rounded(wire, sum[at] + members[(i + hop) % m][at]);
            }
        }
    }
    sum
}

/// Addends of the ring members: of single ranks, or of all ranks of a host in rank order.
fn members(world: u32, per_host: u32, len: usize) -> Vec<Vec<f32>> {
    let of_host = |first: u32| {
        let ranks = first..(first + per_host).min(world);
        (0..len).map(|i| ranks.clone().map(|rank| input(rank, i)).reduce(|a, b| a + b).unwrap()).collect()
    };
    (0..world).step_by(per_host as usize).map(of_host).collect()
}

fn same_bits(got: &[f32], want: &[f32], what: &str) {
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
            "{what} [{i}]: {got:e}, not {want:e}"
        );
    }
}

/// The models of these tests add values in the order of a ring.
fn around_a_ring(lanes: u32, wire: Wire) -> Options {
    Options { lanes, wire, algorithm: Some(Algorithm::Ring), ..Options::default() }
}

#[test]
fn sums_match_the_model_bit_for_bit() {
    for (world, per_host) in [(2, 1), (3, 1), (4, 1), (5, 1), (3, 2), (4, 2), (5, 2)] {
        let change = |c: &mut GroupConfig| match per_host {
            1 => c.transport = Force::Tcp,
            _ => c.host_id = format!("host-{}", c.rank() / per_host),
        };
        for wire in WIRES {
            let wanted = LENS.map(|len| ring_model(&members(world, per_host, len), wire));
            for lanes in [1, 3] {
                let bits = group_with(world, around_a_ring(lanes, wire), change, &LENS, |mut comm| {
                    for b in 0..LENS.len() {
                        let rank = comm.group.rank();
                        comm.reducer.bucket_mut(b).iter_mut().enumerate().for_each(|(i, x)| *x = input(rank, i));
                        comm.reducer.start(b);
                    }
                    for (b, wanted) in wanted.iter().enumerate() {
                        comm.reducer.wait(b).unwrap();
                        same_bits(comm.reducer.bucket(b), wanted, &format!("{wire:?}, {world} ranks, bucket {b}"));
                    }
                    let bits: Vec<u32> = comm.reducer.bucket(4).iter().map(|x| x.to_bits()).collect();
                    comm.leave().unwrap();
                    bits
                });
                assert!(bits.windows(2).all(|pair| pair[0] == pair[1]), "ranks differ, not a number included");
            }
        }
    }
}

#[test]
fn the_error_is_at_most_half_an_ulp_per_member() {
    for (wire, unit, least) in [(Wire::F16, 2f64.powi(-11), 2f64.powi(-25)), (Wire::Bf16, 2f64.powi(-8), 0.0)] {
        let mut largest: f64 = 0.0;
        for m in 2..=5 {
            let parts: Vec<Vec<f32>> = (0..m).map(|rank| (0..3000).map(|i| number(rank, 1, i)).collect()).collect();
            for (i, sum) in ring_model(&parts, wire).iter().enumerate() {
                let exact: f64 = parts.iter().map(|part| f64::from(part[i])).sum();
                let size: f64 = parts.iter().map(|part| f64::from(part[i].abs())).sum();
                let allowed = f64::from(m) * (unit * size * 1.01 + least);
                let error = (f64::from(*sum) - exact).abs();
                assert!(error <= allowed, "{wire:?}, {m} members [{i}]: {error:e} > {allowed:e}");
                largest = largest.max(error / allowed);
            }
        }
        assert!(largest > 0.1, "the bound is never approached: {largest}");
    }
}

#[test]
fn an_f16_overflow_on_one_rank_reaches_all() {
    let options = Options { lanes: 2, wire: Wire::F16, ..Options::default() };
    let seen = group_with(
        4,
        options,
        |c| c.host_id = format!("host-{}", c.rank() % 2),
        &[5000, 5000],
        |mut comm| {
            let own = comm.group.rank() == 3;
            comm.reducer.bucket_mut(1)[4321] = if own { 1e6 } else { 0.0 };
            comm.reducer.all_reduce(0).unwrap();
            comm.reducer.all_reduce(1).unwrap();
            let finite = [0, 1].map(|b| comm.reducer.bucket(b).iter().all(|x| x.is_finite()));
            comm.leave().unwrap();
            finite
        },
    );
    assert_eq!(seen, [[true, false]; 4]);
}

#[test]
fn two_byte_formats_halve_the_traffic() {
    const HEADER: u64 = 32;
    const BUCKETS: [usize; 3] = [48_000, 192, 9600];
    for (world, lanes) in [(2, 1), (3, 1), (4, 3)] {
        let sent = |wire: Wire, force: Force| -> Vec<u64> {
            group_with(
                world,
                around_a_ring(lanes, wire),
                |c| c.transport = force,
                &BUCKETS,
                |mut comm| {
                    assert_eq!(comm.reducer.bytes_sent(), 0);
                    let mut sum = 0;
                    for (b, len) in BUCKETS.into_iter().enumerate() {
                        comm.reducer.all_reduce(b).unwrap();
                        let timing = comm.reducer.timing(b).unwrap();
                        assert_eq!(timing.bytes, 4 * len as u64);
                        sum += timing.sent;
                    }
                    assert_eq!(comm.reducer.bytes_sent(), sum);
                    comm.leave().unwrap();
                    sum
                },
            )
        };
        // Each rank sends 2 (m - 1) of m segments; these lengths divide evenly.
        let numbers: u64 = BUCKETS.iter().map(|len| *len as u64 * 2 * u64::from(world - 1) / u64::from(world)).sum();
        for (wire, size) in [(Wire::F32, 4), (Wire::F16, 2), (Wire::Bf16, 2)] {
            assert_eq!(sent(wire, Force::Tcp), vec![3 * HEADER + numbers * size; world as usize], "{wire:?}");
        }
        assert_eq!(sent(Wire::F16, Force::Shm), vec![0; world as usize]);
    }
}

/// A measurement decides which buckets are reduced together, so this must not change any sum.
#[test]
fn fused_reductions_match_separate_ones_bit_for_bit() {
    let lens = [33, 5_000, 1, 70_000, 16, 12_345];
    let numbers = |rank: u32, bucket: usize| {
        (0..lens[bucket]).map(move |i| ((i * 31 + bucket * 7 + 5) as f32 * (rank + 1) as f32).sin())
    };
    let layouts: [fn(&mut GroupConfig); 3] =
        [|c| c.transport = Force::Shm, |c| c.transport = Force::Tcp, |c| c.host_id = format!("host-{}", c.rank() / 2)];
    for (number, layout) in layouts.into_iter().enumerate() {
        for wire in [Wire::F32, Wire::F16] {
            let options = Options { lanes: 2, wire, ..Options::default() };
            let digests = group_with(5, options, layout, &lens, |mut comm| {
                let mut reduced = |runs: &[Range<usize>]| {
                    for bucket in 0..lens.len() {
                        let own = numbers(comm.group.rank(), bucket);
                        comm.reducer.bucket_mut(bucket).iter_mut().zip(own).for_each(|(number, own)| *number = own);
                    }
                    for (lane, run) in runs.iter().enumerate() {
                        comm.reducer.start_all(run.clone(), lane);
                    }
                    (0..lens.len()).for_each(|bucket| comm.reducer.wait(bucket).unwrap());
                    (0..lens.len())
                        .flat_map(|b| comm.reducer.bucket(b).iter().map(|x| x.to_bits()))
                        .collect::<Vec<u32>>()
                };
                let each = reduced(&[0..1, 1..2, 2..3, 3..4, 4..5, 5..6]);
                assert_eq!(each, reduced(std::slice::from_ref(&(0..6))), "{wire:?}, layout {number}");
                assert_eq!(each, reduced(&[0..1, 1..5, 5..6]), "{wire:?}, layout {number}");
                assert_eq!(comm.reducer.timing(1).unwrap().bytes, 4 * lens[1..5].iter().sum::<usize>() as u64);
                assert_eq!(comm.reducer.timing(2), None, "it is part of another one");
                comm.leave().unwrap();
                each
            });
            assert!(digests.windows(2).all(|pair| pair[0] == pair[1]), "{wire:?}, layout {number}");
        }
    }
}

#[test]
fn values_too_small_for_f16_survive_with_a_scale_or_in_4_bytes() {
    let own = |rank: u32, i: usize| 1e-9 * number(rank, 0, i);
    let exact: Vec<f64> = (0..5_000).map(|i| (0..3).map(|rank| f64::from(own(rank, i))).sum()).collect();
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let whole = norm(&mut exact.iter().copied());
    let options = Options { wire: Wire::F16, ..Options::default() };
    let layout = |c: &mut GroupConfig| c.transport = Force::Tcp;
    for (scale, least, most) in [(Some(1.0), 0.1, f64::INFINITY), (Some(2f32.powi(30)), 1e-5, 1e-3), (None, 0.0, 1e-6)]
    {
        let errors = group_with(3, options, layout, &[5_000], |mut comm| {
            comm.reducer.set_wire_scale(scale);
            let rank = comm.group.rank();
            comm.reducer.bucket_mut(0).iter_mut().enumerate().for_each(|(i, x)| *x = own(rank, i));
            comm.reducer.all_reduce(0).unwrap();
            let off = norm(&mut comm.reducer.bucket(0).iter().zip(&exact).map(|(x, exact)| f64::from(*x) - exact));
            comm.leave().unwrap();
            off / whole
        });
        assert!(errors.iter().all(|error| (least..=most).contains(error)), "{scale:?}: {errors:?}");
    }
}

#[test]
fn times_are_ordered_and_lanes_are_independent() {
    for force in [Force::Shm, Force::Tcp] {
        let options = Options { lanes: 2, ..Options::default() };
        group_with(
            2,
            options,
            |c| c.transport = force,
            &[50_000; 4],
            |mut comm| {
                assert!((0..4).all(|b| comm.reducer.timing(b).is_none()));
                // Buckets 0 and 2 share a lane, 1 and 3 the other.
                let late = comm.group.rank() == 1;
                if !late {
                    comm.reducer.start(0);
                    comm.reducer.start(2);
                }
                comm.reducer.start(1);
                comm.reducer.wait(1).unwrap();
                comm.reducer.start(3);
                comm.reducer.wait(3).unwrap();
                comm.group.barrier().unwrap();
                if late {
                    std::thread::sleep(Duration::from_millis(50));
                    comm.reducer.start(0);
                    comm.reducer.start(2);
                }
                for b in [0, 2] {
                    comm.reducer.wait(b).unwrap();
                }
                let [first, second, third, fourth] = [0, 1, 2, 3].map(|b| comm.reducer.timing(b).unwrap());
                for timing in [first, second, third, fourth] {
                    assert!(timing.started <= timing.began && timing.began <= timing.ended, "{timing:?}");
                }
                assert!(first.ended <= third.began && second.ended <= fourth.started);
                if !late {
                    assert!(first.ended - first.began >= Duration::from_millis(45), "{first:?}");
                    assert!(third.began - third.started >= Duration::from_millis(45), "{third:?}");
                    assert!(second.ended < first.ended && fourth.ended < first.ended);
                }
                // The last reduction counts until the next one completes.
                comm.reducer.start(1);
                assert_eq!(comm.reducer.timing(1), Some(second));
                comm.reducer.wait(1).unwrap();
                assert!(comm.reducer.timing(1).unwrap().started >= second.ended);
                comm.leave().unwrap();
            },
        );
    }
}

#[test]
fn clocks_of_one_machine_agree() {
    let offsets = group_with(
        4,
        Options::default(),
        |c| c.host_id = format!("host-{}", c.rank() / 2),
        &[8],
        |comm| {
            let offset = comm.group.clock_offset();
            comm.leave().unwrap();
            offset
        },
    );
    assert_eq!(&offsets[..2], [0, 0], "the host of rank 0");
    // Both of these ranks query the clock. Half of the fastest of 16 round trips is far below this
    // even on a busy machine.
    assert!(offsets.iter().all(|micros| micros.abs() < 20_000), "{offsets:?}");
}
