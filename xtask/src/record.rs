//! `cargo xtask test --record`: writes timings to `docs/results/test-time.json`.

use crate::images::Version;
use crate::totals::Outcome;
use crate::workspace::{machine, root};
use anyhow::{Context, Result};
use clap::ValueEnum;
use serde_json::{Value as Json, json};
use std::fs;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Number of slowest tests to keep.
const SLOWEST: usize = 40;

/// The conditions of a recorded run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Record {
    /// Nothing else runs on this machine.
    Quiet,
    /// The run competes with a load on all cores.
    Busy,
    /// Nothing is built or cached: no target folder, no programs, no crates.
    Fresh,
}

impl Record {
    /// Records a run and keeps the records of other conditions.
    pub(crate) fn write(self, seconds: f64, cores: &Cores, outcome: &Outcome) -> Result<()> {
        let name = self.to_possible_value().context("invariant: each has a name")?.get_name().to_owned();
        let path = root().join("docs/results/test-time.json");
        let mut file: Json = match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| path.display().to_string())?,
            Err(_) => json!({"command": "cargo xtask test --record quiet|busy|fresh", "runs": {}}),
        };
        let stages: Vec<Json> = outcome
            .times
            .iter()
            .map(|time| {
                json!({
                    "name": time.name, "seconds": time.seconds.round(), "cpuSeconds": time.cpu.round(), "tests": time.tests,
                })
            })
            .collect();
        let slowest = outcome.totals.times.iter().take(SLOWEST);
        let slowest: Vec<Json> =
            slowest.map(|(seconds, name)| json!({"seconds": seconds, "test": name.to_string()})).collect();
        file["runs"][&name] = json!({
            "commit": Version::of_this_tree().commit, "machine": machine(), "seconds": seconds.round(),
            "idlePercent": cores.idle_percent().round(), "passed": outcome.totals.passed, "failed": outcome.totals.failed,
            "stages": stages, "slowest": slowest,
        });
        fs::write(&path, serde_json::to_string_pretty(&file)? + "\n").with_context(|| path.display().to_string())?;
        println!("docs/results/test-time.json");
        Ok(())
    }
}

/// CPU ticks of all cores since boot, as the baseline for idle time.
#[derive(Debug)]
pub(crate) struct Cores(Option<(f64, f64)>);

impl Cores {
    /// Starts counting.
    pub(crate) fn now() -> Cores {
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        let ticks: Vec<f64> = text
            .lines()
            .next()
            .map(|line| line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect())
            .unwrap_or_default();
        // user, nice, system, idle, iowait, ...
        Cores((ticks.len() > 4).then(|| (ticks[3] + ticks[4], ticks.iter().sum())))
    }

    /// Idle share of the cores' time since then, percent; 0 if the kernel does not report it.
    pub(crate) fn idle_percent(&self) -> f64 {
        match (self.0, Cores::now().0) {
            (Some((idle, all)), Some((idle_now, all_now))) if all_now > all => {
                100.0 * (idle_now - idle) / (all_now - all)
            }
            _ => 0.0,
        }
    }
}

/// A load on all cores until it is dropped.
#[derive(Debug)]
pub(crate) struct Load {
    ended: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    /// Starts one busy thread per core.
    pub(crate) fn start() -> Load {
        let ended = Arc::new(AtomicBool::new(false));
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let spin = |ended: Arc<AtomicBool>| {
            let mut number = 0u64;
            while !ended.load(Ordering::Relaxed) {
                number = black_box(number.wrapping_add(1));
            }
        };
        let threads = (0..cores)
            .map(|_| {
                let ended = Arc::clone(&ended);
                thread::spawn(move || spin(ended))
            })
            .collect();
        Load { ended, threads }
    }

    /// Number of cores it keeps busy.
    pub(crate) fn cores(&self) -> usize {
        self.threads.len()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
