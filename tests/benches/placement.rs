//! GPU placement: quality against brute force and against common policies, and latency at 10,000
//! nodes.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "placement/cluster.rs"]
mod cluster;

use jiff::Timestamp;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use switchyard_core::devices::Devices;
use switchyard_core::model::NodeOrd;
use switchyard_core::placement::gpus::{Fleet, Group, Level, MinLink, Request, Shape, Site};
use switchyard_plan::cluster::admitted::Admitted;
use switchyard_plan::cluster::gang;
use switchyard_plan::cluster::levels::Levels;
use switchyard_plan::cluster::{PlacementRequest, PlacementRules};
use switchyard_plan::objects::Defaults;
use switchyard_plan::validate;
use switchyard_tests::Random;
use switchyard_tests::placement::{World, any_request, fixtures};

/// Cluster oracle instances of each kind.
const INSTANCES: u64 = 20_000;
/// Repetitions of a timed decision. A node changes between repetitions.
const REPEATS: usize = 400;

fn main() {
    let quality = node_quality();
    let oracle = [cluster_oracle("equal pods", 1), cluster_oracle("unequal pods", 3)];
    let time = time();
    let arguments: Vec<String> = std::env::args().collect();
    let Some(path) = arguments.iter().position(|word| word == "--json").and_then(|at| arguments.get(at + 1)) else {
        return;
    };
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let result = json!({
        "command": "cargo xtask bench placement", "machine": model.trim_start_matches(['\t', ' ', ':']),
        "node": quality, "cluster": oracle, "time": time,
    });
    std::fs::write(path, format!("{}\n", serde_json::to_string_pretty(&result).unwrap())).unwrap();
}

/// The first free GPUs, as chosen by DRA, and by the device plugin without a preference.
fn first_fit(free: u32, gpus: u8) -> u32 {
    (0..32).filter(|bit| free >> bit & 1 == 1).take(gpus.into()).fold(0, |set, bit| set | 1 << bit)
}

/// The best-effort policy of NVIDIA's device plugin. Partitions the free GPUs into sets of this
/// size, takes the partition with the highest total score, and from it the set with the highest
/// score. A pair scores by its PCIe class, plus 100 for every direct NVLink. NVSwitch links do not
/// count (go-gpuallocator, links/device.go).
fn best_effort(devices: &Devices, free: u32, gpus: u8) -> u32 {
    use switchyard_core::path::PathClass;
    let count = devices.gpus.len();
    let score = |set: u32| -> u32 {
        let members: Vec<usize> = (0..count).filter(|bit| set >> bit & 1 == 1).collect();
        let pair = |a: usize, b: usize| {
            let class = match devices.gpu_paths[a * count + b] {
                PathClass::Same | PathClass::Pix => 50,
                PathClass::Pxb => 40,
                PathClass::Phb => 30,
                PathClass::Node => 20,
                PathClass::Sys => 10,
            };
            class + 100 * u32::from(devices.direct_links[a * count + b])
        };
        members.iter().enumerate().map(|(i, a)| members[i + 1..].iter().map(|b| pair(*a, *b)).sum::<u32>()).sum()
    };
    // Best partition of every subset. GPUs that do not fill a set are left over.
    let size = u32::from(gpus);
    let mut best: Vec<(u32, u32)> = vec![(0, 0); 1 << count];
    for mask in 1_u32..1 << count {
        if mask & !free != 0 {
            continue;
        }
        let lowest = mask & mask.wrapping_neg();
        let without = best[(mask & !lowest) as usize];
        let mut top = if mask.count_ones() % size == 0 { (0, 0) } else { without };
        let rest = mask & !lowest;
        let mut others = rest;
        loop {
            if others.count_ones() == size - 1 {
                let set = others | lowest;
                let (total, chosen) = best[(mask & !set) as usize];
                let chosen = if chosen != 0 && score(chosen) >= score(set) { chosen } else { set };
                if total + score(set) > top.0 || top.1 == 0 {
                    top = (total + score(set), chosen);
                }
            }
            if others == 0 {
                break;
            }
            others = (others - 1) & rest;
        }
        best[mask as usize] = top;
    }
    best[free as usize].1
}

/// Value of the choices of first-fit, best-effort and our tables, as a share of the optimum, over
/// every set of free GPUs.
fn node_quality() -> Vec<Value> {
    println!("one pod on a node: share of the best bandwidth over all sets of free GPUs, mean / worst");
    println!(
        "{:<14} {:>4}  {:<22} {:>15} {:>15} {:>15}",
        "machine", "GPUs", "value", "first-fit", "best-effort", "switchyard"
    );
    let level = Level { share: 1000, nvlink: false };
    let mut rows = Vec::new();
    for (name, gpus, spread) in [
        ("f01-dgx-1v", 4_u8, None),
        ("f04-h200", 2, Some(level)),
        ("f04-h200", 4, Some(level)),
        ("f08-a30", 2, None),
        ("f09-pcie-8", 2, None),
        ("f10-b200", 4, None),
    ] {
        let (_, devices) = fixtures().into_iter().find(|(known, _)| known == name).unwrap();
        let shape = Shape::new(&devices);
        let value = |set: u32| f64::from(shape.ring[set as usize].min(shape.outward(set, spread)));
        let site = |free| Site { shape: 0, free, open: true, domains: Arc::default() };
        // Two equal nodes where NIC bandwidth counts, so that both must take this set.
        let pods = if spread.is_some() { 2 } else { 1 };
        let sites = vec![site(0); pods];
        let mut fleet = Fleet::new(vec![level], std::slice::from_ref(&devices), &sites).unwrap();
        let request = gang(pods as u32, gpus);
        let mut shares = [const { Vec::new() }; 3];
        for free in (0..=shape.all()).filter(|free| free.count_ones() >= gpus.into()) {
            let best = (0..=free)
                .filter(|set| set & !free == 0 && set.count_ones() == u32::from(gpus))
                .map(value)
                .fold(0.0, f64::max);
            (0..pods).for_each(|node| fleet.set(NodeOrd(node as u32), free, true));
            let ours = fleet.solve(&request).unwrap().pods[0].set;
            for (shares, set) in shares.iter_mut().zip([first_fit(free, gpus), best_effort(&devices, free, gpus), ours])
            {
                shares.push(value(set) / best);
            }
        }
        let of = |shares: &Vec<f64>| {
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            (mean, shares.iter().copied().fold(f64::MAX, f64::min))
        };
        let words = if spread.is_some() { "min(ring, NICs)" } else { "ring" };
        let text: Vec<String> =
            shares.iter().map(|shares| format!("{:.2} / {:.2}", of(shares).0, of(shares).1)).collect();
        println!("{name:<14} {gpus:>4}  {words:<22} {:>15} {:>15} {:>15}", text[0], text[1], text[2]);
        let pair = |index: usize| json!({"mean": of(&shares[index]).0, "worst": of(&shares[index]).1});
        rows.push(json!({
            "machine": name, "gpus": gpus, "value": words, "sets": shares[0].len(),
            "firstFit": pair(0), "bestEffort": pair(1), "switchyard": pair(2),
        }));
    }
    rows
}

/// Compares our placement with every possible placement, on random small clusters.
fn cluster_oracle(what: &str, groups: usize) -> Value {
    let (mut placed, mut equal, mut false_refusals, mut gap) = (0_u64, 0_u64, 0_u64, 0.0);
    let (mut ours, mut fewest) = ([0_usize; 3], [0_usize; 3]);
    let random = Random::new(5);
    for _ in 0..INSTANCES {
        let (world, count) = (World::random(&random, 8), if groups == 1 { 1 } else { 2 + random.below(groups - 1) });
        let request = any_request(&random, count, if groups == 1 { 6 } else { 2 });
        let (found, best) = (world.fleet().solve(&request), world.best(&request));
        let Some((max, domains)) = best else {
            assert!(found.is_err(), "a placement where there is none");
            continue;
        };
        let Ok(found) = found else {
            false_refusals += 1;
            continue;
        };
        world.check(&request, &found);
        placed += 1;
        equal += u64::from(found.bandwidth == max);
        gap += 1.0 - f64::from(found.bandwidth) / f64::from(max);
        let nodes: Vec<usize> = found.pods.iter().map(|pod| pod.node.0 as usize).collect();
        for ((ours, fewest), (own, min)) in
            ours.iter_mut().zip(&mut fewest).zip(world.domains(&nodes).into_iter().zip(domains))
        {
            (*ours, *fewest) = (*ours + own, *fewest + min);
        }
    }
    let more = |level: usize| 100.0 * (ours[level] as f64 / fewest[level].max(1) as f64 - 1.0);
    println!(
        "\n{what}: {INSTANCES} random clusters, {placed} placed, {equal} with the best bandwidth of all placements, mean gap {:.4} %, \
         {false_refusals} refused although there is a place; {:.2} % more blocks and {:.2} % more racks than the fewest",
        100.0 * gap / placed as f64,
        more(1),
        more(2)
    );
    json!({
        "what": what, "instances": INSTANCES, "placed": placed, "best": equal, "meanGapPercent": 100.0 * gap / placed as f64,
        "falseRefusals": false_refusals, "moreBlocksPercent": more(1), "moreRacksPercent": more(2),
    })
}

fn gang(pods: u32, gpus: u8) -> Request {
    Request { groups: vec![Group { pods, gpus }], min_link: MinLink::System, within: None, slices: None }
}

/// Blocks of 25 racks of 20 nodes, with four machine types. A share of the nodes is empty and the
/// others are half full.
fn fleet_of(
    random: &Random,
    blocks: u32,
    racks: u32,
    nodes: u32,
    shapes: &[&str],
    empty_permille: usize,
) -> (Vec<Devices>, Vec<Site>) {
    let all = fixtures();
    let devices: Vec<Devices> =
        shapes.iter().map(|name| all.iter().find(|(known, _)| known == name).unwrap().1.clone()).collect();
    let mut sites = Vec::new();
    for rack in 0..blocks * racks {
        // All nodes of a rack have the same machine type.
        let shape = random.below(devices.len()) as u32;
        for _ in 0..nodes {
            let free = if random.below(1000) < empty_permille {
                u32::MAX
            } else {
                random.next() as u32 & random.next() as u32
            };
            sites.push(Site { shape, free, open: true, domains: [Some(rack), Some(rack / racks)].into() });
        }
    }
    (devices, sites)
}

fn percentile(times: &mut [Duration], percent: usize) -> f64 {
    times.sort_unstable();
    times[(times.len() * percent / 100).min(times.len() - 1)].as_nanos() as f64 / 1000.0
}

fn time() -> Vec<Value> {
    let random = Random::new(7);
    let spine = vec![
        Level { share: 1000, nvlink: false },
        Level { share: 1000, nvlink: false },
        Level { share: 500, nvlink: false },
    ];
    let mut nvl = spine.clone();
    nvl[0].nvlink = true;
    let mix = ["f03b-hgx-h100", "f04-h200", "f02-dgx-a100", "f10-b200"];
    let mut rows = Vec::new();
    println!("\n{:<52} {:>12} {:>12}", "decision with devices and ranks, one core", "p50 us", "p99 us");
    let mut case = |what: &str, levels: &[Level], (devices, sites): &(Vec<Devices>, Vec<Site>), request: &Request| {
        let alone = what.ends_with("decision alone");
        let mut fleet = Fleet::new(levels.to_vec(), devices, sites).unwrap();
        let _ = fleet.solve(request);
        let (mut times, mut placed) = (Vec::new(), 0);
        for _ in 0..REPEATS {
            let node = NodeOrd(random.below(sites.len()) as u32);
            fleet.set(node, random.next() as u32, true);
            let start = Instant::now();
            placed += usize::from(match alone {
                true => black_box(fleet.bandwidth(request)).is_some(),
                false => black_box(fleet.solve(request)).is_ok(),
            });
            times.push(start.elapsed());
        }
        let (p50, p99) = (percentile(&mut times, 50), percentile(&mut times, 99));
        println!("{what:<52} {p50:>12.1} {p99:>12.1}   {placed} of {REPEATS} placed");
        rows.push(json!({"what": what, "nodes": sites.len(), "p50Microseconds": p50, "p99Microseconds": p99, "placed": placed, "repeats": REPEATS}));
    };
    let wide = fleet_of(&random, 20, 25, 20, &mix, 300);
    let full = fleet_of(&random, 20, 25, 20, &mix, 15);
    let trays = fleet_of(&random, 16, 70, 18, &["f06-gb200"], 300);
    case("128 x 8 GPUs, 10,000 nodes, 30 % empty", &spine, &wide, &gang(128, 8));
    case("128 x 8 GPUs, 10,000 nodes, 30 % empty, decision alone", &spine, &wide, &gang(128, 8));
    case("128 x 8 GPUs, 10,000 nodes, 1.5 % empty", &spine, &full, &gang(128, 8));
    case("128 x 8 GPUs, 10,000 nodes, 1.5 % empty, decision alone", &spine, &full, &gang(128, 8));
    case("256 x 4 GPUs, 10,000 nodes, 30 % empty", &spine, &wide, &gang(256, 4));
    case("512 x 2 GPUs, 10,000 nodes, 30 % empty", &spine, &wide, &gang(512, 2));
    case("1,024 x 1 GPU, 10,000 nodes, 30 % empty", &spine, &wide, &gang(1024, 1));
    case("512 x 8 GPUs, 10,000 nodes, 30 % empty", &spine, &wide, &gang(512, 8));
    case("256 x 4 GPUs, 20,160 GB200 trays in NVL72 racks", &nvl, &trays, &gang(256, 4));
    case("1,024 x 4 GPUs, 20,160 GB200 trays in NVL72 racks", &nvl, &trays, &gang(1024, 4));
    case("refusal: 9,000 x 8 GPUs, 10,000 nodes", &spine, &wide, &gang(9000, 8));
    let mut once = |what: &str, repeats: usize, mut measured: Box<dyn FnMut() + '_>| {
        let mut times: Vec<Duration> = (0..repeats)
            .map(|_| {
                let start = Instant::now();
                measured();
                start.elapsed()
            })
            .collect();
        let (p50, p99) = (percentile(&mut times, 50), percentile(&mut times, 99));
        println!("{what:<52} {p50:>12.1} {p99:>12.1}");
        rows.push(json!({"what": what, "p50Microseconds": p50, "p99Microseconds": p99, "repeats": repeats}));
    };
    let (devices, sites) = &wide;
    once(
        "cold: 10,000 nodes, tables and a first decision",
        20,
        Box::new(|| {
            let mut fleet = Fleet::new(spine.clone(), devices, sites).unwrap();
            let _ = black_box(fleet.solve(&gang(2, 8)));
        }),
    );
    let mut fleet = Fleet::new(spine.clone(), devices, sites).unwrap();
    for gpus in [1, 2, 4, 8] {
        let _ = fleet.solve(&gang(2, gpus));
    }
    once(
        "1,000 changes of a node, four sizes of pods",
        200,
        Box::new(|| {
            for _ in 0..1000 {
                fleet.set(NodeOrd(random.below(10_000) as u32), random.next() as u32, true);
            }
        }),
    );
    let nodes = cluster::nodes();
    let levels =
        Levels::new(["example.com/rack", "example.com/block", "cluster:2"].map(|l| l.parse().unwrap()).into()).unwrap();
    for (what, count, required) in [
        ("the controller's look at 10,000 nodes: 128 x 8 placed", 128, false),
        ("the same, refused and explained: 1,000 x 8 in one rack", 1000, true),
    ] {
        let job = cluster::job(count, required);
        let (valid, defaults) = (validate(&job).unwrap(), Defaults::default());
        let rules = PlacementRules { defaults: &defaults, levels: &levels, now: Timestamp::now() };
        let admitted = &Admitted::of_template(&valid, job.status.as_ref());
        let request = PlacementRequest { job: &job, valid: &valid, rules, admitted, avoided_nodes: &BTreeMap::new() };
        assert_eq!(gang::place(&request, &nodes).is_ok(), !required);
        once(what, 30, Box::new(|| drop(black_box(gang::place(&request, &nodes)))));
    }
    rows
}
