//! Injected hangs, drawn from a seed: a layer that sleeps, a held lock, all ranks at once, a
//! checkpoint that cannot be written, a stopped process. The report must name the right rank, its
//! operation, and what the others do.
//!
//! `cargo xtask chaos` runs 200 of them and writes `docs/results/hangs.json`; the tests run one of
//! each kind.

#![allow(clippy::unwrap_used)]

#[path = "../../tests/src/chaos.rs"]
mod chaos;
mod collective_support;
mod hooked;
mod plain;
mod pods;
#[path = "../../tests/src/random.rs"]
mod random;
mod ranks;

use collective_support::wait_until;
use hooked::{Hook, registry};
use pods::{Job, Running, pid_of, wait_for_step};
use random::Random;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use std::fs;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use switchyard_worker::comm::{Cause, CauseKind};
use switchyard_worker::train::{Alarm, Blueprint, OnAlarm, Reporter, RunOptions, open, run};
use switchyard_worker_contract::config::{Checkpoint, EngineConfig, Length, OnHang, Watchdog};
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::Failure;
use switchyard_worker_contract::recorder::{Operation, Recording};

const RANKS: u32 = 3;
/// Long enough for a step on a busy machine.
const LIMIT: u32 = 4;
const WATCHDOG: Watchdog = Watchdog { timeout_seconds: Some(LIMIT), on_hang: OnHang::Restart };
/// Seed of a normal test run.
const SEED: u64 = 20_261_123;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A layer's forward pass never returns.
    Layer,
    /// A layer's backward pass waits for a lock that is never released.
    Lock,
    /// The same layer sleeps on all ranks.
    AllRanks,
    /// Part of a checkpoint is written to a pipe without a reader.
    Checkpoint,
    /// SIGSTOP: none of the rank's threads run, its watchdog included.
    Stopped,
}

const KINDS: [Kind; 5] = [Kind::Layer, Kind::Lock, Kind::AllRanks, Kind::Checkpoint, Kind::Stopped];

/// The report of a hang, and its delay after the timeout.
struct Report {
    origin: u32,
    cause: String,
    during: String,
    late: f64,
}

/// Blocks until it is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        drop(self.changed.wait_while(self.open.lock().unwrap(), |open| !*open).unwrap());
    }
}

/// Hangs a layer of ranks that are threads of this process; `victim` is `None` for all ranks.
fn in_layer(kind: Kind, victim: Option<u32>, pass: u64) -> Report {
    let folder = tempfile::tempdir().unwrap();
    let config = EngineConfig { length: Length::Steps(1_000_000), watchdog: WATCHDOG, ..hooked::config() };
    let (gate, held) = (Arc::new(Gate::default()), Arc::new(Mutex::new(())));
    let (injected, report) = (Arc::new(Mutex::new(None)), Arc::new(Mutex::new(None::<(Cause, Instant)>)));
    let keeper = held.lock().unwrap();
    std::thread::scope(|scope| {
        let training = scope.spawn(|| {
            ranks::on_ranks(RANKS, |group| {
                let rank = group.rank();
                let (here, lock, injected) = (Arc::clone(&gate), Arc::clone(&held), Arc::clone(&injected));
                let own = Mutex::new(0);
                let hang: Hook = Arc::new(move || {
                    let mut own = own.lock().unwrap();
                    *own += 1;
                    if *own == pass && victim.is_none_or(|victim| victim == rank) {
                        injected.lock().unwrap().get_or_insert_with(Instant::now);
                        if kind == Kind::Lock { drop(lock.lock().unwrap()) } else { here.wait() }
                    }
                });
                let nothing: Hook = Arc::new(|| ());
                let registry = if kind == Kind::Lock { registry(nothing, hang) } else { registry(hang, nothing) };
                let (gate, report, stop) = (Arc::clone(&gate), Arc::clone(&report), AtomicI32::new(0));
                let on_alarm: OnAlarm = Arc::new(move |alarm| {
                    let Alarm::End(cause) = alarm else { panic!("{alarm:?}") };
                    report.lock().unwrap().get_or_insert((cause, Instant::now()));
                    gate.open();
                });
                let outside = RunOptions { run_dir: folder.path(), fault: None, stop: &stop, on_alarm: Some(on_alarm) };
                let blueprint = Blueprint::new(&config, open(&config).unwrap(), (RANKS, 0), None, &registry).unwrap();
                run(blueprint, &group, &outside, &mut Reporter::new(std::io::sink()), |_| {}).unwrap_err();
                assert_eq!(stop.load(Ordering::Relaxed), 0);
            })
        });
        gate.wait();
        drop(keeper);
        training.join().unwrap();
    });
    let (cause, at) = report.lock().unwrap().take().unwrap();
    assert_eq!(cause.kind, CauseKind::Hung);
    let late = (at - injected.lock().unwrap().unwrap()).as_secs_f64() - f64::from(LIMIT);
    Report { origin: cause.origin_rank, cause: cause.text, during: cause.during, late }
}

fn recording(job: &Job, rank: u32) -> Recording {
    Recording::read(&fs::read(job.path(&format!("run-0/record/rank-{rank}.attempt-1.recorder"))).unwrap()).unwrap()
}

/// When the last operation of this kind began, in seconds since 1970.
fn began(of: &Recording, operation: Operation) -> f64 {
    let entry = of.entries.iter().rev().find(|entry| entry.operation == operation).unwrap();
    (of.start_us + entry.since_us) as f64 / 1e6
}

/// Hangs a process of a pod.
fn in_process(kind: Kind, victim: u32, step: u64) -> Report {
    let every = step.max(2);
    let job = Job::new(1, RANKS, 1_000_000).with(|config| (config.fetch_every_steps, config.watchdog) = (1, WATCHDOG));
    let folder = job.path("checkpoints").join(format!("step-{every:09}.attempt-{}", u32::MAX));
    let job = match kind {
        Kind::Checkpoint => {
            fs::create_dir_all(&folder).unwrap();
            let pipe = folder.join(format!("rank-{victim}.safetensors.tmp"));
            mknodat(CWD, pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            let path = job.path("checkpoints").display().to_string();
            let saves = Checkpoint { path, every_steps: every, period_seconds: 0, keep: 2, on_suspend: false };
            job.with(|config| config.checkpoint = Some(saves))
        }
        _ => job,
    };
    let mut command = job.command(0);
    if kind == Kind::Stopped {
        command.env(env::PEER_TIMEOUT_SECONDS, LIMIT.to_string());
    }
    let mut pod = Running(command.spawn().unwrap());
    let mut stopped = None;
    if kind == Kind::Stopped {
        assert!(wait_for_step(&job, &mut pod, step), "{}", job.read("err-0"));
        // A rank that has been alive for this long has sent heartbeats.
        assert!(wait_until(|| recording(&job, victim).alive_us > 2_500_000), "{}", job.read("err-0"));
        let pid = pid_of(&job, 0, victim);
        stopped = Some(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64());
        kill_process(pid, Signal::STOP).unwrap();
    }
    pod.ended();
    let Failure { origin_rank, cause, during, .. } = job.termination(0).failure.unwrap();
    let injected = stopped.unwrap_or_else(|| began(&recording(&job, victim), Operation::Checkpoint));
    let report = began(&recording(&job, (victim + 1) % RANKS), Operation::Failed);
    Report { origin: origin_rank, cause, during, late: report - injected - f64::from(LIMIT) }
}

/// Injects a hang. Returns whether the report is right, and the report.
fn inject(kind: Kind, random: &Random) -> (bool, Report) {
    let (victim, pass) = (*random.pick(&[0, 1, 2]), 2 + random.below(10) as u64);
    let report = match kind {
        Kind::Layer | Kind::Lock => in_layer(kind, Some(victim), pass),
        Kind::AllRanks => in_layer(kind, None, pass),
        // Rank 0 is the one that notices silence.
        Kind::Stopped => in_process(kind, victim.max(1), pass),
        Kind::Checkpoint => in_process(kind, victim, pass),
    };
    let of_step = |step: u64, doing: &str| format!("in step {step}: {doing}");
    let doing = match kind {
        Kind::Layer | Kind::AllRanks => of_step(pass, "forward pass of micro-batch 0, layer hooked (process "),
        Kind::Lock => of_step(pass, "backward pass of micro-batch 0, layer hooked (process "),
        Kind::Checkpoint => of_step(2 * pass, "writing its part of a checkpoint (process "),
        Kind::Stopped => "no sign of life for ".to_owned(),
    };
    let others = match kind {
        Kind::AllRanks => "stand still as well: ",
        Kind::Checkpoint => "waiting for all ranks to agree",
        _ => "waiting for the all-reduce of bucket ",
    };
    let origin = match kind {
        Kind::AllRanks => report.origin,
        Kind::Stopped => victim.max(1),
        _ => victim,
    };
    let listed = (0..RANKS).filter(|rank| *rank != origin).map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ");
    let is_right = report.origin == origin
        && report.cause.contains(&doing)
        && report.during.contains(others)
        && report.during.contains(&format!("ranks {listed}"));
    (is_right, report)
}

#[test]
fn every_hang_is_reported_correctly() {
    let seed = chaos::seed().unwrap_or(SEED);
    let random = Random::new(seed);
    let each = chaos::size(1, 40);
    let mut hangs = Vec::new();
    for number in 0..each * KINDS.len() {
        let kind = KINDS[number % KINDS.len()];
        let (is_right, Report { origin, cause, during, late }) = inject(kind, &random);
        assert!(is_right, "{kind:?}: rank {origin}: {cause}; {during}; rerun with SWITCHYARD_SEED={seed}");
        let late = (late * 1000.0).round() / 1000.0;
        hangs.push(json!({"kind": format!("{kind:?}"), "namedRight": is_right, "secondsAfterTimeout": late}));
    }
    let late = |hang: &Value| hang["secondsAfterTimeout"].as_f64().unwrap();
    let most = hangs.iter().map(late).fold(f64::MIN, f64::max);
    let within = hangs.iter().filter(|hang| late(hang) <= 1.0).count();
    let result = json!({
        "ranks": RANKS, "timeoutSeconds": LIMIT, "seed": seed, "planted": hangs.len(), "namedRight": hangs.len(),
        "withinOneSecond": within, "secondsAfterTimeoutMost": most, "hangs": hangs,
    });
    chaos::report("hangs", &result).unwrap();
}
