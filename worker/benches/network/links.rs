//! All-reduce by size, ours next to plain streams and the peers.

use super::hosts::{Hosts, wait_all};
use super::role::{Role, Times};
use super::{Options, Outcome, median, mpi, range};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::process::{Child, Stdio};

/// Gbit/s and hosts.
const NETWORKS: [(u64, usize); 3] = [(1, 2), (1, 4), (10, 2)];
/// Bytes, and calls in a round.
const SIZES: [(usize, usize); 4] = [(64 << 10, 20), (1 << 20, 10), (16 << 20, 4), (64 << 20, 3)];
/// Share of a rate that is payload: 1,448 of the 1,514 bytes of a full packet.
const PAYLOAD: f64 = 1448.0 / 1514.0;

/// Seconds of each call, by side and size.
type Calls = BTreeMap<(&'static str, usize), Vec<f64>>;

pub fn measure(options: &Options) -> Outcome<Value> {
    let (mut limits, mut rows) = (Vec::new(), Vec::new());
    for (gigabits, ranks) in NETWORKS {
        let hosts = Hosts::start(ranks, gigabits * 1_000_000_000)?;
        let (mut calls, mut streams) = (Calls::new(), Vec::new());
        for _ in 0..options.rounds {
            streams.push(stream(&hosts)?);
            add(&mut calls, "switchyard f32", &ours(&hosts, false)?);
            add(&mut calls, "switchyard f16", &ours(&hosts, true)?);
            if let Some(python) = &options.python {
                add(&mut calls, "gloo", &gloo(&hosts, python)?);
            }
            if let Some(python) = &options.mpi {
                add(&mut calls, "Open MPI", &mpi::all_reduce(&hosts, python, &SIZES)?);
            }
        }
        let limit = streams.iter().fold(0.0, |most: f64, rate| most.max(*rate));
        let nominal = gigabits as f64 * 1e9 / 8.0 * PAYLOAD;
        println!(
            "# {gigabits} Gbit/s, {ranks} hosts; plain streams {:.1} MB/s, {:.1} % of the rate's payload",
            limit / 1e6,
            100.0 * limit / nominal
        );
        println!(
            "# {:>10} {:<16} {:>12} {:>12} {:>10} {:>10} {:>8}",
            "size(B)", "side", "best(us)", "median(us)", "busbw MB/s", "of stream", "of gloo"
        );
        limits.push(json!({"gigabits": gigabits, "hosts": ranks, "streamMBps": streams.iter().map(|rate| rate / 1e6).collect::<Vec<_>>(), "payloadMBps": nominal / 1e6}));
        for ((side, bytes), seconds) in &calls {
            let [best, worst] = range(seconds);
            let factor = 2.0 * (ranks as f64 - 1.0) / ranks as f64;
            let rate = *bytes as f64 * factor / best;
            let times = |other: &'static str| calls.get(&(other, *bytes)).map(|other| median(other) / median(seconds));
            let gloo = times("gloo");
            println!(
                "  {bytes:>10} {side:<16} {:>12.0} {:>12.0} {:>10.1} {:>9.1}% {:>8}",
                best * 1e6,
                median(seconds) * 1e6,
                rate / 1e6,
                100.0 * rate / limit,
                gloo.map_or("-".to_owned(), |times| format!("{times:.2}")),
            );
            rows.push(json!({
                "gigabits": gigabits, "hosts": ranks, "side": side, "bytes": bytes, "bestMs": best * 1e3,
                "medianMs": median(seconds) * 1e3, "worstMs": worst * 1e3, "busbwMBps": rate / 1e6,
                "ofPayloadPercent": 100.0 * rate / nominal, "ofStreamPercent": 100.0 * rate / limit,
                "timesGloo": gloo, "timesOpenMpi": times("Open MPI"), "timesF32": times("switchyard f32"),
            }));
        }
    }
    Ok(json!({"limits": limits, "rows": rows}))
}

fn add(calls: &mut Calls, side: &'static str, times: &[Times]) {
    for Times { bytes, seconds } in times {
        calls.entry((side, *bytes)).or_default().extend(seconds);
    }
}

/// Bytes per second of the slowest stream, while each host sends to the next.
fn stream(hosts: &Hosts) -> Outcome<f64> {
    let ranks = hosts.len();
    // Half a second.
    let bytes = (hosts.bits_per_second as usize / 16).next_multiple_of(1 << 20);
    let text = run(hosts, |rank| Role::Stream { rank, ranks, bytes })?;
    Ok(bytes as f64 / text.trim().parse::<f64>()?)
}

fn ours(hosts: &Hosts, half: bool) -> Outcome<Vec<Times>> {
    let mut key = vec![0; 32];
    getrandom::fill(&mut key)?;
    let ranks = hosts.len();
    let role = |rank| Role::AllReduce { rank, ranks, sizes: SIZES.to_vec(), half, key: key.clone() };
    parse(&run(hosts, role)?)
}

fn run(hosts: &Hosts, role: impl Fn(usize) -> Role) -> Outcome<String> {
    let start = |rank| -> Outcome<Child> { Ok(role(rank).command(hosts)?.stdout(output(rank)).spawn()?) };
    wait_all((0..hosts.len()).map(start).collect::<Outcome<_>>()?)
}

fn gloo(hosts: &Hosts, python: &std::path::Path) -> Outcome<Vec<Times>> {
    parse(&torch(hosts, python, |_| json!({"role": "allReduce", "sizes": SIZES}))?)
}

/// Runs the peers' script on all hosts; returns what rank 0 prints.
pub fn torch(hosts: &Hosts, python: &std::path::Path, role: impl Fn(usize) -> Value) -> Outcome<String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/torch_network.py");
    let python = python.to_str().ok_or("the path of Python is not UTF-8")?;
    let start = |rank: usize| -> Outcome<Child> {
        let mut command = hosts.command(rank, python);
        command.args([script, &role(rank).to_string()]);
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", hosts.len().to_string());
        command.env("MASTER_ADDR", Hosts::address(0)).env("MASTER_PORT", "29500").env("GLOO_SOCKET_IFNAME", "eth0");
        Ok(command.env("OMP_NUM_THREADS", "1").stdout(output(rank)).spawn()?)
    };
    wait_all((0..hosts.len()).map(start).collect::<Outcome<_>>()?)
}

/// Rank 0's output is read; the others print nothing.
fn output(rank: usize) -> Stdio {
    if rank == 0 { Stdio::piped() } else { Stdio::null() }
}

/// The lines of times; others are for people.
pub fn parse(text: &str) -> Outcome<Vec<Times>> {
    let lines: Vec<Times> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    if lines.len() == SIZES.len() {
        Ok(lines)
    } else {
        Err(format!("got {text:?}, expected a line for each size").into())
    }
}
