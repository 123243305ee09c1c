//! What the threads of one rank share: the first failure, the replies of rank 0, requests to the control thread, and
//! what the rank is doing right now.

use super::{
    ballot::Ballot,
    error::{Cause, CauseKind, CommError},
    gpus::gpu_trouble,
    options::Options,
    roster::Roster,
    standstill::{Heard, stuck},
};
use crate::recorder::{Recorder, Vitals};
use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use switchyard_worker_contract::event::{GpuTrouble, Stuck};
use switchyard_worker_contract::recorder::Operation;

/// A request to the control thread.
pub(super) enum Request {
    Value(Ballot),
    Abort(Cause),
    Leave,
    /// The group is being dropped.
    Stop,
}

#[derive(Default)]
struct Status {
    failure: Option<Cause>,
    /// Every peer that can be reached has been notified of the failure.
    delivered: bool,
    formed: Option<Roster>,
    missing: Option<Vec<u32>>,
    agreed: Option<Result<Vec<Vec<u8>>, String>>,
    left: bool,
    /// Microseconds to rank 0's clock.
    clock_offset: Option<i64>,
    refusals: Vec<String>,
    doing: String,
    stuck: Option<Stuck>,
    gpu: Option<GpuTrouble>,
}

type Waker = Box<dyn Fn() + Send>;

pub(super) struct Shared {
    pub rank: u32,
    pub world: u32,
    pub connect_seconds: f64,
    failed: AtomicBool,
    status: Mutex<Status>,
    changed: Condvar,
    wakers: Mutex<Vec<Waker>>,
    requests: Mutex<Vec<Request>>,
    /// Wakes the control thread; absent in a group of one.
    bell: Option<OwnedFd>,
    hosts: OnceLock<Vec<String>>,
    /// By lane.
    progress: [Progress; Options::MAX_LANES as usize],
    recorder: OnceLock<Arc<Recorder>>,
}

/// Longest time that a failing rank waits for rank 0 to confirm the root cause, and rank 0 for its last words to be
/// read.
pub(super) const LAST_WORDS: Duration = Duration::from_millis(500);

impl Shared {
    pub fn new((rank, world): (u32, u32), connect_timeout: Duration) -> Result<Shared, CommError> {
        let bell = if world > 1 {
            let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
            Some(rustix::event::eventfd(0, flags).map_err(|e| CommError::system("create an eventfd", e))?)
        } else {
            None
        };
        Ok(Shared {
            rank,
            world,
            connect_seconds: connect_timeout.as_secs_f64(),
            failed: AtomicBool::new(false),
            status: Mutex::default(),
            changed: Condvar::new(),
            wakers: Mutex::default(),
            requests: Mutex::default(),
            bell,
            hosts: OnceLock::new(),
            progress: Default::default(),
            recorder: OnceLock::new(),
        })
    }

    /// See [`super::Group::record_to`].
    pub fn record_to(&self, recorder: Arc<Recorder>) {
        let _ = self.recorder.set(recorder);
    }

    pub fn recorder(&self) -> Option<&Recorder> {
        self.recorder.get().map(Arc::as_ref)
    }

    /// Waits for other ranks, and then goes on with what the rank did before.
    pub fn recorded<T>(&self, operation: Operation, index: u32, wait: impl FnOnce() -> T) -> T {
        let Some(recorder) = self.recorder() else { return wait() };
        let before = recorder.latest();
        recorder.begin(operation, index);
        let result = wait();
        // In a group that has failed this is what the rank did last.
        if !self.failed() {
            recorder.begin(before.operation, before.index);
        }
        result
    }

    /// What the rank does; `None` if nobody records it.
    pub fn vitals(&self) -> Option<Vitals> {
        self.recorder().map(Recorder::vitals)
    }

    /// Changes whenever an all-reduce moves on.
    pub fn moved(&self) -> u64 {
        self.progress.iter().fold(0, |sum: u64, lane| {
            let bucket = lane.bucket.load(Ordering::Relaxed);
            sum.wrapping_mul(3).wrapping_add(u64::from(bucket) << 40).wrapping_add(lane.done.load(Ordering::Relaxed))
        })
    }

    pub fn progress(&self, lane: usize) -> &Progress {
        &self.progress[lane]
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub fn failure(&self) -> Option<Cause> {
        if self.failed() { self.status().failure.clone() } else { None }
    }

    /// An error if the group has failed.
    pub fn check(&self) -> Result<(), CommError> {
        match self.failure() {
            Some(cause) => Err(CommError::Failed(cause)),
            None => Ok(()),
        }
    }

    /// Records the root cause and wakes every waiter of this rank. Only the first call counts.
    pub fn fail(&self, cause: Cause) {
        let mut status = self.status();
        if status.failure.is_some() {
            return;
        }
        status.failure = Some(self.complete(cause));
        self.failed.store(true, Ordering::SeqCst);
        drop(status);
        self.changed.notify_all();
        for waker in self.wakers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            waker();
        }
    }

    /// Fills in the host of the origin.
    pub fn complete(&self, mut cause: Cause) -> Cause {
        if cause.host.is_empty()
            && let Some(host) = self.hosts.get().and_then(|hosts| hosts.get(cause.origin_rank as usize))
        {
            cause.host.clone_from(host);
        }
        cause
    }

    /// Calls `waker` when the group fails, or now if it has already failed.
    pub fn on_failure(&self, waker: Waker) {
        let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        if self.failed() {
            waker();
        }
        wakers.push(waker);
    }

    /// Drops what the wakers hold (sockets, mappings).
    pub fn forget_wakers(&self) {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Reports a failure to the group and returns when its root cause is known here (at most [`LAST_WORDS`] later).
    pub fn abort(&self, mut cause: Cause) {
        if self.failed() {
            return;
        }
        if cause.during.is_empty() && cause.origin_rank == self.rank && cause.kind != CauseKind::Hung {
            cause.during = self.activity();
        }
        let cause = self.complete(cause);
        if self.bell.is_some() {
            self.request(Request::Abort(cause.clone()));
            self.wait_until(Instant::now() + LAST_WORDS, |status| {
                (status.failure.is_some() && status.delivered).then_some(())
            });
        }
        self.fail(cause);
    }

    /// The rank is dropped before it has left: no other may wait for it. Returns at once if the group has already failed.
    pub fn give_up(&self) {
        let word = if std::thread::panicking() { "panicked" } else { "gave up without saying why" };
        self.abort(Cause::failed(self.rank, word));
    }

    /// Tells the group why the set-up failed here. Returns the root cause if another rank was first: it says more than
    /// what this rank saw of it.
    pub fn broken_off(&self, error: CommError) -> CommError {
        if matches!(error, CommError::Failed(_) | CommError::Missing { .. }) {
            return error;
        }
        self.abort(Cause::failed(self.rank, error.with_sources()));
        self.failure().filter(|cause| cause.origin_rank != self.rank).map_or(error, CommError::Failed)
    }

    /// The error of an operation that the failure of the group broke off.
    pub fn root_cause(&self) -> CommError {
        CommError::Failed(self.failure().unwrap_or_else(|| Cause::failed(self.rank, "unknown")))
    }

    /// A data lane broke. Usually its peer died and the control connection reports that within milliseconds; only if it
    /// does not, the lane itself is the cause. This keeps survivors from blaming each other in a circle.
    pub fn suspect(&self, cause: Cause) {
        self.await_failure(LAST_WORDS);
        self.abort(cause);
    }

    /// Waits until the group has failed, and no longer than this.
    pub fn await_failure(&self, limit: Duration) {
        self.wait_until(Instant::now() + limit, |status| status.failure.is_some().then_some(()));
    }

    pub fn request(&self, request: Request) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        if let Some(bell) = &self.bell {
            // The counter of an eventfd cannot overflow here, so the write cannot fail in a way that matters.
            let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
        }
    }

    /// Takes the requests and resets the bell.
    pub fn take_requests(&self) -> Vec<Request> {
        if let Some(bell) = &self.bell {
            let _ = rustix::io::read(bell, &mut [0u8; 8]);
        }
        std::mem::take(&mut self.requests.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn bell(&self) -> Option<&OwnedFd> {
        self.bell.as_ref()
    }

    fn wait_until<T>(&self, deadline: Instant, ready: impl Fn(&mut Status) -> Option<T>) -> Option<T> {
        let mut status = self.status();
        loop {
            if let Some(value) = ready(&mut status) {
                return Some(value);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            status = self.changed.wait_timeout(status, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn wait_forever<T>(&self, ready: impl Fn(&mut Status) -> Option<T>) -> T {
        loop {
            if let Some(value) = self.wait_until(Instant::now() + Duration::from_secs(3600), &ready) {
                return value;
            }
        }
    }

    fn update(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status());
        self.changed.notify_all();
    }

    // What the control thread reports.

    pub fn set_formed(&self, roster: Roster) {
        let _ = self.hosts.set(roster.members.iter().map(|member| member.host.clone()).collect());
        self.update(|status| status.formed = Some(roster));
    }

    pub fn set_missing(&self, ranks: Vec<u32>) {
        self.update(|status| status.missing = Some(ranks));
    }

    pub fn set_agreed(&self, result: Result<Vec<Vec<u8>>, String>) {
        self.update(|status| status.agreed = Some(result));
    }

    pub fn set_clock_offset(&self, micros: i64) {
        self.update(|status| status.clock_offset = Some(micros));
    }

    pub fn set_stuck(&self, stuck: Option<Stuck>) {
        self.update(|status| status.stuck = stuck);
    }

    /// See [`super::Aborter::stuck`]. A group of one rank has no control thread that would know.
    pub fn stuck(&self) -> Option<Stuck> {
        match self.world {
            1 => stuck(&[Heard { node: 0, vitals: self.vitals().as_ref() }]),
            _ => self.status().stuck,
        }
    }

    pub fn set_gpu_trouble(&self, gpu: Option<GpuTrouble>) {
        self.update(|status| status.gpu = gpu);
    }

    /// See [`super::Aborter::gpu_trouble`]. As above, of a group of one.
    pub fn gpu_trouble(&self) -> Option<GpuTrouble> {
        match self.world {
            1 => gpu_trouble(&[Heard { node: 0, vitals: self.vitals().as_ref() }]),
            _ => self.status().gpu,
        }
    }

    pub fn set_left(&self) {
        self.update(|status| status.left = true);
    }

    pub fn set_delivered(&self) {
        self.update(|status| status.delivered = true);
    }

    pub fn note_refusal(&self, text: String) {
        let mut status = self.status();
        if status.refusals.len() < 32 {
            status.refusals.push(text);
        }
    }

    pub fn refusals(&self) -> Vec<String> {
        self.status().refusals.clone()
    }

    // What the main thread waits for.

    pub fn wait_formed(&self, deadline: Instant) -> Result<Roster, CommError> {
        let outcome = self.wait_until(deadline, |status| {
            if let Some(missing) = status.missing.take() {
                return Some(Err(CommError::Missing { missing, world: self.world, seconds: self.connect_seconds }));
            }
            match (&status.failure, status.formed.take()) {
                (Some(cause), _) => Some(Err(CommError::Failed(cause.clone()))),
                (None, Some(roster)) => Some(Ok(roster)),
                (None, None) => None,
            }
        });
        outcome.unwrap_or_else(|| Err(CommError::protocol("rank 0", "no roster in time")))
    }

    pub fn wait_agreed(&self) -> Result<Vec<Vec<u8>>, CommError> {
        self.wait_forever(|status| match (&status.failure, status.agreed.take()) {
            (_, Some(result)) => Some(result.map_err(CommError::Disagreement)),
            (Some(cause), None) => Some(Err(CommError::Failed(cause.clone()))),
            (None, None) => None,
        })
    }

    pub fn wait_clock_offset(&self) -> Result<i64, CommError> {
        self.wait_forever(|status| match (&status.failure, status.clock_offset) {
            (Some(cause), _) => Some(Err(CommError::Failed(cause.clone()))),
            (None, Some(micros)) => Some(Ok(micros)),
            (None, None) => None,
        })
    }

    pub fn wait_left(&self) -> Result<(), CommError> {
        self.wait_forever(|status| match (&status.failure, status.left) {
            (_, true) => Some(Ok(())),
            (Some(cause), false) => Some(Err(CommError::Failed(cause.clone()))),
            (None, false) => None,
        })
    }

    // What this rank is doing.

    pub fn set_doing(&self, text: &str) {
        let mut status = self.status();
        status.doing.clear();
        status.doing.push_str(text);
    }

    /// A phrase for people.
    pub fn activity(&self) -> String {
        let doing = self.status().doing.clone();
        if !doing.is_empty() {
            return doing;
        }
        let lanes: Vec<String> = self.progress.iter().filter_map(Progress::text).collect();
        if lanes.is_empty() { "no operation in flight".to_owned() } else { lanes.join("; ") }
    }
}

/// The all-reduce running in one lane, readable from any thread.
pub(super) struct Progress {
    bucket: AtomicU32,
    done: AtomicU64,
    total: AtomicU64,
}

impl Default for Progress {
    fn default() -> Progress {
        Progress { bucket: AtomicU32::new(u32::MAX), done: AtomicU64::new(0), total: AtomicU64::new(0) }
    }
}

impl Progress {
    pub fn begin(&self, bucket: u32, total: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
        self.bucket.store(bucket, Ordering::Relaxed);
    }

    /// Bytes of the bucket that are final, or nearly so: a figure for people.
    pub fn reached(&self, done: u64) {
        self.done.store(done, Ordering::Relaxed);
    }

    pub fn end(&self) {
        self.bucket.store(u32::MAX, Ordering::Relaxed);
    }

    fn text(&self) -> Option<String> {
        let bucket = self.bucket.load(Ordering::Relaxed);
        if bucket == u32::MAX {
            return None;
        }
        let (done, total) = (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed));
        const MIB: f64 = 1_048_576.0;
        if total < 1 << 20 {
            return Some(format!("all_reduce of bucket {bucket}, {done} of {total} bytes"));
        }
        Some(format!("all_reduce of bucket {bucket}, {:.1} of {:.1} MiB", done as f64 / MIB, total as f64 / MIB))
    }
}
