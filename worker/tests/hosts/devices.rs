//! Several devices in one process train and fail exactly like separate processes.

use crate::pods::{Job, events, finished, ready};
use switchyard_worker_contract::config::EngineConfig;
use switchyard_worker_contract::env;
use switchyard_worker_contract::event::Event;

fn devices(count: u32) -> impl Fn(&mut EngineConfig) {
    move |config| {
        config.devices_per_process = count;
        config.fetch_every_steps = 1;
    }
}

#[test]
fn devices_of_one_process_train_like_processes() {
    for (nodes, ranks) in [(1, 2), (1, 4), (2, 4)] {
        let mut digests = Vec::new();
        for count in [1, 2, ranks] {
            let job = Job::new(nodes, ranks, 25).with(devices(count));
            let codes = job.run(&[]);
            assert!(codes.iter().all(|code| *code == 0), "{codes:?} {}{}", job.read("err-0"), job.read("err-1"));
            let log = job.read("out-0");
            let lines = log.lines().count();
            assert_eq!(events(&log).len(), lines, "every line is a complete event: {log}");
            let reporting: Vec<u32> = events(&log).iter().filter_map(Event::rank).collect();
            let steps = reporting.iter().filter(|rank| **rank == 0).count();
            assert!(steps >= 27 && (0..ranks).all(|rank| reporting.contains(&rank)), "{log}");
            let mut pids: Vec<u32> = ready(&log).iter().map(|ready| ready.pid).collect();
            assert!(pids.len() as u32 == ranks && ready(&log).iter().all(|ready| ready.threads >= 1), "{log}");
            pids.sort_unstable();
            pids.dedup();
            assert_eq!(pids.len() as u32, ranks / count, "processes");
            digests.push(finished(&log).unwrap().weights_digest);
            assert_eq!(job.processes(), [""; 0]);
        }
        assert!(digests.iter().all(|digest| digest == &digests[0]), "{digests:?}");
    }
}

#[test]
fn a_device_that_fails_is_the_root_cause_of_its_process() {
    for (fault, origin, codes) in [("panic:5@1", 1, [5, 4]), ("panic:5@2", 2, [4, 5]), ("panic:5@3", 3, [4, 5])] {
        let job = Job::new(2, 2, 1_000_000).with(devices(2));
        assert_eq!(job.run(&[(env::FAULT, fault)]), codes, "{fault} {}", job.read("err-0"));
        for node in [0, 1] {
            let failure = job.termination(node).failure.unwrap();
            assert!(failure.origin_rank == origin && failure.cause.contains("panicked"), "{fault}: {failure:?}");
        }
        let failure = job.termination(origin / 2).failure.unwrap();
        assert!(failure.rank == origin && failure.cause.contains("a fault was asked for"), "{failure:?}");
        assert_eq!(job.processes(), [""; 0]);
    }
}

#[test]
fn a_killed_process_loses_all_its_devices() {
    let job = Job::new(2, 4, 1_000_000).with(devices(2));
    assert_eq!(job.run(&[(env::FAULT, "kill:5@7")]), [4, 5], "{}", job.read("err-0"));
    let failure = job.termination(1).failure.unwrap();
    // Both devices of the process died together, so either may have been noticed first.
    assert!([6, 7].contains(&failure.origin_rank) && failure.cause.contains("SIGKILL"), "{failure:?}");
    assert_eq!(job.processes(), [""; 0]);
}

#[test]
fn ranks_that_are_not_a_multiple_of_the_devices_are_refused() {
    let job = Job::new(1, 3, 5).with(devices(2));
    assert_eq!(job.run(&[]), [2]);
    let cause = job.termination(0).failure.unwrap().cause;
    assert!(cause.contains("got 3; expected a multiple of devicesPerProcess, which is 2"), "{cause}");
}
