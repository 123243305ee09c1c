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
type Deadline = Arc<AtomicU64>;

/// The writing side, held by the election.
pub(crate) struct Leader {
    changes: Sender<bool>,
    deadline: Deadline,
}

impl Leader {
    /// Extends the lead to `end`.
    pub fn extend_to(&self, end: Duration) {
        self.deadline.store(end.as_millis() as u64, Ordering::Release);
        self.notify(true);
    }

    /// Makes this process lead forever, for use without an election.
    pub fn lead_forever(&self) {
        self.deadline.store(u64::MAX, Ordering::Release);
        self.notify(true);
    }

    /// Ends the lead.
    pub fn stop(&self) {
        self.deadline.store(0, Ordering::Release);
        self.notify(false);
    }

    fn notify(&self, is_leader: bool) {
        self.changes.send_if_modified(|before| std::mem::replace(before, is_leader) != is_leader);
    }
}

/// The reading side.
#[derive(Clone)]
pub(crate) struct Leadership {
    changes: Receiver<bool>,
    deadline: Deadline,
    clock: Clock,
}

impl Leadership {
    /// Whether this process may act as leader now. It reads the clock, so that a process that was
    /// suspended for longer than its lead gets `false` before its election task runs again.
    pub fn is_held(&self) -> bool {
        (self.clock)().as_millis() < u128::from(self.deadline.load(Ordering::Acquire))
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
pub(crate) fn channel(clock: Clock) -> (Leader, Leadership) {
    let (sender, receiver) = watch::channel(false);
    let deadline = Deadline::default();
    (Leader { changes: sender, deadline: Arc::clone(&deadline) }, Leadership { changes: receiver, deadline, clock })
}
