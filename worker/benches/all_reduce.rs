//! All-reduce time between two processes on this host, by size.
//!
//! `cargo bench -p switchyard-worker --bench all_reduce -- [--transport shm|tcp] [--options]
//! [--json FILE]`
//!
//! `--options` instead compares lanes and wire formats, for one size.
//!
//! Each rank is pinned to its own CPU. Every timed call is "dirty": both ranks first rewrite their
//! whole buffer, as a backward pass does. Up to 4 KiB, blocks of calls are timed, including the
//! rewrites. Above that, single calls after a barrier are timed. The reported time is the longer of
//! the two ranks' times. At start, the cache-line probe measures the distance between the two CPUs.
//! NEAR and FAR runs cannot be compared.

#[path = "all_reduce/options.rs"]
mod options;
#[path = "../tests/collective_support/rank.rs"]
mod rank;

use rank::Rank;
use std::{
    hint::black_box,
    io::Write,
    process::{Command, ExitCode},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};
use switchyard_worker::comm::{Force, GroupConfig, Options, Token};

const SIZES: [usize; 11] =
    [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
/// Sizes up to this are timed in blocks of calls.
const BLOCK_LIMIT_KIB: usize = 4;
const BLOCK: usize = 200;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let outcome = if std::env::var_os("BENCH_RANK").is_some() { rank() } else { launch(&args) };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("all_reduce: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Probes the machine and starts the two ranks.
fn launch(args: &[String]) -> Result<(), String> {
    let (mut transport, mut json, mut options) = ("auto".to_owned(), String::new(), "");
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        let mut value = || rest.next().cloned().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--transport" => transport = value()?,
            "--json" => json = value()?,
            "--options" => options = "1",
            other => return Err(format!("got {other:?}, expected --transport shm|tcp, --options or --json FILE")),
        }
    }
    let cpus = allowed_cpus();
    let probe = match cpus.as_slice() {
        [first, second, ..] => round_trip(*first, *second).to_string(),
        _ => String::new(),
    };
    let mut key = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
    let mut token = [0; 32];
    getrandom::fill(&mut token).map_err(|e| e.to_string())?;
    key.write_all(&token).map_err(|e| e.to_string())?;
    // One port per group, because the groups of the comparison exist at the same time.
    let listeners: Vec<_> = (0..options::GROUPS).map(|_| std::net::TcpListener::bind("127.0.0.1:0")).collect();
    let mut ports = Vec::new();
    for listener in listeners {
        ports.push(listener.and_then(|l| l.local_addr()).map_err(|e| e.to_string())?.port().to_string());
    }
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut children = Vec::new();
    for rank in 0..2 {
        let child = Command::new(&program)
            .env("BENCH_RANK", rank.to_string())
            .env("BENCH_PORTS", ports.join(","))
            .env("BENCH_OPTIONS", options)
            .env("BENCH_KEY", key.path())
            .env("BENCH_TRANSPORT", &transport)
            .env("BENCH_JSON", &json)
            .env("BENCH_PROBE", &probe)
            .env("BENCH_CPU", cpus.get(rank).map_or(String::new(), usize::to_string))
            .spawn()
            .map_err(|e| e.to_string())?;
        children.push(child);
    }
    let mut failed = false;
    for mut child in children {
        failed |= !child.wait().map_err(|e| e.to_string())?.success();
    }
    if failed { Err("a rank failed".to_owned()) } else { Ok(()) }
}

fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Cache-line round trip between two CPUs in nanoseconds; the best of several rounds.
fn round_trip(first: usize, second: usize) -> f64 {
    const ROUND_TRIPS: u32 = 20_000;
    let best = (0..5).map(|_| {
        let (ping, pong) = (AtomicU32::new(0), AtomicU32::new(0));
        let wait = |word: &AtomicU32, value| {
            let mut spins = 0u64;
            while word.load(Ordering::Acquire) != value {
                std::hint::spin_loop();
                spins += 1;
                if spins.is_multiple_of(1 << 16) {
                    std::thread::yield_now();
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pin(second);
                for turn in 1..=ROUND_TRIPS {
                    wait(&ping, turn);
                    pong.store(turn, Ordering::Release);
                }
            });
            let timed = scope.spawn(|| {
                pin(first);
                let start = Instant::now();
                for turn in 1..=ROUND_TRIPS {
                    ping.store(turn, Ordering::Release);
                    wait(&pong, turn);
                }
                start.elapsed().as_nanos() as f64 / f64::from(ROUND_TRIPS)
            });
            timed.join().unwrap_or(f64::NAN)
        })
    });
    best.fold(f64::INFINITY, f64::min)
}

fn var(name: &str) -> String {
    std::env::var(name).unwrap_or_default()
}

fn rank() -> Result<(), String> {
    if let Ok(cpu) = var("BENCH_CPU").parse() {
        pin(cpu);
    }
    if !var("BENCH_OPTIONS").is_empty() {
        return options::compare().map_err(|e| e.to_string());
    }
    let transport = match var("BENCH_TRANSPORT").as_str() {
        "auto" => Force::Auto,
        "shm" => Force::Shm,
        "tcp" => Force::Tcp,
        other => return Err(format!("--transport: got {other:?}, expected shm or tcp")),
    };
    let config = config(0, transport)?;
    // All sizes, then one value as a barrier, then the times of both ranks.
    let mut lens: Vec<usize> = SIZES.iter().map(|size| size / 4).collect();
    lens.extend([1, 2]);
    let mut comm = Rank::connect(&config, &lens, &Options::default()).map_err(|e| e.to_string())?;
    measure(&mut comm).map_err(|e| e.to_string())?;
    comm.leave().map_err(|e| e.to_string())
}

/// This rank's configuration for group number `group`.
fn config(group: usize, transport: Force) -> Result<GroupConfig, String> {
    let ports = var("BENCH_PORTS");
    Ok(GroupConfig {
        job: "bench".to_owned(),
        attempt: 1,
        node_rank: 0,
        num_nodes: 1,
        procs_per_node: 2,
        local_rank: var("BENCH_RANK").parse().map_err(|_| "BENCH_RANK")?,
        servers: 0,
        server: None,
        rendezvous: format!("127.0.0.1:{}", ports.split(',').nth(group).unwrap_or_default()),
        key: Token::from_file(var("BENCH_KEY").as_ref()).map_err(|e| e.to_string())?,
        transport,
        host_id: String::new(),
        peer_timeout: Duration::from_secs(10),
        connect_timeout: Duration::from_secs(10),
    })
}

struct Row {
    bytes: usize,
    best: f64,
    median: f64,
}

fn measure(comm: &mut Rank) -> Result<(), Box<dyn std::error::Error>> {
    let first = comm.group.rank() == 0;
    let (cpu, probe, place) = machine();
    let transport = comm.reducer.transport().word();
    if first {
        println!("# all-reduce of f32, 2 ranks, in place, registered memory, rewritten before each call");
        println!("# {cpu}; cache line round trip {probe:.0} ns ({place})");
        println!(
            "# {:>10} {:>12} {:>12} {:>10} {:>10}  transport",
            "bytes", "best us", "median us", "algbw GB/s", "busbw GB/s"
        );
    }
    let mut rows = Vec::new();
    for (b, bytes) in SIZES.into_iter().enumerate() {
        let (repeats, calls) = match bytes >> 10 {
            0..=BLOCK_LIMIT_KIB => (15, BLOCK),
            5..=1024 => (100, 1),
            1025..=4096 => (30, 1),
            4097..=16_384 => (12, 1),
            _ => (9, 1),
        };
        let times = (0..repeats + 2).map(|_| time_reduction(comm, b, calls)).collect::<Result<Vec<f64>, _>>()?;
        let row = summary(bytes, &times[2..]);
        if first {
            // With two ranks, 2(n-1)/n is 1, so both bandwidths are equal.
            let bandwidth = row.bytes as f64 / row.best / 1e3;
            println!(
                "  {:>10} {:>12.2} {:>12.2} {:>10.2} {:>10.2}  {transport}",
                row.bytes, row.best, row.median, bandwidth, bandwidth
            );
        }
        rows.push(row);
    }
    let (copy, reduction) = against_memcpy(comm)?;
    let (best_ratio, ratio) = (reduction.best / copy.best, reduction.median / copy.median);
    if first {
        println!(
            "# memcpy of 64 MiB by both ranks at once: best {:.0} us, median {:.0} us; all-reduce alternating with it: {:.0}, {:.0} us",
            copy.best, copy.median, reduction.best, reduction.median
        );
        let verdict = if ratio <= 4.0 { "met" } else { "MISSED" };
        println!("# all-reduce / memcpy: {best_ratio:.2} (best), {ratio:.2} (median); required <= 4: {verdict}");
        let path = var("BENCH_JSON");
        if !path.is_empty() {
            let rows: Vec<_> = rows
                .iter()
                .map(|r| {
                    serde_json::json!({"bytes": r.bytes, "bestMicros": r.best, "medianMicros": r.median,
                    "algbwGBs": r.bytes as f64 / r.best / 1e3, "busbwGBs": r.bytes as f64 / r.best / 1e3})
                })
                .collect();
            let report = serde_json::json!({
                "benchmark": "all_reduce", "ranks": 2, "transport": transport, "cpu": cpu,
                "roundTripNanos": if probe.is_finite() { Some(probe) } else { None }, "placement": place, "rows": rows,
                "memcpy64MiBMicros": {"best": copy.best, "median": copy.median},
                "allReduce64MiBMicros": {"best": reduction.best, "median": reduction.median},
                "ratioToMemcpy": {"best": best_ratio, "median": ratio},
            });
            std::fs::write(&path, serde_json::to_string_pretty(&report)? + "\n")?;
        }
    }
    Ok(())
}

/// CPU name, cache-line probe in nanoseconds, and the placement that it indicates.
fn machine() -> (String, f64, &'static str) {
    let probe: f64 = var("BENCH_PROBE").parse().unwrap_or(f64::NAN);
    (cpu_model(), probe, if probe < 180.0 { "NEAR" } else { "FAR" })
}

/// Microseconds per call, the longer of the two ranks' times.
fn time_reduction(comm: &mut Rank, b: usize, calls: usize) -> Result<f64, Box<dyn std::error::Error>> {
    if calls == 1 {
        comm.reducer.bucket_mut(b).fill(1.0);
    }
    comm.reducer.all_reduce(SIZES.len())?;
    let start = Instant::now();
    for _ in 0..calls {
        if calls > 1 {
            comm.reducer.bucket_mut(b).fill(1.0);
        }
        comm.reducer.all_reduce(b)?;
    }
    let time = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
    assert_eq!(comm.reducer.bucket(b).last(), Some(&2.0), "wrong sum");
    longest(comm, SIZES.len() + 1, time)
}

/// The longer of the two ranks' times, exchanged through a bucket of two values.
fn longest(comm: &mut Rank, slot: usize, time: f64) -> Result<f64, Box<dyn std::error::Error>> {
    let rank = comm.group.rank() as usize;
    let times = comm.reducer.bucket_mut(slot);
    times.fill(0.0);
    times[rank] = time as f32;
    comm.reducer.all_reduce(slot)?;
    Ok(comm.reducer.bucket(slot).iter().copied().fold(0.0f32, f32::max).into())
}

/// Alternates copies and reductions of 64 MiB, so that both run under the same conditions.
fn against_memcpy(comm: &mut Rank) -> Result<(Row, Row), Box<dyn std::error::Error>> {
    let b = SIZES.len() - 1;
    let mut target = vec![1.0f32; comm.reducer.bucket(b).len()];
    let (mut copies, mut reductions) = (Vec::new(), Vec::new());
    for _ in 0..9 {
        comm.reducer.bucket_mut(b).fill(1.0);
        comm.reducer.all_reduce(SIZES.len())?;
        let start = Instant::now();
        target.copy_from_slice(comm.reducer.bucket(b));
        black_box(&mut target);
        let time = start.elapsed().as_secs_f64() * 1e6;
        copies.push(longest(comm, SIZES.len() + 1, time)?);
        reductions.push(time_reduction(comm, b, 1)?);
    }
    Ok((summary(SIZES[b], &copies), summary(SIZES[b], &reductions)))
}

fn summary(bytes: usize, times: &[f64]) -> Row {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    Row { bytes, best: sorted[0], median: sorted[sorted.len() / 2] }
}

fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or(": unknown CPU");
    model.trim_start_matches([' ', '\t', ':']).to_owned()
}
