//! The API server's clock. Deadlines and graces start at times recorded by the API server or a
//! kubelet, and the clock of this machine may be minutes off.

use http::{HeaderMap, header::DATE};
use jiff::{SignedDuration, Timestamp, fmt::rfc2822};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// `Date` has a resolution of whole seconds.
const RESOLUTION: SignedDuration = SignedDuration::from_secs(1);
/// Smaller skews are ignored, because following each of several API servers would make time run
/// unevenly.
const TOLERATED: SignedDuration = SignedDuration::from_secs(2);
/// Responses that took longer bound the time too loosely.
const SLOW: Duration = Duration::from_secs(5);

/// The API server's time: set from the `Date` of its responses and advanced by the monotonic clock.
/// Before the first response it is the time of this machine.
#[derive(Debug)]
pub struct ServerClock(Mutex<Reading>);

/// The server's time at an instant.
#[derive(Debug, Clone, Copy)]
struct Reading {
    at: Instant,
    time: Timestamp,
}

impl Default for ServerClock {
    fn default() -> ServerClock {
        ServerClock(Mutex::new(Reading { at: Instant::now(), time: Timestamp::now() }))
    }
}

impl ServerClock {
    /// The API server's current time.
    pub fn now(&self) -> Timestamp {
        self.read().time_at(Instant::now())
    }

    /// By how much the clock of this machine is ahead of the API server's.
    pub fn skew(&self) -> SignedDuration {
        Timestamp::now().duration_since(self.now())
    }

    /// Updates the clock from the headers of a response.
    pub(crate) fn observe(&self, sent: Instant, headers: &HeaderMap) {
        let date = headers.get(DATE).and_then(|date| date.to_str().ok());
        let Some(date) = date.and_then(|date| rfc2822::parse(date).ok()) else { return };
        let mut reading = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *reading = reading.after(sent, Instant::now(), date.timestamp());
    }

    fn read(&self) -> Reading {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reading {
    fn time_at(self, now: Instant) -> Timestamp {
        let passed = SignedDuration::try_from(now.saturating_duration_since(self.at)).unwrap_or(SignedDuration::MAX);
        self.time.saturating_add(passed).unwrap_or(Timestamp::MAX)
    }

    /// The reading after a response with this `Date`. It stays the same if it is within the bounds
    /// given by the response.
    fn after(self, sent: Instant, received: Instant, date: Timestamp) -> Reading {
        let took = received.saturating_duration_since(sent);
        if took > SLOW {
            return self;
        }
        // The server wrote the date at some time between request and response.
        let latest = RESOLUTION + SignedDuration::try_from(took).unwrap_or(SignedDuration::ZERO);
        let ahead = self.time_at(received).duration_since(date);
        if ahead >= -TOLERATED && ahead <= latest + TOLERATED {
            return self;
        }
        Reading { at: received, time: date.saturating_add(latest / 2).unwrap_or(date) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_follows_a_server_that_is_minutes_off_and_no_difference_of_a_second() {
        let (start, zero) = (Instant::now(), Timestamp::from_second(1_000_000).unwrap());
        let reading = Reading { at: start, time: zero };
        let after = |millis: u64| start + Duration::from_millis(millis);
        // Seconds by which the server is ahead, duration of the request in milliseconds,
        // milliseconds by which the time is advanced.
        for (ahead, took, set) in [
            (0, 10, 0),
            (1, 10, 0),
            (2, 10, 0),
            (-3, 10, 0),
            (-4, 10, -3505),
            (3, 10, 3495),
            (600, 10, 600_495),
            (-3600, 2000, -3_600_500),
            (-2, 4000, 0),
            (-5, 4000, -6500),
            (3600, 6000, 0),
        ] {
            let received = after(took);
            let date = zero + SignedDuration::from_secs(ahead);
            let now = reading.after(start, received, date).time_at(received);
            let expected = zero + SignedDuration::from_millis(took as i64 + set);
            assert_eq!(now, expected, "{ahead} s ahead, after {took} ms");
        }
    }

    #[test]
    fn time_goes_on_between_responses_and_the_header_of_a_go_server_is_read() {
        let clock = ServerClock::default();
        assert!(clock.skew().abs() < SignedDuration::from_secs(1));
        let mut headers = HeaderMap::new();
        headers.insert(DATE, "Fri, 27 Nov 2020 19:04:51 GMT".parse().unwrap());
        clock.observe(Instant::now(), &headers);
        let date: Timestamp = "2020-11-27T19:04:51Z".parse().unwrap();
        let since = clock.now().duration_since(date);
        assert!(since.is_positive() && since < SignedDuration::from_secs(60), "{since}");
        assert!(clock.skew() > SignedDuration::from_hours(24), "{}", clock.skew());
        headers.insert(DATE, "yesterday".parse().unwrap());
        clock.observe(Instant::now(), &headers);
        assert!(clock.now().duration_since(date) >= since);
    }
}
