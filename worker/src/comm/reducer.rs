//! In-place sums of buckets over all ranks of a group.
#![allow(unsafe_code)]

use super::{
    connect::{BucketPlan, Parts, connect},
    engine::Queue,
    error::CommError,
    group::Group,
    join::spawn,
    operation::{OpKind, Shards},
    options::Options,
    plan::Algorithm,
    probe::ConnectionRate,
    shm::Memory,
    state::Shared,
    timing::Timing,
};
use std::{ops::Range, sync::Arc, thread::JoinHandle, time::Instant};
use switchyard_worker_contract::{config::Transport, event::Link, recorder::Operation};

/// Buckets start at multiples of this many floats (128 bytes).
const BUCKET_ALIGN: usize = 32;

/// Reduces a rank's buckets and owns their memory.
pub struct Reducer {
    // Dropped first: the threads use the other fields.
    threads: Threads,
    memory: Arc<Memory>,
    buckets: Vec<(usize, usize)>,
    /// Reductions in flight, by bucket.
    in_flight: Vec<Option<InFlight>>,
    /// Times of the last completed reduction, then of the last gather, by their first bucket.
    timings: Vec<Option<Timing>>,
    transport: Transport,
    links: Vec<Link>,
    probed: Option<ConnectionRate>,
    algorithms: Arc<[Algorithm]>,
    shards: Arc<Shards>,
}

/// A started operation.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    kind: OpKind,
    ticket: u32,
    started: Instant,
    lane: usize,
    /// This bucket is not the first of its operation.
    is_follower: bool,
}

/// The lanes and their threads, which end in bounded time.
struct Threads {
    shared: Arc<Shared>,
    lanes: Vec<Arc<Queue>>,
    workers: Vec<JoinHandle<()>>,
}

impl Drop for Threads {
    fn drop(&mut self) {
        if !self.lanes.iter().all(|lane| lane.is_idle()) {
            // A thread in the middle of a reduction ends only with the group.
            self.shared.give_up();
        }
        for lane in &self.lanes {
            lane.stop();
        }
        for thread in self.workers.drain(..) {
            // That thread has already reported a panic.
            let _ = thread.join();
        }
    }
}

impl Reducer {
    /// Connects the ranks of a group. Collective: it returns when all ranks are connected.
    ///
    /// `bucket_lens` are the bucket lengths in elements; they and the options must be equal on all
    /// ranks.
    pub fn connect(group: &mut Group, bucket_lens: &[usize], options: &Options) -> Result<Reducer, CommError> {
        Reducer::connect_among(group, &[], bucket_lens, options)
    }

    /// Connects this rank with `members`, to which it belongs: ascending ranks, none: all.
    /// Collective over the whole group: every rank calls it with the members to which it belongs,
    /// and members call it with the same buckets. [`Reducer::shard`] then counts members, not
    /// ranks. Only all-reduces are for some of the ranks.
    pub fn connect_among(
        group: &mut Group,
        members: &[u32],
        bucket_lens: &[usize],
        options: &Options,
    ) -> Result<Reducer, CommError> {
        let shared = Arc::clone(group.shared());
        Reducer::try_connect(group, members, bucket_lens, options).map_err(|error| shared.setup_failed(error))
    }

    fn try_connect(
        group: &mut Group,
        members: &[u32],
        bucket_lens: &[usize],
        options: &Options,
    ) -> Result<Reducer, CommError> {
        options.check()?;
        let (buckets, arena) = layout(bucket_lens)?;
        let parts = connect(group, &BucketPlan { bucket_lens, arena, options: *options, members })?;
        let reducer = Reducer::assemble(group.shared(), parts, buckets)?;
        group.agree("the end of the set-up", &[])?;
        Ok(reducer)
    }

    fn assemble(shared: &Arc<Shared>, parts: Parts, buckets: Vec<(usize, usize)>) -> Result<Reducer, CommError> {
        let Parts { memory, engines, transport, links, probed, algorithms, shards } = parts;
        let mut threads = Threads { shared: Arc::clone(shared), lanes: Vec::new(), workers: Vec::new() };
        for (lane, engine) in engines.into_iter().enumerate() {
            let (memory, buckets) = (Arc::clone(&memory), buckets.clone());
            let queue = Arc::new(Queue::new((engine, lane), memory, buckets, Arc::clone(shared)));
            threads.lanes.push(Arc::clone(&queue));
            let waking = Arc::downgrade(&queue);
            shared.on_failure(Box::new(move || {
                if let Some(queue) = waking.upgrade() {
                    queue.wake_caller();
                }
            }));
            if shared.world > 1 {
                threads.workers.push(spawn(&format!("collectives-{lane}"), move || queue.run())?);
            }
        }
        let (in_flight, timings) = (vec![None; buckets.len()], vec![None; 2 * buckets.len()]);
        Ok(Reducer { threads, memory, buckets, in_flight, timings, transport, links, probed, algorithms, shards })
    }

    /// Transport used for gradients.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// Data links from this rank to others.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Rate of the connection from the previous rank in the ring; `None` if not measured, or if
    /// this rank is not in the ring.
    pub fn probed(&self) -> Option<ConnectionRate> {
        self.probed
    }

    /// Algorithm between hosts for a bucket; `None` if all ranks share memory, or if another rank
    /// of this host exchanges values with other hosts.
    pub fn algorithm(&self, bucket: usize) -> Option<Algorithm> {
        self.algorithms.get(bucket).copied()
    }

    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// Concurrent all-reduces: as many as requested, but at most one per bucket.
    pub fn lanes(&self) -> usize {
        self.threads.lanes.len()
    }

    /// Bytes that completed reductions sent from this rank to other hosts, including headers.
    /// Traffic within a host does not count.
    pub fn bytes_sent(&self) -> u64 {
        self.threads.lanes.iter().map(|lane| lane.bytes_sent()).sum()
    }

    /// Times of the last completed all-reduce or scatter that began with this bucket.
    ///
    /// # Panics
    /// If there is no such bucket.
    pub fn timing(&self, bucket: usize) -> Option<Timing> {
        self.timings[bucket]
    }

    /// Times of the last completed gather that began with this bucket.
    pub fn gather_timing(&self, bucket: usize) -> Option<Timing> {
        self.timings[self.buckets.len() + bucket]
    }

    /// Elements of a bucket that a rank owns: it has their sum after a scatter, and the other ranks
    /// get them from it in a gather. Multiples of 16, except for the last ones.
    ///
    /// # Panics
    /// If there is no such bucket or rank.
    pub fn shard(&self, bucket: usize, rank: u32) -> Range<usize> {
        self.shard_of(self.buckets[bucket].1, rank)
    }

    /// [`Reducer::shard`] of a bucket of this length.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn shard_of(&self, len: usize, rank: u32) -> Range<usize> {
        self.shards.range(len, rank)
    }

    /// A bucket. It is aligned to 64 bytes.
    ///
    /// # Panics
    /// If its reduction is in flight (or was when the group failed), or if there is no such bucket.
    pub fn bucket(&self, bucket: usize) -> &[f32] {
        let (start, len) = self.idle_bucket(bucket);
        // SAFETY: an idle bucket belongs to this rank; `start` needs `&mut self` and thus ends this
        // borrow.
        unsafe { self.memory.slice(start, len) }
    }

    /// Mutable access to a bucket.
    ///
    /// # Panics
    /// See [`Reducer::bucket`].
    pub fn bucket_mut(&mut self, bucket: usize) -> &mut [f32] {
        let (start, len) = self.idle_bucket(bucket);
        // SAFETY: as in `bucket`, and `&mut self` excludes other references.
        unsafe { self.memory.slice_mut(start, len) }
    }

    /// Mutable access to two different buckets at once.
    ///
    /// # Panics
    /// See [`Reducer::bucket`]; also if both are the same.
    pub fn buckets_mut(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]) {
        assert_ne!(a, b, "two different buckets");
        let ((a_start, a_len), (b_start, b_len)) = (self.idle_bucket(a), self.idle_bucket(b));
        // SAFETY: as in `bucket_mut`; two buckets do not overlap.
        unsafe { (self.memory.slice_mut(a_start, a_len), self.memory.slice_mut(b_start, b_len)) }
    }

    fn idle_bucket(&self, bucket: usize) -> (usize, usize) {
        assert!(self.in_flight[bucket].is_none(), "bucket {bucket} is used while its all_reduce is in flight");
        self.buckets[bucket]
    }

    /// Sets the factor applied to values sent as f16, and undone on receipt; a power of two.
    /// `None`: values are sent as f32. All ranks must set the same factor, while nothing is in
    /// flight. Initially 1.
    pub fn set_wire_scale(&mut self, scale: Option<f32>) {
        self.threads.lanes.iter().for_each(|lane| lane.set_wire_scale(scale));
    }

    /// Starts the in-place sum of a bucket over all ranks, in lane `bucket % lanes`, and returns at
    /// once.
    ///
    /// # Panics
    /// If the bucket is already in flight, or if there is no such bucket.
    pub fn start(&mut self, bucket: usize) {
        self.push(OpKind::Reduce, bucket..bucket + 1, bucket, true);
    }

    /// Starts one reduction over several consecutive buckets, in lane `lane % lanes`. Results are
    /// bit-identical to separate reductions. All ranks must start the same ranges. Each bucket is
    /// waited for separately.
    ///
    /// # Panics
    /// If the range is empty, a bucket is already in flight, or there is no such bucket.
    pub fn start_all(&mut self, buckets: Range<usize>, lane: usize) {
        self.push(OpKind::Reduce, buckets, lane, true);
    }

    /// As [`Reducer::start_all`], but each rank gets only the sums that it owns, with the bits of
    /// an all-reduce. The rest of a bucket is undefined afterwards.
    ///
    /// # Panics
    /// See [`Reducer::start_all`].
    pub fn scatter_all(&mut self, buckets: Range<usize>, lane: usize) {
        self.push(OpKind::Scatter, buckets, lane, true);
    }

    /// As [`Reducer::start_all`], but copies each part of a bucket from the rank that owns it.
    ///
    /// # Panics
    /// See [`Reducer::start_all`].
    pub fn gather_all(&mut self, buckets: Range<usize>, lane: usize) {
        self.push(OpKind::Gather, buckets, lane, true);
    }

    /// Waits until a started operation is complete; returns at once for a bucket that is not in
    /// flight. If the group fails, every rank gets the same root cause, and the bucket stays in
    /// flight.
    pub fn wait(&mut self, bucket: usize) -> Result<(), CommError> {
        let Some(InFlight { kind, ticket, started, lane, is_follower }) = self.in_flight[bucket] else { return Ok(()) };
        let Threads { shared, lanes, .. } = &self.threads;
        let complete = lanes[lane].done(ticket)
            || shared.record_wait(Operation::Reduce, bucket as u32, || lanes[lane].wait(ticket));
        if complete {
            self.in_flight[bucket] = None;
            let offset = if kind == OpKind::Gather { self.buckets.len() } else { 0 };
            self.timings[offset + bucket] = (!is_follower).then(|| lanes[lane].timing(kind, bucket, started));
            return Ok(());
        }
        Err(self.threads.shared.root_cause())
    }

    /// Whether the bucket's reduction is still running. Does not block.
    pub fn is_running(&self, bucket: usize) -> bool {
        self.in_flight[bucket].is_some_and(|started| !self.threads.lanes[started.lane].done(started.ticket))
    }

    /// `start` and `wait` in one, on this thread: fastest if there is nothing to overlap with.
    pub fn all_reduce(&mut self, bucket: usize) -> Result<(), CommError> {
        self.push(OpKind::Reduce, bucket..bucket + 1, bucket, false);
        self.wait(bucket)
    }

    fn push(&mut self, kind: OpKind, buckets: Range<usize>, lane: usize, wake: bool) {
        assert!(!buckets.is_empty(), "at least one bucket is reduced");
        for bucket in buckets.clone() {
            self.idle_bucket(bucket);
        }
        let (started, lane) = (Instant::now(), lane % self.threads.lanes.len());
        let ticket = self.threads.lanes[lane].push(kind, &buckets, wake && self.threads.shared.world > 1);
        for bucket in buckets.clone() {
            self.in_flight[bucket] =
                Some(InFlight { kind, ticket, started, lane, is_follower: bucket > buckets.start });
        }
    }
}

/// Start and length of each bucket, and the arena size, in floats.
fn layout(lens: &[usize]) -> Result<(Vec<(usize, usize)>, usize), CommError> {
    let mut at = 0usize;
    let mut buckets = Vec::with_capacity(lens.len());
    for len in lens {
        buckets.push((at, *len));
        let next = len.checked_next_multiple_of(BUCKET_ALIGN).and_then(|len| at.checked_add(len));
        at = next.filter(|next| next.checked_mul(8).is_some()).ok_or_else(|| CommError::Group {
            got: format!("a bucket of {len} numbers"),
            expected: "buckets that fit into the address space".to_owned(),
        })?;
    }
    Ok((buckets, at))
}
