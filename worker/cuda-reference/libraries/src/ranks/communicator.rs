//! One rank of a communicator.

use super::log;
use super::socket::{Call, Hello, Kind, connect, receive, send};
use super::{IN_PROGRESS, INVALID_USAGE, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR, Status};
use crate::fault::Faults;
use crate::finding::{self, explain};
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) struct Communicator {
    pub(crate) rank: u32,
    /// Number of its GPU, from 1.
    pub(crate) device: usize,
    faults: Faults,
    seed: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    stream: Option<Arc<UnixStream>>,
    is_ready: bool,
    /// Makes no more calls. Done once this holds for all ranks.
    is_finalized: bool,
    is_done: bool,
    error: Option<Status>,
    /// Device work continues without a result.
    is_aborted: bool,
    /// Calls so far, and those whose data was sent.
    called: u64,
    sent: u64,
    sums: VecDeque<Vec<u8>>,
}

/// Signals a state change of any communicator.
static CHANGE: (Mutex<()>, Condvar) = (Mutex::new(()), Condvar::new());

/// Waits for a state change, for a short time at most.
pub(crate) fn await_change() {
    let guard = CHANGE.0.lock().unwrap_or_else(PoisonError::into_inner);
    drop(CHANGE.1.wait_timeout(guard, Duration::from_millis(10)));
}

fn key(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

impl Communicator {
    /// Starts to connect. `device`: its number in this process, and its machine-wide number.
    pub(crate) fn start(
        name: Vec<u8>,
        (rank, world): (u32, u32),
        (device, ordinal): (usize, usize),
        (faults, seed): (Faults, u64),
    ) -> Result<Arc<Communicator>, Status> {
        if faults.nccl_init == Some(u64::from(rank)) {
            explain("ncclCommInitRankConfig", "injected fault");
            return Err(SYSTEM_ERROR);
        }
        let state = Mutex::default();
        let new = Arc::new(Communicator { rank, device, faults, seed, state });
        if faults.nccl_absent != Some(u64::from(rank)) {
            // Ranks with the same ID are on one host for NCCL.
            let host = std::env::var_os("NCCL_HOSTID");
            let device = key((&host, ordinal));
            let hello = Hello { rank: rank.into(), world: world.into(), device, host: key(host) };
            let own = Arc::clone(&new);
            std::thread::spawn(move || own.follow(&name, hello));
        }
        Ok(new)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        CHANGE.1.notify_all();
    }

    /// Reports an asynchronous failure.
    fn fail(&self, status: Status, text: &str) {
        if !self.state().is_aborted {
            explain("a communicator", text);
        }
        self.change(|state| state.error = state.error.or(Some(status)));
    }

    fn follow(&self, name: &[u8], hello: Hello) {
        let Ok(stream) = connect(name).map(Arc::new) else {
            return self.fail(SYSTEM_ERROR, "nothing listens at the address in the id");
        };
        self.change(|state| state.stream = Some(Arc::clone(&stream)));
        if send(&stream, Kind::Hello, &[bytemuck::bytes_of(&hello)]).is_err() {
            return self.fail(REMOTE_ERROR, "the root is gone");
        }
        loop {
            let Ok((kind, body)) = receive(&stream) else { return self.fail(REMOTE_ERROR, "the root is gone") };
            let text = || String::from_utf8_lossy(&body);
            match kind {
                Kind::Ready => {
                    log::channels(self.device, hello, body.first() == Some(&1));
                    self.change(|state| state.is_ready = true);
                }
                Kind::Sum => self.change(|state| state.sums.push_back(body)),
                Kind::Lost => return self.fail(REMOTE_ERROR, &format!("rank {} is gone", text())),
                Kind::Done => return self.change(|state| state.is_done = true),
                Kind::Refused => return self.fail(INVALID_USAGE, &text()),
                _ => finding::report(&text(), self.seed),
            }
        }
    }

    /// `ncclCommGetAsyncError`.
    pub(crate) fn status(&self) -> Status {
        let state = self.state();
        let is_under_way = !state.is_ready || (state.is_finalized && !state.is_done);
        state.error.unwrap_or(if is_under_way { IN_PROGRESS } else { SUCCESS })
    }

    /// Waits until no operation is in progress, or it has failed.
    pub(crate) fn settle(&self) -> Status {
        loop {
            match self.status() {
                IN_PROGRESS => await_change(),
                status => return status,
            }
        }
    }

    /// The number of a new call, from 1.
    pub(crate) fn next_call(&self) -> u64 {
        let mut state = self.state();
        state.called += 1;
        state.called
    }

    /// Sends the data of a call.
    pub(crate) fn send(&self, call: Call, numbers: &[u8]) {
        let mut state = self.state();
        state.sent += 1;
        let here = Some((u64::from(self.rank), state.sent));
        let stream = state.stream.clone().filter(|_| !state.is_aborted && here != self.faults.nccl_silent);
        drop(state);
        if here == self.faults.nccl_error {
            return self.fail(SYSTEM_ERROR, "injected fault");
        }
        if let Some(stream) = stream
            && send(&stream, Kind::Call, &[bytemuck::bytes_of(&call), numbers]).is_err()
        {
            self.fail(REMOTE_ERROR, "the root is gone");
        }
    }

    /// Whether the next sum has arrived, or will never be needed.
    pub(crate) fn has_sum(&self) -> bool {
        let state = self.state();
        state.is_aborted || !state.sums.is_empty()
    }

    /// The next sum; `None` if the communicator was aborted.
    pub(crate) fn sum(&self) -> Option<Vec<u8>> {
        let mut state = self.state();
        if state.is_aborted { None } else { state.sums.pop_front() }
    }

    pub(crate) fn is_finalized(&self) -> bool {
        self.state().is_finalized
    }

    /// Makes no more calls.
    pub(crate) fn finalize(&self) {
        self.change(|state| {
            if let Some(stream) = state.stream.as_ref().filter(|_| !state.is_finalized) {
                // If the root is gone, there is nothing to tell it.
                let _ = send(stream, Kind::Bye, &[]);
            }
            state.is_finalized = true;
        });
    }

    /// Lets device work continue without a result.
    pub(crate) fn abort(&self) {
        self.change(|state| {
            if let Some(stream) = &state.stream {
                let _ = stream.shutdown(Shutdown::Both);
            }
            state.is_aborted = true;
        });
    }
}
