//! Gathers of the packed form of buckets.

use crate::collective_support::{group_with, number};
use switchyard_worker::comm::{Algorithm, BucketRun, GroupConfig, Options, Packing, Reducer};

/// Length and width of the segments of each bucket.
const SEGMENTS: [&[(usize, bool)]; 3] = [
    &[(16, false), (1600, true), (48, false), (4096, true), (160, false)],
    &[(32, false)],
    &[(16, true), (16, false), (160, true)],
];
/// Elements of the last bucket that are not in its packed form.
const TAIL: usize = 7;

/// Every rank gets the part of every other rank, and only packed values travel between hosts.
#[test]
fn every_rank_gets_all_packed_parts() {
    let packing = |segments: &&[(usize, bool)]| {
        let mut packing = Packing::default();
        segments.iter().for_each(|(len, is_half)| packing.push(*len, *is_half));
        packing
    };
    let packings = SEGMENTS.each_ref().map(packing);
    let mut lens = SEGMENTS.map(|segments| segments.iter().map(|(len, _)| len).sum());
    lens[2] += TAIL;
    let packed = packings.each_ref().map(|packing| packing.place(usize::MAX));
    let runs = [BucketRun { buckets: 0..lens.len(), place: 0 }];
    let host = |hosts: u32| move |c: &mut GroupConfig| c.host_id = format!("host-{}", c.rank() % hosts);
    for world in 1..=5 {
        // All ranks on one host, some on each of two, one on each.
        for hosts in [1, 2, world] {
            for algorithm in [Algorithm::Ring, Algorithm::RecursiveDoubling] {
                let options = Options { lanes: 2, algorithm: Some(algorithm), ..Options::default() };
                let sent = group_with(world, options, host(hosts), &[1], |mut comm| {
                    let rank = comm.group.rank();
                    let mut reducer =
                        Reducer::connect_in_places(&mut comm.group, &lens, (&runs, &packings), &options).unwrap();
                    let mut sent = Vec::new();
                    for together in [false, true] {
                        for (b, packing) in packings.iter().enumerate() {
                            let own = reducer.shard(b, rank);
                            let own = packing.place(own.start)..packing.place(own.end);
                            for (i, x) in reducer.bucket_mut(b).iter_mut().enumerate() {
                                *x = if own.contains(&i) { number(0, b as u32, i) } else { f32::NAN };
                            }
                        }
                        let before = reducer.bytes_sent();
                        if together {
                            reducer.gather_packed(0..lens.len(), 0);
                        } else {
                            (0..lens.len()).for_each(|b| reducer.gather_packed(b..b + 1, b));
                        }
                        (0..lens.len()).for_each(|b| reducer.wait(b).unwrap());
                        for (b, &len) in packed.iter().enumerate() {
                            let expected: Vec<f32> = (0..len).map(|i| number(0, b as u32, i)).collect();
                            assert_eq!(reducer.bucket(b)[..len], expected, "bucket {b}: {world} ranks, {hosts} hosts");
                        }
                        let whole = reducer.bytes_sent();
                        if together {
                            reducer.gather_all(0..lens.len(), 0);
                        } else {
                            (0..lens.len()).for_each(|b| reducer.gather_all(b..b + 1, b));
                        }
                        (0..lens.len()).for_each(|b| reducer.wait(b).unwrap());
                        sent.push([whole - before, reducer.bytes_sent() - whole]);
                    }
                    drop(reducer);
                    comm.leave().unwrap();
                    sent
                });
                // Headers are the same.
                let saved = (lens.iter().sum::<usize>() - packed.iter().sum::<usize>()) as u64;
                for case in [0, 1] {
                    let [packed, whole] = [0, 1].map(|form| sent.iter().map(|rank| rank[case][form]).sum::<u64>());
                    let hosts = u64::from(hosts.min(world));
                    assert_eq!(
                        whole - packed,
                        (hosts - 1) * 4 * saved,
                        "{world} ranks on {hosts} hosts, {algorithm:?}"
                    );
                }
            }
        }
    }
}
