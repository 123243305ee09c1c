//! GPU placement against brute force: on random machines and clusters, and on the fixture machines.

use std::cmp::Reverse;
use std::sync::Arc;
use switchyard_core::devices::Devices;
use switchyard_core::model::NodeOrd;
use switchyard_core::placement::gpus::{
    Fleet, Group, Level, MinLink, Pod, Request, Shape, Site, Slices, UNLIMITED, ring,
};
use switchyard_tests::placement::{
    World, any_devices, any_request, best_pod, fixtures, injection, joined, positions, ring as ring_of,
};
use switchyard_tests::{Random, chaos};

/// Runs a property on numbered cases. A failure names its seed; `SWITCHYARD_SEED` reruns that one
/// alone.
fn each(cases: u64, property: impl Fn(&Random) + std::panic::RefUnwindSafe) {
    let seeds = chaos::seed().map_or(0..cases, |seed| seed..seed + 1);
    for seed in seeds {
        if let Err(panic) = std::panic::catch_unwind(|| property(&Random::new(seed))) {
            eprintln!("SWITCHYARD_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

fn every_set_has_its_value(devices: &Devices, max: u32) {
    let shape = Shape::new(devices);
    let worst = ring::worst_links(devices);
    for set in (1_u32..1 << devices.gpus.len()).filter(|set| set.count_ones() <= max) {
        let gpus = positions(set);
        assert_eq!(shape.ring[set as usize], ring_of(devices, &gpus), "ring of {gpus:?}");
        assert_eq!(shape.injection[set as usize], injection(devices, &gpus), "injection of {gpus:?}");
        for class in MinLink::ALL {
            assert_eq!(worst[set as usize] <= class, joined(devices, &gpus, class), "{class:?} joins {gpus:?}");
        }
    }
}

#[test]
fn random_machines_match_the_bandwidth_definition() {
    each(150, |random| every_set_has_its_value(&any_devices(random, 5), 5));
}

/// The node oracle: on every machine, for every set of free GPUs and every size, our set must be
/// optimal.
#[test]
fn every_fixture_yields_the_optimal_gpu_set() {
    for (name, devices) in fixtures() {
        let shape = Shape::new(&devices);
        // Sets of 16 GPUs are too large for enumerating rings by permutation, so test at most 5 of
        // them.
        let max = if shape.gpus > 8 { 3 } else { 8 };
        println!("{name}: {} GPUs, {} NICs", shape.gpus, devices.nics.len());
        every_set_has_its_value(&devices, max.min(6));
        let level = Level { share: 1000, nvlink: false };
        let masks: Vec<u32> = if shape.gpus > 8 { vec![0xffff, 0xf0f1, 0x8123] } else { (0..=shape.all()).collect() };
        for gpus in [1_u8, 2, 3, 4, 8].into_iter().filter(|gpus| u32::from(*gpus) <= max) {
            for spread in [None, Some(level)] {
                let best = shape.best(gpus, spread, MinLink::System);
                let values: Vec<u32> = (0..=shape.all())
                    .map(|set| if set.count_ones() == u32::from(gpus) { value(&shape, set, spread) } else { 0 })
                    .collect();
                for mask in &masks {
                    let max = (0..=*mask).filter(|set| set & !mask == 0).map(|set| values[set as usize]).max();
                    assert_eq!(Some(best[*mask as usize]), max, "{name}: {gpus} of {mask:#x}");
                }
            }
        }
    }
}

fn value(shape: &Shape, set: u32, spread: Option<Level>) -> u32 {
    shape.ring[set as usize].min(shape.outward(set, spread))
}

/// NCCL's published figures for these machines.
#[test]
fn known_machines_have_their_known_rates() {
    let all = fixtures();
    let of = |name: &str| {
        let (_, devices) = all.iter().find(|(known, _)| known == name).unwrap();
        let shape = Shape::new(devices);
        let all = shape.all() as usize;
        (shape.ring[all], shape.injection[all])
    };
    assert_eq!(of("f01-dgx-1v"), (2 * 3 * 20_000, 12_000), "three cycles through 8 V100, both ways; one NIC");
    assert_eq!(of("f02-dgx-a100"), (12 * 20_000, 8 * 24_000));
    assert_eq!(of("f03b-hgx-h100"), (370_800, 8 * 48_000));
    assert_eq!(of("f04-h200"), (370_800, 4 * 48_000), "two GPUs behind each NIC");
    assert_eq!(of("f12-dgx-2").0, 6 * 20_000);
    // A B200 without NVLink: a ring of 8 crosses host bridges, a ring of the other 7 does not.
    let (_, b200) = all.iter().find(|(name, _)| name == "f10-b200").unwrap();
    let shape = Shape::new(b200);
    assert_eq!((shape.ring[0xfb], shape.ring[0xff]), (18 * 40_100, 48_000 / 6 * 5));
    let pair = shape.best(2, None, MinLink::System);
    assert_eq!(pair[0b1110], 18 * 40_100, "1 and 3, not 2");
}

/// The cluster oracle: the placement has the bandwidth of the best possible one, and is consistent.
fn gets_the_optimal_placement(world: &World, request: &Request) {
    let placement = world.fleet().solve(request);
    assert_eq!(world.fleet().bandwidth(request), placement.as_ref().ok().map(|placement| placement.bandwidth));
    let best = world.best(request).map(|(bandwidth, _)| bandwidth);
    assert_eq!(placement.as_ref().ok().map(|placement| placement.bandwidth), best);
    if let Ok(placement) = &placement {
        world.check(request, placement);
    }
}

#[test]
fn equal_pods_get_the_optimal_placement() {
    each(1_500, |random| gets_the_optimal_placement(&World::random(random, 8), &any_request(random, 1, 5)));
}

#[test]
fn unequal_pods_get_the_optimal_placement() {
    each(1_000, |random| {
        let groups = 2 + random.below(2);
        gets_the_optimal_placement(&World::random(random, 6), &any_request(random, groups, 2));
    });
}

/// After node losses, the placement has the best possible bandwidth, and among all such placements
/// it moves the fewest pods.
#[test]
fn a_repair_moves_as_few_pods_as_possible() {
    let (repaired, moved) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    for seed in chaos::seed().map_or(0..1_500, |seed| seed..seed + 1) {
        let random = Random::new(seed);
        let (mut world, request) = (World::random(&random, 8), any_request(&random, 1, 5));
        if seed % 2 == 0 {
            // If larger domains have the same bandwidth, the gang is spread, and pods in several
            // domains stay.
            world.levels.iter_mut().for_each(|level| level.share = 1000);
        }
        let Ok(first) = world.fleet().solve(&request) else { continue };
        let earlier: Vec<(Option<NodeOrd>, u32)> = first.pods.iter().map(|pod| (Some(pod.node), pod.set)).collect();
        for _ in 0..1 + random.below(2) {
            let lost = random.pick(&earlier).0.unwrap();
            world.sites[lost.0 as usize].open = random.below(3) == 0;
            world.sites[lost.0 as usize].free &= random.next() as u32;
        }
        let again = world.fleet().repair(&request, &earlier);
        assert_eq!(again.as_ref().ok().map(|p| p.bandwidth), world.best(&request).map(|(best, _)| best), "seed {seed}");
        let Ok(again) = again else { continue };
        world.check(&request, &again);
        let stays = |(pod, was): &(&Pod, &(Option<NodeOrd>, u32))| (Some(pod.node), pod.set) == **was;
        let moves = earlier.len() - again.pods.iter().zip(&earlier).filter(stays).count();
        assert_eq!(Some(moves), world.fewest_moves(&request, &earlier, again.bandwidth), "seed {seed}: {again:?}");
        repaired.set(repaired.get() + 1);
        moved.set(moved.get() + moves);
    }
    println!("{} repairs, {} pods moved", repaired.get(), moved.get());
}

#[test]
fn an_updated_fleet_equals_a_new_one() {
    each(500, |random| {
        let (world, groups) = (World::random(random, 8), 1 + random.below(2));
        let request = any_request(random, groups, 4);
        let mut kept = world.fleet();
        let _ = kept.solve(&request);
        let mut changed = world.clone();
        for _ in 0..1 + random.below(20) {
            let node = random.below(world.sites.len());
            let (free, open) = (random.next() as u32, random.below(4) > 0);
            kept.set(NodeOrd(node as u32), free, open);
            (changed.sites[node].free, changed.sites[node].open) = (free, open);
        }
        assert_eq!(kept.solve(&request), changed.fleet().solve(&request));
    });
}

#[test]
fn placement_is_monotone_and_ignores_node_order() {
    each(500, |random| {
        let (world, groups) = (World::random(random, 8), 1 + random.below(2));
        let request = any_request(random, groups, 4);
        let value = |world: &World| world.fleet().solve(&request).ok().map(|placement| placement.bandwidth);
        let before = value(&world);
        let mut richer = world.clone();
        let node = random.below(world.sites.len());
        richer.sites[node].free |= random.next() as u32;
        richer.sites[node].open = true;
        assert!(value(&richer) >= before);
        let mut turned = world.clone();
        turned.sites.reverse();
        assert_eq!(value(&turned), before);
    });
}

#[test]
fn slices_stay_whole_and_fitting_jobs_are_placed() {
    each(700, |random| {
        let world = World::random(random, 8);
        let (pods, count, level) = (1 + random.below(3) as u32, 1 + random.below(3) as u32, random.below(2));
        let groups = vec![Group { pods: pods * count, gpus: random.below(3) as u8 }];
        let request = Request { groups, min_link: MinLink::System, within: None, slices: Some(Slices { level, pods }) };
        let placement = world.fleet().solve(&request);
        let fits = |node: &usize| {
            let site = &world.sites[*node];
            let devices = &world.shapes[site.shape as usize];
            let free = site.free & ((1 << devices.gpus.len()) - 1);
            site.open && best_pod(devices, free, request.groups[0].gpus, None, MinLink::System).is_some()
        };
        let mut domains: Vec<Vec<usize>> = Vec::new();
        for node in (0..world.sites.len()).filter(fits) {
            let mine = |domain: &&mut Vec<usize>| world.level(&[domain[0], node]).unwrap_or(0) <= level;
            match domains.iter_mut().find(mine) {
                Some(domain) => domain.push(node),
                None => domains.push(vec![node]),
            }
        }
        let room: usize = domains.iter().map(|domain| domain.len() / pods as usize).sum();
        assert_eq!(placement.is_ok(), room >= count as usize);
        if let Ok(placement) = placement {
            world.check(&request, &placement);
            for domain in domains {
                let inside = placement.pods.iter().filter(|pod| domain.contains(&(pod.node.0 as usize))).count();
                assert!(inside.is_multiple_of(pods as usize), "{inside} pods in a domain, slices of {pods}");
            }
        }
    });
}

fn h200s(nodes: u32) -> World {
    let (_, devices) = fixtures().into_iter().find(|(name, _)| name == "f04-h200").unwrap();
    let rack = |node: u32| Arc::from([Some(node / 4)]);
    let sites = (0..nodes).map(|node| Site { shape: 0, free: 0xff, open: true, domains: rack(node) }).collect();
    let levels = vec![Level { share: 1000, nvlink: false }, Level { share: 500, nvlink: false }];
    World { levels, shapes: vec![devices], sites }
}

fn gang(pods: u32, gpus: u8) -> Request {
    Request { groups: vec![Group { pods, gpus }], min_link: MinLink::NVLink, within: None, slices: None }
}

#[test]
fn a_gang_stays_in_its_rack_unless_it_does_not_fit() {
    let world = h200s(8);
    let placement = world.fleet().solve(&gang(4, 8)).unwrap();
    assert_eq!((placement.bandwidth, placement.level), (192_000, Some(0)));
    let placement = world.fleet().solve(&gang(5, 8)).unwrap();
    assert_eq!((placement.bandwidth, placement.level, placement.domains), (96_000, Some(1), vec![2, 1]));
    let refused = world.fleet().solve(&Request { within: Some(0), ..gang(5, 8) }).unwrap_err();
    assert_eq!(refused.fullest, Some((4, NodeOrd(0))));
    assert_eq!(refused.groups, [[0, 0, 8]]);
}

#[test]
fn pods_of_a_gang_use_the_same_rails_and_distinct_nics() {
    let mut world = h200s(4);
    // The first GPU is taken on two nodes, the fourth and fifth on the others.
    for (site, free) in world.sites.iter_mut().zip([0xfe, 0xfe, 0xe7, 0xe7]) {
        site.free = free;
    }
    let placement = world.fleet().solve(&gang(4, 2)).unwrap();
    assert_eq!(placement.bandwidth, 96_000, "two NICs for two GPUs");
    let shape = Shape::new(&world.shapes[0]);
    let rails: Vec<u64> = placement.pods.iter().map(|pod| shape.rails[pod.set as usize]).collect();
    assert!(rails.iter().all(|used| *used == rails[0] && used.count_ones() == 2), "{rails:?}");
    // Local ranks must follow the rail order.
    assert!(placement.pods.iter().all(|pod| pod.gpus.is_sorted()), "{placement:?}");
}

#[test]
fn a_single_gpu_breaks_no_complete_group() {
    let mut world = h200s(2);
    world.sites[1].free = 0b0000_0010;
    let placement = world.fleet().solve(&gang(1, 1)).unwrap();
    assert_eq!((placement.pods[0].node, placement.bandwidth), (NodeOrd(1), UNLIMITED));
}

/// The rack with fewer idle nodes loses one more; the other keeps room for a gang.
#[test]
fn a_single_pod_uses_the_rack_with_the_fewest_idle_nodes() {
    let mut world = h200s(8);
    world.sites[4].free = 0;
    for (gpus, node) in [(1, 5), (8, 5)] {
        assert_eq!(world.fleet().solve(&gang(1, gpus)).unwrap().pods[0].node, NodeOrd(node), "{gpus} GPUs");
    }
    assert_eq!(world.fleet().solve(&gang(4, 8)).unwrap().pods[0].node, NodeOrd(0));
}

/// Bandwidth comes first, then a partly used node, and only then the node's location.
#[test]
fn single_pods_rank_nodes_by_value_use_and_idle_neighbours() {
    each(2000, |random| {
        let world = World::random(random, 12);
        let request = any_request(random, 1, 1);
        let Ok(placement) = world.fleet().solve(&request) else { return };
        let rank = |node: usize| {
            let site = &world.sites[node];
            let devices = &world.shapes[site.shape as usize];
            let free = site.free & ((1_u32 << devices.gpus.len()) - 1);
            let value =
                best_pod(devices, free, request.groups[0].gpus, None, request.min_link).filter(|_| site.open)?;
            Some((Reverse(value), free.count_ones(), world.idle_nodes_nearby(node)))
        };
        let first = (0..world.sites.len()).filter_map(rank).min();
        assert_eq!(rank(placement.pods[0].node.0 as usize), first, "{world:?}");
    });
}

#[test]
fn contradictory_requests_are_refused() {
    let world = h200s(2);
    let fleet = |levels: Vec<Level>| Fleet::new(levels, &world.shapes, &world.sites).unwrap_err().to_string();
    let level = |share| Level { share, nvlink: false };
    assert!(fleet(vec![]).contains("expected 1 (the cluster) to 8"));
    assert!(fleet(vec![level(500), level(1000)]).contains("expected 1 to 500"), "shares must not grow");
    assert!(fleet(vec![level(0), level(1)]).contains("0 thousandths"));
    assert!(fleet(vec![level(1)]).contains("node 0"));
    let mut fleet = world.fleet();
    for request in [gang(0, 1), Request { groups: vec![], ..gang(1, 1) }, Request { within: Some(2), ..gang(1, 1) }] {
        assert!(fleet.solve(&request).unwrap_err().invalid.is_some());
    }
    assert_eq!(fleet.solve(&gang(1, 9)).unwrap_err().groups, [[2, 0, 0]]);
}
