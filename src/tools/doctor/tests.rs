//! Logs of several ranks: the first error is found even if another rank is louder, and no input
//! breaks the reader.

use super::*;
use proptest::prelude::*;

/// Reads logs, given as name and text.
fn diagnose(logs: &[(&str, &str)]) -> Diagnosis {
    let mut doctor = Doctor::new().unwrap();
    for (name, text) in logs {
        let mut log = doctor.open(name, 2026);
        text.lines().for_each(|line| doctor.line(&mut log, line.as_bytes()));
    }
    doctor.diagnosis()
}

fn only(logs: &[(&str, &str)]) -> Attempt {
    let mut attempts = diagnose(logs).attempts;
    assert_eq!(attempts.len(), 1, "{attempts:?}");
    attempts.remove(0)
}

/// Id and speaker of the first error.
fn first(attempt: &Attempt) -> (&str, &str) {
    attempt.first.as_ref().map_or(("", ""), |line| (line.error.id, line.who.as_str()))
}

fn ids(folds: &[Fold]) -> Vec<(&str, &str)> {
    folds.iter().map(|fold| (fold.error.id, fold.who.as_str())).collect()
}

#[test]
fn every_known_error_is_found_by_its_own_texts_and_well_formed() {
    let mut matcher = Matcher::new().unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for known in known() {
        assert!(seen.insert(known.id), "{} is there twice", known.id);
        assert!(!known.means.is_empty() && !known.look.is_empty() && !known.says.is_empty(), "{}", known.id);
        assert!(known.look.iter().chain([&known.means]).all(|text| !text.ends_with('.')), "{}", known.id);
        for group in known.texts {
            let line = format!("prefix {} suffix", group.join(" 0000 "));
            let (_, found) = matcher.find(line.as_bytes()).unwrap_or_else(|| panic!("{line}"));
            // A more serious error can match part of the text and then takes precedence.
            assert!(found.id == known.id || found.role <= known.role, "{}: {line} is {}", known.id, found.id);
        }
    }
    assert!(seen.len() >= 60, "{}", seen.len());
    assert!(matcher.find(b"step=1 loss=2.0").is_none());
}

#[test]
fn rules_and_checks_that_are_named_exist() {
    for known in known().filter(|known| known.told_by.contains("lint rule")) {
        let named = known
            .told_by
            .split(['/', ';', ',', ' '])
            .filter(|word| word.contains('-') || *word == "interface" || *word == "contradiction");
        for rule in named {
            assert!(switchyard_fabric::lint::RULES.iter().any(|known| known.id == rule), "{}: {rule}", known.id);
        }
    }
}

#[test]
fn a_rank_out_of_memory_is_the_cause_rather_than_its_peers() {
    let attempt = only(&[
        (
            "logs/rank-0.log",
            "2026-11-20T14:07:31.2Z [E] NCCL error: remote process exited or there was a network error\n2026-11-20T14:07:32Z Connection reset by peer",
        ),
        (
            "logs/rank-1.log",
            "2026-11-20T14:07:31Z x\n[1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        ),
        ("logs/rank-2.log", "2026-11-20T14:07:31.5Z Connection closed by peer [10.0.0.3]:4711"),
    ]);
    assert_eq!(first(&attempt), ("gpu-out-of-memory", "rank 1"));
    assert_eq!(ids(&attempt.followed), [("nccl-remote-error", "rank 0"), ("connection-closed", "ranks 0, 2")]);
    assert_eq!(attempt.followed[1].after_seconds, Some(0.5));
    assert_eq!((attempt.followed[1].count, attempt.suspects), (2, None));
}

/// The launcher polls every few seconds, so it reports the kill after the peers' complaints.
#[test]
fn a_cause_reported_late_still_counts_unless_it_is_much_later() {
    let logs = |killed: &str| {
        only(&[
            (
                "rank-0.log",
                "[2026-11-20 14:07:31] gpu:1:2 [0] NCCL WARN socketProgress: Connection closed by remote peer gpu-1<4>",
            ),
            ("rank-3.log", "2026-11-20 14:07:30 RuntimeError: unhandled system error"),
            ("launcher.log", &format!("{killed} torch.distributed failed (exitcode: -9) local_rank: 1 (pid: 7)")),
        ])
    };
    let soon = logs("2026-11-20 14:07:36,123");
    assert_eq!(first(&soon), ("killed", "launcher.log"));
    assert_eq!(soon.followed.len(), 2);
    let late = logs("2026-11-20 15:30:00,123");
    assert_eq!(first(&late), ("nccl-system-error", "rank 3"));
    assert_eq!(ids(&late.other_causes), [("killed", "launcher.log")]);
}

#[test]
fn the_earliest_of_several_causes_counts_in_any_log_order() {
    let attempt = only(&[
        ("rank-0.log", "2026-11-20T14:00:05Z ModuleNotFoundError: x"),
        ("rank-1.log", "2026-11-20T14:00:03Z No space left on device"),
        ("dmesg", "[Fri Nov 20 14:00:02 2026] NVRM: Xid (PCI:0000:ab:00): 79, pid=7, GPU has fallen off the bus."),
    ]);
    assert_eq!(first(&attempt), ("gpu-lost", "dmesg"));
    assert_eq!(ids(&attempt.other_causes), [("disk-full", "rank 1"), ("library-missing", "rank 0")]);
}

#[test]
fn without_times_a_cause_comes_before_its_consequences() {
    let attempt = only(&[
        ("rank-0.log", "ncclSystemError: System call failed"),
        ("rank-1.log", "NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes"),
    ]);
    assert_eq!(first(&attempt), ("shared-memory-full", "rank 1"));
    assert!(attempt.first.unwrap().error.told_by.contains("check 7"));
}

#[test]
fn followers_without_a_cause_point_elsewhere() {
    let attempt = only(&[("rank-0.log", "ncclRemoteError: x"), ("rank-2.log", "recvValue failed on SocketImpl")]);
    assert_eq!((first(&attempt), attempt.followed.len()), (("", ""), 2));
    assert!(attempt.basis.contains("another process"), "{}", attempt.basis);
}

#[test]
fn our_own_events_and_messages_name_the_origin() {
    let event = |rank: u32, origin: u32, cause: &str| {
        format!(
            r#"{{"time":"2026-11-20T14:00:0{rank}Z","attempt":2,"rank":{rank},"event":{{"event":"failed","rank":{rank},"originRank":{origin},"cause":"{cause}","during":"x","exitCode":4}}}}"#
        )
    };
    // Rank 1 was killed and logs nothing; the others agree that it was first.
    let silent =
        [event(0, 1, "connection closed: the process ended"), event(2, 1, "connection closed: the process ended")];
    let attempt = only(&[("events.jsonl", &silent.join("\n"))]);
    assert_eq!((attempt.attempt, first(&attempt)), (Some(2), ("", "")));
    assert_eq!(attempt.suspects.as_deref(), Some("rank 1: the others name it as the one that failed first"));
    // The status describes its end.
    let status = "message: 'rank 1 (pid 41207): killed by signal 9 (SIGKILL)'";
    let logs = [
        ("attempt-2/rank-0.log", "error: rank 1: connection closed: the process ended or its network failed"),
        ("attempt-2/status.yaml", status),
    ];
    let attempt = only(&logs);
    assert_eq!(first(&attempt), ("killed", "rank 1"));
    assert_eq!(ids(&attempt.followed), [("worker-peer", "rank 0")]);
    // A stopped rank writes nothing. The others agree on it, whether its pod has several ranks or
    // only this one.
    let words = "error: rank 2: no sign of life for 10.0 s";
    for (log, line) in [
        ("attempt-1/stop-1-0.log", format!("[rank 0] {words}")),
        ("attempt-1/stop-1-0/rank-0.log", words.to_owned()),
        ("events.jsonl", event(0, 2, "no sign of life for 10.0 s")),
        (
            "attempt-1/stop-1-0.log",
            r#"{"event":"failed","rank":0,"originRank":2,"cause":"no sign of life for 10.0 s","during":"x","exitCode":4}"#.into(),
        ),
    ] {
        let attempt = only(&[(log, &line)]);
        assert_eq!(first(&attempt), ("worker-silent", "rank 2"), "{line}");
        assert_eq!(ids(&attempt.followed), [("worker-peer", "rank 0")], "{line}");
    }
    // A rank that reports its own error.
    let own = event(1, 1, "spec.engine.data.path: a.bin has changed since the start");
    assert_eq!(first(&only(&[("events.jsonl", &own)])), ("worker-data", "rank 1"));
    assert_eq!(first(&only(&[("rank-3.log", "error: rank 3: something novel")])), ("worker-failure", "rank 3"));
}

#[test]
fn a_timeout_names_the_rank_that_is_behind_or_silent() {
    let waits = |rank: u32, sequence: u32| {
        format!(
            "[rank{rank}]:[E1120 14:03:1{rank}.5 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, OpType=ALLREDUCE)"
        )
    };
    let all = [waits(0, 812), waits(1, 812), waits(2, 811)].join("\n");
    assert_eq!(only(&[("all.log", &all)]).suspects.as_deref(), Some("rank 2: behind the others, at collective 811"));
    let (zero, one) = (waits(0, 9), waits(1, 9));
    let attempt = only(&[("rank-0.log", &zero), ("rank-1.log", &one), ("rank-2.log", "step 811")]);
    assert_eq!(attempt.suspects.as_deref(), Some("rank 2: silent while the others wait"));
    assert_eq!(first(&attempt), ("nccl-timeout", "rank 0"));
}

#[test]
fn launchers_name_ranks() {
    let torchrun = "2026-11-20 14:03:15 ChildFailedError:\nRoot Cause (first observed failure):\n  time      : 2026-11-20_14:03:12\n  host      : gpu-3\n  rank      : 13 (local_rank: 5)\n  exitcode  : -9 (pid: 4711)\n";
    assert_eq!(first(&only(&[("launcher.log", torchrun)])), ("killed", "rank 13"));
    let mpirun = "mpirun noticed that process rank 5 with PID 0 on node w-1 exited on signal 9 (Killed).";
    assert_eq!(first(&only(&[("launcher.log", mpirun)])), ("killed", "rank 5"));
    let pods = "[pod/gpt-worker-1/pytorch] 2026-11-20T14:00:00Z CUDA out of memory";
    assert_eq!(first(&only(&[("-", pods)])), ("gpu-out-of-memory", "gpt-worker-1"));
}

#[test]
fn an_exception_is_shown_by_its_last_line() {
    let lines = |last: &str| {
        format!(
            "[rank1]: Traceback (most recent call last):\n[rank0]: fine\n[rank1]:   File \"t.py\", line 3, in main\n[rank1]:     x = y\n[rank1]: {last}"
        )
    };
    let attempt = only(&[("all.log", &lines("KeyError: 'label'"))]);
    assert_eq!(first(&attempt), ("exception", "rank 1"));
    let line = attempt.first.unwrap();
    assert_eq!((line.text.as_str(), line.line), ("[rank1]: KeyError: 'label'", 5));
    let known = only(&[("all.log", &lines("torch.OutOfMemoryError: CUDA out of memory."))]);
    assert_eq!((first(&known), known.followed.len()), (("gpu-out-of-memory", "rank 1"), 0));
}

#[test]
fn attempts_are_kept_apart() {
    let diagnosis = diagnose(&[
        ("logs/attempt-1/rank-0.log", "CUDA out of memory"),
        ("logs/attempt-2/rank-0.log", "fine"),
        ("logs/attempt-3/rank-1.log", "No space left on device"),
    ]);
    let found: Vec<_> = diagnosis.attempts.iter().map(|attempt| (attempt.attempt, first(attempt))).collect();
    assert_eq!(found, [(Some(1), ("gpu-out-of-memory", "rank 0")), (Some(3), ("disk-full", "rank 1"))]);
}

#[test]
fn remarks_are_not_errors_and_healthy_logs_have_none() {
    let attempt = only(&[("rank-0.log", "gpu:1:2 [0] NCCL INFO NET/IB : No device found.\nUsing network Socket")]);
    assert_eq!((first(&attempt), ids(&attempt.remarks)), (("", ""), vec![("nccl-over-tcp", "rank 0")]));
    let healthy = "2026-11-20T14:03:12Z step=240/600 loss=2.184\nNCCL INFO comm 0x5 rank 0 nranks 2 - Init COMPLETE\n\n[rank 0] a warning";
    assert_eq!(diagnose(&[("rank-0.log", healthy)]).attempts, []);
}

/// Memory depends on the number of ranks and errors rather than the length of logs.
#[test]
fn equal_errors_are_counted_rather_than_kept() {
    let mut doctor = Doctor::new().unwrap();
    let mut log = doctor.open("rank-0.log", 2026);
    (0..10_000).for_each(|_| doctor.line(&mut log, b"Connection reset by peer"));
    let mut other = doctor.open("x.log", 2026);
    (0..80_000).for_each(|rank| doctor.line(&mut other, format!("[rank{rank}]: Broken pipe").as_bytes()));
    let attempt_hits = &doctor.attempts[&None];
    assert_eq!((attempt_hits.speakers[&Speaker::Rank(0)].len(), attempt_hits.speakers.len()), (1, MAX_SPEAKERS));
    assert_eq!(doctor.diagnosis().read.lines, 90_000);
}

#[test]
fn lines_are_shown_without_control_characters() {
    let attempt = only(&[("a.log", &format!("\u{1b}[31mCUDA out of memory\u{1b}[0m {}", "x".repeat(1000)))]);
    let text = attempt.first.unwrap().text;
    assert!(!text.contains('\u{1b}') && text.chars().count() == KEPT + 1, "{text}");
}

proptest! {
    #[test]
    fn no_bytes_panic(
        lines in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..80), 0..20),
        texts in proptest::collection::vec(
            proptest::sample::select(vec![
                "Traceback (most recent call last)", "[rank", "[1,", "error: rank ", "CUDA out of memory", "{\"event\":{\"event\":\"failed\"}}",
                "rank      : 1 (local_rank: 0)", "exitcode : -9", "2026-11-20T14:03:12", "SeqNum=", "process rank ", "\u{e9}\u{1F600}", "[pod/",
                "Watchdog caught collective operation timeout", ": ", "(pid ", "99999999999",
            ]),
            0..12,
        ),
    ) {
        let mut doctor = Doctor::new().unwrap();
        let mut log = doctor.open("attempt-1/rank-x.log", 2026);
        lines.iter().for_each(|line| doctor.line(&mut log, line));
        doctor.line(&mut log, texts.concat().as_bytes());
        texts.iter().for_each(|text| doctor.line(&mut log, text.as_bytes()));
        let not_utf8 = lines.iter().filter(|line| std::str::from_utf8(line).is_err()).count() as u64;
        prop_assert_eq!(doctor.diagnosis().read.not_utf8, not_utf8);
    }
}

/// Logs of users, each with the first error and its line, or the only remark.
#[test]
fn logs_from_the_field_have_their_diagnosis() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/field");
    let read = |name: &str| std::fs::read_to_string(format!("{folder}/{name}.txt")).unwrap();
    for (name, id, line) in [
        ("doctor-graph-file", "nccl-graph-file", 3),
        ("doctor-message-truncated-bootstrap", "nccl-internal-error", 1),
        ("doctor-mismatched-collective", "nccl-mismatched-collective", 1),
        ("doctor-modify-qp-timeout", "rdma-unreachable", 1),
        ("doctor-peer-access-217", "peer-access", 3),
        ("doctor-shm-old-form", "shared-memory-full", 1),
        ("pass-doctor-bus-lost-in-three-lines", "gpu-lost", 3),
        ("doctor-efa-security-group", "efa-request", 1),
        ("doctor-gloo-loopback", "gloo-mesh", 2),
        ("doctor-hip-memory-fault", "gpu-program-fault", 1),
        ("doctor-hip-no-binary", "no-kernel-image", 1),
        ("doctor-nccl-gpu-memory", "gpu-out-of-memory", 5),
        ("doctor-rdma-local-access", "rdma-access", 2),
        ("doctor-slurm-bus-error", "bus-error", 1),
        ("doctor-slurm-oom", "out-of-memory", 1),
        ("doctor-slurm-oom-old-form", "out-of-memory", 1),
        ("doctor-slurm-time-limit", "time-limit", 3),
        ("doctor-store-timeout", "rendezvous", 1),
        ("doctor-xid-caused-by-previous", "nvlink-fault", 1),
        ("doctor-xid-nonfatal", "xid", 1),
        ("doctor-watchdog-stuck", "nccl-watchdog-stuck", 1),
        ("pass-doctor-box-lines", "nccl-timeout", 1),
        ("pass-doctor-cq-memlock", "rdma-memlock", 3),
        ("pass-doctor-rank-behind", "nccl-timeout", 1),
        ("pass-doctor-ucx-memlock", "rdma-memlock", 1),
        ("pass-doctor-ucx-queue-pairs", "ucx-error", 1),
    ] {
        let attempt = only(&[(name, &read(name))]);
        let first = attempt.first.as_ref().map_or(("", 0), |said| (said.error.id, said.line));
        assert_eq!(first, (id, line), "{name}: {attempt:#?}");
    }
    for (name, id) in [
        ("doctor-gloo-loopback", "gloo-error"),
        ("doctor-nccl-gpu-memory", "connection-closed"),
        ("doctor-slurm-oom-old-form", "terminated"),
    ] {
        let attempt = only(&[(name, &read(name))]);
        assert!(attempt.followed.iter().any(|fold| fold.error.id == id), "{name}: {attempt:#?}");
    }
    for (name, id) in [
        ("doctor-gdr-disabled", "gpudirect-off"),
        ("doctor-ofi-init-failed", "efa-missing"),
        ("doctor-ofi-no-provider", "efa-missing"),
    ] {
        let attempt = only(&[(name, &read(name))]);
        assert!(attempt.first.is_none(), "{name}: {attempt:#?}");
        assert!(attempt.remarks.iter().any(|fold| fold.error.id == id), "{name}: {attempt:#?}");
    }
}
