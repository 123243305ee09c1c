//! State shared by the threads of one rank: the first failure, rank 0's replies, requests to the
//! control thread, and the rank's current activity.

use super::{
    ballot::Ballot,
    error::{Cause, CauseKind, CommError},
    gpu_health::gpu_trouble,
    hang::{RankReport, stuck},
    options::Options,
    roster::Roster,
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
    /// Every reachable peer has been notified of the failure.
    delivered: bool,
    formed: Option<Roster>,
    missing: Option<Vec<u32>>,
    agreed: Option<Result<Vec<Vec<u8>>, String>>,
    left: bool,
    /// Offset to rank 0's clock in microseconds.
    clock_offset: Option<i64>,
    refusals: Vec<String>,
    activity: String,
    stuck: Option<Stuck>,
    gpu: Option<GpuTrouble>,
}

type Waker = Box<dyn Fn() + Send>;

pub(super) struct Shared {
    pub rank: u32,
    pub world: u32,
    /// Ranks, and parameter servers in processes of their own.
    pub members: u32,
    pub connect_seconds: f64,
    failed: AtomicBool,
    status: Mutex<Status>,
    changed: Condvar,
    wakers: Mutex<Vec<Waker>>,
    requests: Mutex<Vec<Request>>,
    /// Wakes the control thread; absent in a group of one.
    wake_fd: Option<OwnedFd>,
    hosts: OnceLock<Vec<String>>,
    /// By lane.
    progress: [Progress; Options::MAX_LANES as usize],
    recorder: OnceLock<Arc<Recorder>>,
}

/// How long a failing rank waits for rank 0 to confirm the root cause, and rank 0 for its final
/// message to be read.
pub(super) const GRACE_PERIOD: Duration = Duration::from_millis(500);

impl Shared {
    pub fn new((rank, world): (u32, u32), members: u32, connect_timeout: Duration) -> Result<Shared, CommError> {
        let wake_fd = if members > 1 {
            let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
            Some(rustix::event::eventfd(0, flags).map_err(|e| CommError::system("create an eventfd", e))?)
        } else {
            None
        };
        Ok(Shared {
            rank,
            world,
            members,
            connect_seconds: connect_timeout.as_secs_f64(),
            failed: AtomicBool::new(false),
            status: Mutex::default(),
            changed: Condvar::new(),
            wakers: Mutex::default(),
            requests: Mutex::default(),
            wake_fd,
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

    /// Records a wait for other ranks; afterwards the recorder returns to the previous operation.
    pub fn record_wait<T>(&self, operation: Operation, index: u32, wait: impl FnOnce() -> T) -> T {
        let Some(recorder) = self.recorder() else { return wait() };
        let before = recorder.latest();
        recorder.begin(operation, index);
        let result = wait();
        // If the group has failed, this stays the rank's last operation.
        if !self.failed() {
            recorder.begin(before.operation, before.index);
        }
        result
    }

    /// The rank's current state; `None` without a recorder.
    pub fn vitals(&self) -> Option<Vitals> {
        self.recorder().map(Recorder::vitals)
    }

    /// Changes whenever an all-reduce makes progress.
    pub fn progress_count(&self) -> u64 {
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

    /// Records the root cause and wakes every waiter of this rank. Later calls are ignored.
    pub fn fail(&self, cause: Cause) {
        let mut status = self.status();
        if status.failure.is_some() {
            return;
        }
        status.failure = Some(self.with_host(cause));
        self.failed.store(true, Ordering::SeqCst);
        drop(status);
        self.changed.notify_all();
        for waker in self.wakers.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            waker();
        }
    }

    /// The error when members have not arrived.
    pub fn missing(&self, missing: Vec<u32>) -> CommError {
        let Shared { world, members, connect_seconds: seconds, .. } = *self;
        CommError::Missing { missing, world, members, seconds }
    }

    /// Fills in the origin's host.
    pub fn with_host(&self, mut cause: Cause) -> Cause {
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

    /// Drops the wakers with the sockets and mappings they hold.
    pub fn forget_wakers(&self) {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Reports a failure to the group. Returns when the root cause is known here, at most
    /// [`GRACE_PERIOD`] later.
    pub fn abort(&self, mut cause: Cause) {
        if self.failed() {
            return;
        }
        if cause.during.is_empty() && cause.origin_rank == self.rank && cause.kind != CauseKind::Hung {
            cause.during = self.activity();
        }
        let cause = self.with_host(cause);
        if self.wake_fd.is_some() {
            self.request(Request::Abort(cause.clone()));
            self.wait_until(Instant::now() + GRACE_PERIOD, |status| {
                (status.failure.is_some() && status.delivered).then_some(())
            });
        }
        self.fail(cause);
    }

    /// Aborts because the rank is dropped before it has left, so that no other rank waits for it.
    /// Returns at once if the group has already failed.
    pub fn give_up(&self) {
        let word = if std::thread::panicking() { "panicked" } else { "gave up without saying why" };
        self.abort(Cause::failed(self.rank, word));
    }

    /// Reports a set-up error to the group. Returns the root cause instead if another rank failed
    /// first, because this rank's error is then only a consequence.
    pub fn setup_failed(&self, error: CommError) -> CommError {
        if matches!(error, CommError::Failed(_) | CommError::Missing { .. }) {
            return error;
        }
        self.abort(Cause::failed(self.rank, error.with_sources()));
        self.failure().filter(|cause| cause.origin_rank != self.rank).map_or(error, CommError::Failed)
    }

    /// The error of an operation that the group's failure interrupted.
    pub fn root_cause(&self) -> CommError {
        CommError::Failed(self.failure().unwrap_or_else(|| Cause::failed(self.rank, "unknown")))
    }

    /// Handles a broken data lane. Usually the peer has died, and the control connection reports
    /// that within milliseconds; only otherwise is the lane itself the cause. This keeps survivors
    /// from blaming each other.
    pub fn suspect(&self, cause: Cause) {
        self.await_failure(GRACE_PERIOD);
        self.abort(cause);
    }

    /// Waits until the group has failed, at most for `limit`.
    pub fn await_failure(&self, limit: Duration) {
        self.wait_until(Instant::now() + limit, |status| status.failure.is_some().then_some(()));
    }

    pub fn request(&self, request: Request) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
        if let Some(wake_fd) = &self.wake_fd {
            // An eventfd counter cannot overflow here, so the write cannot fail in a way that
            // matters.
            let _ = rustix::io::write(wake_fd, &1u64.to_ne_bytes());
        }
    }

    /// Takes the requests and resets the eventfd.
    pub fn take_requests(&self) -> Vec<Request> {
        if let Some(wake_fd) = &self.wake_fd {
            let _ = rustix::io::read(wake_fd, &mut [0u8; 8]);
        }
        std::mem::take(&mut self.requests.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn wake_fd(&self) -> Option<&OwnedFd> {
        self.wake_fd.as_ref()
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

    // Reports of the control thread.

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

    /// See [`super::Aborter::stuck`]. A group of one rank has no control thread, so its state is
    /// read directly.
    pub fn stuck(&self) -> Option<Stuck> {
        match self.members {
            1 => stuck(&[RankReport { node: 0, vitals: self.vitals().as_ref() }]),
            _ => self.status().stuck,
        }
    }

    pub fn set_gpu_trouble(&self, gpu: Option<GpuTrouble>) {
        self.update(|status| status.gpu = gpu);
    }

    /// See [`super::Aborter::gpu_trouble`]; reads a group of one directly, like [`Self::stuck`].
    pub fn gpu_trouble(&self) -> Option<GpuTrouble> {
        match self.members {
            1 => gpu_trouble(&[RankReport { node: 0, vitals: self.vitals().as_ref() }]),
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

    // Waits of the main thread.

    pub fn wait_formed(&self, deadline: Instant) -> Result<Roster, CommError> {
        let outcome = self.wait_until(deadline, |status| {
            if let Some(missing) = status.missing.take() {
                return Some(Err(self.missing(missing)));
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

    // Current activity.

    pub fn set_activity(&self, text: &str) {
        let mut status = self.status();
        status.activity.clear();
        status.activity.push_str(text);
    }

    /// Describes the current activity, for messages.
    pub fn activity(&self) -> String {
        let activity = self.status().activity.clone();
        if !activity.is_empty() {
            return activity;
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

    /// Bytes of the bucket that are final, approximately; only displayed.
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
