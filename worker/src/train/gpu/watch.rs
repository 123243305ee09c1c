//! The thread that ends the communicators of a rank when NCCL or the group fails: work of the device that waits for a rank that is gone
//! would never end, and whoever waits for that work neither.

use super::health::Sight;
use crate::comm::{Aborter, Cause, CommError};
use crate::train::TrainError;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use switchyard_cuda::Error;
use switchyard_cuda::nccl::{Blame, Communicator};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(20);
/// How long a rank whose peer is gone waits for the reason, which travels by other connections than the end of that peer's communicators.
const PEER_WORDS: Duration = Duration::from_secs(5);

/// The thread, which ends when this is dropped.
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    communicators: Vec<Arc<Communicator>>,
    rank: u32,
    aborter: Aborter,
    sight: Sight,
    stop: AtomicBool,
    /// The sums are no sums.
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
            std::thread::park_timeout(PAUSE);
        }
    }

    /// Tells the group first: the other ranks' NCCL fails when these communicators end, and their errors would hide this one.
    fn fail(&self, error: &Error) {
        let text = format!("a sum of gradients failed: {error}{}", self.sight.errors());
        suspect(&self.aborter, Some(error), Cause::failed(self.rank, text));
        self.abort();
    }

    fn abort(&self) {
        // Said before the device goes on: whoever waits for it then knows.
        self.is_aborted.store(true, Ordering::Release);
        self.communicators.iter().for_each(|communicator| communicator.abort());
    }
}

/// Says why communicators end here, unless the group fails by itself meanwhile, for which it waits longer if NCCL blames another rank.
/// The group has failed when it returns.
pub(super) fn suspect(aborter: &Aborter, error: Option<&Error>, cause: Cause) {
    if error.and_then(Blame::of) == Some(Blame::Another) {
        aborter.await_failure(PEER_WORDS);
    }
    aborter.suspect(cause);
}

impl Watch {
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        communicators: Vec<Arc<Communicator>>,
        rank: u32,
        aborter: Aborter,
        sight: Sight,
    ) -> Result<Watch, TrainError> {
        let [stop, is_aborted] = [false, false].map(AtomicBool::new);
        let shared = Arc::new(Shared { communicators, rank, aborter, sight, stop, is_aborted });
        let own = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("nccl-watch".into()).spawn(move || own.watch());
        let thread = thread.map_err(|error| TrainError::Nccl(format!("cannot start a thread: {error}")))?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    /// The outcome of a call. If NCCL failed or communicators were aborted meanwhile, it is the root cause, whatever the call says.
    ///
    /// # Errors
    /// The call failed, or the communicators were aborted.
    pub fn judge<T>(&mut self, outcome: Result<T, Error>) -> Result<T, TrainError> {
        if !self.shared.is_aborted.load(Ordering::Acquire) {
            match outcome {
                Err(error) if Blame::of(&error).is_some() => self.shared.fail(&error),
                other => return Ok(other?),
            }
        }
        // It knows the root cause before it ends.
        self.join();
        let cause = self.shared.aborter.failure();
        Err(cause.map_or_else(|| TrainError::Nccl("aborted".to_owned()), |cause| CommError::Failed(cause).into()))
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic in that thread was reported there.
            let _ = thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        self.join();
        // Ranks of a group that has failed do not wait for each other.
        if self.shared.aborter.failure().is_some() {
            self.shared.abort();
        }
    }
}
