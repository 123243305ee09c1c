//! When an all-reduce was asked for, started and completed.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// The times of one completed all-reduce on this rank, and what it moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// The caller started it.
    pub started: Instant,
    /// Its lane took it up, after earlier ones in that lane. From here on it may also wait for other ranks.
    pub began: Instant,
    /// The bucket was final.
    pub ended: Instant,
    /// Size of its buckets: 4 bytes a number.
    pub bytes: u64,
    /// Bytes that this rank sent to other hosts for it, including headers; 0 within a host.
    pub sent: u64,
    /// The lane that it ran in.
    pub lane: u32,
}

/// What the lane records about the last operation of a bucket. The hand-over of the bucket publishes it.
#[derive(Default)]
pub(super) struct Record {
    /// Nanoseconds since the epoch of the queue.
    began: AtomicU64,
    ended: AtomicU64,
    bytes: AtomicU64,
    sent: AtomicU64,
}

impl Record {
    pub fn note(&self, epoch: Instant, (began, ended): (Instant, Instant), bytes: u64, sent: u64) {
        let nanos = |time: Instant| time.saturating_duration_since(epoch).as_nanos() as u64;
        self.began.store(nanos(began), Ordering::Relaxed);
        self.ended.store(nanos(ended), Ordering::Relaxed);
        self.bytes.store(bytes, Ordering::Relaxed);
        self.sent.store(sent, Ordering::Relaxed);
    }

    pub fn timing(&self, epoch: Instant, started: Instant, lane: u32) -> Timing {
        let time = |nanos: &AtomicU64| epoch + Duration::from_nanos(nanos.load(Ordering::Relaxed));
        let (bytes, sent) = (self.bytes.load(Ordering::Relaxed), self.sent.load(Ordering::Relaxed));
        Timing { started, began: time(&self.began), ended: time(&self.ended), bytes, sent, lane }
    }
}
