//! Heartbeat timing and silence detection. Pure; used on both sides of a control connection.

use std::time::{Duration, Instant};

pub(super) struct Pulse {
    interval: Duration,
    timeout: Duration,
    last_tick: Instant,
    next_beat: Instant,
}

pub(super) struct Beat {
    /// Send a heartbeat now.
    pub send: bool,
    /// This process did not run for a while (stopped, suspended, starved), so messages from peers
    /// may be unread.
    pub was_asleep: bool,
}

impl Pulse {
    /// Beats once a second, or five times per timeout if that is more often.
    pub fn new(timeout: Duration, now: Instant) -> Pulse {
        let interval = (timeout / 5).clamp(Duration::from_millis(10), Duration::from_secs(1));
        Pulse { interval, timeout, last_tick: now, next_beat: now + interval }
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// How often to call [`Self::tick`].
    pub fn tick_interval(&self) -> Duration {
        self.interval / 2
    }

    pub fn tick(&mut self, now: Instant) -> Beat {
        let was_asleep = now.saturating_duration_since(self.last_tick) > self.timeout / 2;
        self.last_tick = now;
        let send = now >= self.next_beat;
        if send {
            self.next_beat = now + self.interval;
        }
        Beat { send, was_asleep }
    }

    /// Failure text for a silent peer; the same on every rank.
    pub fn silence(&self) -> String {
        format!("no sign of life for {:.1} s", self.timeout.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beats_are_regular_and_suspension_is_detected() {
        let start = Instant::now();
        let mut pulse = Pulse::new(Duration::from_secs(10), start);
        let at = |ms| start + Duration::from_millis(ms);
        assert!(!pulse.tick(at(500)).send);
        assert!(pulse.tick(at(1000)).send);
        assert!(!pulse.tick(at(1500)).send);
        let beat = pulse.tick(at(9000));
        assert!(beat.send && beat.was_asleep);
        assert!(!pulse.tick(at(9500)).was_asleep);
    }
}
