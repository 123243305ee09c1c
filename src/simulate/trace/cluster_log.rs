//! Cluster logs in the format of the Helios (SenseTime, SC '21) and Acme (Shanghai AI Laboratory,
//! NSDI '24) traces, following the schemas in the READMEs of S-Lab-System-Group/HeliosData and
//! InternLM/AcmeTrace.

use super::log::{Log, TIME, is_known, time};
use super::{Format, Row, Skipped, Trace, gpus};
use crate::fabric::Fabric;
use crate::table::{Table, TableError};
use jiff::Timestamp;
use serde::Deserialize;
use std::io::Read;

/// `queue` is a time in these logs, and `duration` includes the wait in one of the files, so
/// neither is read.
#[derive(Deserialize)]
struct Raw<'a> {
    submit_time: &'a str,
    start_time: &'a str,
    end_time: &'a str,
    gpu_num: &'a str,
    /// Virtual cluster.
    #[serde(default)]
    vc: &'a str,
    #[serde(default)]
    user: &'a str,
}

pub(super) fn read(table: Table<impl Read>, fabric: &Fabric) -> Result<Trace, TableError> {
    let mut log = Log::default();
    table.rows(&["submit_time", "start_time", "end_time", "gpu_num"], |line, record, header| {
        let raw: Raw<'_> = record.deserialize(Some(header)).map_err(|source| TableError::Form { line, source })?;
        job(line, &raw, fabric, &mut log)
    })?;
    log.finish(Format::ClusterLog)
}

fn job(line: u64, raw: &Raw<'_>, fabric: &Fabric, log: &mut Log) -> Result<(), TableError> {
    let wrong = |field, got: &str, expected: String| TableError::Field { line, field, got: got.into(), expected };
    // Some logs have 8.0 instead of 8.
    let count = raw.gpu_num.strip_suffix(".0").unwrap_or(raw.gpu_num);
    if count == "0" || !is_known(count) {
        log.skip(Skipped::NoGpus);
        return Ok(());
    }
    let gpus = gpus(count, fabric).map_err(|expected| wrong("gpu_num", raw.gpu_num, expected))?;
    if !is_known(raw.start_time) || !is_known(raw.end_time) {
        log.skip(Skipped::NoEnd);
        return Ok(());
    }
    let at =
        |field, text| -> Result<Timestamp, TableError> { time(text).ok_or_else(|| wrong(field, text, TIME.into())) };
    let (submit, start) = (at("submit_time", raw.submit_time)?, at("start_time", raw.start_time)?);
    let duration = at("end_time", raw.end_time)?.duration_since(start).as_secs_f64();
    if duration < 0.0 {
        return Err(wrong("end_time", raw.end_time, format!("no time before start_time, {}", raw.start_time)));
    }
    let queue = if raw.vc.is_empty() { raw.user } else { raw.vc };
    log.add(submit, Row { line, submit: 0.0, duration, gpus, queue: queue.into(), limit: None, preemptible: None });
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::read;
    use super::*;

    const HELIOS: &str =
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n";
    const ACME: &str =
        "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n";

    fn of(header: &str, rows: &str) -> Result<Trace, String> {
        read(format!("{header}{rows}").as_bytes(), &Fabric::regular(16, 8)).map_err(|error| error.to_string())
    }

    #[test]
    fn helios_jobs_are_sorted_by_submission_and_exclude_the_wait() {
        let trace = of(
            HELIOS,
            "2,u1,vcA,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:42:00,2020-06-09 18:45:36,216,33\n\
             1,u2,vcB,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0\n\
             3,u2,vcB,0,8,1,COMPLETED,2020-06-09 18:41:28,2020-06-09 18:41:28,2020-06-09 18:41:29,1,0\n\
             4,u2,vcB,8,8,1,CANCELLED,2020-06-09 18:41:29,,2020-06-09 18:41:39,0,10\n\
             5,u2,vcB,8,8,1,FAILED,2020-06-09 18:41:30,2020-06-09 18:41:39,2020-06-09 18:41:39,0,9\n",
        );
        let trace = trace.unwrap();
        let rows: Vec<_> =
            trace.rows.iter().map(|row| (row.line, row.submit, row.duration, row.gpus, row.queue.as_str())).collect();
        assert_eq!(rows, [(3, 0.0, 36848.0, 1, "vcB"), (2, 26.0, 216.0, 4, "vcA")]);
        assert_eq!(trace.skipped, [(Skipped::NoGpus, 1), (Skipped::NoEnd, 1), (Skipped::TooShort, 1)]);
    }

    #[test]
    fn acme_run_times_are_from_start_to_end_and_queues_are_users() {
        let trace = of(
            ACME,
            "d,u7,8,64,960,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,2023-05-17 11:01:16+00:00,18,10.0,1152.0\n",
        );
        let Trace { format, rows, .. } = trace.unwrap();
        assert_eq!(
            (format, rows[0].duration, rows[0].gpus, rows[0].queue.as_str()),
            (Format::ClusterLog, 8.0, 64, "u7")
        );
    }

    #[test]
    fn wrong_rows_are_named_by_their_line() {
        let row =
            |gpus: &str, start: &str, end: &str| format!("1,u,v,{gpus},1,1,X,2020-06-09 18:41:01,{start},{end},1,0\n");
        let (start, end) = ("2020-06-09 18:41:01", "2020-06-09 18:41:09");
        for (rows, words) in [
            (row("many", start, end), "line 2: gpu_num: got `many`; expected 1 to 1024"),
            (row("1", "soon", end), "line 2: start_time: got `soon`; expected a time like"),
            (row("1", end, start), "line 2: end_time: got `2020-06-09 18:41:01`; expected no time before start_time"),
            (row("0", start, end), "no rows"),
        ] {
            let error = of(HELIOS, &rows).unwrap_err();
            assert!(error.contains(words), "{rows}: {error}");
        }
        assert!(of("gpu_num,submit_time\n", "1,x\n").unwrap_err().contains("no column `start_time`"));
    }
}
