//! Whatever happens to one rank, all others report the same cause soon, and nothing is left behind.

#![allow(clippy::unwrap_used, reason = "helpers of tests may end the test")]

mod collective_support;

use collective_support::{
    config, free_port, group, mappings_of_buckets, open_handles, rank_process, spawn_rank, spawn_rank_with, try_group,
    wait_until,
};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    process::Child,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use switchyard_worker::comm::{Cause, CauseKind, CommError, Communicator, Force, Token};

/// Tests that look at time, processor use or open files of this process run one after another.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

const BUCKETS: [usize; 2] = [300_000, 40];

/// A rank of its own process: reduces for ever, and prints its root cause.
#[test]
fn process_that_reduces_for_ever() {
    let Some(config) = rank_process() else { return };
    // The test harness may run behind sockets of its own.
    let before = open_handles();
    let mut comm = Communicator::connect(&config, &BUCKETS).unwrap();
    println!("ready");
    let error = loop {
        comm.start(0);
        comm.start(1);
        if let Err(error) = comm.wait(1).and_then(|()| comm.wait(0)) {
            break error;
        }
        comm.bucket_mut(0).fill(1.0);
        comm.bucket_mut(1).fill(1.0);
    };
    let seen = Instant::now();
    let cause = error.cause().unwrap().clone();
    drop(comm);
    assert!(seen.elapsed() < Duration::from_secs(1), "drop took {:?}", seen.elapsed());
    println!("cause {}", serde_json::to_string(&cause).unwrap());
    assert_eq!(open_handles(), before);
    assert_eq!(mappings_of_buckets(), 0);
}

struct Ranks {
    children: Vec<Child>,
    outputs: Vec<BufReader<std::process::ChildStdout>>,
}

impl Ranks {
    fn start(world: u32, extra: &[(&str, &str)]) -> Ranks {
        let port = free_port();
        let mut children: Vec<Child> =
            (0..world).map(|rank| spawn_rank("process_that_reduces_for_ever", rank, world, port, extra)).collect();
        let outputs: Vec<_> = children.iter_mut().map(|c| BufReader::new(c.stdout.take().unwrap())).collect();
        let mut ranks = Ranks { children, outputs };
        for output in &mut ranks.outputs {
            loop {
                let mut line = String::new();
                assert_ne!(output.read_line(&mut line).unwrap(), 0, "a rank ended before it was ready");
                if line.contains("ready") {
                    break;
                }
            }
        }
        ranks
    }

    fn signal(&self, rank: usize, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.children[rank].id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// The causes that all ranks but `dead` print; the time until the last one.
    fn causes(&mut self, dead: usize) -> Vec<Cause> {
        let mut causes = Vec::new();
        for (rank, output) in self.outputs.iter_mut().enumerate().filter(|(rank, _)| *rank != dead) {
            let mut text = String::new();
            output.read_to_string(&mut text).unwrap();
            let line = text.lines().find_map(|line| line.strip_prefix("cause ")).unwrap_or_else(|| panic!("{text}"));
            causes.push(serde_json::from_str(line).unwrap());
            assert!(self.children[rank].wait().unwrap().success(), "{text}");
        }
        causes
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn same(causes: &[Cause], origin: u32, text: &str) {
    for cause in causes {
        assert_eq!((cause.origin_rank, cause.kind), (origin, CauseKind::Failed), "{causes:?}");
        assert!(cause.text.contains(text), "{cause:?}");
        assert_eq!((&cause.text, &cause.host), (&causes[0].text, &causes[0].host), "{causes:?}");
        assert!(!cause.host.is_empty() && !cause.during.is_empty(), "{cause:?}");
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    let _alone = alone();
    for (transport, victim) in [("auto", 2), ("auto", 0), ("tcp", 1), ("tcp", 0)] {
        let mut ranks = Ranks::start(3, &[("TEST_TRANSPORT", transport)]);
        std::thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        ranks.signal(victim, rustix::process::Signal::KILL);
        let causes = ranks.causes(victim);
        assert!(start.elapsed() < Duration::from_secs(2), "took {:?}", start.elapsed());
        assert_eq!(causes.len(), 2);
        same(&causes, victim as u32, "connection closed");
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_timeout() {
    let _alone = alone();
    for victim in [1, 0] {
        let mut ranks = Ranks::start(3, &[("TEST_PEER_TIMEOUT_MS", "1500")]);
        let start = Instant::now();
        ranks.signal(victim, rustix::process::Signal::STOP);
        let causes = ranks.causes(victim);
        let took = start.elapsed();
        assert!(took > Duration::from_millis(1100) && took < Duration::from_millis(4000), "took {took:?}");
        same(&causes, victim as u32, "no sign of life for 1.5 s");
    }
}

#[test]
fn the_word_of_an_aborting_rank_reaches_all() {
    let _alone = alone();
    for (force, origin) in [(Force::Shm, 1), (Force::Tcp, 2), (Force::Tcp, 0), (Force::Shm, 0)] {
        let causes = group(
            4,
            |c| c.transport = force,
            &BUCKETS,
            |mut comm| {
                let start = Instant::now();
                if comm.rank() == origin {
                    comm.abort(Cause::failed(origin, "the loss is not a number"));
                } else {
                    comm.start(0);
                    let error = comm.wait(0).unwrap_err();
                    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
                    assert_eq!(error.cause(), comm.failure().as_ref());
                    // Later calls fail at once, with the same cause.
                    assert_eq!(comm.wait(0).unwrap_err().cause(), error.cause());
                    assert_eq!(comm.barrier().unwrap_err().cause(), error.cause());
                }
                let cause = comm.failure().unwrap();
                let start = Instant::now();
                drop(comm);
                assert!(start.elapsed() < Duration::from_secs(1), "drop took {:?}", start.elapsed());
                cause
            },
        );
        same(&causes, origin, "the loss is not a number");
        assert!(causes.iter().all(|cause| *cause == causes[0]));
    }
}

#[test]
fn the_first_of_several_failures_wins_everywhere() {
    let _alone = alone();
    let causes = group(
        4,
        |_| {},
        &BUCKETS,
        |comm| {
            comm.aborter().abort(Cause::stopped(comm.rank(), 15));
            comm.failure().unwrap()
        },
    );
    assert!(causes.iter().all(|cause| *cause == causes[0]), "{causes:?}");
    assert_eq!(causes[0].kind, CauseKind::Stopped(15));
}

#[test]
fn a_rank_that_gives_up_or_leaves_early_is_named() {
    let _alone = alone();
    let causes = group(
        3,
        |_| {},
        &BUCKETS,
        |mut comm| {
            if comm.rank() == 1 {
                drop(comm);
                return None;
            }
            Some(comm.all_reduce(0).unwrap_err().cause().unwrap().clone())
        },
    );
    same(&causes.into_iter().flatten().collect::<Vec<_>>(), 1, "gave up without a word");
    let causes = group(
        3,
        |_| {},
        &BUCKETS,
        |mut comm| {
            let error = if comm.rank() == 1 { comm.leave().unwrap_err() } else { comm.barrier().unwrap_err() };
            error.cause().unwrap().clone()
        },
    );
    same(&causes, 1, "left the group while");
}

#[test]
fn ranks_out_of_step_are_named() {
    let _alone = alone();
    for force in [Force::Shm, Force::Tcp] {
        let causes = group(
            2,
            |c| c.transport = force,
            &[100, 2000],
            |mut comm| {
                let first = usize::from(comm.rank() == 1);
                comm.start(first);
                let error = comm.wait(first).unwrap_err();
                error.cause().unwrap().clone()
            },
        );
        assert_eq!(causes[0], causes[1]);
        let text = &causes[0].text;
        assert!(text.contains("out of step") && text.contains("operation 1"), "{text}");
        assert!(text.contains("bucket 0 (100 numbers)") && text.contains("bucket 1 (2000 numbers)"), "{text}");
    }
}

#[test]
fn whoever_does_not_belong_is_refused_and_the_group_forms_without_it() {
    let _alone = alone();
    let port = free_port();
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || {
            let comm = Communicator::connect(&config(0, 2, port), &[8]).unwrap();
            let refusals = comm.refusals();
            let late = scope.spawn(move || Communicator::connect(&config(1, 2, port), &[8]).err().unwrap().to_string());
            let late = late.join().unwrap();
            (comm, refusals, late)
        });
        let intruder = |change: &dyn Fn(&mut switchyard_worker::comm::GroupConfig)| {
            let mut config = config(1, 2, port);
            config.connect_timeout = Duration::from_millis(1500);
            change(&mut config);
            Communicator::connect(&config, &[8]).err().unwrap().to_string()
        };
        let text = intruder(&|c| c.key = Token::new([1; 32]));
        assert!(text.contains("refused") && text.contains("same job token"), "{text}");
        let text = intruder(&|c| c.attempt = 0);
        assert!(text.contains("attempt 0 is over, this is attempt 1"), "{text}");
        let text = intruder(&|c| c.job = "other".to_owned());
        assert!(text.contains("be of one job"), "{text}");
        let text = intruder(&|c| c.num_nodes = 3);
        assert!(text.contains("expects 3 ranks"), "{text}");
        // A newer attempt waits for the older one to end.
        let text = intruder(&|c| c.attempt = 2);
        assert!(text.contains("older attempt is still there"), "{text}");
        let one = scope.spawn(move || Communicator::connect(&config(1, 2, port), &[8]).unwrap());
        let (one, (zero, refusals, late)) = (one.join().unwrap(), zero.join().unwrap());
        assert!(refusals.iter().any(|text| text.contains("wrong job token")), "{refusals:?}");
        assert!(late.contains("rank 1 is already present"), "{late}");
        let leaving = scope.spawn(move || zero.leave());
        one.leave().unwrap();
        leaving.join().unwrap().unwrap();
    });
}

#[test]
fn absent_ranks_are_listed_by_all() {
    let _alone = alone();
    let port = free_port();
    let texts: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = [0, 2]
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let mut config = config(rank, 5, port);
                    config.connect_timeout = Duration::from_millis(800);
                    Communicator::connect(&config, &[8]).err().unwrap().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|text| text.contains("ranks 1, 3, 4")), "{texts:?}");
    let mut lonely = config(1, 2, free_port());
    lonely.connect_timeout = Duration::from_millis(300);
    let error = Communicator::connect(&lonely, &[8]).err().unwrap();
    assert!(matches!(error, CommError::Unreachable { .. }), "{error}");
}

#[test]
fn garbage_and_idle_connections_do_not_disturb_a_group() {
    let _alone = alone();
    let port = free_port();
    let strangers = Mutex::new(Vec::new());
    let flood = |count: usize, garbage: &[u8]| {
        for _ in 0..count {
            if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                let _ = stream.write_all(garbage);
                strangers.lock().unwrap().push(stream);
            }
        }
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || Communicator::connect(&config(0, 2, port), &BUCKETS).unwrap());
        assert!(wait_until(Duration::from_secs(5), || TcpStream::connect(("127.0.0.1", port)).is_ok()));
        flood(100, b"");
        let mut noise = [0u8; 3000];
        getrandom::fill(&mut noise).unwrap();
        flood(20, &noise);
        flood(5, b"GET / HTTP/1.1\r\n\r\n");
        let start = Instant::now();
        let one = scope.spawn(move || Communicator::connect(&config(1, 2, port), &BUCKETS).unwrap());
        let (mut one, mut zero) = (one.join().unwrap(), zero.join().unwrap());
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        flood(100, &noise[..40]);
        let work = |comm: &mut Communicator| {
            for _ in 0..20 {
                comm.all_reduce(0).unwrap();
            }
            comm.barrier().unwrap();
        };
        let other = scope.spawn(move || {
            work(&mut one);
            one.leave().unwrap();
        });
        work(&mut zero);
        zero.leave().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn nothing_is_left_behind() {
    let _alone = alone();
    let before = open_handles();
    for round in 0..6 {
        let force = if round % 2 == 0 { Force::Shm } else { Force::Tcp };
        try_group(
            3,
            |c| c.transport = force,
            &BUCKETS,
            |result| {
                let mut comm = result.unwrap();
                // Another rank may be done first and end the group before this one has seen that all are done.
                let reduced = comm.all_reduce(0);
                assert!(reduced.is_ok() || round > 1, "{reduced:?}");
                match round {
                    0 | 1 => comm.leave().unwrap(),
                    2 | 3 => comm.abort(Cause::failed(0, "test")),
                    _ => drop(comm),
                }
            },
        );
    }
    assert_eq!(open_handles(), before);
    assert_eq!(mappings_of_buckets(), 0);
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        tasks
            .filter(|task| {
                let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
                matches!(name.trim(), "control" | "collectives")
            })
            .count()
    };
    assert!(wait_until(Duration::from_secs(1), || threads() == 0), "{} threads", threads());
    let leftovers = std::fs::read_dir("/dev/shm").map(|d| d.flatten().count()).unwrap_or(0);
    assert!(
        std::fs::read_dir("/dev/shm")
            .into_iter()
            .flatten()
            .flatten()
            .all(|e| !e.file_name().to_string_lossy().contains("switchyard")),
        "{leftovers} entries"
    );
}

/// A rank of its own process that waits long for a peer, and measures its own processor time.
#[test]
fn process_that_waits() {
    let Some(config) = rank_process() else { return };
    if std::env::var_os("TEST_PINNED").is_some() {
        let mut one = rustix::thread::CpuSet::new();
        one.set(0);
        rustix::thread::sched_setaffinity(None, &one).unwrap();
    }
    let mut comm = Communicator::connect(&config, &BUCKETS).unwrap();
    println!("ready");
    if comm.rank() == 0 {
        std::thread::sleep(Duration::from_millis(2500));
    }
    let cpu = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    let (begin, start) = (cpu(), Instant::now());
    comm.start(0);
    comm.start(1);
    if std::env::var_os("TEST_PINNED").is_some() {
        // The compute thread is busy elsewhere; the communication thread alone waits.
        std::thread::sleep(Duration::from_millis(1500));
    }
    comm.wait(0).unwrap();
    comm.wait(1).unwrap();
    let (used, took) = (cpu() - begin, start.elapsed());
    println!("used {} of {}", used.as_micros(), took.as_micros());
    comm.leave().unwrap();
}

#[test]
fn waiting_ranks_leave_the_processor_to_others() {
    let _alone = alone();
    for extra in [&[("TEST_TRANSPORT", "auto")][..], &[("TEST_TRANSPORT", "tcp")], &[("TEST_PINNED", "1")]] {
        let port = free_port();
        let children: Vec<Child> = (0..2).map(|rank| spawn_rank("process_that_waits", rank, 2, port, extra)).collect();
        for (rank, child) in children.into_iter().enumerate() {
            let output = child.wait_with_output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{text}");
            if rank == 1 {
                let line = text.lines().find_map(|line| line.strip_prefix("used ")).unwrap();
                let (used, took) = line.split_once(" of ").unwrap();
                let (used, took): (f64, f64) = (used.parse().unwrap(), took.parse().unwrap());
                assert!(took > 1_500_000.0, "it did not wait: {line}");
                assert!(used < 0.05 * took, "{extra:?}: {line} us");
            }
        }
    }
}

/// A rank of its own process: one reduction, then the end.
#[test]
fn process_that_reduces_once() {
    let Some(config) = rank_process() else { return };
    let mut comm = Communicator::connect(&config, &BUCKETS).unwrap();
    comm.bucket_mut(1).fill(1.0);
    comm.all_reduce(1).unwrap();
    println!("sum {} at {}", comm.bucket(1)[0], comm.local_address());
    comm.leave().unwrap();
}

#[test]
fn rank_zero_takes_the_listener_it_finds_on_standard_input() {
    let _alone = alone();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // The port stays taken by this process: a rank 0 that does not use the listener cannot listen there.
    let stdin = std::process::Stdio::from(std::os::fd::OwnedFd::from(listener.try_clone().unwrap()));
    let one = spawn_rank("process_that_reduces_once", 1, 2, port, &[]);
    std::thread::sleep(Duration::from_millis(100));
    let zero = spawn_rank_with(stdin, "process_that_reduces_once", 0, 2, port, &[]);
    for child in [zero, one] {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("sum 2 at 127.0.0.1:"), "{text}");
    }
}

#[test]
fn failures_cross_hosts() {
    let _alone = alone();
    for origin in 0..5 {
        let causes = group(
            5,
            |c| c.host_id = format!("host-{}", c.rank() / 2),
            &BUCKETS,
            |mut comm| {
                if comm.rank() == origin {
                    comm.aborter().abort(Cause::failed(origin, "the disk is full"));
                    return comm.failure().unwrap();
                }
                let start = Instant::now();
                let error = comm.all_reduce(0).unwrap_err();
                assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
                error.cause().unwrap().clone()
            },
        );
        same(&causes, origin, "the disk is full");
    }
}
