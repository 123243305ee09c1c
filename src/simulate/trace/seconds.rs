//! Our own format: CSV in seconds, in submission order.

use super::{Format, LONGEST, Row, Trace, gpus};
use crate::fabric::Fabric;
use crate::table::{Table, TableError};
use serde::Deserialize;
use std::io::Read;

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

pub(super) fn read(table: Table<impl Read>, fabric: &Fabric) -> Result<Trace, TableError> {
    let mut rows: Vec<Row> = Vec::new();
    table.rows(&["submit_seconds", "duration_seconds", "gpus"], |line, record, header| {
        let raw: Raw<'_> = record.deserialize(Some(header)).map_err(|source| TableError::Form { line, source })?;
        rows.push(row(line, &raw, rows.last(), fabric)?);
        Ok(())
    })?;
    Ok(Trace { format: Format::Seconds, rows, skipped: Vec::new() })
}

fn row(line: u64, raw: &Raw<'_>, before: Option<&Row>, fabric: &Fabric) -> Result<Row, TableError> {
    let wrong = |field, got: &str, expected: String| TableError::Field { line, field, got: got.into(), expected };
    let number = |field, text: &str, least: f64| match text.parse::<f64>() {
        Ok(number) if (least..=LONGEST).contains(&number) => Ok(number),
        _ => Err(wrong(field, text, format!("seconds from {least} to {LONGEST}"))),
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
    let gpus = gpus(raw.gpus, fabric).map_err(|expected| wrong("gpus", raw.gpus, expected))?;
    Ok(Row { line, submit, duration, gpus, queue: raw.queue.into(), limit, preemptible: None })
}
