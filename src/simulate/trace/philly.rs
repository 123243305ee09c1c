//! `cluster_job_log` of the Philly traces (Microsoft, ATC '19), following the schema in the README
//! of msr-fiddle/philly-traces: a JSON list of jobs with their attempts. A job gets the GPUs of its
//! largest attempt and the total run time of all attempts.

use super::log::{Log, TIME, is_known, time};
use super::{Format, Row, Skipped, Trace, gpus};
use crate::fabric::Fabric;
use crate::table::{MAX_ROWS, TableError};
use jiff::Timestamp;
use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, SeqAccess, Visitor};
use std::fmt;
use std::io::Read;

#[derive(Deserialize)]
struct Job {
    jobid: String,
    #[serde(default)]
    vc: Option<String>,
    submitted_time: String,
    #[serde(default)]
    attempts: Vec<Attempt>,
}

#[derive(Deserialize)]
struct Attempt {
    start_time: Option<String>,
    end_time: Option<String>,
    #[serde(default)]
    detail: Vec<Server>,
}

#[derive(Deserialize)]
struct Server {
    gpus: Vec<IgnoredAny>,
}

pub(super) fn read(from: impl Read, fabric: &Fabric) -> Result<Trace, TableError> {
    let mut jobs = Jobs { fabric, log: Log::default() };
    serde_json::Deserializer::from_reader(from).deserialize_seq(&mut jobs)?;
    jobs.log.finish(Format::Philly)
}

/// Processes one job after another, because the log is larger than the data we keep.
struct Jobs<'a> {
    fabric: &'a Fabric,
    log: Log,
}

impl<'de> Visitor<'de> for &mut Jobs<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of jobs")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let mut number = 0;
        while let Some(job) = list.next_element::<Job>()? {
            number += 1;
            if number > MAX_ROWS as u64 {
                return Err(A::Error::custom(TableError::TooMany));
            }
            let id = &job.jobid;
            self.take(number, &job).map_err(|why| A::Error::custom(format!("job {id}: {why}")))?;
        }
        Ok(())
    }
}

impl Jobs<'_> {
    fn take(&mut self, number: u64, job: &Job) -> Result<(), String> {
        let at = |field: &str, text: &str| -> Result<Timestamp, String> {
            time(text).ok_or_else(|| format!("{field}: got `{text}`; expected {TIME}"))
        };
        let submit = at("submitted_time", &job.submitted_time)?;
        let count = |attempt: &Attempt| attempt.detail.iter().map(|server| server.gpus.len()).sum();
        let most: usize = job.attempts.iter().map(count).max().unwrap_or(0);
        if most == 0 {
            self.log.skip(Skipped::NoGpus);
            return Ok(());
        }
        let gpus =
            gpus(&most.to_string(), self.fabric).map_err(|expected| format!("{most} GPUs; expected {expected}"))?;
        let mut duration = 0.0;
        for Attempt { start_time, end_time, .. } in &job.attempts {
            let known = |text: &Option<String>| text.clone().filter(|text| is_known(text));
            let (Some(start), Some(end)) = (known(start_time), known(end_time)) else {
                self.log.skip(Skipped::NoEnd);
                return Ok(());
            };
            let ran = at("end_time", &end)?.duration_since(at("start_time", &start)?).as_secs_f64();
            if ran < 0.0 {
                return Err(format!("end_time: got `{end}`; expected no time before start_time, {start}"));
            }
            duration += ran;
        }
        let queue = job.vc.clone().unwrap_or_default();
        self.log.add(submit, Row { line: number, submit: 0.0, duration, gpus, queue, limit: None, preemptible: None });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::read;
    use super::*;
    use serde_json::{Value, json};

    fn of(jobs: &Value) -> Result<Trace, String> {
        read(jobs.to_string().as_bytes(), &Fabric::regular(16, 8)).map_err(|error| error.to_string())
    }

    fn attempt(start: Value, end: Value, gpus: usize) -> Value {
        json!({"start_time": start, "end_time": end, "detail": [{"ip": "m47", "gpus": vec!["gpu0"; gpus]}]})
    }

    fn job(id: &str, attempts: &[Value]) -> Value {
        json!({"status": "Pass", "vc": "ee9e8c", "jobid": id, "attempts": attempts, "submitted_time": "2017-10-07 01:11:39", "user": "u"})
    }

    #[test]
    fn attempts_of_a_job_are_added_up() {
        let (start, end) = (json!("2017-10-07 01:12:00"), json!("2017-10-07 01:13:00"));
        let jobs = json!([
            job(
                "a",
                &[
                    attempt(start.clone(), end.clone(), 8),
                    attempt(json!("2017-10-07 01:20:00"), json!("2017-10-07 02:20:00"), 8)
                ]
            ),
            job("b", &[]),
            job("c", &[attempt(start.clone(), json!("None"), 1)]),
            job("d", &[attempt(start.clone(), Value::Null, 1)]),
            job("e", &[attempt(start.clone(), start, 1)]),
        ]);
        let trace = of(&jobs).unwrap();
        let row = Row {
            line: 1,
            submit: 0.0,
            duration: 3660.0,
            gpus: 8,
            queue: "ee9e8c".into(),
            limit: None,
            preemptible: None,
        };
        assert_eq!((trace.format, trace.rows), (Format::Philly, vec![row]));
        assert_eq!(trace.skipped, [(Skipped::NoGpus, 1), (Skipped::NoEnd, 2), (Skipped::TooShort, 1)]);
    }

    #[test]
    fn errors_name_the_job_and_the_position() {
        let (start, end) = (json!("2017-10-07 01:12:00"), json!("2017-10-07 01:13:00"));
        for (jobs, words) in [
            (
                json!([job("a", &[attempt(end.clone(), start.clone(), 8)])]),
                "job a: end_time: got `2017-10-07 01:12:00`; expected no time before",
            ),
            (
                json!([job("a", &[attempt(json!("now"), end.clone(), 8)])]),
                "job a: start_time: got `now`; expected a time like",
            ),
            (json!([job("a", &[attempt(start, end, 2000)])]), "job a: 2000 GPUs; expected 1 to 1024"),
            (json!([{"jobid": "a"}]), "missing field `submitted_time` at line 1"),
            (json!({"jobs": []}), "expected a list of jobs"),
            (json!([]), "no rows"),
        ] {
            let error = of(&jobs).unwrap_err();
            assert!(error.contains(words), "{jobs}: {error}");
        }
    }
}
