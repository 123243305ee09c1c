//! Times at which an all-reduce was started, began running and completed.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// Times of one completed all-reduce on this rank, and the bytes it moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// The caller queued it.
    pub started: Instant,
    /// Its lane began to run it, after earlier operations in that lane. It may still wait for other
    /// ranks.
    pub began: Instant,
    /// The bucket was final.
    pub ended: Instant,
    /// Size of its buckets, at 4 bytes per element, or of their packed form.
    pub bytes: u64,
    /// Bytes that this rank sent to other hosts for it, including headers; 0 within a host.
    pub sent: u64,
    pub lane: u32,
}

/// A lane's record of a bucket's last operation. Handing back the bucket publishes it.
#[derive(Default)]
pub(super) struct Record {
    /// Nanoseconds since the queue's epoch.
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
