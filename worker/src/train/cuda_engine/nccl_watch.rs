//! The NCCL watch thread: aborts a rank's communicators when NCCL or the group fails. Otherwise
//! device operations that wait for a lost rank would never end, nor would the threads that wait for
//! them.

use super::health::HealthHandle;
use crate::comm::{Aborter, Cause, CommError};
use crate::train::TrainError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use switchyard_cuda::Error;
use switchyard_cuda::nccl::{Blame, Communicator};

/// Poll interval.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long to wait for the peer's own failure report, which travels on other connections than the
/// end of its communicators.
const PEER_REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// The thread; it ends when this is dropped.
pub(super) struct CommunicatorWatch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    communicators: Vec<Arc<Communicator>>,
    rank: u32,
    aborter: Aborter,
    health: HealthHandle,
    stop: AtomicBool,
    /// The reduced values are invalid.
    is_aborted: AtomicBool,
}

impl Shared {
    fn watch(&self) {
        while !self.stop.load(Ordering::Acquire) {
            if self.aborter.failure().is_some() {
                return self.abort();
            }
            if let Some(error) = self.communicators.iter().find_map(|communicator| communicator.is_ready().err()) {
                return self.fail(&error);
            }
            std::thread::park_timeout(POLL_INTERVAL);
        }
    }

    /// Reports to the group first: the other ranks' NCCL fails when these communicators end, and
    /// their errors would hide this one.
    fn fail(&self, error: &Error) {
        let text = format!("a sum of gradients failed: {error}{}", self.health.errors());
        suspect(&self.aborter, Some(error), Cause::failed(self.rank, text));
        self.abort();
    }

    fn abort(&self) {
        // Set before the device continues, so that threads waiting for it see the abort.
        self.is_aborted.store(true, Ordering::Release);
        self.communicators.iter().for_each(|communicator| communicator.abort());
    }
}

/// Reports why communicators failed here, unless the group fails by itself meanwhile. Waits longer
/// for that if NCCL blames another rank. The group has failed when this returns.
pub(super) fn suspect(aborter: &Aborter, error: Option<&Error>, cause: Cause) {
    if error.and_then(Blame::of) == Some(Blame::Another) {
        aborter.await_failure(PEER_REPORT_TIMEOUT);
    }
    aborter.suspect(cause);
}

impl CommunicatorWatch {
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        communicators: Vec<Arc<Communicator>>,
        rank: u32,
        aborter: Aborter,
        health: HealthHandle,
    ) -> Result<CommunicatorWatch, TrainError> {
        let [stop, is_aborted] = [false, false].map(AtomicBool::new);
        let shared = Arc::new(Shared { communicators, rank, aborter, health, stop, is_aborted });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("nccl-watch".into()).spawn(move || own.watch());
        let thread = thread.map_err(|error| TrainError::Nccl(format!("cannot start a thread: {error}")))?;
        Ok(CommunicatorWatch { shared, thread: Some(thread) })
    }

    /// Checks the outcome of a call. If NCCL failed or communicators were aborted meanwhile, the
    /// error is the root cause, regardless of the outcome.
    ///
    /// # Errors
    /// The call failed, or the communicators were aborted.
    pub fn check<T>(&mut self, outcome: Result<T, Error>) -> Result<T, TrainError> {
        if !self.shared.is_aborted.load(Ordering::Acquire) {
            match outcome {
                Err(error) if Blame::of(&error).is_some() => self.shared.fail(&error),
                other => return Ok(other?),
            }
        }
        // The thread ends only after the root cause is known.
        self.join();
        let cause = self.shared.aborter.failure();
        Err(cause.map_or_else(|| TrainError::Nccl("aborted".to_owned()), |cause| CommError::Failed(cause).into()))
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // That thread has already reported a panic.
            let _ = thread.join();
        }
    }
}

impl Drop for CommunicatorWatch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        self.join();
        // After a failure, ranks do not wait for each other.
        if self.shared.aborter.failure().is_some() {
            self.shared.abort();
        }
    }
}
