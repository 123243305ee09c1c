//! Traces with one row per job. The format is detected from the start of the file, see [`Format`].
//!
//! ```text
//! file ─> unpacked ─> format ─┬─> seconds: our own CSV, in submission order ─────────┐
//!                             └─> cluster_log, sacct, philly ─> Log (sorted) ────────┼─> Trace
//! objects of a cluster ───────────> objects ─> Log ────────────────────────────────────┘
//! ```

mod cluster_log;
mod log;
mod objects;
mod philly;
mod sacct;
mod seconds;

pub use objects::from_objects;

use crate::fabric::{Fabric, pods};
use crate::rng::{Rng, mix};
use crate::table::{Table, TableError, unpacked};
use std::fmt;
use std::io::{BufRead, Read};

/// One job.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Line in the file (the header is line 1); for JSON the index of the job.
    pub line: u64,
    /// Seconds.
    pub submit: f64,
    /// Seconds of work at the best placement.
    pub duration: f64,
    pub gpus: u32,
    /// Empty if unknown.
    pub queue: String,
    /// Seconds after which the job would have been stopped, if known.
    pub limit: Option<f64>,
    /// Whether the queue policy may preempt the job, if known.
    pub preemptible: Option<bool>,
}

/// Longest time in a trace: 31 years in seconds. Timestamps of Kubernetes end in the year 9999.
const LONGEST: f64 = 1e9;

/// Jobs in submission order.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    pub format: Format,
    pub rows: Vec<Row>,
    /// Jobs that cannot be replayed, counted by reason.
    pub skipped: Vec<(Skipped, u64)>,
}

/// The origin of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Our own columns: `submit_seconds`, `duration_seconds`, `gpus`.
    Seconds,
    /// Cluster log in the format of the Helios and Acme traces: `submit_time`, `start_time`,
    /// `end_time`, `gpu_num`.
    ClusterLog,
    /// Slurm: `sacct --parsable2`.
    Sacct,
    /// `cluster_job_log` of the Philly traces, in JSON.
    Philly,
    /// TrainJobs and pods from a cluster.
    Objects,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Seconds => "CSV with submit_seconds",
            Format::ClusterLog => "log of a cluster as Helios and Acme have it",
            Format::Sacct => "sacct --parsable2",
            Format::Philly => "cluster_job_log of Philly",
            Format::Objects => "TrainJobs and pods",
        })
    }
}

/// Why a logged job is not replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Skipped {
    NoGpus,
    NoEnd,
    TooShort,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Skipped::NoGpus => "without GPUs",
            Skipped::NoEnd => "without a start or an end",
            Skipped::TooShort => "ran for less than a second",
        })
    }
}

/// Reads a trace for a replay on `fabric`.
///
/// # Errors
/// The first invalid row, with its line.
pub fn read(from: impl Read, fabric: &Fabric) -> Result<Trace, TableError> {
    let mut text = unpacked(from)?;
    let start = text.fill_buf()?;
    let first = start.iter().copied().find(|byte| !byte.is_ascii_whitespace());
    if matches!(first, Some(b'[' | b'{')) {
        return philly::read(text, fabric);
    }
    let header = start.split(|byte| *byte == b'\n').next().unwrap_or_default();
    if header.contains(&b'|') {
        return sacct::read(Table::open(text, b'|')?, fabric);
    }
    let table = Table::open(text, b',')?;
    if table.has("gpu_num") { cluster_log::read(table, fabric) } else { seconds::read(table, fabric) }
}

/// Parses a job's number of GPUs; the error describes the expected value.
fn gpus(text: &str, fabric: &Fabric) -> Result<u32, String> {
    let most = fabric.gpus();
    let gpus = text.parse().ok().filter(|gpus| (1..=most).contains(gpus));
    let gpus =
        gpus.ok_or_else(|| format!("1 to {most}: a job gets all its GPUs at once, and the cluster has no more"))?;
    let ((pods, each), hosts) = (pods(gpus, fabric.gpus_per_host), fabric.hosts.len());
    if pods as usize > hosts {
        return Err(format!("at most {hosts} equal pods, one for each host: these would be {pods} of {each}"));
    }
    Ok(gpus)
}

/// A perturbed trace: submissions move by up to half an hour and durations by up to 5 % (input
/// shaking: Tsafrir, Ouaknine, Feitelson, MASCOTS 2007). Differences between rules that are smaller
/// than their spread over perturbed inputs are noise.
#[must_use]
pub fn shaken(rows: &[Row], seed: u64) -> Vec<Row> {
    let mut chance = Rng::new(mix(seed));
    let shake = |row: &Row| {
        let submit = (row.submit + 1800.0 * chance.around()).max(0.0);
        let duration = (row.duration * (1.0 + 0.05 * chance.around())).max(1.0);
        Row { submit, duration, ..row.clone() }
    };
    let mut rows: Vec<Row> = rows.iter().map(shake).collect();
    rows.sort_by(|a, b| a.submit.total_cmp(&b.submit).then(a.line.cmp(&b.line)));
    rows
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::measure::{JobWindow, figures};
    use crate::replay::{Limits, Scenario, replay};
    use crate::rules::{HostOrder, Order, Peer};
    use crate::speed::Model;
    use std::io::Write;

    const GOOD: &str = "submit_seconds,duration_seconds,gpus,queue\n0,60,8,a\n10,5,118,\n";

    /// 93 hosts of 8 GPUs.
    fn fabric() -> Fabric {
        Fabric::regular(93, 1)
    }

    fn error(text: &str) -> String {
        read(text.as_bytes(), &fabric()).unwrap_err().to_string()
    }

    #[test]
    fn compression_does_not_change_the_trace() {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(GOOD.as_bytes()).unwrap();
        let rows = read(GOOD.as_bytes(), &fabric()).unwrap().rows;
        assert_eq!(rows, read(packed.finish().unwrap().as_slice(), &fabric()).unwrap().rows);
        assert_eq!((rows[0].line, rows[0].queue.as_str(), rows[1].gpus), (2, "a", 118));
    }

    /// The figures in the README next to the traces.
    #[test]
    fn the_committed_traces_are_complete() {
        for (file, count, gpu_hours, most) in
            [("lingjun-2023", 2257, 313_061.0, 744), ("philly-2017-october", 62_421, 1_621_608.0, 128)]
        {
            let path = format!("{}/../../tests/fixtures/traces/{file}.csv.gz", env!("CARGO_MANIFEST_DIR"));
            let rows = read(std::fs::File::open(path).unwrap(), &Fabric::regular(16, 8)).unwrap().rows;
            let hours: f64 = rows.iter().map(|row| row.duration * f64::from(row.gpus) / 3600.0).sum();
            assert_eq!(
                (rows.len(), hours.round(), rows.iter().map(|row| row.gpus).max()),
                (count, gpu_hours, Some(most)),
                "{file}"
            );
        }
    }

    #[test]
    fn bad_rows_are_named_by_their_line() {
        for (text, words) in [
            ("", "no column `submit_seconds`"),
            ("submit_seconds,gpus\n", "no column `duration_seconds`"),
            ("submit_seconds,duration_seconds,gpus\n", "no rows"),
            (
                "submit_seconds,duration_seconds,gpus\n9,1,1\n8,1,1\n",
                "line 3: submit_seconds: got `8`; expected at least 9",
            ),
            (
                "submit_seconds,duration_seconds,gpus\n9,-1,1\n",
                "line 2: duration_seconds: got `-1`; expected seconds from 1 to 1000000000",
            ),
            ("submit_seconds,duration_seconds,gpus\nNaN,1,1\n", "line 2: submit_seconds: got `NaN`"),
            (
                "submit_seconds,duration_seconds,gpus\n0,3e11,8\n",
                "line 2: duration_seconds: got `3e11`; expected seconds from 1 to 1000000000",
            ),
            ("submit_seconds,duration_seconds,gpus\n9,1,745\n", "line 2: gpus: got `745`; expected 1 to 744"),
            (
                "submit_seconds,duration_seconds,gpus\n9,1,101\n",
                "line 2: gpus: got `101`; expected at most 93 equal pods, one for each host: these would be 101 of 1",
            ),
            ("submit_seconds,duration_seconds,gpus\n9,1\n", "line 2: CSV error"),
            (
                "submit_seconds,duration_seconds,gpus,limit_seconds\n9,1,1,never\n",
                "line 2: limit_seconds: got `never`; expected seconds from 1 to 1000000000",
            ),
        ] {
            assert!(error(text).contains(words), "{text:?}: {}", error(text));
        }
    }

    /// Rows that are generated while they are read.
    struct Generated {
        row: u64,
        count: u64,
        text: Vec<u8>,
    }

    impl Read for Generated {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            if self.text.is_empty() && self.row < self.count {
                let header = if self.row == 0 { "submit_seconds,duration_seconds,gpus,queue\n" } else { "" };
                self.text =
                    format!("{header}{},{},{},team-{}\n", self.row, 1 + self.row % 300, 1 + self.row % 8, self.row % 9)
                        .into();
                self.row += 1;
            }
            let count = into.len().min(self.text.len());
            into[..count].copy_from_slice(&self.text[..count]);
            self.text.drain(..count);
            Ok(count)
        }
    }

    /// So a million rows need less than a gibibyte.
    #[test]
    fn each_further_row_takes_less_than_a_kibibyte() {
        let fabric = Fabric::regular(32, 8);
        // Peak memory of the whole process after a replay, including tests that run in parallel.
        let kibibytes_after = |count: u64| {
            let rows = read(Generated { row: 0, count, text: Vec::new() }, &fabric).unwrap().rows;
            let scenario = Scenario::new(&fabric, Model::Levels, Limits::Coarse);
            let outcome = replay(&rows, scenario, &mut Peer::new(&fabric, Order::Strict, HostOrder::Domains)).unwrap();
            assert_eq!(outcome.jobs.len() as u64, count);
            assert!(figures(&outcome, fabric.gpus(), JobWindow::Middle).completion_mean > 0.0);
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
            peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
        };
        let [few, many] = [50_000, 150_000].map(kibibytes_after);
        assert!(many - few < 100_000, "{few} KiB, then {many} KiB");
    }

    #[test]
    fn shaking_a_trace_is_reproducible_and_keeps_it_sorted() {
        let rows = read(GOOD.as_bytes(), &fabric()).unwrap().rows;
        let shaken_rows = shaken(&rows, 1);
        assert_eq!(shaken_rows, shaken(&rows, 1));
        assert_ne!(shaken_rows, shaken(&rows, 2));
        assert!(shaken_rows.is_sorted_by(|a, b| a.submit <= b.submit));
    }
}
