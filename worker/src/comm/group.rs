//! A rank's membership in its group: values that all ranks exchange, and the one root cause when
//! something fails.
//!
//! Small values travel over the control connections to rank 0. Gradients use other paths: see
//! [`super::Reducer`].

use super::{
    ballot::{Ballot, Exchange},
    config::GroupConfig,
    error::{Cause, CommError},
    frame::MAX_GATHER,
    host,
    join::{Peers, join},
    state::{Request, Shared},
};
use crate::recorder::Recorder;
use std::{sync::Arc, thread::JoinHandle, time::Duration};
use switchyard_worker_contract::event::{GpuTrouble, Stuck};
use switchyard_worker_contract::recorder::Operation;

/// Maximum bytes of a value that all ranks compare or receive.
const MAX_VALUE: usize = 4096;
/// Bytes of a broadcast per exchange, which rank 0 holds once for every other rank.
const BROADCAST_CHUNK: usize = 64 << 10;
/// Maximum bytes of a value's name.
const MAX_NAME: usize = 256;

/// A rank's membership in its group.
pub struct Group {
    // Dropped first: it uses the rest.
    control: Control,
    shared: Arc<Shared>,
    peers: Option<Arc<Peers>>,
    clock_offset: i64,
    host: String,
    local_address: String,
    /// Values exchanged so far.
    calls: u32,
}

/// The control thread; it ends in bounded time.
struct Control {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    left: bool,
}

impl Drop for Control {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            if !self.left {
                self.shared.give_up();
            }
            self.shared.request(Request::Stop);
            // That thread has already reported a panic.
            let _ = thread.join();
        }
        self.shared.forget_wakers();
    }
}

/// Ends the group from another thread (signals, panic hook).
#[derive(Clone)]
pub struct Aborter(Arc<Shared>);

impl Aborter {
    /// See [`Group::abort`].
    pub fn abort(&self, cause: Cause) {
        self.0.abort(cause);
    }

    /// Reports why this rank cannot continue, unless the group fails by itself within half a
    /// second: the symptom may be a consequence of another rank's failure. The group has failed
    /// when this returns.
    pub fn suspect(&self, cause: Cause) {
        self.0.suspect(cause);
    }

    /// Waits until the group has failed, at most for `limit`.
    pub fn await_failure(&self, limit: Duration) {
        self.0.await_failure(limit);
    }

    /// See [`Group::failure`].
    pub fn failure(&self) -> Option<Cause> {
        self.0.failure()
    }

    /// The rank that has hung longest while `onHang` lets the job keep waiting. Known only to rank
    /// 0.
    pub fn stuck(&self) -> Option<Stuck> {
        self.0.stuck()
    }

    /// The worst GPU problem of all ranks. Known only to rank 0.
    pub fn gpu_trouble(&self) -> Option<GpuTrouble> {
        self.0.gpu_trouble()
    }
}

impl Group {
    /// Joins the group. Returns when all ranks are present, or an error that names the missing
    /// ranks.
    pub fn join(config: &GroupConfig) -> Result<Group, CommError> {
        config.check()?;
        let shared = Arc::new(Shared::new((config.rank(), config.world()), config.members(), config.connect_timeout)?);
        let mut control = Control { shared: Arc::clone(&shared), thread: None, left: false };
        let (mut peers, mut clock_offset, mut local_address) = (None, 0, config.rendezvous.clone());
        if config.members() > 1 {
            let joined = join(config, &shared, &mut control.thread);
            let (joined, offset) = joined.map_err(|error| shared.setup_failed(error))?;
            (clock_offset, local_address) = (offset, joined.address.to_string());
            peers = Some(Arc::new(joined));
        }
        Ok(Group { control, shared, peers, clock_offset, host: host::name(), local_address, calls: 0 })
    }

    /// See [`GroupConfig::rank`].
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    pub fn world(&self) -> u32 {
        self.shared.world
    }

    /// Local address of the control connection; on rank 0 the rendezvous address.
    pub fn local_address(&self) -> &str {
        &self.local_address
    }

    /// Host name of this process.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Microseconds to add to this host's wall clock to get that of rank 0's host, estimated when
    /// the group formed; 0 on that host itself. The error is at most half of the fastest round
    /// trip, plus clock drift since then.
    pub fn clock_offset(&self) -> i64 {
        self.clock_offset
    }

    /// Time limit for ranks to connect to each other.
    pub fn connect_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.shared.connect_seconds)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The other ranks; `None` for a single one.
    pub(super) fn peers(&self) -> Option<Arc<Peers>> {
        self.members().filter(|_| self.shared.world > 1)
    }

    /// The other members; `None` in a group of one.
    pub(super) fn members(&self) -> Option<Arc<Peers>> {
        self.peers.clone()
    }

    /// Attaches the recorder: it records waits and progress from now on, and heartbeats carry its
    /// state.
    pub(crate) fn record_to(&self, recorder: &Arc<Recorder>) {
        self.shared.record_to(Arc::clone(recorder));
        let shared = Arc::downgrade(&self.shared);
        recorder.add_counter(move || shared.upgrade().map_or(0, |shared| shared.progress_count()));
    }

    /// Returns `Ok` if every rank passes the same bytes (at most 4096) under the same name;
    /// otherwise every rank gets an error that names the ranks and their values. The group stays
    /// usable.
    pub fn agree(&mut self, what: &str, value: &[u8]) -> Result<(), CommError> {
        self.exchange(Exchange::Agree, what, value, MAX_VALUE).map(drop)
    }

    /// Returns every rank's bytes (at most 16 MiB each) in rank order on rank 0, and nothing on the
    /// other ranks.
    pub fn gather(&mut self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.exchange(Exchange::Gather, what, own, MAX_GATHER)
    }

    /// Returns every rank's bytes (at most 4096 each) in rank order, on every rank.
    pub fn all_gather(&mut self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.exchange(Exchange::AllGather, what, own, MAX_VALUE)
    }

    /// Returns rank 0's bytes on every rank; the bytes of the others are ignored.
    pub fn broadcast(&mut self, what: &str, own: &[u8]) -> Result<Vec<u8>, CommError> {
        let mut chunks = own.chunks(BROADCAST_CHUNK).filter(|_| self.shared.rank == 0).collect::<Vec<_>>().into_iter();
        let mut all = Vec::new();
        loop {
            let values =
                self.exchange(Exchange::AllGather, what, chunks.next().unwrap_or_default(), BROADCAST_CHUNK)?;
            let chunk = values.into_iter().next().unwrap_or_default();
            all.extend_from_slice(&chunk);
            if chunk.len() < BROADCAST_CHUNK {
                return Ok(all);
            }
        }
    }

    /// Sums a few numbers over all ranks in rank order, so that all ranks get identical bits.
    pub fn sum<const N: usize>(&mut self, what: &str, own: [f64; N]) -> Result<[f64; N], CommError> {
        let own: Vec<u8> = own.iter().flat_map(|number| number.to_le_bytes()).collect();
        let mut sums = [0.0; N];
        for (rank, bytes) in self.all_gather(what, &own)?.iter().enumerate() {
            if bytes.len() != own.len() {
                let text = format!("{what}: got {} bytes; expected {}", bytes.len(), own.len());
                return Err(CommError::protocol(format!("rank {rank}"), text));
            }
            for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks().0) {
                *sum += f64::from_le_bytes(*bytes);
            }
        }
        Ok(sums)
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), CommError> {
        self.agree("a barrier", &[])
    }

    fn exchange(
        &mut self,
        exchange: Exchange,
        what: &str,
        value: &[u8],
        most: usize,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        if value.len() > most || what.len() > MAX_NAME {
            return Err(CommError::Group {
                got: format!("{} bytes to agree on under a name of {} bytes", value.len(), what.len()),
                expected: format!("at most {most} and {MAX_NAME}"),
            });
        }
        self.shared.check()?;
        self.calls = self.calls.wrapping_add(1);
        if self.shared.world == 1 {
            return Ok(if exchange == Exchange::Agree { Vec::new() } else { vec![value.to_vec()] });
        }
        self.shared.set_activity(&format!("agreement on {what}"));
        let ballot = Ballot { exchange, sequence: self.calls, subject: what.to_owned(), value: value.to_owned() };
        let result = self.shared.record_wait(Operation::Agree, 0, || {
            self.shared.request(Request::Value(ballot));
            self.shared.wait_agreed()
        });
        self.shared.set_activity("");
        result
    }

    /// Ends the group: every rank gets this cause, unless there is an earlier one. Returns when
    /// rank 0 has confirmed, or after half a second. Empty fields of the cause are filled in.
    pub fn abort(&self, cause: Cause) {
        self.shared.abort(cause);
    }

    /// Returns a handle for use from another thread.
    pub fn aborter(&self) -> Aborter {
        Aborter(Arc::clone(&self.shared))
    }

    /// The root cause, once the group has failed.
    pub fn failure(&self) -> Option<Cause> {
        self.shared.failure()
    }

    /// Description of what this rank's communication is doing.
    pub fn activity(&self) -> String {
        self.shared.activity()
    }

    /// Connections that rank 0 refused, with reasons; at most 32.
    pub fn refusals(&self) -> Vec<String> {
        self.shared.refusals()
    }

    /// Stays in the group, as a parameter server, until all ranks have left. Returns an error if
    /// any member fails.
    pub fn stay(mut self) -> Result<(), CommError> {
        self.shared.wait_left()?;
        self.control.left = true;
        Ok(())
    }

    /// Leaves the group gracefully: waits for all ranks to leave. Until then this returns an error
    /// if any rank fails; afterwards it cannot fail. No reduction may be in flight.
    pub fn leave(mut self) -> Result<(), CommError> {
        self.shared.check()?;
        if self.shared.members > 1 {
            self.shared.set_activity("the end of the job");
            self.shared.record_wait(Operation::Leave, 0, || {
                self.shared.request(Request::Leave);
                self.shared.wait_left()
            })?;
        }
        self.control.left = true;
        Ok(())
    }
}
