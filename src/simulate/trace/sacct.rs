//! Output of Slurm's `sacct --parsable2`: cells separated by `|`, with a header.

use super::log::{Log, TIME, time};
use super::{Format, LONGEST, Row, Skipped, Trace, gpus};
use crate::fabric::Fabric;
use crate::table::{Table, TableError};
use serde::Deserialize;
use std::io::Read;

#[derive(Deserialize)]
struct Raw<'a> {
    #[serde(rename = "JobID", default)]
    job: &'a str,
    #[serde(rename = "Submit")]
    submit: &'a str,
    #[serde(rename = "Elapsed")]
    elapsed: &'a str,
    #[serde(rename = "AllocTRES")]
    allocated: &'a str,
    #[serde(rename = "Account", default)]
    account: &'a str,
    #[serde(rename = "Timelimit", default)]
    limit: &'a str,
}

pub(super) fn read(table: Table<impl Read>, fabric: &Fabric) -> Result<Trace, TableError> {
    let mut log = Log::default();
    table.rows(&["Submit", "Elapsed", "AllocTRES"], |line, record, header| {
        let raw: Raw<'_> = record.deserialize(Some(header)).map_err(|source| TableError::Form { line, source })?;
        job(line, &raw, fabric, &mut log)
    })?;
    log.finish(Format::Sacct)
}

fn job(line: u64, raw: &Raw<'_>, fabric: &Fabric, log: &mut Log) -> Result<(), TableError> {
    let wrong = |field, got: &str, expected: String| TableError::Field { line, field, got: got.into(), expected };
    // `7.batch` is a step of job 7 and repeats its resources.
    if raw.job.contains('.') {
        return Ok(());
    }
    let Some(count) = allocated(raw.allocated) else {
        log.skip(Skipped::NoGpus);
        return Ok(());
    };
    let gpus = gpus(&count, fabric).map_err(|expected| wrong("AllocTRES", raw.allocated, expected))?;
    let submit = time(raw.submit).ok_or_else(|| wrong("Submit", raw.submit, TIME.into()))?;
    let span = |field, text| seconds(text).ok_or_else(|| wrong(field, text, "a time like 05:00 or 1-12:30:00".into()));
    let duration = span("Elapsed", raw.elapsed)?;
    let limit = match raw.limit {
        "" | "UNLIMITED" | "Partition_Limit" | "INVALID" => None,
        text => Some(span("Timelimit", text)?),
    };
    log.add(submit, Row { line, submit: 0.0, duration, gpus, queue: raw.account.into(), limit, preemptible: None });
    Ok(())
}

/// The number of GPUs in a list like `cpu=64,gres/gpu=8,gres/gpu:h100=8,node=1`, if any.
fn allocated(list: &str) -> Option<String> {
    let count = |item: &str| Some(item.strip_prefix("gres/gpu=")?.to_owned());
    let of_type = |item: &str| item.strip_prefix("gres/gpu:")?.split_once('=')?.1.parse::<u32>().ok();
    let items = || list.split(',');
    let typed = || items().filter_map(of_type).reduce(u32::saturating_add).map(|count| count.to_string());
    items().find_map(count).or_else(typed).filter(|count| count != "0")
}

/// Seconds from `[days-]hours:minutes:seconds` or `minutes:seconds`, with optional fraction.
fn seconds(text: &str) -> Option<f64> {
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let parts = clock.split(':').map(|part| part.parse::<f64>().ok().filter(|part| part.is_finite() && *part >= 0.0));
    let parts: Vec<f64> = parts.collect::<Option<_>>()?;
    let within = match parts[..] {
        [minutes, seconds] => 60.0 * minutes + seconds,
        [hours, minutes, seconds] => 3600.0 * hours + 60.0 * minutes + seconds,
        _ => return None,
    };
    Some(86_400.0 * f64::from(days.parse::<u32>().ok()?) + within).filter(|seconds| *seconds <= LONGEST)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::read;
    use super::*;

    fn of(text: &str) -> Result<Trace, String> {
        read(text.as_bytes(), &Fabric::regular(16, 8)).map_err(|error| error.to_string())
    }

    #[test]
    fn jobs_have_limits_and_accounts_and_steps_are_skipped() {
        let trace = of("JobID|Submit|Elapsed|AllocTRES|Account|Timelimit|State\n\
             9|2024-05-02T03:04:05|1-00:00:10|billing=8,cpu=64,gres/gpu:h100=8,gres/gpu=8,node=1|vision|2-00:00:00|COMPLETED\n\
             9.batch|2024-05-02T03:04:05|1-00:00:10|cpu=64,gres/gpu=8|vision||COMPLETED\n\
             8|2024-05-02T03:03:05|00:20:00|cpu=8,gres/gpu:a100=2,gres/gpu:h100=1,node=2|text|UNLIMITED|FAILED\n\
             7|2024-05-02T03:00:05|00:20:00|cpu=8,node=2|text|UNLIMITED|FAILED\n\
             6|2024-05-02T03:00:05|00:00:00||text|01:00:00|CANCELLED\n");
        let trace = trace.unwrap();
        let rows: Vec<_> = trace
            .rows
            .iter()
            .map(|row| (row.line, row.submit, row.duration, row.gpus, row.queue.as_str(), row.limit))
            .collect();
        assert_eq!(rows, [(4, 0.0, 1200.0, 3, "text", None), (2, 60.0, 86_410.0, 8, "vision", Some(172_800.0))]);
        assert_eq!((trace.format, trace.skipped), (Format::Sacct, vec![(Skipped::NoGpus, 2)]));
    }

    #[test]
    fn wrong_rows_are_named_by_their_line() {
        let row = |submit: &str, elapsed: &str, limit: &str| {
            format!("Submit|Elapsed|AllocTRES|Timelimit\n{submit}|{elapsed}|gres/gpu=1|{limit}\n")
        };
        for (text, words) in [
            (row("Unknown", "01:00", ""), "line 2: Submit: got `Unknown`; expected a time like"),
            (row("2024-05-02T03:04:05", "long", ""), "line 2: Elapsed: got `long`; expected a time like"),
            (row("2024-05-02T03:04:05", "99999-00:00:00", ""), "line 2: Elapsed: got `99999-00:00:00`"),
            (row("2024-05-02T03:04:05", "-1:00", ""), "line 2: Elapsed: got `-1:00`"),
            (row("2024-05-02T03:04:05", "01:00", "1h"), "line 2: Timelimit: got `1h`"),
            ("Submit|Elapsed\nx|y\n".into(), "the header has no column `AllocTRES`"),
        ] {
            let error = of(&text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        let large = "Submit|Elapsed|AllocTRES\n2024-05-02T03:04:05|01:00|gres/gpu=4096\n";
        assert!(of(large).unwrap_err().contains("line 2: AllocTRES: got `gres/gpu=4096`; expected 1 to 1024"));
    }
}
