//! Traces of jobs: CSV, one row a job, in the order of submission; packed by gzip or not.

use crate::chance::{Chance, mixed};
use crate::fabric::Fabric;
use crate::play::pods;
use crate::table::{self, TableError};
use serde::Deserialize;
use std::io::Read;

/// One job.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Line of the file, the header being 1.
    pub line: u64,
    /// Seconds.
    pub submit: f64,
    /// Seconds of work at the best place.
    pub duration: f64,
    pub gpus: u32,
    /// Empty: not known.
    pub queue: String,
    /// Seconds after which the job would have been stopped; `None`: not known.
    pub limit: Option<f64>,
}

#[derive(Deserialize)]
struct Raw<'a> {
    submit_seconds: &'a str,
    duration_seconds: &'a str,
    gpus: &'a str,
    #[serde(default)]
    queue: &'a str,
    #[serde(default)]
    limit_seconds: &'a str,
}

/// Reads the trace of jobs that are to be played on a cluster.
///
/// # Errors
/// The first row that is wrong, by its line.
pub fn read(from: impl Read, fabric: &Fabric) -> Result<Vec<Row>, TableError> {
    let mut rows: Vec<Row> = Vec::new();
    table::read(from, &["submit_seconds", "duration_seconds", "gpus"], |line, record, header| {
        let raw: Raw<'_> = record.deserialize(Some(header)).map_err(|source| TableError::Form { line, source })?;
        rows.push(row(line, &raw, rows.last(), fabric)?);
        Ok(())
    })?;
    Ok(rows)
}

fn row(line: u64, raw: &Raw<'_>, before: Option<&Row>, fabric: &Fabric) -> Result<Row, TableError> {
    let wrong = |field, got: &str, expected: String| TableError::Field { line, field, got: got.into(), expected };
    let number = |field, text: &str, least: f64| match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= least => Ok(number),
        _ => Err(wrong(field, text, format!("seconds of at least {least}"))),
    };
    let submit = number("submit_seconds", raw.submit_seconds, 0.0)?;
    if let Some(before) = before.filter(|before| submit < before.submit) {
        let expected =
            format!("at least {}, as in the line before: rows are in the order of submission", before.submit);
        return Err(wrong("submit_seconds", raw.submit_seconds, expected));
    }
    let duration = number("duration_seconds", raw.duration_seconds, 1.0)?;
    let limit = match raw.limit_seconds {
        "" => None,
        text => Some(number("limit_seconds", text, 1.0)?),
    };
    let most_gpus = fabric.gpus();
    let gpus = raw.gpus.parse().ok().filter(|gpus| (1..=most_gpus).contains(gpus));
    let gpus = gpus.ok_or_else(|| {
        wrong(
            "gpus",
            raw.gpus,
            format!("1 to {most_gpus}: a job gets all its GPUs at once, and the cluster has no more"),
        )
    })?;
    let (pods, each) = pods(gpus, fabric.gpus_per_host);
    let hosts = fabric.hosts.len();
    if pods as usize > hosts {
        let expected = format!("at most {hosts} equal pods, one for each host: these would be {pods} of {each}");
        return Err(wrong("gpus", raw.gpus, expected));
    }
    Ok(Row { line, submit, duration, gpus, queue: raw.queue.into(), limit })
}

/// The same trace a little otherwise: submissions up to half an hour earlier or later, durations up to 5 % (input shaking: Tsafrir, Ouaknine,
/// Feitelson, MASCOTS 2007). Two rules that differ by less than they do over such inputs do not differ.
#[must_use]
pub fn shaken(rows: &[Row], seed: u64) -> Vec<Row> {
    let mut chance = Chance::new(mixed(seed));
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
    use crate::measure::{Counted, figures};
    use crate::play::{Limits, Setting, play};
    use crate::rules::{Order, Peer, Places};
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
    fn packed_or_not_it_is_the_same_trace() {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(GOOD.as_bytes()).unwrap();
        let rows = read(GOOD.as_bytes(), &fabric()).unwrap();
        assert_eq!(rows, read(packed.finish().unwrap().as_slice(), &fabric()).unwrap());
        assert_eq!((rows[0].line, rows[0].queue.as_str(), rows[1].gpus), (2, "a", 118));
    }

    /// What the README beside the traces says of them.
    #[test]
    fn the_traces_of_the_repository_are_whole() {
        for (file, count, gpu_hours, most) in
            [("lingjun-2023", 2257, 313_061.0, 744), ("philly-2017-october", 62_421, 1_621_608.0, 128)]
        {
            let path = format!("{}/../../tests/fixtures/traces/{file}.csv.gz", env!("CARGO_MANIFEST_DIR"));
            let rows = read(std::fs::File::open(path).unwrap(), &Fabric::regular(16, 8)).unwrap();
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
                "line 2: duration_seconds: got `-1`; expected seconds of at least 1",
            ),
            ("submit_seconds,duration_seconds,gpus\nNaN,1,1\n", "line 2: submit_seconds: got `NaN`"),
            ("submit_seconds,duration_seconds,gpus\n9,1,745\n", "line 2: gpus: got `745`; expected 1 to 744"),
            (
                "submit_seconds,duration_seconds,gpus\n9,1,101\n",
                "line 2: gpus: got `101`; expected at most 93 equal pods, one for each host: these would be 101 of 1",
            ),
            ("submit_seconds,duration_seconds,gpus\n9,1\n", "line 2: CSV error"),
            (
                "submit_seconds,duration_seconds,gpus,limit_seconds\n9,1,1,never\n",
                "line 2: limit_seconds: got `never`; expected seconds of at least 1",
            ),
        ] {
            assert!(error(text).contains(words), "{text:?}: {}", error(text));
        }
    }

    /// A million rows that nobody keeps as text.
    struct Million {
        row: u64,
        text: Vec<u8>,
    }

    impl Read for Million {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            if self.text.is_empty() && self.row < 1_000_000 {
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

    #[test]
    fn a_million_rows_are_played_in_less_than_a_gibibyte() {
        let fabric = Fabric::regular(32, 8);
        let rows = read(Million { row: 0, text: Vec::new() }, &fabric).unwrap();
        let setting = Setting { fabric: &fabric, model: Model::Levels, limits: Limits::Coarse };
        let played = play(&rows, setting, &mut Peer::new(&fabric, Order::Strict, Places::Domains)).unwrap();
        assert_eq!(played.jobs.len(), 1_000_000);
        assert!(figures(&played, fabric.gpus(), Counted::Middle).completion_mean > 0.0);
        // Of this process, with the tests that run beside.
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        let kibibytes: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
        assert!(kibibytes < 1024 * 1024, "{kibibytes} KiB");
    }

    #[test]
    fn a_shaken_trace_is_another_one_in_order_and_the_same_every_time() {
        let rows = read(GOOD.as_bytes(), &fabric()).unwrap();
        let shaken_rows = shaken(&rows, 1);
        assert_eq!(shaken_rows, shaken(&rows, 1));
        assert_ne!(shaken_rows, shaken(&rows, 2));
        assert!(shaken_rows.is_sorted_by(|a, b| a.submit <= b.submit));
    }
}
