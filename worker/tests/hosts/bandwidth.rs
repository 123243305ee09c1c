//! The bandwidth check before the first step, with real pods: a sufficient bandwidth lets the job
//! continue, a pod behind a slow network is named by its links, and an enforced check keeps the job
//! from starting.

use crate::collective_support::alone;
use crate::network::Network;
use crate::pods::{Job, Running, events, finished, ready};
use std::time::Duration;
use switchyard_worker_contract::config::BandwidthCheck;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Link, Measured};

/// Network delay per 16 KiB: at most 2 MB/s, slower than the loopback interface of a busy machine.
const SLOW: Duration = Duration::from_millis(8);
/// A bandwidth between those of the slow and the fast network.
const REQUIRED: f64 = 5e6;

fn job(nodes: u32, procs: u32, least_bytes_per_second: f64, enforce: bool) -> Job {
    Job::new(nodes, procs, 4).with(|config| {
        config.cpu_threads = 1;
        config.bandwidth_check = Some(BandwidthCheck { least_bytes_per_second, enforce });
    })
}

fn measured(job: &Job) -> Option<Measured> {
    events(&job.read("out-0")).into_iter().find_map(|event| match event {
        Event::Measured(measured) => Some(measured),
        _ => None,
    })
}

/// Runs all pods, each behind the test network; one of them may be slow.
fn run(job: &Job, nodes: usize, slow: Option<usize>) -> Vec<i32> {
    let network = Network::new(nodes, job.port);
    if let Some(rank) = slow {
        network.slow(rank, SLOW);
    }
    let pod = |rank: usize| {
        let mut command = job.command(rank as u32);
        if rank > 0 {
            command.env(env::RENDEZVOUS, network.rendezvous(rank).to_string());
        }
        Running(command.spawn().unwrap())
    };
    let mut pods: Vec<Running> = (0..nodes).map(pod).collect();
    pods.iter_mut().map(Running::code).collect()
}

#[test]
fn sufficient_bandwidth_is_measured_and_training_starts() {
    let _alone = alone();
    let job = job(3, 1, 1e3, true);
    assert_eq!(run(&job, 3, None), [0; 3], "{}", job.read("err-0"));
    let found = measured(&job).unwrap();
    assert_eq!((found.ranks, found.bytes, found.shortfall()), (3, 16 << 20, None));
    let factor = found.bus_bandwidth * found.seconds / found.bytes as f64;
    assert!((factor - 4.0 / 3.0).abs() < 1e-9, "2 (n - 1) / n: {factor}");
    let mut ends: Vec<(u32, u32)> = found.links.iter().map(|link| (link.from, link.to)).collect();
    ends.sort_unstable();
    assert_eq!(ends, [(0, 1), (1, 2), (2, 0)]);
    assert!(found.links.iter().all(|link| link.bytes_per_second > 0.0), "{found:?}");
    assert!(finished(&job.read("out-0")).is_some());
    println!("bus bandwidth {:.3} GB/s", found.bus_bandwidth / 1e9);
}

#[test]
fn a_slow_pod_is_named_by_its_links_and_nothing_starts() {
    let _alone = alone();
    let job = job(3, 1, REQUIRED, true);
    assert_eq!(run(&job, 3, Some(1)), [7; 3], "{}", job.read("err-0"));
    let found = measured(&job).unwrap();
    let mut slow: Vec<(u32, u32)> = found.slow().iter().map(|link| (link.from, link.to)).collect();
    slow.sort_unstable();
    assert_eq!(slow, [(0, 1), (1, 2)], "{found:?}");
    assert!(found.bus_bandwidth < REQUIRED, "{found:?}");
    assert!(finished(&job.read("out-0")).is_none() && ready(&job.read("out-0")).is_empty());
    for node in 0..3 {
        let failure = job.termination(node).failure.unwrap();
        assert!(failure.cause.contains("minBusBandwidth") && failure.cause.contains("slow links"), "{failure:?}");
        assert!(failure.cause.contains("rank 0 to rank 1"), "{failure:?}");
    }
}

#[test]
fn an_unenforced_check_only_reports() {
    let _alone = alone();
    let job = job(2, 2, 1e15, false);
    assert_eq!(job.run(&[]), [0; 2], "{}", job.read("err-0"));
    let found = measured(&job).unwrap();
    assert!(found.shortfall().unwrap().contains("over 4 ranks"), "{found:?}");
    assert_eq!(found.links.len(), 2, "one connection each way between two hosts: {found:?}");
    assert!(finished(&job.read("out-0")).is_some());
    // Each rank reports the links that carry its data: memory within a host, and a connection from
    // its first rank to the other host.
    let links: Vec<Link> = ready(&job.read("out-0")).into_iter().flat_map(|ready| ready.links).collect();
    assert!(links.contains(&Link::SharedMemory { ranks: "1".into() }), "{links:?}");
    assert!(
        links.iter().any(|link| matches!(link, Link::Tcp { rank: 2, interface: Some(name), .. } if name == "lo")),
        "{links:?}"
    );
}
