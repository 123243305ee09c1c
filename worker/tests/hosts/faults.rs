//! G9: ranks are killed, hang, exit, lose their connections, or have a partitioned or slow network.
//! Whatever the fault, the remaining ranks report it in time and name the rank, the attempt ends
//! with the documented exit codes, and the next one resumes from the newest checkpoint and reaches
//! exactly the weights of a run without faults.
//!
//! Each rank is its own pod on its own host, behind a network that the test controls.

use crate::collective_support::{alone, wait_until};
use crate::network::{Network, Traffic};
use crate::pods::{Job, Running, events, finished, last_step, pid_of, resumed, wait_for_step};
use crate::random::Random;
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::Checkpoint;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Failure};

/// Silence after which a rank counts as lost.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Steps between checkpoints.
const EVERY: u64 = 4;
/// Maximum number of steps until a fault.
const STEPS: u64 = 30;
/// Seed of a normal test run.
const SEED: u64 = 20_261_122;
/// Delay of a slow link per chunk.
const SLOW: Duration = Duration::from_millis(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// SIGKILL.
    Kill,
    /// SIGSTOP: alive, but silent; resumed once the others have exited.
    Hang,
    /// A rank exits on its own, with an exit code or a panic.
    Exit,
    /// The connection to rank 0 is reset.
    ResetControl,
    /// The data connections to the next rank are reset.
    ResetData,
    /// No byte passes to or from a rank.
    Partition,
}

/// Maxima over all faults of one kind.
#[derive(Default)]
struct Measured {
    faults: usize,
    /// From the fault until all remaining ranks have reported it. The goal is one second more than
    /// the timeout; a busy machine does not always achieve it, so it is reported but not asserted.
    reported: Duration,
    /// From then until the next attempt has completed a step.
    resumed: Duration,
    /// Number of repeated steps.
    lost: u64,
}

fn world() -> usize {
    crate::chaos::size(4, 8)
}

fn job(world: usize, steps: u64, saves: bool) -> Job {
    let job = Job::new(world as u32, 1, steps);
    let path = job.path("checkpoints").display().to_string();
    job.with(|config| {
        config.fetch_every_steps = 1;
        config.cpu_threads = 1;
        let checkpoint = Checkpoint { path, every_steps: EVERY, period_seconds: 0, keep: 2, on_suspend: false };
        config.checkpoint = saves.then_some(checkpoint);
    })
}

/// The final digest of the same job without checkpoints, faults and test network.
fn undisturbed(steps: u64) -> String {
    let job = job(world(), steps, false);
    assert_eq!(job.run(&[]), vec![0; world()], "{}", job.read("err-0"));
    finished(&job.read("out-0")).unwrap().weights_digest
}

/// Starts the pods of an attempt, each behind the network.
fn start(job: &Job, network: &Network, attempt: u32, fault: Option<&str>) -> Vec<Running> {
    let pod = |rank: usize| {
        let mut command = job.command(rank as u32);
        command.env(env::ATTEMPT, attempt.to_string()).env(env::PEER_TIMEOUT_SECONDS, TIMEOUT.as_secs().to_string());
        if rank > 0 {
            command.env(env::RENDEZVOUS, network.rendezvous(rank).to_string());
        }
        Running(command.envs(fault.map(|fault| (env::FAULT, fault))).spawn().unwrap())
    };
    (0..world()).map(pod).collect()
}

/// The failure that a rank reported.
fn failure(job: &Job, rank: usize) -> Option<Failure> {
    events(&job.read(&format!("out-{rank}"))).into_iter().find_map(|event| match event {
        Event::Failed(failure) => Some(failure),
        _ => None,
    })
}

impl Fault {
    /// Injects the fault. Returns the ranks that may be named as the cause, and the remaining
    /// ranks, which must name one.
    fn inject(self, job: &Job, network: &Network, pods: &mut [Running], victim: usize) -> (Vec<usize>, Vec<usize>) {
        let others = || (0..world()).filter(|rank| *rank != victim).collect::<Vec<_>>();
        match self {
            Fault::Kill => kill_process(pid_of(job, victim as u32, victim as u32), Signal::KILL).unwrap(),
            Fault::Hang => kill_process(pid_of(job, victim as u32, victim as u32), Signal::STOP).unwrap(),
            Fault::Exit => drop(pods[victim].ended()),
            Fault::ResetControl => assert_eq!(network.reset(victim, Traffic::Control), [0]),
            Fault::ResetData => {
                let mut ends = network.reset(victim, Traffic::Data);
                assert!(!ends.is_empty());
                // Both ends notice it, and either may report it first.
                ends.push(victim);
                return (ends, (0..world()).collect());
            }
            Fault::Partition => network.cut(victim, true),
        }
        (vec![victim], others())
    }
}

/// Injects this many faults of a kind, each in its own attempt, and then runs to the end.
fn inject_repeatedly(fault: Fault, faults: usize) -> Value {
    let _alone = alone();
    let seed = crate::chaos::seed().unwrap_or(SEED) + fault as u64;
    let random = Random::new(seed);
    let context = format!("{fault:?}; rerun with SWITCHYARD_SEED={}", seed - fault as u64);
    let steps = (faults as u64 + 1) * STEPS;
    let job = job(world(), steps, true);
    let mut measured = Measured::default();
    let (mut reached, mut ended) = (0, None);
    for attempt in 1.. {
        let last = measured.faults == faults;
        let network = Network::new(world(), job.port);
        let victim = random.below(world() - usize::from(fault == Fault::ResetControl));
        let victim = victim + usize::from(fault == Fault::ResetControl);
        let at = reached + 1 + random.below(20) as u64;
        let kind = *random.pick(&["exit", "panic"]);
        let own = (fault == Fault::Exit && !last).then(|| format!("{kind}:{at}@{victim}"));
        let mut pods = start(&job, &network, attempt, own.as_deref());
        if let Some(ended) = ended {
            assert!(wait_until(|| last_step(&job) > 0), "{context}: no step: {}", job.read("err-0"));
            measured.resumed = measured.resumed.max(Instant::now() - ended);
            let from = resumed(&job).unwrap_or(0);
            // Apart from the checkpoint that may be in progress, one is complete.
            assert!(from >= (reached / EVERY).saturating_sub(1) * EVERY, "{context}: from {from} after {reached}");
            measured.lost = measured.lost.max(reached - from.min(reached));
        }
        if last {
            let codes: Vec<i32> = pods.iter_mut().map(Running::code).collect();
            assert_eq!(codes, vec![0; world()], "{context}: {}", job.read("err-0"));
            assert!(network.passed() > 0, "the traffic bypassed the network");
            break;
        }
        if fault != Fault::Exit {
            assert!(wait_for_step(&job, &mut pods[0], at), "{context}: ended before: {}", job.read("err-0"));
            std::thread::sleep(Duration::from_micros(random.below(3000) as u64));
        }
        let (named, left) = fault.inject(&job, &network, &mut pods, victim);
        let injected = Instant::now();
        let all_reported = wait_until(|| left.iter().all(|rank| failure(&job, *rank).is_some()));
        let words = |rank: usize| (rank, failure(&job, rank), job.read(&format!("err-{rank}")));
        let all_words = || left.iter().map(|rank| words(*rank)).collect::<Vec<_>>();
        assert!(all_reported, "{context}: not reported: {:?}", all_words());
        measured.reported = measured.reported.max(injected.elapsed());
        for rank in &left {
            assert!(pods[*rank].ended().code().is_some(), "{context}");
        }
        if fault == Fault::Hang {
            kill_process(pid_of(&job, victim as u32, victim as u32), Signal::CONT).unwrap();
        }
        let codes: Vec<i32> = pods.iter_mut().map(Running::code).collect();
        for (rank, code) in codes.iter().enumerate() {
            let failure = job.termination(rank as u32).failure.unwrap();
            let origin = failure.origin_rank as usize;
            assert_eq!(*code, if origin == rank { 5 } else { 4 }, "{context}: rank {rank}: {failure:?}");
            // A disconnected rank can only observe that rank 0 is gone; a disconnected rank 0, that
            // another rank is.
            assert!(named.contains(&origin) || !left.contains(&rank), "{context}: {named:?}: rank {rank}: {failure:?}");
        }
        reached = reached.max(last_step(&job));
        (measured.faults, ended) = (measured.faults + 1, Some(Instant::now()));
    }
    let digest = finished(&job.read("out-0")).unwrap().weights_digest;
    assert_eq!(digest, undisturbed(steps), "{context}");
    assert_eq!(job.processes(), [""; 0]);
    let seconds = |time: Duration| (time.as_secs_f64() * 100.0).round() / 100.0;
    json!({
        "faults": measured.faults, "toldSecondsMost": seconds(measured.reported),
        "resumedSecondsMost": seconds(measured.resumed), "stepsLostMost": measured.lost,
    })
}

/// Slow links, one after another in one attempt: nothing is lost and no rank exits.
fn slow(links: usize) -> usize {
    let _alone = alone();
    let random = Random::new(crate::chaos::seed().unwrap_or(SEED));
    let steps = links as u64 * 8 + 8;
    let job = job(world(), steps, false);
    let network = Network::new(world(), job.port);
    let mut pods = start(&job, &network, 1, None);
    for link in 0..links as u64 {
        let rank = random.below(world());
        assert!(wait_for_step(&job, &mut pods[0], 8 * link + 1), "{}", job.read("err-0"));
        let (before, delayed) = (last_step(&job), network.delayed());
        network.slow(rank, SLOW);
        assert!(wait_for_step(&job, &mut pods[0], before + 3), "{}", job.read("err-0"));
        network.slow(rank, Duration::ZERO);
        assert!(network.delayed() > delayed, "rank {rank} is not slow");
    }
    let codes: Vec<i32> = pods.iter_mut().map(Running::code).collect();
    assert_eq!(codes, vec![0; world()], "{}", job.read("err-0"));
    assert_eq!((last_step(&job), resumed(&job)), (steps, None));
    let digest = finished(&job.read("out-0")).unwrap().weights_digest;
    assert_eq!(digest, undisturbed(steps), "slow links");
    links
}

#[test]
fn the_weights_are_the_same_after_any_fault() {
    let started = Instant::now();
    let kinds = [
        ("sigkill", Fault::Kill, crate::chaos::size(3, 400)),
        ("sigstop", Fault::Hang, crate::chaos::size(2, 100)),
        ("exit", Fault::Exit, crate::chaos::size(2, 100)),
        ("resetControl", Fault::ResetControl, crate::chaos::size(2, 150)),
        ("resetData", Fault::ResetData, crate::chaos::size(2, 150)),
        ("partition", Fault::Partition, crate::chaos::size(2, 100)),
    ];
    let mut rows = serde_json::Map::new();
    for (name, fault, faults) in kinds {
        rows.insert(name.to_owned(), inject_repeatedly(fault, faults));
    }
    rows.insert("slowLink".to_owned(), json!({"faults": slow(crate::chaos::size(3, 100)), "stepsLostMost": 0}));
    let faults: u64 = rows.values().filter_map(|row| row["faults"].as_u64()).sum();
    let result = json!({
        "ranks": world(), "faults": faults, "violations": 0, "timeoutSeconds": TIMEOUT.as_secs(), "stepsPerCheckpoint": EVERY,
        "seed": crate::chaos::seed().unwrap_or(SEED), "seconds": started.elapsed().as_secs(), "kinds": rows,
    });
    crate::chaos::report("g9-workers", &result).unwrap();
}
