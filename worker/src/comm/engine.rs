//! One lane: runs started operations in order, on its communication thread or on the caller's own
//! thread.
//!
//! `start` only appends to a queue. The thread that holds the [`Engine`] lock runs the next
//! operation. Normally that is the communication thread, in parallel with the computing caller. A
//! caller that waits while the lock is free runs the operation itself: this saves two thread
//! switches and keeps two threads of one rank from competing for a CPU.
//!
//! An operation reduces one bucket, or several consecutive ones. The queue is a ring buffer with
//! one cell per bucket (a bucket can be in flight only once). `started` and `finished` count
//! operations. From `start` until `finished` passes the operation's number, the engine owns the
//! memory of its buckets. Release stores and acquire loads of the counters hand it over.
#![allow(unsafe_code)]

use super::{
    error::Cause,
    local::LocalGroup,
    op_context::{OpContext, OpError},
    operation::{OpKind, Operation},
    remote::Remote,
    shm::Memory,
    socket::timespec,
    state::Shared,
    timing::{Record, Timing},
    wait::MAX_SLEEP,
};
use rustix::thread::futex::{self, Flags};
use std::{
    ops::Range,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Instant,
};

/// Bits of the number of buckets in a cell.
const COUNT_BITS: u32 = 30;

/// Data paths of one lane.
pub(super) struct Engine {
    pub local: Option<LocalGroup>,
    pub remote: Option<Remote>,
}

impl Engine {
    /// Returns the bytes sent to other hosts.
    fn operate(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        memory: &Memory,
        ctx: &OpContext<'_>,
    ) -> Result<u64, OpError> {
        match (&mut self.local, &mut self.remote) {
            (None, None) => Ok(0),
            (None, Some(remote)) => {
                // SAFETY: the buckets are in flight, so they belong to the engine, whose lock this
                // thread holds; the padding between them is never accessed elsewhere.
                let data = unsafe { memory.slice_mut(op.start, op.len) };
                remote.run(op, buckets, data, ctx)
            }
            (Some(local), None) if local.is_single_host() => match op.kind {
                OpKind::Reduce => local.all_reduce(op, ctx).map(|()| 0),
                OpKind::Scatter => local.reduce_scatter(op, buckets, ctx).map(|()| 0),
                OpKind::Gather | OpKind::PackedGather => local.all_gather(op, buckets, ctx).map(|()| 0),
            },
            (Some(local), remote) => {
                match op.kind {
                    OpKind::Reduce | OpKind::Scatter => local.reduce_to_leader(op, ctx)?,
                    OpKind::Gather | OpKind::PackedGather => local.collect_at_leader(op, buckets, ctx)?,
                }
                let mut sent = 0;
                if let Some(remote) = remote {
                    // SAFETY: as above; this rank is the leader, and all local ranks have finished
                    // their part of its arena.
                    let data = unsafe { memory.slice_mut(op.start, op.len) };
                    sent = remote.run(op, buckets, data, ctx)?;
                }
                local.spread_from_leader(op, buckets, ctx).map(|()| sent)
            }
        }
    }
}

/// Queue between the caller and the communication thread, and the state that both use.
pub(super) struct Queue {
    engine: Mutex<Engine>,
    memory: Arc<Memory>,
    /// Start and length of each bucket in the arena.
    buckets: Vec<(usize, usize)>,
    /// The same of each bucket with a packed form, in that form.
    packed: Vec<(usize, usize)>,
    shared: Arc<Shared>,
    lane: usize,
    /// First bucket of an operation in the upper half; kind (2 bits) and number of buckets in the
    /// lower half.
    cells: Box<[AtomicU64]>,
    started: AtomicU32,
    finished: AtomicU32,
    /// Futex word of the communication thread; incremented by every start and by `stop`.
    wakeups: AtomicU32,
    /// The communication thread sleeps or is about to.
    idle: AtomicBool,
    /// The caller sleeps on `finished`.
    caller_parked: AtomicBool,
    stop: AtomicBool,
    bytes_sent: AtomicU64,
    /// Bits of the f16 gradient scale; 0: gradients travel as f32.
    wire_scale: AtomicU32,
    epoch: Instant,
    /// Indexed by the first bucket of an operation, then of a gather; only this lane's entries are
    /// used.
    records: Box<[Record]>,
}

impl Queue {
    pub fn new(
        (engine, lane): (Engine, usize),
        memory: Arc<Memory>,
        [buckets, packed]: [Vec<(usize, usize)>; 2],
        shared: Arc<Shared>,
    ) -> Queue {
        // A power of two, so that indices stay correct when the counters wrap.
        let cells = buckets.len().max(1).next_power_of_two();
        Queue {
            engine: Mutex::new(engine),
            records: (0..2 * buckets.len()).map(|_| Record::default()).collect(),
            memory,
            buckets,
            packed,
            shared,
            lane,
            cells: (0..cells).map(|_| AtomicU64::new(0)).collect(),
            started: AtomicU32::new(0),
            finished: AtomicU32::new(0),
            wakeups: AtomicU32::new(0),
            idle: AtomicBool::new(false),
            caller_parked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            bytes_sent: AtomicU64::new(0),
            wire_scale: AtomicU32::new(1.0f32.to_bits()),
            epoch: Instant::now(),
        }
    }

    /// Appends an operation on a non-empty range of buckets; returns its ticket. `wake`: wake the
    /// communication thread.
    pub fn push(&self, kind: OpKind, buckets: &Range<usize>, wake: bool) -> u32 {
        let number = self.started.load(Ordering::Relaxed);
        let cell = ((buckets.start as u64) << 32) | (kind as u64) << COUNT_BITS | buckets.len() as u64;
        self.cells[number as usize % self.cells.len()].store(cell, Ordering::Relaxed);
        let ticket = number.wrapping_add(1);
        self.started.store(ticket, Ordering::SeqCst);
        if wake {
            self.wakeups.fetch_add(1, Ordering::SeqCst);
            if self.idle.load(Ordering::SeqCst) {
                let _ = futex::wake(&self.wakeups, Flags::PRIVATE, 1);
            }
        }
        ticket
    }

    /// See [`super::Reducer::set_wire_scale`].
    pub fn set_wire_scale(&self, scale: Option<f32>) {
        // Published by the start of the next operation.
        self.wire_scale.store(scale.map_or(0, f32::to_bits), Ordering::Relaxed);
    }

    /// Whether all started operations are complete.
    pub fn is_idle(&self) -> bool {
        self.started.load(Ordering::SeqCst) == self.finished.load(Ordering::SeqCst)
    }

    /// Bytes sent to other hosts by completed operations.
    pub fn bytes_sent(&self) -> u64 {
        self.bytes_sent.load(Ordering::Relaxed)
    }

    /// Times of the operation that began with this bucket. Its ticket must have been waited for.
    pub fn timing(&self, kind: OpKind, bucket: usize, started: Instant) -> Timing {
        self.record(kind, bucket).timing(self.epoch, started, self.lane as u32)
    }

    fn record(&self, kind: OpKind, bucket: usize) -> &Record {
        let offset = if kind.is_gather() { self.buckets.len() } else { 0 };
        &self.records[offset + bucket]
    }

    pub fn done(&self, ticket: u32) -> bool {
        self.finished.load(Ordering::Acquire).wrapping_sub(ticket) as i32 >= 0
    }

    /// Waits for a ticket; `false` if the group failed first.
    pub fn wait(&self, ticket: u32) -> bool {
        loop {
            if self.done(ticket) {
                return true;
            }
            if self.shared.failed() {
                return false;
            }
            let engine = match self.engine.try_lock() {
                Ok(engine) => Some(engine),
                Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) => None,
            };
            if let Some(mut engine) = engine {
                while !self.done(ticket) {
                    if self.shared.failed() || !self.run_next(&mut engine, false) {
                        return self.done(ticket);
                    }
                }
                return true;
            }
            // The communication thread is running the operation. Sleep, so that it can use this
            // CPU.
            self.caller_parked.store(true, Ordering::SeqCst);
            let finished = self.finished.load(Ordering::SeqCst);
            if !self.done(ticket) && !self.shared.failed() {
                let _ = futex::wait(&self.finished, Flags::PRIVATE, finished, Some(&timespec(MAX_SLEEP)));
            }
            self.caller_parked.store(false, Ordering::SeqCst);
        }
    }

    /// Runs the oldest operation; `false` if the group failed.
    fn run_next(&self, engine: &mut Engine, background: bool) -> bool {
        let number = self.finished.load(Ordering::Relaxed);
        let cell = self.cells[number as usize % self.cells.len()].load(Ordering::Relaxed);
        let (bucket, count) = ((cell >> 32) as u32, cell as usize & ((1 << COUNT_BITS) - 1));
        let kind = OpKind::of(cell as u32 >> COUNT_BITS);
        let form = if kind == OpKind::PackedGather { &self.packed } else { &self.buckets };
        let buckets = &form[bucket as usize..][..count];
        let start = buckets[0].0;
        let len = buckets[count - 1].0 + buckets[count - 1].1 - start;
        let op = Operation { kind, sequence: number.wrapping_add(1), bucket, start, len };
        let began = Instant::now();
        let progress = self.shared.progress(self.lane);
        progress.begin(bucket, len as u64 * 4);
        let wire_scale = Some(f32::from_bits(self.wire_scale.load(Ordering::Relaxed))).filter(|scale| *scale > 0.0);
        let ctx =
            OpContext { shared: &self.shared, progress, wire_scale, background, caller_parked: &self.caller_parked };
        let sent = match engine.operate(op, buckets, &self.memory, &ctx) {
            Ok(sent) => sent,
            Err(OpError::GroupFailed) => {
                self.shared.suspect(Cause::failed(self.shared.rank, "a rank of this host failed without saying why"));
                return false;
            }
            Err(OpError::LaneLost(cause)) => {
                self.shared.suspect(cause);
                return false;
            }
            Err(OpError::Known(cause)) => {
                self.shared.abort(cause);
                return false;
            }
        };
        progress.end();
        self.bytes_sent.fetch_add(sent, Ordering::Relaxed);
        let bytes = buckets.iter().map(|(_, len)| *len as u64 * 4).sum();
        self.record(kind, bucket as usize).note(self.epoch, (began, Instant::now()), bytes, sent);
        self.finished.store(op.sequence, Ordering::SeqCst);
        if self.caller_parked.load(Ordering::SeqCst) {
            let _ = futex::wake(&self.finished, Flags::PRIVATE, 1);
        }
        true
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Main loop of this lane's communication thread.
    pub fn run(&self) {
        let _guard = PanicGuard(&self.shared);
        loop {
            // Load this before checking for work: any later wake-up changes the value and ends the
            // sleep below at once.
            let wakeups = self.wakeups.load(Ordering::SeqCst);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            if self.has_work() {
                let mut engine = self.engine();
                // The caller may have run the operations while this thread waited for the lock.
                while self.has_work() && self.run_next(&mut engine, true) {}
                continue;
            }
            self.idle.store(true, Ordering::SeqCst);
            let _ = futex::wait(&self.wakeups, Flags::PRIVATE, wakeups, None);
            self.idle.store(false, Ordering::SeqCst);
        }
    }

    fn has_work(&self) -> bool {
        !self.is_idle() && !self.shared.failed()
    }

    /// Stops the communication thread. An operation in flight ends only if the group has failed.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.wakeups.fetch_add(1, Ordering::SeqCst);
        let _ = futex::wake(&self.wakeups, Flags::PRIVATE, i32::MAX as u32);
    }

    /// Wakes the caller so that it notices the failure.
    pub fn wake_caller(&self) {
        let _ = futex::wake(&self.finished, Flags::PRIVATE, i32::MAX as u32);
    }
}

/// A panic in the communication thread is a bug, but the group must still end.
struct PanicGuard<'a>(&'a Shared);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.abort(Cause::failed(self.0.rank, "internal error: the communication thread panicked"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shm::Mapping;
    use super::*;
    use rustix::io::Errno;
    use std::time::Duration;

    fn queue() -> Queue {
        let shared = Shared::new((0, 2), 2, Duration::from_secs(1)).unwrap();
        let memory = Memory::Private(Mapping::anonymous(4096).unwrap());
        Queue::new(
            (Engine { local: None, remote: None }, 0),
            Arc::new(memory),
            [vec![(0, 16)], Vec::new()],
            Arc::new(shared),
        )
    }

    /// The communication thread may have found the queue empty and be about to sleep when an
    /// operation is pushed.
    #[test]
    fn a_wake_up_before_the_sleep_is_not_lost() {
        let sleep = |queue: &Queue, wakeups: u32| {
            // Never reached: the futex returns at once because the value differs.
            futex::wait(&queue.wakeups, Flags::PRIVATE, wakeups, Some(&timespec(Duration::from_secs(60))))
        };
        let queue = queue();
        let before = queue.wakeups.load(Ordering::SeqCst);
        queue.push(OpKind::Reduce, &(0..1), true);
        assert_eq!(sleep(&queue, before), Err(Errno::AGAIN), "an operation");
        let before = queue.wakeups.load(Ordering::SeqCst);
        queue.stop();
        assert_eq!(sleep(&queue, before), Err(Errno::AGAIN), "the end");
        queue.run();
    }

    #[test]
    fn stop_ends_the_thread_in_every_state() {
        for round in 0..2_000 {
            let queue = queue();
            std::thread::scope(|scope| {
                scope.spawn(|| queue.run());
                if round % 2 == 0 {
                    let ticket = queue.push(OpKind::Reduce, &(0..1), true);
                    assert!(queue.wait(ticket));
                }
                queue.stop();
            });
        }
    }
}
