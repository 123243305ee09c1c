//! Shared leadership state, for tasks that act only as leader.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch::{self, Receiver, Sender};

/// A monotonic clock: time since an arbitrary start.
pub(crate) type Clock = fn() -> Duration;

/// Time since boot, including suspension of the machine or the process.
pub(crate) fn boot_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// End of the lead, in milliseconds of the clock; `u64::MAX` if unbounded.
type Until = Arc<AtomicU64>;

/// The writing side, held by the election.
pub(crate) struct Leader {
    changes: Sender<bool>,
    until: Until,
}

impl Leader {
    /// Extends the lead to `end`.
    pub fn until(&self, end: Duration) {
        self.until.store(end.as_millis() as u64, Ordering::Release);
        self.tell(true);
    }

    /// Makes this process lead forever, for use without an election.
    pub fn forever(&self) {
        self.until.store(u64::MAX, Ordering::Release);
        self.tell(true);
    }

    /// Ends the lead.
    pub fn lost(&self) {
        self.until.store(0, Ordering::Release);
        self.tell(false);
    }

    fn tell(&self, leads: bool) {
        self.changes.send_if_modified(|before| std::mem::replace(before, leads) != leads);
    }
}

/// The reading side.
#[derive(Clone)]
pub(crate) struct Leading {
    changes: Receiver<bool>,
    until: Until,
    clock: Clock,
}

impl Leading {
    /// Whether this process may act as leader now. It reads the clock, so that a process that was
    /// suspended for longer than its lead gets `false` before its election task runs again.
    pub fn now(&self) -> bool {
        (self.clock)().as_millis() < u128::from(self.until.load(Ordering::Acquire))
    }

    /// Waits until this process starts or stops leading.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            // The writing side is gone, so nothing will change.
            std::future::pending::<()>().await;
        }
    }
}

/// Creates both sides, initially without a lead.
pub(crate) fn channel(clock: Clock) -> (Leader, Leading) {
    let (sender, receiver) = watch::channel(false);
    let until = Until::default();
    (Leader { changes: sender, until: Arc::clone(&until) }, Leading { changes: receiver, until, clock })
}
