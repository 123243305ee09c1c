//! Whether this process leads, for those who act on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch::{self, Receiver, Sender};

/// A clock that nobody sets: time since some start.
pub(crate) type Clock = fn() -> Duration;

/// Time since the machine started, also while it sleeps or the process is stopped.
pub(crate) fn boot_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Until when this process leads, in milliseconds of the clock; `u64::MAX`: forever.
type Until = Arc<AtomicU64>;

/// The side that knows.
pub(crate) struct Leader {
    changes: Sender<bool>,
    until: Until,
}

impl Leader {
    /// This process leads until then, at least.
    pub fn until(&self, end: Duration) {
        self.until.store(end.as_millis() as u64, Ordering::Release);
        self.tell(true);
    }

    /// There is no election: this process always leads.
    pub fn forever(&self) {
        self.until.store(u64::MAX, Ordering::Release);
        self.tell(true);
    }

    /// This process does not lead.
    pub fn lost(&self) {
        self.until.store(0, Ordering::Release);
        self.tell(false);
    }

    fn tell(&self, leads: bool) {
        self.changes.send_if_modified(|before| std::mem::replace(before, leads) != leads);
    }
}

/// The side that asks.
#[derive(Clone)]
pub(crate) struct Leading {
    changes: Receiver<bool>,
    until: Until,
    clock: Clock,
}

impl Leading {
    /// Whether this process may act as leader now. Looks at the clock: a process that was stopped longer than its Lease lasts
    /// is answered `false` before its election task has noticed anything.
    pub fn now(&self) -> bool {
        (self.clock)().as_millis() < u128::from(self.until.load(Ordering::Acquire))
    }

    /// Waits until this process begins or ceases to lead.
    pub async fn changed(&mut self) {
        if self.changes.changed().await.is_err() {
            // Nobody is left who could change it.
            std::future::pending::<()>().await;
        }
    }
}

/// Both sides; nobody leads yet.
pub(crate) fn channel(clock: Clock) -> (Leader, Leading) {
    let (sender, receiver) = watch::channel(false);
    let until = Until::default();
    (Leader { changes: sender, until: Arc::clone(&until) }, Leading { changes: receiver, until, clock })
}
