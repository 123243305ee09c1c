//! Pods as real processes: supervisors with their ranks, two of them as two hosts connected over
//! the loopback interface.

use crate::collective_support::wait_until;
use crate::pods::{Job, Running, WORKER, events, pid_of, ready};
use rustix::process::{Signal, geteuid};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::Command;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::{Event, Summary, step_in};
use switchyard_worker_contract::termination::Termination;

#[test]
fn two_pods_train_and_report_it() {
    let job = Job::new(2, 2, 30);
    assert_eq!(job.run(&[]), [0, 0], "{}{}", job.read("err-0"), job.read("err-1"));
    let (first, second) = (job.termination(0), job.termination(1));
    let summary = first.summary.unwrap();
    assert_eq!((summary.step, summary.total_steps, summary.remaining_seconds), (30, 30, Some(0.0)));
    assert!(summary.validation_loss.is_some_and(|loss| loss > 0.0) && summary.items_per_second > 0.0, "{summary:?}");
    assert_eq!((second.summary, &first.failure, &second.failure), (None, &None, &None));
    let logs = (job.read("out-0"), job.read("out-1"));
    assert_eq!(Summary::last_in(&logs.0), Some(summary), "{}", logs.0);
    assert!(events(&logs.0).iter().any(|event| matches!(event, Event::Finished(end) if end.step == 30)), "{}", logs.0);
    assert_eq!((ready(&logs.0).len(), ready(&logs.1).len()), (2, 2), "{}", logs.1);
    let others = events(&logs.1).into_iter().filter(|event| !matches!(event, Event::Progress(_))).count();
    assert!(others == 2 && step_in(&logs.1).is_some(), "{}", logs.1);
    assert!(ready(&logs.0).iter().all(|ready| ready.threads >= 1 && ready.transport.word() == "shm+tcp"), "{}", logs.0);
    assert!(job.path("run-0/model.safetensors").exists() && !job.path("run-1/model.safetensors").exists());
    assert_eq!(job.processes(), [""; 0]);
}

#[test]
fn a_killed_rank_is_the_root_cause_in_both_pods() {
    for (victim, codes, here, there) in [("3", [4, 5], 1, 0), ("0", [5, 4], 0, 1)] {
        let job = Job::new(2, 2, 1_000_000);
        assert_eq!(job.run(&[(env::FAULT, &format!("kill:5@{victim}"))]), codes, "{}", job.read("err-0"));
        let own = job.termination(here).failure.unwrap();
        let seen = job.termination(there).failure.unwrap();
        let origin: u32 = victim.parse().unwrap();
        assert_eq!((own.rank, own.origin_rank, own.exit_code), (origin, origin, 5), "{own:?}");
        assert_eq!((seen.origin_rank, seen.exit_code), (origin, 4), "{seen:?}");
        assert_eq!(own.cause, format!("{} (killed by signal 9 (SIGKILL))", seen.cause));
        let pods = [job.termination(0), job.termination(1)];
        assert_eq!(Termination::root_cause(&pods), Some(&own));
        assert_eq!(job.processes(), [""; 0]);
    }
}

#[test]
fn a_silent_rank_is_killed_by_its_pod() {
    // The other rank of its pod learns from the group that it is silent.
    let job = Job::new(2, 2, 1_000_000);
    assert_eq!(job.run(&[(env::FAULT, "hang:5@3"), (env::PEER_TIMEOUT_SECONDS, "4")]), [4, 5]);
    let failure = job.termination(1).failure.unwrap();
    assert!(failure.origin_rank == 3 && failure.cause.contains("did not answer"), "{failure:?}");
    assert_eq!(job.processes(), [""; 0]);
}

#[test]
fn stopping_one_pod_stops_the_job_and_names_the_pod() {
    let job = Job::new(2, 2, 1_000_000);
    let mut pods = [job.start(0), job.start(1)];
    job.wait_for("out-0", "\"summary\"");
    pods[1].signal(Signal::TERM);
    assert_eq!([pods[0].code(), pods[1].code()], [143, 143]);
    for node in [0, 1] {
        let failure = job.termination(node).failure.unwrap();
        assert!([2, 3].contains(&failure.origin_rank) && failure.exit_code == 143, "{failure:?}");
    }
    assert!(job.termination(0).summary.is_some_and(|summary| summary.step > 0));
    assert_eq!(job.processes(), [""; 0]);
}

#[test]
fn a_second_signal_does_not_wait() {
    let job = Job::new(1, 1, 1_000_000);
    let mut pod = Running(job.command(0).env(env::FAULT, "hang:6").spawn().unwrap());
    job.wait_for("out-0", "\"progress\"");
    // Pending signals of one kind are merged, so they are sent until one counts as the second.
    let ended = wait_until(|| {
        pod.signal(Signal::INT);
        pod.0.try_wait().unwrap().is_some()
    });
    assert!(ended, "the pod waits for an unresponsive rank");
    assert_eq!(pod.code(), 130);
    assert_eq!(job.termination(0).failure.unwrap().cause, "stopped by SIGINT");
    assert_eq!(job.processes(), [""; 0]);
}

#[test]
fn a_single_pod_needs_neither_a_key_nor_a_rendezvous_address() {
    let job = Job::new(1, 2, 12);
    fs::remove_file(job.path("key")).unwrap();
    let mut pod = Running(job.command(0).env_remove(env::KEY_FILE).env_remove(env::RENDEZVOUS).spawn().unwrap());
    assert_eq!(pod.code(), 0, "{}", job.read("err-0"));
    assert_eq!(job.termination(0).summary.unwrap().step, 12);
    let mut left: Vec<_> = fs::read_dir(job.path("run-0")).unwrap().flatten().map(|entry| entry.file_name()).collect();
    left.sort();
    assert_eq!(left, ["model.safetensors", "record", "tensorboard"]);
}

#[test]
fn refusals_are_in_the_termination_message() {
    let job = Job::new(2, 2, 5);
    let refused = |change: &dyn Fn(&mut Command) -> &mut Command| {
        let mut command = job.command(1);
        change(&mut command);
        let code = Running(command.spawn().unwrap()).code();
        let failure = job.termination(1).failure.unwrap();
        assert_eq!((failure.exit_code, failure.rank, failure.origin_rank), (code as u8, 2, 2), "{failure:?}");
        assert!(job.read("err-1").contains(&failure.cause), "{}", job.read("err-1"));
        (code, failure.cause)
    };
    for name in [env::KEY_FILE, env::CONFIG, env::RENDEZVOUS, env::JOB, env::RUN_DIR] {
        let (code, cause) = refused(&|command| command.env_remove(name));
        assert!(code == 2 && cause.contains(name), "{name}: {code} {cause}");
        if name == env::KEY_FILE || name == env::CONFIG {
            let (code, cause) = refused(&|command| command.env(name, "/nowhere"));
            assert!(code == 2 && cause.contains("/nowhere"), "{name}: {code} {cause}");
        }
    }
    job.write_key(0o444);
    let (code, cause) = refused(&|command| command);
    assert!(code == 2 && cause.contains("mode 0444"), "{code} {cause}");
}

#[test]
fn wrong_data_ends_the_pod_with_code_3() {
    let job = Job::new(1, 2, 5);
    fs::remove_file(job.path("data.txt")).unwrap();
    assert_eq!(job.run(&[]), [3]);
    let failure = job.termination(0).failure.unwrap();
    assert!(failure.exit_code == 3 && failure.cause.contains("data.txt"), "{failure:?}");
    assert!(job.read("err-0").contains("[rank "), "{}", job.read("err-0"));
}

#[test]
fn an_unprivileged_user_can_read_a_secret_volume() {
    assert!(geteuid().is_root(), "only root can give files to another user: run this test as root");
    const USER: u32 = 65_532;
    let job = Job::new(1, 1, 5);
    fs::set_permissions(job.folder.path(), Permissions::from_mode(0o755)).unwrap();
    let run = |mode: u32| {
        job.write_key(mode);
        chown(job.path("key"), Some(0), Some(USER)).unwrap();
        let mut command = job.command(0);
        fs::write(job.path("termination-0"), "").unwrap();
        for name in ["run-0", "termination-0"] {
            chown(job.path(name), Some(USER), Some(USER)).unwrap();
        }
        Running(command.uid(USER).gid(USER).spawn().unwrap()).code()
    };
    assert_eq!(run(0o440), 0, "{}", job.read("err-0"));
    assert_eq!(run(0o444), 2);
    assert!(job.termination(0).failure.unwrap().cause.contains("mode 0444, owned by user 0"));
}

#[test]
fn orphans_are_reaped_and_nothing_is_left() {
    let job = Job::new(1, 1, 1_000_000);
    // The shell becomes the supervisor, which therefore has children that it did not start, like
    // process 1 of a pod.
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "sleep 0 & sleep 0 & sleep 1000 & exec \"$0\" pod", WORKER]);
    let template = job.command(0);
    command.envs(template.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdout(File::create(job.path("out-0")).unwrap()).stderr(File::create(job.path("err-0")).unwrap());
    let mut pod = Running(command.spawn().unwrap());
    job.wait_for("out-0", "\"ready\"");
    let children = || fs::read_to_string(format!("/proc/{0}/task/{0}/children", pod.0.id())).unwrap();
    let only_two = wait_until(|| children().split_whitespace().count() == 2);
    assert!(only_two, "expected exactly the rank and the long sleep: {}", children());
    pod.signal(Signal::TERM);
    assert_eq!(pod.code(), 143);
    assert_eq!(job.processes(), [""; 0]);
}

/// The controller reads in the pod's log which links NCCL chose.
#[test]
fn ranks_log_the_links_that_nccl_chooses_unless_the_user_sets_its_log() {
    for (own, expected) in [(None, "NCCL_DEBUG=INFO"), (Some("WARN"), "NCCL_DEBUG=WARN")] {
        let job = Job::new(1, 1, 1_000_000);
        let mut command = job.command(0);
        command.envs(own.map(|level| ("NCCL_DEBUG", level)));
        let mut pod = Running(command.spawn().unwrap());
        job.wait_for("out-0", "\"ready\"");
        let rank = pid_of(&job, 0, 0).as_raw_nonzero();
        let environment = fs::read(format!("/proc/{rank}/environ")).unwrap();
        let has = |entry: &str| environment.split(|byte| *byte == 0).any(|known| known == entry.as_bytes());
        assert!(has(expected), "{}", String::from_utf8_lossy(&environment));
        assert_eq!(has("NCCL_DEBUG_SUBSYS=INIT,NET,P2P,SHM"), own.is_none());
        pod.signal(Signal::KILL);
        pod.ended();
    }
}

#[test]
fn ranks_die_with_a_killed_supervisor() {
    let job = Job::new(1, 2, 1_000_000);
    let mut pod = job.start(0);
    job.wait_for("out-0", "\"ready\"");
    pod.signal(Signal::KILL);
    assert!(!pod.ended().success());
    assert!(wait_until(|| job.processes().is_empty()), "{:?}", job.processes());
}

#[test]
fn a_pod_of_the_previous_attempt_cannot_join() {
    let job = Job::new(2, 1, 10);
    let mut first = Running(job.command(0).env(env::ATTEMPT, "2").spawn().unwrap());
    let mut old = Running(job.command(1).env(env::ATTEMPT, "1").spawn().unwrap());
    assert_eq!(old.code(), 5);
    let cause = job.termination(1).failure.unwrap().cause;
    assert!(cause.contains("attempt 1 is over, this is attempt 2"), "{cause}");
    let mut second = Running(job.command(1).env(env::ATTEMPT, "2").spawn().unwrap());
    assert_eq!([first.code(), second.code()], [0, 0], "{}", job.read("err-0"));
}

#[test]
fn help_documents_the_pod() {
    let output = Command::new(WORKER).args(["pod", "--help"]).output().unwrap();
    let all = Command::new(WORKER).arg("--help").output().unwrap();
    let texts = [output, all].map(|output| String::from_utf8(output.stdout).unwrap());
    assert!(texts[0].contains("termination message") && texts[1].contains("pod"), "{texts:?}");
    assert!(texts[1].contains(env::TERMINATION_LOG) && texts[1].contains(env::CPU_THREADS), "{}", texts[1]);
}
