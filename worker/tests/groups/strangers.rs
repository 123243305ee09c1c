//! A process that does not belong to a group does not disturb it, and missing ranks are named.

use crate::collective_support::{
    Rank, alone, config, free_port, rank_process, spawn_rank, spawn_rank_with, wait_until,
};
use std::{io::Write, net::TcpStream, sync::Mutex, time::Duration};
use switchyard_worker::comm::{CommError, Options, Token};

const BUCKETS: [usize; 2] = [300_000, 40];

#[test]
fn intruders_are_refused_and_the_group_forms_without_them() {
    let _alone = alone();
    let port = free_port();
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || {
            let comm = Rank::connect(&config(0, 2, port), &[8], &Options::default()).unwrap();
            let refusals = comm.group.refusals();
            let late = scope.spawn(move || {
                Rank::connect(&config(1, 2, port), &[8], &Options::default()).err().unwrap().to_string()
            });
            let late = late.join().unwrap();
            (comm, refusals, late)
        });
        let intruder = |change: &dyn Fn(&mut switchyard_worker::comm::GroupConfig)| {
            let mut config = config(1, 2, port);
            change(&mut config);
            Rank::connect(&config, &[8], &Options::default()).err().unwrap().to_string()
        };
        let text = intruder(&|c| c.key = Token::new([1; 32]));
        assert!(text.contains("refused") && text.contains("same job token"), "{text}");
        let text = intruder(&|c| c.attempt = 0);
        assert!(text.contains("attempt 0 is over, this is attempt 1"), "{text}");
        let text = intruder(&|c| c.job = "other".to_owned());
        assert!(text.contains("belong to the same job"), "{text}");
        let text = intruder(&|c| c.num_nodes = 3);
        assert!(text.contains("expects 3 ranks"), "{text}");
        // A newer attempt waits for the older one to end.
        let text = intruder(&|c| {
            c.attempt = 2;
            c.connect_timeout = Duration::from_secs(3);
        });
        assert!(text.contains("older attempt is still running"), "{text}");
        let one = scope.spawn(move || Rank::connect(&config(1, 2, port), &[8], &Options::default()).unwrap());
        let (one, (zero, refusals, late)) = (one.join().unwrap(), zero.join().unwrap());
        assert!(refusals.iter().any(|text| text.contains("wrong job token")), "{refusals:?}");
        assert!(late.contains("rank 1 is already present"), "{late}");
        let leaving = scope.spawn(move || zero.leave());
        one.leave().unwrap();
        leaving.join().unwrap().unwrap();
    });
}

#[test]
fn every_rank_lists_the_missing_ones() {
    let _alone = alone();
    let port = free_port();
    let texts: Vec<String> = std::thread::scope(|scope| {
        let ranks: Vec<_> = [0, 2]
            .into_iter()
            .map(|rank| {
                scope.spawn(move || {
                    let mut config = config(rank, 5, port);
                    config.connect_timeout = Duration::from_secs(3);
                    Rank::connect(&config, &[8], &Options::default()).err().unwrap().to_string()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|text| text.contains("ranks 1, 3, 4")), "{texts:?}");
    let mut lonely = config(1, 2, free_port());
    lonely.connect_timeout = Duration::from_millis(300);
    let error = Rank::connect(&lonely, &[8], &Options::default()).err().unwrap();
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
        let zero = scope.spawn(move || Rank::connect(&config(0, 2, port), &BUCKETS, &Options::default()).unwrap());
        assert!(wait_until(|| TcpStream::connect(("127.0.0.1", port)).is_ok()));
        flood(100, b"");
        let mut noise = [0u8; 3000];
        getrandom::fill(&mut noise).unwrap();
        flood(20, &noise);
        flood(5, b"GET / HTTP/1.1\r\n\r\n");
        let one = scope.spawn(move || Rank::connect(&config(1, 2, port), &BUCKETS, &Options::default()).unwrap());
        let (mut one, mut zero) = (one.join().unwrap(), zero.join().unwrap());
        flood(100, &noise[..40]);
        let work = |comm: &mut Rank| {
            for _ in 0..20 {
                comm.reducer.all_reduce(0).unwrap();
            }
            comm.group.barrier().unwrap();
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

/// A rank in its own process: one reduction, then it leaves.
#[test]
fn process_that_reduces_once() {
    let Some(config) = rank_process() else { return };
    let mut comm = Rank::connect(&config, &BUCKETS, &Options::default()).unwrap();
    comm.reducer.bucket_mut(1).fill(1.0);
    comm.reducer.all_reduce(1).unwrap();
    println!("sum {} at {}", comm.reducer.bucket(1)[0], comm.group.local_address());
    comm.leave().unwrap();
}

#[test]
fn rank_zero_uses_a_listener_on_standard_input() {
    let _alone = alone();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    // This process keeps the port, so a rank 0 that ignored the listener could not bind it.
    let stdin = std::process::Stdio::from(std::os::fd::OwnedFd::from(listener.try_clone().unwrap()));
    let one = spawn_rank("strangers::process_that_reduces_once", 1, 2, port, &[]);
    std::thread::sleep(Duration::from_millis(100));
    let zero = spawn_rank_with(stdin, "strangers::process_that_reduces_once", 0, 2, port, &[]);
    for child in [zero, one] {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("sum 2 at 127.0.0.1:"), "{text}");
    }
}
