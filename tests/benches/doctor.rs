//! Speed of `switchyard doctor` on large logs: `cargo xtask bench doctor`.
//!
//! Builds two logs in memory by repeating a chunk: the output of a healthy rank with
//! `NCCL_DEBUG=INFO` and one line per step, and the same with errors of every kind at one line in
//! fifty. Only the per-line processing is timed, without disk reads.
#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::{Value, json};
use std::time::Instant;
use switchyard_tools::doctor::{Doctor, known};

/// Bytes of each log.
const BYTES: u64 = 1 << 30;
/// Lines of a chunk.
const PIECE: usize = 10_000;

fn main() {
    let rows = [("healthy", 0), ("an error in 50 lines", 50)].map(|(what, every)| timed(what, every));
    let arguments: Vec<String> = std::env::args().collect();
    let Some(path) = arguments.iter().position(|word| word == "--json").and_then(|at| arguments.get(at + 1)) else {
        return;
    };
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let result = json!({
        "command": "cargo xtask bench doctor", "machine": model.trim_start_matches(['\t', ' ', ':']),
        "threads": 1, "rows": rows,
    });
    std::fs::write(path, format!("{}\n", serde_json::to_string_pretty(&result).unwrap())).unwrap();
}

/// Lines of a chunk. One in `every` is an error; 0 means none.
fn piece(every: usize) -> Vec<String> {
    let errors: Vec<String> = known().map(|known| format!("[rank0]: {}", known.texts[0].join(" 0 "))).collect();
    let line = |number: usize| match number {
        number if every > 0 && number % every == 0 => errors[number / every % errors.len()].clone(),
        number if number % 4 == 0 => format!(
            "gpu-1:7:19 [0] NCCL INFO Channel {:02}/0 : {}[7] -> {}[0] [send] via NET/IB/0/GDRDMA",
            number % 32,
            number % 8,
            8 + number % 8
        ),
        number => format!(
            "2026-11-20T14:{:02}:{:02}.123Z step={number} loss=2.{number:04} tokensPerSecond=20900 stepMs=97.9 lr=0.001",
            number / 60 % 60,
            number % 60
        ),
    };
    (0..PIECE).map(line).collect()
}

fn timed(what: &str, every: usize) -> Value {
    let piece = piece(every);
    let mut doctor = Doctor::new().unwrap();
    let mut log = doctor.open("rank-0.log", 2026);
    let (mut bytes, mut lines) = (0_u64, 0_u64);
    let start = Instant::now();
    while bytes < BYTES {
        for line in &piece {
            doctor.line(&mut log, line.as_bytes());
            bytes += line.len() as u64 + 1;
            lines += 1;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let diagnosis = doctor.diagnosis();
    let found = diagnosis.attempts.first().is_some_and(|attempt| attempt.first.is_some());
    assert_eq!(found, every > 0, "{diagnosis:?}");
    let rate = bytes as f64 / seconds / 1e6;
    println!(
        "{what:<24} {:>6.2} GiB {lines:>11} lines {seconds:>7.2} s {rate:>7.0} MB/s",
        bytes as f64 / (1_u64 << 30) as f64
    );
    json!({
        "log": what, "bytes": bytes, "lines": lines, "seconds": (seconds * 100.0).round() / 100.0,
        "megabytesPerSecond": rate.round(),
    })
}
