//! Shared parts of foreign log formats: absolute times in any order, and jobs that cannot be
//! replayed.

use super::{Format, Row, Skipped, Trace};
use crate::table::TableError;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use std::collections::BTreeMap;

#[derive(Default)]
pub(super) struct Log {
    /// [`Row::submit`] is filled in by [`Log::finish`].
    jobs: Vec<(Timestamp, Row)>,
    skipped: BTreeMap<Skipped, u64>,
}

impl Log {
    pub fn add(&mut self, submit: Timestamp, row: Row) {
        if row.duration < 1.0 {
            self.skip(Skipped::TooShort);
        } else {
            self.jobs.push((submit, row));
        }
    }

    pub fn skip(&mut self, why: Skipped) {
        *self.skipped.entry(why).or_default() += 1;
    }

    /// The jobs in submission order, in seconds since the first submission.
    pub fn finish(mut self, format: Format) -> Result<Trace, TableError> {
        self.jobs.sort_by_key(|(submit, row)| (*submit, row.line));
        let first = self.jobs.first().ok_or(TableError::Empty)?.0;
        let seconds =
            |(submit, row): (Timestamp, Row)| Row { submit: submit.duration_since(first).as_secs_f64(), ..row };
        Ok(Trace {
            format,
            rows: self.jobs.into_iter().map(seconds).collect(),
            skipped: self.skipped.into_iter().collect(),
        })
    }
}

/// The format that [`time`] expects.
pub(super) const TIME: &str = "a time like 2024-05-31 18:41:01, with or without an offset";

/// Parses a timestamp. Without an offset it is taken as UTC, since only differences matter.
pub(super) fn time(text: &str) -> Option<Timestamp> {
    let local = || text.parse::<DateTime>().ok()?.to_zoned(TimeZone::UTC).ok();
    text.parse().ok().or_else(|| Some(local()?.timestamp()))
}

/// False for the various spellings of "has not happened".
pub(super) fn is_known(text: &str) -> bool {
    !["", "none", "null", "nan", "nat", "unknown"].contains(&text.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn times_with_and_without_an_offset_are_read() {
        let seconds = |text: &str| time(text).map(|time| time.as_second());
        assert_eq!(seconds("1970-01-01 00:01:00"), Some(60));
        assert_eq!(seconds("1970-01-01T00:01:00"), Some(60));
        assert_eq!(seconds("1970-01-01 08:01:00+08:00"), Some(60));
        assert_eq!(seconds("yesterday"), None);
    }
}
