//! Runs ended by signals, as real processes: the state is saved, and the next start resumes from
//! it.

use crate::collective_support::wait_until;
use crate::pods::{Job, Running, finished, last_step, pid_of, ready, resumed, wait_for_step};
use rustix::process::{Signal, kill_process};
use std::fs;
use std::time::Duration;
use switchyard_worker_contract::config::{Amp, Checkpoint, HalfType, Length, LossScaling, Precision};
use switchyard_worker_contract::env;
use xxhash_rust::xxh3::xxh3_128;

/// A single-node job that saves its state.
fn saving(procs: u32, steps: u64, every_steps: u64) -> Job {
    let job = Job::new(1, procs, steps);
    let path = job.path("checkpoints").display().to_string();
    job.with(|config| {
        config.fetch_every_steps = 1;
        config.checkpoint = Some(Checkpoint { path, every_steps, period_seconds: 0, keep: 2, on_suspend: true });
    })
}

/// The final digest of the same job without checkpoints and faults.
fn undisturbed(procs: u32, steps: u64) -> String {
    let job = Job::new(1, procs, steps);
    assert_eq!(job.run(&[]), [0], "{}", job.read("err-0"));
    finished(&job.read("out-0")).unwrap().weights_digest
}

#[test]
fn a_stop_saves_first_and_the_next_start_resumes() {
    for signal in [Signal::TERM, Signal::INT] {
        let job = saving(2, 1_000_000, 0);
        let mut pod = job.start(0);
        assert!(wait_for_step(&job, &mut pod, 5));
        pod.signal(signal);
        let code = if signal == Signal::TERM { 143 } else { 130 };
        assert_eq!(pod.code(), code, "{}", job.read("err-0"));
        let last = last_step(&job);
        let cause = job.termination(0).failure.unwrap().cause;
        assert_eq!(cause, format!("stopped by a signal after step {last}, which is saved"));
        let end = last + 10;
        let job = job.with(|config| config.length = Length::Steps(end));
        assert_eq!(job.run(&[(env::ATTEMPT, "2")]), [0], "{}", job.read("err-0"));
        assert_eq!(resumed(&job), Some(last));
        let digest = finished(&job.read("out-0")).unwrap().weights_digest;
        assert_eq!(digest, undisturbed(2, end), "stopped after {last}");
    }
}

#[test]
fn stopping_one_rank_stops_all_after_saving() {
    let job = saving(3, 1_000_000, 0);
    let mut pod = job.start(0);
    assert!(wait_for_step(&job, &mut pod, 3));
    kill_process(pid_of(&job, 0, 2), Signal::TERM).unwrap();
    assert_eq!(pod.code(), 143, "{}", job.read("err-0"));
    let failure = job.termination(0).failure.unwrap();
    assert!(failure.cause.contains("which is saved"), "{failure:?}");
}

#[test]
fn a_second_signal_does_not_wait_for_saving() {
    // Rank 1 hangs, so the step in which the others could agree to stop never ends.
    let job = saving(2, 1_000_000, 0);
    let mut command = job.command(0);
    command.env(env::FAULT, "hang:6@1").env(env::PEER_TIMEOUT_SECONDS, "600");
    let mut pod = Running(command.spawn().unwrap());
    assert!(wait_for_step(&job, &mut pod, 5));
    let first = pid_of(&job, 0, 0);
    let term = || kill_process(first, Signal::TERM);
    term().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(pod.0.try_wait().unwrap().is_none(), "the first signal only requests a stop: {}", job.read("err-0"));
    // Pending signals of one kind are merged, so they are sent until one counts as the second.
    let ended = wait_until(|| {
        let _ = term();
        pod.0.try_wait().unwrap().is_some()
    });
    assert!(ended, "it waits for an unresponsive rank");
    assert_eq!(pod.code(), 143, "{}", job.read("err-0"));
}

/// Kills ranks at random moments until the training completes despite them.
fn survives_kills(procs: u32, kills: u32, seed: u32) {
    const EVERY: u64 = 4;
    let steps = u64::from(kills) * 30;
    let job = saving(procs, steps, EVERY);
    let mut random = seed;
    let mut next = |below: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 16) % below
    };
    let (mut reached, mut killed) = (0, 0);
    for attempt in 1.. {
        let mut pod = Running(job.command(0).env(env::ATTEMPT, attempt.to_string()).spawn().unwrap());
        let goes_on = killed < kills && wait_for_step(&job, &mut pod, reached + u64::from(next(24)) + 1);
        if goes_on {
            let (victim, pause) = (pid_of(&job, 0, next(procs)), next(2000));
            std::thread::sleep(Duration::from_micros(pause.into()));
            let _ = kill_process(victim, Signal::KILL);
            killed += 1;
        }
        let code = pod.code();
        // Apart from the checkpoint that may be in progress, one is complete.
        let complete = (reached / EVERY).saturating_sub(1) * EVERY;
        assert!(resumed(&job).unwrap_or(0) >= complete, "attempt {attempt}: {:?} after {reached}", resumed(&job));
        reached = reached.max(last_step(&job));
        assert!(attempt == 1 || reached < 2 * EVERY || resumed(&job).is_some(), "attempt {attempt} starts over");
        if code == 0 {
            break;
        }
        assert!(goes_on && code == 5, "attempt {attempt}: {code} {}", job.read("err-0"));
    }
    assert!(killed >= kills / 2, "{killed} kills");
    let digest = finished(&job.read("out-0")).unwrap().weights_digest;
    assert_eq!(digest, undisturbed(procs, steps), "{procs} ranks, {killed} kills, seed {seed}");
    assert_eq!(job.processes(), [""; 0]);
}

#[test]
fn two_ranks_survive_ten_kills() {
    survives_kills(2, 10, 1);
}

#[test]
fn three_ranks_survive_ten_kills() {
    survives_kills(3, 10, 2);
}

#[test]
fn four_ranks_survive_ten_kills() {
    survives_kills(4, 10, 3);
}

#[test]
fn a_rank_that_kills_itself_costs_at_most_one_interval() {
    let job = saving(2, 40, 5);
    assert_eq!(job.run(&[(env::FAULT, "kill:23@1#1")]), [5]);
    assert_eq!(job.run(&[(env::FAULT, "kill:23@1#1"), (env::ATTEMPT, "2")]), [0], "{}", job.read("err-0"));
    assert!([Some(15), Some(20)].contains(&resumed(&job)), "{:?}", resumed(&job));
    assert_eq!(finished(&job.read("out-0")).unwrap().weights_digest, undisturbed(2, 40));
}

#[test]
fn a_damaged_checkpoint_is_named_in_the_log() {
    let job = saving(2, 12, 4);
    assert_eq!(job.run(&[]), [0]);
    let file = job.path("checkpoints/step-000000012.attempt-1/rank-0.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert_eq!(job.run(&[(env::ATTEMPT, "2")]), [0], "{}", job.read("err-0"));
    let log = job.read("err-0");
    assert!(log.contains("step 12, attempt 1 is skipped") && log.contains("damaged: chunk 0"), "{log}");
    assert_eq!(resumed(&job), Some(8));
    assert_eq!(finished(&job.read("out-0")).unwrap().weights_digest, undisturbed(2, 12));
}

#[test]
fn a_bf16_kernel_other_than_the_checkpoints_is_logged() {
    let amp = Amp { compute_type: HalfType::Bf16, loss_scaling: LossScaling::Static { scale: 1.0 } };
    let job = saving(2, 12, 4).with(|config| config.precision = Precision::Amp(amp));
    let portable = |attempt| [(env::KERNEL, "portable"), (env::ATTEMPT, attempt)];
    assert_eq!(job.run(&portable("1")), [0], "{}", job.read("err-0"));
    // As if its CPUs had had AMX.
    let file = job.path("checkpoints/step-000000012.attempt-1/manifest.json");
    let text = fs::read_to_string(&file).unwrap();
    let (_, inner) = text.trim_end().split_once(",\"manifest\":").unwrap();
    let inner = inner.strip_suffix('}').unwrap().replace("\"halfKernel\":\"f32\"", "\"halfKernel\":\"amx\"");
    let digest = xxh3_128(inner.as_bytes());
    fs::write(&file, format!("{{\"digest\":\"{digest:032x}\",\"manifest\":{inner}}}\n")).unwrap();
    let job = job.with(|config| config.length = Length::Steps(16));
    assert_eq!(job.run(&portable("2")), [0], "{}", job.read("err-0"));
    assert_eq!(resumed(&job), Some(12));
    let log = job.read("err-0");
    let note = "note: products of bf16 are computed by f32; up to the checkpoint it was amx";
    assert_eq!(log.matches(note).count(), 1, "rank 0 says it: {log}");
}

#[test]
fn an_incompatible_checkpoint_ends_the_pod_with_code_6() {
    let job = saving(2, 12, 4);
    assert_eq!(job.run(&[]), [0]);
    let job = job.with(|config| config.seed += 1);
    assert_eq!(job.run(&[(env::ATTEMPT, "2")]), [6], "{}", job.read("err-0"));
    let failure = job.termination(0).failure.unwrap();
    assert!(failure.exit_code == 6 && failure.cause.contains("spec.engine.seed: got 8; expected 7"), "{failure:?}");
}

#[test]
fn a_node_without_access_to_the_checkpoints_reports_it_to_all() {
    let job = Job::new(2, 1, 12).with(|config| {
        let path = "checkpoints".into();
        config.checkpoint = Some(Checkpoint { path, every_steps: 4, period_seconds: 0, keep: 2, on_suspend: true });
    });
    fs::create_dir(job.path("elsewhere")).unwrap();
    let run = |attempt: &str, folders: [&str; 2]| {
        let start = |node: u32| {
            let mut command = job.command(node);
            command.env(env::ATTEMPT, attempt).current_dir(job.path(folders[node as usize]));
            Running(command.spawn().unwrap())
        };
        let mut pods = [start(0), start(1)];
        [pods[0].code(), pods[1].code()]
    };
    assert_eq!(run("1", [".", "."]), [0, 0], "{}", job.read("err-0"));
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let expected = format!(
        "spec.checkpoint.path: checkpoints: got another directory on rank 1 ({0}) than on rank 0 ({0}): rank 0's lock \
         is not there; expected one directory on storage that all hosts share",
        host.trim()
    );
    let refuses = |attempt: &str| {
        assert_eq!(run(attempt, [".", "elsewhere"]), [6, 6], "{} {}", job.read("err-0"), job.read("err-1"));
        for node in [0, 1] {
            let failure = job.termination(node).failure.unwrap();
            assert!(failure.cause.contains(&expected), "{failure:?}");
            assert!(ready(&job.read(&format!("out-{node}"))).is_empty(), "before the first step");
        }
    };
    refuses("2");
    // A new job as well: it could not complete any checkpoint.
    fs::remove_dir_all(job.path("checkpoints")).unwrap();
    refuses("3");
}
