//! How far this rank's wall clock is from rank 0's, measured by round trips over the control connection.
//!
//! A question leaves at `t0`, rank 0 stamps its answer `t1`, and the answer arrives at `t3`. The offset is
//! `t1 - (t0 + t3) / 2`: the formula of the Network Time Protocol (RFC 5905, section 8) for an answer that leaves as soon
//! as the question arrives. Its error is at most half the round trip, so the fastest of several trips is used.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Number of round trips.
pub(super) const TRIPS: u32 = 16;

/// Nanoseconds of this host's wall clock since 1970.
pub(super) fn wall_nanos() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64)
}

/// One moment by both clocks: round trips are measured with the one that nobody sets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    pub instant: Instant,
    pub wall: i64,
}

impl Moment {
    pub fn now() -> Moment {
        Moment { instant: Instant::now(), wall: wall_nanos() }
    }
}

/// The asking side. Questions are numbered from 1.
#[derive(Default)]
pub(super) struct ClockSync {
    asked: Option<(u32, Moment)>,
    /// Round trip and offset in nanoseconds.
    best: Option<(Duration, i64)>,
}

/// What to do after an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Ask,
    /// Microseconds to add to this clock to get rank 0's.
    Done(i64),
}

impl ClockSync {
    /// A question leaves now; returns its number.
    pub fn ask(&mut self, now: Moment) -> u32 {
        let number = self.asked.map_or(0, |(number, _)| number) + 1;
        self.asked = Some((number, now));
        number
    }

    /// Rank 0's clock, in answer to question `number`. `None`: that question is not open.
    pub fn answered(&mut self, number: u32, theirs: i64, now: Instant) -> Option<Next> {
        let (asked, sent) = self.asked.filter(|(asked, _)| *asked == number)?;
        let trip = now.saturating_duration_since(sent.instant);
        let middle = sent.wall.saturating_add(trip.as_nanos() as i64 / 2);
        let offset = theirs.saturating_sub(middle);
        let best = self.best.filter(|(best, _)| *best <= trip).unwrap_or((trip, offset));
        self.best = Some(best);
        Some(if asked < TRIPS { Next::Ask } else { Next::Done((best.1 as f64 / 1e3).round() as i64) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Round trips with these delays there and back in microseconds, to a clock that is 1,234,567 us ahead.
    fn measure(delays: impl Fn(u32) -> (u64, u64)) -> i64 {
        let (mut sync, mut now) =
            (ClockSync::default(), Moment { instant: Instant::now(), wall: 1_700_000_000_000_000 });
        loop {
            let number = sync.ask(now);
            let (there, back) = delays(number);
            let theirs = now.wall + 1_234_567_000 + there as i64 * 1000;
            now.instant += Duration::from_micros(there + back);
            now.wall += (there + back) as i64 * 1000;
            assert_eq!(sync.answered(number + 1, 0, now.instant), None);
            match sync.answered(number, theirs, now.instant).unwrap() {
                Next::Ask => {}
                Next::Done(offset) => return offset,
            }
        }
    }

    #[test]
    fn even_trips_give_the_offset_and_the_fastest_of_uneven_ones_counts() {
        assert_eq!(measure(|_| (300, 300)), 1_234_567);
        // All trips but one are delayed in one direction only.
        assert_eq!(measure(|n| if n == 5 { (50, 50) } else { (50, 5000) }), 1_234_567);
        assert_eq!(measure(|n| if n == TRIPS { (50, 60) } else { (9000, 50) }), 1_234_562);
    }
}
