//! Parses times at the start of lines in the formats of loggers, NCCL, Kubernetes and the kernel.

use jiff::Timestamp;
use jiff::civil::DateTime;
use std::fmt;

/// Characters of a line searched for a time.
const SEARCHED: usize = 120;
const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/// The time of a line. Without a zone it is compared as UTC, because all ranks of a job use the
/// same zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Microseconds since 1970.
    micros: i64,
    /// Whether the line has a zone.
    is_zoned: bool,
}

impl Moment {
    /// Microseconds since an earlier moment; 0 if that is later.
    pub fn since(self, earlier: Moment) -> u64 {
        u64::try_from(self.micros.saturating_sub(earlier.micros)).unwrap_or_default()
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ok(time) = Timestamp::from_microsecond(self.micros) else { return out.write_str("-") };
        let text = time.to_string();
        out.write_str(if self.is_zoned { &text } else { text.trim_end_matches('Z') })
    }
}

/// Parses the time of a line; `year` applies to formats without one.
///
/// Formats: `2026-11-20T14:03:12.345Z`, `[2026-11-20 14:03:12]`, `2026/11/20 14:03:12,345`, `E1120
/// 14:03:12.123456` (glog), `Nov 20 14:03:12` (syslog) and `Fri Nov 20 14:03:12 2026` (`dmesg -T`).
/// Seconds since boot are not comparable and are ignored.
pub(super) fn moment(line: &str, year: i16) -> Option<Moment> {
    let head = line.as_bytes();
    let head = &head[..head.len().min(SEARCHED)];
    // Every format has hours, minutes and seconds.
    let clock = (0..head.len().saturating_sub(7)).find(|at| is_clock(&head[*at..]))?;
    let (hour, minute, second) = (two(head, clock)?, two(head, clock + 3)?, two(head, clock + 6)?);
    let (micros, after) = fraction(head, clock + 8);
    let (year, month, day) = date_before(head, clock, after, year)?;
    let time = DateTime::new(year, month, day, hour, minute, second.min(59), 0).ok()?;
    let seconds = time.duration_since(DateTime::constant(1970, 1, 1, 0, 0, 0, 0)).as_secs();
    let offset = offset(head, after);
    Some(Moment { micros: (seconds - offset.unwrap_or(0)) * 1_000_000 + micros, is_zoned: offset.is_some() })
}

fn is_clock(text: &[u8]) -> bool {
    let digits = [0, 1, 3, 4, 6, 7].iter().all(|at| text.get(*at).is_some_and(u8::is_ascii_digit));
    digits && text[2] == b':' && text[5] == b':'
}

fn two(text: &[u8], at: usize) -> Option<i8> {
    let digit = |at: usize| text.get(at).filter(|byte| byte.is_ascii_digit()).map(|byte| (byte - b'0') as i8);
    Some(digit(at)? * 10 + digit(at + 1)?)
}

/// Parses fractional seconds: microseconds, and the position after them.
fn fraction(text: &[u8], at: usize) -> (i64, usize) {
    if !matches!(text.get(at), Some(b'.' | b',')) {
        return (0, at);
    }
    let digits = text[at + 1..].iter().take_while(|byte| byte.is_ascii_digit());
    let (mut micros, mut length) = (0_i64, 0);
    for digit in digits {
        if length < 6 {
            micros = micros * 10 + i64::from(digit - b'0');
        }
        length += 1;
    }
    (micros * 10_i64.pow(6 - length.min(6) as u32), at + 1 + length)
}

/// Seconds east of UTC, if the line has a zone.
fn offset(text: &[u8], at: usize) -> Option<i64> {
    match text.get(at)? {
        b'Z' => Some(0),
        sign @ (b'+' | b'-') => {
            let hours = i64::from(two(text, at + 1)?);
            let minutes = two(text, at + 4).or_else(|| two(text, at + 3)).map_or(0, i64::from);
            Some((hours * 3600 + minutes * 60) * if *sign == b'-' { -1 } else { 1 })
        }
        _ => None,
    }
}

/// The date before a clock time, or around it as in `ctime`.
fn date_before(text: &[u8], clock: usize, after: usize, year: i16) -> Option<(i16, i8, i8)> {
    let before = std::str::from_utf8(&text[..clock.checked_sub(1)?]).ok()?;
    let tail = |length: usize| before.len().checked_sub(length).and_then(|at| before.get(at..));
    // 2026-11-20 or 2026/11/20.
    if let Some(date) = tail(10)
        && let [year, month, day] = date.split(['-', '/']).collect::<Vec<_>>()[..]
        && year.len() == 4
    {
        return Some((year.parse().ok()?, month.parse().ok()?, day.parse().ok()?));
    }
    // E1120.
    if let Some(date) = tail(5)
        && date.starts_with(['I', 'W', 'E', 'F'])
        && date[1..].bytes().all(|byte| byte.is_ascii_digit())
    {
        return Some((year, date[1..3].parse().ok()?, date[3..5].parse().ok()?));
    }
    // Nov 20, optionally with the year after the clock time.
    let mut words = before.rsplit(' ').filter(|word| !word.is_empty());
    let day = words.next()?.parse().ok()?;
    let word = words.next()?.trim_start_matches('[');
    let month = MONTHS.iter().position(|month| *month == word)?;
    let rest = text.get(after + 1..after + 5).and_then(|digits| std::str::from_utf8(digits).ok());
    let year = rest.and_then(|digits| digits.parse().ok()).unwrap_or(year);
    Some((year, i8::try_from(month + 1).ok()?, day))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(line: &str) -> String {
        moment(line, 2026).map_or_else(String::new, |moment| moment.to_string())
    }

    #[test]
    fn all_time_formats_are_parsed() {
        for (line, wanted) in [
            ("2026-11-20T14:03:12Z step=240", "2026-11-20T14:03:12Z"),
            ("2026-11-20T14:03:12.345678901+01:00 stderr F x", "2026-11-20T13:03:12.345678Z"),
            ("[2026-11-20 14:03:12] gpu-01:77:99 [0] misc/x.cc:1 NCCL WARN y", "2026-11-20T14:03:12"),
            ("2026-11-20 14:03:12,5 INFO x", "2026-11-20T14:03:12.5"),
            ("[rank0]:[E1120 14:03:12.123456789 ProcessGroupNCCL.cpp:616] x", "2026-11-20T14:03:12.123456"),
            ("Nov 20 14:03:12 gpu-01 kernel: NVRM: Xid", "2026-11-20T14:03:12"),
            ("[Fri Nov  6 14:03:12 2025] NVRM: Xid", "2025-11-06T14:03:12"),
            ("2026/11/20 14:03:12 x", "2026-11-20T14:03:12"),
        ] {
            assert_eq!(text(line), wanted, "{line}");
        }
        for line in ["", "[12345.678901] NVRM: Xid", "14:03:12 x", "2026-13-40 14:03:12", "took 00:01:02", "::::::::"] {
            assert_eq!(text(line), "", "{line}");
        }
    }

    #[test]
    fn distant_moments_are_ordered() {
        let at = |line: &str| moment(line, 2026).unwrap();
        let (first, second) = (at("2026-11-20 14:03:12.2"), at("2026-11-20 14:03:13"));
        assert!(first < second);
        assert_eq!((second.since(first), first.since(second)), (800_000, 0));
    }

    proptest! {
        #[test]
        fn no_line_panics(line in "\\PC*", digits in "[0-9:,. TZ+-]{0,40}", year in -9999..9999_i16) {
            let _ = moment(&line, year).map(|moment| moment.to_string());
            let _ = moment(&digits, year);
        }
    }
}
