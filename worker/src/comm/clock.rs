//! Offset of this rank's wall clock from rank 0's, measured by round trips over the control
//! connection.
//!
//! A request leaves at `t0`, rank 0 stamps its response `t1`, and the response arrives at `t3`. The
//! offset is `t1 - (t0 + t3) / 2`: the formula of the Network Time Protocol (RFC 5905, section 8)
//! with zero processing time at rank 0. Its error is at most half the round trip, so the fastest of
//! several trips is used.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Number of round trips.
pub(super) const TRIPS: u32 = 16;

/// This host's wall clock, in nanoseconds since 1970.
pub(super) fn wall_nanos() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as i64)
}

/// One point in time on both clocks. Round trips use the monotonic one, which cannot be set.
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

/// The requesting side. Requests are numbered from 1.
#[derive(Default)]
pub(super) struct ClockSync {
    outstanding: Option<(u32, Moment)>,
    /// Round trip and offset in nanoseconds.
    best: Option<(Duration, i64)>,
}

/// What to do after a response.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Request,
    /// Microseconds to add to this clock to get rank 0's.
    Done(i64),
}

impl ClockSync {
    /// Records that a request is sent now; returns its number.
    pub fn request(&mut self, now: Moment) -> u32 {
        let number = self.outstanding.map_or(0, |(number, _)| number) + 1;
        self.outstanding = Some((number, now));
        number
    }

    /// Handles rank 0's response to request `number`. `None` if that request is not outstanding.
    pub fn response(&mut self, number: u32, theirs: i64, now: Instant) -> Option<Next> {
        let (current, sent) = self.outstanding.filter(|(current, _)| *current == number)?;
        let trip = now.saturating_duration_since(sent.instant);
        let middle = sent.wall.saturating_add(trip.as_nanos() as i64 / 2);
        let offset = theirs.saturating_sub(middle);
        let best = self.best.filter(|(best, _)| *best <= trip).unwrap_or((trip, offset));
        self.best = Some(best);
        Some(if current < TRIPS { Next::Request } else { Next::Done((best.1 as f64 / 1e3).round() as i64) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Measures the offset in microseconds of a clock that is 1,234,567 us ahead, with these delays
    /// there and back in microseconds.
    fn measure(delays: impl Fn(u32) -> (u64, u64)) -> i64 {
        let (mut sync, mut now) =
            (ClockSync::default(), Moment { instant: Instant::now(), wall: 1_700_000_000_000_000 });
        loop {
            let number = sync.request(now);
            let (there, back) = delays(number);
            let theirs = now.wall + 1_234_567_000 + there as i64 * 1000;
            now.instant += Duration::from_micros(there + back);
            now.wall += (there + back) as i64 * 1000;
            assert_eq!(sync.response(number + 1, 0, now.instant), None);
            match sync.response(number, theirs, now.instant).unwrap() {
                Next::Request => {}
                Next::Done(offset) => return offset,
            }
        }
    }

    #[test]
    fn symmetric_trips_are_exact_and_the_fastest_asymmetric_trip_wins() {
        assert_eq!(measure(|_| (300, 300)), 1_234_567);
        // All trips but one are delayed in one direction only.
        assert_eq!(measure(|n| if n == 5 { (50, 50) } else { (50, 5000) }), 1_234_567);
        assert_eq!(measure(|n| if n == TRIPS { (50, 60) } else { (9000, 50) }), 1_234_562);
    }
}
