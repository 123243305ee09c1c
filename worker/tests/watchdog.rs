//! Injected hangs: all ranks name a hung rank, its operation and what the others wait for, and its
//! flight recorder shows it afterwards.

#![allow(clippy::unwrap_used)]

mod collective_support;
mod hooked;
mod plain;
mod pods;
mod ranks;

use collective_support::wait_until;
use hooked::registry;
use pods::{Job, Running, pid_of, wait_for_step};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Signal, kill_process};
use std::fs;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use switchyard_worker::comm::{CauseKind, CommError};
use switchyard_worker::train::{Alarm, Blueprint, OnAlarm, Reporter, RunOptions, TrainError, open, run};
use switchyard_worker_contract::config::{Checkpoint, EngineConfig, Length, OnHang, Watchdog};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Failure, Stuck, Summary};
use switchyard_worker_contract::exit::Exit;
use switchyard_worker_contract::recorder::{Operation, Recording};

/// Long enough for a step on a busy machine, short enough for a test.
const LIMIT: Watchdog = Watchdog { timeout_seconds: Some(4), on_hang: OnHang::Restart };

fn job(nodes: u32, procs: u32, watchdog: Watchdog) -> Job {
    Job::new(nodes, procs, 1_000_000).with(|config| {
        config.fetch_every_steps = 1;
        config.watchdog = watchdog;
    })
}

/// The contents of a rank's recorder; each node has its own run directory.
fn recording(job: &Job, node: u32, rank: u32) -> Recording {
    let path = job.path(&format!("run-{node}/record/rank-{rank}.attempt-1.recorder"));
    Recording::read(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_hung_rank_is_named_by_all_and_the_others_report_what_they_wait_for() {
    let job = job(3, 1, LIMIT);
    assert_eq!(job.run(&[(env::FAULT, "stall:6@1")]), [4, 10, 4], "{}", job.read("err-1"));
    let pid = pid_of(&job, 1, 1);
    for node in 0..3 {
        let Failure { origin_rank, cause, during, .. } = job.termination(node).failure.unwrap();
        assert_eq!(origin_rank, 1, "{cause}");
        assert!(cause.contains("stands still for 4 s, since "), "{cause}");
        assert!(cause.contains(&format!("in reports and files after step 5 (process {pid})")), "{cause}");
        assert_eq!(during, "ranks 0, 2: step 6: waiting for the all-reduce of bucket 0");
    }
    let stuck = recording(&job, 1, 1);
    let last = stuck.entries.last().unwrap();
    assert_eq!((stuck.pid as i32, last.operation, last.step), (pid.as_raw_pid(), Operation::Between, 5));
    assert!(stuck.alive_us > last.since_us, "it was alive but idle: {stuck:?}");
    let [.., waited, end] = recording(&job, 0, 0).entries[..] else { panic!() };
    assert_eq!((waited.operation, waited.step, end.operation), (Operation::Reduce, 6, Operation::Failed));
}

#[test]
fn a_hung_checkpoint_is_reported_when_the_next_one_is_due() {
    let job = job(1, 2, LIMIT);
    let path = job.path("checkpoints");
    // Opening a pipe for writing blocks until there is a reader. After the last possible attempt,
    // the next one has the same number.
    let folder = path.join(format!("step-000000004.attempt-{}", u32::MAX));
    fs::create_dir_all(&folder).unwrap();
    mknodat(CWD, folder.join("rank-1.safetensors.tmp"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let path = path.display().to_string();
    let job = job.with(|config| {
        config.checkpoint = Some(Checkpoint { path, every_steps: 4, period_seconds: 0, keep: 2, on_suspend: false });
    });
    assert_eq!(job.run(&[]), [10], "{}", job.read("err-0"));
    let Failure { origin_rank, cause, during, .. } = job.termination(0).failure.unwrap();
    assert_eq!(origin_rank, 1, "{cause}");
    assert!(cause.contains("in step 8: writing its part of a checkpoint"), "{cause}");
    assert_eq!(during, "rank 0: step 8: waiting for all ranks to agree");
}

#[test]
fn the_last_operation_of_a_stopped_rank_is_reported() {
    let job = job(1, 2, LIMIT);
    let mut command = job.command(0);
    command.env(env::PEER_TIMEOUT_SECONDS, "2");
    let mut pod = Running(command.spawn().unwrap());
    assert!(wait_for_step(&job, &mut pod, 1));
    // A rank that has been alive for longer than the timeout has sent heartbeats.
    assert!(wait_until(|| recording(&job, 0, 1).alive_us > 2_500_000));
    let pid = pid_of(&job, 0, 1);
    kill_process(pid, Signal::STOP).unwrap();
    assert_eq!(pod.code(), 5, "{}", job.read("err-0"));
    let Failure { origin_rank, cause, during, .. } = job.termination(0).failure.unwrap();
    assert!(origin_rank == 1 && cause.contains("no sign of life for 2.0 s"), "{cause}");
    assert!(during.contains("last heard in ") && during.contains(&format!("(process {pid})")), "{during}");
    assert!(recording(&job, 0, 1).entries.last().unwrap().step > 0);
}

#[test]
fn a_job_that_only_reports_hangs_keeps_waiting() {
    let job = job(1, 2, Watchdog { on_hang: OnHang::Report, ..LIMIT });
    let mut command = job.command(0);
    command.env(env::FAULT, "stall:6@1");
    let mut pod = Running(command.spawn().unwrap());
    assert!(wait_for_step(&job, &mut pod, 5));
    job.wait_for("err-0", "failurePolicy.onHang is Report");
    let log = job.read("err-0");
    assert!(log.contains("warning: rank 1 stands still") && !log.contains("warning: rank 0 stands still"), "{log}");
    assert!(wait_until(|| stuck(&job).is_some()), "{}", job.read("out-0"));
    let Stuck { rank, operation, step, ranks, .. } = stuck(&job).unwrap();
    assert_eq!((rank, operation, step, ranks), (1, Operation::Between, 5, 1));
    assert!(pod.0.try_wait().unwrap().is_none(), "it keeps running");
}

#[test]
fn all_ranks_are_named_when_all_hang() {
    let job = job(1, 2, Watchdog { timeout_seconds: Some(6), on_hang: OnHang::Restart });
    assert_eq!(job.run(&[(env::FAULT, "stall:6")]), [10], "{}", job.read("err-0"));
    let Failure { origin_rank, cause, during, .. } = job.termination(0).failure.unwrap();
    let pid = pid_of(&job, 0, origin_rank);
    assert!(cause.contains("stands still for 6 s, since "), "{cause}");
    assert!(cause.contains(&format!("in reports and files after step 5 (process {pid})")), "{cause}");
    let other = 1 - origin_rank;
    assert_eq!(during, format!("rank {other} stands still as well: reports and files after step 5"));
}

/// The last summary in the job's log.
fn stuck(job: &Job) -> Option<Stuck> {
    Summary::last_in(&job.read("out-0")).and_then(|summary| summary.stuck)
}

#[test]
fn the_summary_names_hung_ranks_if_the_job_only_reports_hangs() {
    let job = job(2, 1, Watchdog { on_hang: OnHang::Report, ..LIMIT });
    let mut pods: Vec<Running> =
        (0..2).map(|node| Running(job.command(node).env(env::FAULT, "stall:6").spawn().unwrap())).collect();
    assert!(wait_until(|| stuck(&job).is_some_and(|stuck| stuck.ranks == 2)), "{}", job.read("out-0"));
    let Stuck { operation, step, node_rank, rank, .. } = stuck(&job).unwrap();
    assert_eq!((operation, step, node_rank), (Operation::Between, 5, rank));
    assert!(pods.iter_mut().all(|pod| pod.0.try_wait().unwrap().is_none()), "it keeps running");
}

/// This forward pass, counted over both ranks, waits until the gate opens.
const STUCK: u32 = 9;
static CALLS: AtomicU32 = AtomicU32::new(0);
static GATE: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

#[test]
fn a_sleeping_layer_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let sleep = || {
        if CALLS.fetch_add(1, Ordering::SeqCst) == STUCK {
            let open = GATE.0.lock().unwrap();
            drop(GATE.1.wait_while(open, |open| !*open).unwrap());
        }
    };
    let watchdog = Watchdog { timeout_seconds: Some(3), on_hang: OnHang::Restart };
    let config = EngineConfig { length: Length::Steps(1000), watchdog, ..hooked::config() };
    let causes = Arc::new(Mutex::new(Vec::new()));
    let outcomes = ranks::on_ranks(2, |group| {
        let (rank, stop, causes) = (group.rank(), AtomicI32::new(0), Arc::clone(&causes));
        let on_alarm: OnAlarm = Arc::new(move |alarm| {
            let Alarm::End(cause) = alarm else { panic!("{alarm:?}") };
            causes.lock().unwrap().push((rank, cause));
            *GATE.0.lock().unwrap() = true;
            GATE.1.notify_all();
        });
        let outside = RunOptions { run_dir: folder.path(), fault: None, stop: &stop, on_alarm: Some(on_alarm) };
        let registry = registry(Arc::new(sleep), Arc::new(|| ()));
        let blueprint = Blueprint::new(&config, open(&config)?, (2, 0), None, &registry)?;
        run(blueprint, &group, &outside, &mut Reporter::new(std::io::sink()), |_| {})
    });
    let [(rank, cause)] = &causes.lock().unwrap()[..] else { panic!("{causes:?}") };
    assert_eq!((cause.origin_rank, cause.kind), (*rank, CauseKind::Hung));
    assert!(cause.text.contains("forward pass of micro-batch 0, layer hooked (process "), "{cause}");
    assert!(cause.during.contains("waiting for the all-reduce"), "{cause}");
    for (other, outcome) in (0..).zip(outcomes) {
        let error = outcome.unwrap_err();
        assert!(matches!(&error, TrainError::Comm(CommError::Failed(seen)) if seen == cause), "rank {other}: {error}");
        assert_eq!(error.exit(other), if other == *rank { Exit::Hung } else { Exit::PeerFailure });
    }
}
