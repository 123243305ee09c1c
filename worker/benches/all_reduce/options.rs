//! Compares lanes and wire formats: 25 MiB, as two buckets in flight at once.
//!
//! All groups exist at the same time and alternate, so that they run under the same conditions.
//! `together` is half the time of both buckets. The last columns are the fastest reductions: as one
//! call, and as start directly followed by wait.

use super::rank::Rank;
use super::{Row, config, longest, machine, summary, var};
use std::time::Instant;
use switchyard_worker::comm::{Force, Options, Wire};

const CASES: [(Force, u32, Wire); 8] = [
    (Force::Shm, 1, Wire::F32),
    (Force::Shm, 2, Wire::F32),
    (Force::Tcp, 1, Wire::F32),
    (Force::Tcp, 1, Wire::F16),
    (Force::Tcp, 1, Wire::Bf16),
    (Force::Tcp, 2, Wire::F32),
    (Force::Tcp, 2, Wire::F16),
    (Force::Tcp, 2, Wire::Bf16),
];
const BYTES: usize = 25 << 20;
const FIRST: usize = 0;
const SECOND: usize = 1;
const SMALL: usize = 2;
/// Two large buckets and a single value.
const LENS: [usize; 3] = [BYTES / 4, BYTES / 4, 1];
/// Buckets of the referee, an additional f32 group: a single value as a barrier, and the times of
/// both ranks.
const BARRIER: usize = 0;
const TIMES: usize = 1;
/// The groups of the comparison, and their referee.
pub const GROUPS: usize = CASES.len() + 1;
const ROUNDS: usize = 15;
/// Small reductions timed as one block.
const BLOCK: usize = 200;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

#[derive(Default)]
struct Times {
    together: Vec<f64>,
    called: Vec<f64>,
    started: Vec<f64>,
}

pub fn compare() -> Outcome<()> {
    let mut groups = Vec::new();
    for (i, (force, lanes, wire)) in CASES.into_iter().enumerate() {
        let comm = Rank::connect(&config(i, force)?, &LENS, &Options { lanes, wire, ..Options::default() })?;
        groups.push((comm, Times::default()));
    }
    let mut referee = Rank::connect(&config(CASES.len(), Force::Shm)?, &[1, 2], &Options::default())?;
    for round in 0..ROUNDS + 1 {
        for (comm, times) in &mut groups {
            let together = large(comm, &mut referee)?;
            let called = small(comm, &mut referee, false)?;
            let started = small(comm, &mut referee, true)?;
            // The first round touches all memory for the first time.
            if round > 0 {
                times.together.push(together);
                times.called.push(called);
                times.started.push(started);
            }
        }
    }
    let first = groups[0].0.group.rank() == 0;
    let mut rows = Vec::new();
    for ((comm, times), (_, lanes, wire)) in groups.into_iter().zip(CASES) {
        let sent = comm.reducer.timing(FIRST).map_or(0, |timing| timing.sent);
        let row = |times: &[f64], bytes| summary(bytes, times);
        rows.push((
            (comm.reducer.transport().word(), lanes, wire.word(), sent),
            [row(&times.together, BYTES), row(&times.called, 4), row(&times.started, 4)],
        ));
        comm.leave()?;
    }
    referee.leave()?;
    if first {
        report(&rows)?;
    }
    Ok(())
}

/// Microseconds per bucket, for two large buckets in flight at once.
fn large(comm: &mut Rank, referee: &mut Rank) -> Outcome<f64> {
    comm.reducer.bucket_mut(FIRST).fill(1.0);
    comm.reducer.bucket_mut(SECOND).fill(2.0);
    referee.reducer.all_reduce(BARRIER)?;
    let start = Instant::now();
    comm.reducer.start(FIRST);
    comm.reducer.start(SECOND);
    comm.reducer.wait(FIRST)?;
    comm.reducer.wait(SECOND)?;
    let time = start.elapsed().as_secs_f64() * 1e6 / 2.0;
    assert_eq!(
        (comm.reducer.bucket(FIRST).last(), comm.reducer.bucket(SECOND).last()),
        (Some(&2.0), Some(&4.0)),
        "wrong sum"
    );
    longest(referee, TIMES, time)
}

/// Microseconds per reduction of a single value.
fn small(comm: &mut Rank, referee: &mut Rank, start_and_wait: bool) -> Outcome<f64> {
    referee.reducer.all_reduce(BARRIER)?;
    let start = Instant::now();
    for _ in 0..BLOCK {
        if start_and_wait {
            comm.reducer.start(SMALL);
            comm.reducer.wait(SMALL)?;
        } else {
            comm.reducer.all_reduce(SMALL)?;
        }
    }
    let time = start.elapsed().as_secs_f64() * 1e6 / BLOCK as f64;
    longest(referee, TIMES, time)
}

type Case = ((&'static str, u32, &'static str, u64), [Row; 3]);

fn report(rows: &[Case]) -> Outcome<()> {
    let (cpu, probe, place) = machine();
    println!("# two buckets of 25 MiB in flight, 2 ranks; {cpu}; cache line round trip {probe:.0} ns ({place})");
    println!(
        "# busbw counts the f32 bytes of a bucket, whatever the wire format; 4 B: all_reduce, and start + wait, best us"
    );
    println!("# transport lanes wire  best us  median us  busbw GB/s  sent MiB   4 B call  start+wait");
    for ((transport, lanes, wire, sent), [together, called, started]) in rows {
        println!(
            "  {transport:>9} {lanes:>5} {wire:>4} {:>8.0} {:>10.0} {:>11.2} {:>9.2} {:>10.2} {:>11.2}",
            together.best,
            together.median,
            BYTES as f64 / together.best / 1e3,
            *sent as f64 / 1_048_576.0,
            called.best,
            started.best
        );
    }
    let path = var("BENCH_JSON");
    if !path.is_empty() {
        let rows = rows.iter().map(|((transport, lanes, wire, sent), [together, called, started])| {
            serde_json::json!({
                "transport": transport, "lanes": lanes, "wire": wire, "bytes": BYTES, "sentBytes": sent,
                "bestMicros": together.best, "medianMicros": together.median,
                "busbwGBs": BYTES as f64 / together.best / 1e3,
                "smallMicros": {"allReduce": called.best, "startAndWait": started.best},
            })
        });
        let report = serde_json::json!({
            "benchmark": "all_reduce options", "ranks": 2, "cpu": cpu,
            "roundTripNanos": if probe.is_finite() { Some(probe) } else { None }, "placement": place,
            "rows": rows.collect::<Vec<_>>(),
        });
        std::fs::write(&path, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    Ok(())
}
