//! Whatever happens to one rank, all others soon report the same cause, and nothing is left behind.

use crate::collective_support::{
    Rank, alone, free_port, group, group_with, mappings_of_buckets, open_handles, rank_options, rank_process,
    spawn_rank, wait_until,
};
use std::{
    io::{BufRead, BufReader, Read},
    process::Child,
    time::{Duration, Instant},
};
use switchyard_worker::comm::{Cause, CauseKind, CommError, Force, Options};

const BUCKETS: [usize; 4] = [300_000, 40, 70_000, 200_000];

/// A rank in its own process: reduces until it fails, and prints the root cause.
#[test]
fn process_that_reduces_forever() {
    let Some(config) = rank_process() else { return };
    // The test harness may have open sockets itself.
    let before = open_handles();
    let mut comm = Rank::connect(&config, &BUCKETS, &rank_options()).unwrap();
    println!("ready");
    let error = reduce_forever(&mut comm);
    let cause = error.cause().unwrap().clone();
    drop(comm);
    println!("cause {}", serde_json::to_string(&cause).unwrap());
    assert_eq!(open_handles(), before);
    assert_eq!(mappings_of_buckets(), 0);
}

/// Keeps all lanes busy until the group fails.
fn reduce_forever(comm: &mut Rank) -> CommError {
    loop {
        (0..BUCKETS.len()).for_each(|b| comm.reducer.start(b));
        if let Err(error) = (0..BUCKETS.len()).rev().try_for_each(|b| comm.reducer.wait(b)) {
            return error;
        }
        (0..BUCKETS.len()).for_each(|b| comm.reducer.bucket_mut(b).fill(1.0));
    }
}

struct Ranks {
    children: Vec<Child>,
    outputs: Vec<BufReader<std::process::ChildStdout>>,
}

impl Ranks {
    fn start(world: u32, extra: &[(&str, &str)]) -> Ranks {
        let port = free_port();
        let mut children: Vec<Child> = (0..world)
            .map(|rank| spawn_rank("failures::process_that_reduces_forever", rank, world, port, extra))
            .collect();
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

    /// The causes that all ranks but `dead` print.
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

fn assert_same_cause(causes: &[Cause], origin: u32, text: &str) {
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
    for (transport, victim, lanes) in
        [("auto", 2, "1"), ("auto", 0, "3"), ("auto", 1, "4"), ("tcp", 1, "1"), ("tcp", 0, "3"), ("tcp", 2, "4")]
    {
        let mut ranks = Ranks::start(3, &[("TEST_TRANSPORT", transport), ("TEST_LANES", lanes)]);
        std::thread::sleep(Duration::from_millis(50));
        ranks.signal(victim, rustix::process::Signal::KILL);
        let causes = ranks.causes(victim);
        assert_eq!(causes.len(), 2);
        assert_same_cause(&causes, victim as u32, "connection closed");
    }
}

#[test]
fn a_stopped_rank_is_named_after_the_timeout() {
    let _alone = alone();
    for (victim, lanes) in [(1, "1"), (0, "3")] {
        let mut ranks = Ranks::start(3, &[("TEST_PEER_TIMEOUT_MS", "4000"), ("TEST_LANES", lanes)]);
        let start = Instant::now();
        ranks.signal(victim, rustix::process::Signal::STOP);
        let causes = ranks.causes(victim);
        assert!(start.elapsed() > Duration::from_secs(3), "took {:?}", start.elapsed());
        assert_same_cause(&causes, victim as u32, "no sign of life for 4.0 s");
    }
}

#[test]
fn the_cause_of_an_aborting_rank_reaches_all() {
    let _alone = alone();
    for (force, origin) in [(Force::Shm, 1), (Force::Tcp, 2), (Force::Tcp, 0), (Force::Shm, 0)] {
        let causes = group(
            4,
            |c| c.transport = force,
            &BUCKETS,
            |mut comm| {
                if comm.group.rank() == origin {
                    comm.group.abort(Cause::failed(origin, "the loss is not a number"));
                } else {
                    comm.reducer.start(0);
                    let error = comm.reducer.wait(0).unwrap_err();
                    assert_eq!(error.cause(), comm.group.failure().as_ref());
                    // Later calls fail immediately, with the same cause.
                    assert_eq!(comm.reducer.wait(0).unwrap_err().cause(), error.cause());
                    assert_eq!(comm.group.barrier().unwrap_err().cause(), error.cause());
                }
                comm.group.failure().unwrap()
            },
        );
        assert_same_cause(&causes, origin, "the loss is not a number");
        assert!(causes.iter().all(|cause| *cause == causes[0]));
    }
}

#[test]
fn busy_lanes_fail_immediately_with_one_cause() {
    let _alone = alone();
    for (hosts, origin) in [(1, 2), (2, 1), (4, 0), (4, 3)] {
        let options = Options { lanes: 4, ..Options::default() };
        let change = |c: &mut switchyard_worker::comm::GroupConfig| c.host_id = format!("host-{}", c.rank() % hosts);
        let causes = group_with(4, options, change, &BUCKETS, |mut comm| {
            let (aborter, rank) = (comm.group.aborter(), comm.group.rank());
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis(60));
                    if rank == origin {
                        aborter.abort(Cause::failed(origin, "the power is gone"));
                    }
                });
                reduce_forever(&mut comm).cause().unwrap().clone()
            })
        });
        assert_same_cause(&causes, origin, "the power is gone");
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
            comm.group.aborter().abort(Cause::stopped(comm.group.rank(), 15));
            comm.group.failure().unwrap()
        },
    );
    assert!(causes.iter().all(|cause| *cause == causes[0]), "{causes:?}");
    assert_eq!(causes[0].kind, CauseKind::Stopped(15));
}

#[test]
fn a_rank_that_aborts_or_leaves_early_is_named() {
    let _alone = alone();
    let causes = group(
        3,
        |_| {},
        &BUCKETS,
        |mut comm| {
            if comm.group.rank() == 1 {
                drop(comm);
                return None;
            }
            Some(comm.reducer.all_reduce(0).unwrap_err().cause().unwrap().clone())
        },
    );
    assert_same_cause(&causes.into_iter().flatten().collect::<Vec<_>>(), 1, "gave up without saying why");
    let causes = group(
        3,
        |_| {},
        &BUCKETS,
        |mut comm| {
            let error =
                if comm.group.rank() == 1 { comm.leave().unwrap_err() } else { comm.group.barrier().unwrap_err() };
            error.cause().unwrap().clone()
        },
    );
    assert_same_cause(&causes, 1, "left the group while");
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
                let first = usize::from(comm.group.rank() == 1);
                comm.reducer.start(first);
                let error = comm.reducer.wait(first).unwrap_err();
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
fn nothing_is_left_behind() {
    let _alone = alone();
    let before = open_handles();
    for round in 0..6 {
        let force = if round % 2 == 0 { Force::Shm } else { Force::Tcp };
        let options = Options { lanes: 1 + 2 * (round / 2), ..Options::default() };
        group_with(
            3,
            options,
            |c| c.transport = force,
            &BUCKETS,
            |mut comm| {
                // Another rank may finish first and end the group before this one has seen that all
                // are done.
                let reduced = comm.reducer.all_reduce(0);
                assert!(reduced.is_ok() || round > 1, "{reduced:?}");
                match round {
                    0 | 1 => comm.leave().unwrap(),
                    2 | 3 => comm.group.abort(Cause::failed(0, "test")),
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
                name.trim() == "control" || name.starts_with("collectives")
            })
            .count()
    };
    assert!(wait_until(|| threads() == 0), "{} threads", threads());
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

/// A rank in its own process that waits for a peer for a long time, and measures its own CPU time.
#[test]
fn process_that_waits() {
    let Some(config) = rank_process() else { return };
    if std::env::var_os("TEST_PINNED").is_some() {
        let mut one = rustix::thread::CpuSet::new();
        one.set(0);
        rustix::thread::sched_setaffinity(None, &one).unwrap();
    }
    let mut comm = Rank::connect(&config, &BUCKETS, &rank_options()).unwrap();
    println!("ready");
    if comm.group.rank() == 0 {
        std::thread::sleep(Duration::from_millis(2500));
    }
    let cpu = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    let (begin, start) = (cpu(), Instant::now());
    comm.reducer.start(0);
    comm.reducer.start(1);
    if std::env::var_os("TEST_PINNED").is_some() {
        // The compute thread is idle here; only the communication thread waits.
        std::thread::sleep(Duration::from_millis(1500));
    }
    comm.reducer.wait(0).unwrap();
    comm.reducer.wait(1).unwrap();
    let (used, took) = (cpu() - begin, start.elapsed());
    println!("used {} of {}", used.as_micros(), took.as_micros());
    comm.leave().unwrap();
}

#[test]
fn waiting_ranks_use_little_cpu_time() {
    let _alone = alone();
    for extra in [
        &[("TEST_TRANSPORT", "auto")][..],
        &[("TEST_TRANSPORT", "tcp")],
        &[("TEST_PINNED", "1")],
        &[("TEST_PINNED", "1"), ("TEST_LANES", "2")],
        &[("TEST_PINNED", "1"), ("TEST_LANES", "2"), ("TEST_TRANSPORT", "tcp")],
    ] {
        let port = free_port();
        let children: Vec<Child> =
            (0..2).map(|rank| spawn_rank("failures::process_that_waits", rank, 2, port, extra)).collect();
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

#[test]
fn failures_cross_hosts() {
    let _alone = alone();
    for origin in 0..5 {
        let causes = group(
            5,
            |c| c.host_id = format!("host-{}", c.rank() / 2),
            &BUCKETS,
            |mut comm| {
                if comm.group.rank() == origin {
                    comm.group.aborter().abort(Cause::failed(origin, "the disk is full"));
                    return comm.group.failure().unwrap();
                }
                let error = comm.reducer.all_reduce(0).unwrap_err();
                error.cause().unwrap().clone()
            },
        );
        assert_same_cause(&causes, origin, "the disk is full");
    }
}
