//! In-place sums of buckets over all ranks of a group.
#![allow(unsafe_code)]

use super::{
    connect::{BucketPlan, Parts, connect},
    engine::Queue,
    error::CommError,
    group::Group,
    join::spawn,
    options::Options,
    probe::Probed,
    shm::Memory,
    state::Shared,
    timing::Timing,
};
use std::{ops::Range, sync::Arc, thread::JoinHandle, time::Instant};
use switchyard_worker_contract::{config::Transport, event::Link, recorder::Operation};

/// Buckets start at multiples of this many floats (128 bytes).
const BUCKET_ALIGN: usize = 32;

/// Reduces the buckets of a rank, whose memory it owns.
pub struct Reducer {
    // Fields are dropped in this order: first the threads that use the rest.
    threads: Threads,
    memory: Arc<Memory>,
    buckets: Vec<(usize, usize)>,
    /// The reduction in flight, by bucket.
    in_flight: Vec<Option<InFlight>>,
    /// Times of the last completed reduction, by its first bucket.
    timings: Vec<Option<Timing>>,
    transport: Transport,
    links: Vec<Link>,
    probed: Option<Probed>,
}

/// A reduction that was started.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    ticket: u32,
    started: Instant,
    lane: usize,
    /// It reduces buckets before this one too.
    follows: bool,
}

/// The lanes and their threads, which end in bounded time.
struct Threads {
    shared: Arc<Shared>,
    lanes: Vec<Arc<Queue>>,
    workers: Vec<JoinHandle<()>>,
}

impl Drop for Threads {
    fn drop(&mut self) {
        if !self.lanes.iter().all(|lane| lane.at_rest()) {
            // A thread that reduces ends only with the group.
            self.shared.give_up();
        }
        for lane in &self.lanes {
            lane.stop();
        }
        for thread in self.workers.drain(..) {
            // A panic in that thread was reported there.
            let _ = thread.join();
        }
    }
}

impl Reducer {
    /// Connects the ranks of a group. All of them call it together, and it returns when all are connected.
    ///
    /// `bucket_lens` are the lengths of the buckets in numbers; they and the options must be equal on all ranks.
    pub fn connect(group: &mut Group, bucket_lens: &[usize], options: &Options) -> Result<Reducer, CommError> {
        let shared = Arc::clone(group.shared());
        Reducer::try_connect(group, bucket_lens, options).map_err(|error| shared.broken_off(error))
    }

    fn try_connect(group: &mut Group, bucket_lens: &[usize], options: &Options) -> Result<Reducer, CommError> {
        options.check()?;
        let (buckets, arena) = place(bucket_lens)?;
        let parts = connect(group, &BucketPlan { bucket_lens, arena, options: *options })?;
        let reducer = Reducer::assemble(group.shared(), parts, buckets)?;
        group.agree("the end of the set-up", &[])?;
        Ok(reducer)
    }

    fn assemble(shared: &Arc<Shared>, parts: Parts, buckets: Vec<(usize, usize)>) -> Result<Reducer, CommError> {
        let Parts { memory, engines, transport, links, probed } = parts;
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
        let (in_flight, timings) = (vec![None; buckets.len()], vec![None; buckets.len()]);
        Ok(Reducer { threads, memory, buckets, in_flight, timings, transport, links, probed })
    }

    /// How gradients travel.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// What carries data from this rank to others.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Rate of the connection from the previous rank in the ring; `None` if it was not measured, or this rank is not in
    /// the ring.
    pub fn probed(&self) -> Option<Probed> {
        self.probed
    }

    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// All-reduces that can be in flight at a time: as many as asked for, but at most one per bucket.
    pub fn lanes(&self) -> usize {
        self.threads.lanes.len()
    }

    /// Bytes that this rank has sent to other hosts in completed reductions, including headers. Traffic within a host
    /// does not count.
    pub fn bytes_sent(&self) -> u64 {
        self.threads.lanes.iter().map(|lane| lane.bytes_sent()).sum()
    }

    /// The times of the last completed reduction that began with this bucket.
    ///
    /// # Panics
    /// If there is no such bucket.
    pub fn timing(&self, bucket: usize) -> Option<Timing> {
        self.timings[bucket]
    }

    /// A bucket. It starts at a multiple of 64 bytes.
    ///
    /// # Panics
    /// If its reduction is in flight (or was when the group failed), or if there is no such bucket.
    pub fn bucket(&self, bucket: usize) -> &[f32] {
        let (start, len) = self.at_rest(bucket);
        // SAFETY: a bucket at rest belongs to this rank; `start` needs `&mut self` and so ends this borrow.
        unsafe { self.memory.slice(start, len) }
    }

    /// A bucket, for writing.
    ///
    /// # Panics
    /// See [`Reducer::bucket`].
    pub fn bucket_mut(&mut self, bucket: usize) -> &mut [f32] {
        let (start, len) = self.at_rest(bucket);
        // SAFETY: as in `bucket`, and `&mut self` excludes other references.
        unsafe { self.memory.slice_mut(start, len) }
    }

    /// Two different buckets, for writing at the same time.
    ///
    /// # Panics
    /// See [`Reducer::bucket`]; also if both are the same.
    pub fn buckets_mut(&mut self, a: usize, b: usize) -> (&mut [f32], &mut [f32]) {
        assert_ne!(a, b, "two different buckets");
        let ((a_start, a_len), (b_start, b_len)) = (self.at_rest(a), self.at_rest(b));
        // SAFETY: as in `bucket_mut`; two buckets do not overlap.
        unsafe { (self.memory.slice_mut(a_start, a_len), self.memory.slice_mut(b_start, b_len)) }
    }

    fn at_rest(&self, bucket: usize) -> (usize, usize) {
        assert!(self.in_flight[bucket].is_none(), "bucket {bucket} is used while its all_reduce is in flight");
        self.buckets[bucket]
    }

    /// Factor of numbers that travel in f16, undone where they arrive; a power of two. `None`: they travel in 4 bytes.
    /// All ranks set the same one, while nothing is in flight. 1 at first.
    pub fn set_wire_scale(&mut self, scale: Option<f32>) {
        self.threads.lanes.iter().for_each(|lane| lane.set_wire_scale(scale));
    }

    /// Starts the in-place sum of a bucket over all ranks, in lane `bucket % lanes`, and returns at once.
    ///
    /// # Panics
    /// If the bucket is already in flight, or if there is no such bucket.
    pub fn start(&mut self, bucket: usize) {
        self.push(bucket..bucket + 1, bucket, true);
    }

    /// Starts one sum over several buckets in a row, in lane `lane % lanes`: the results are those of one sum each, to
    /// the last bit. All ranks start the same ranges. Each bucket is waited for by itself.
    ///
    /// # Panics
    /// If the range is empty, a bucket is already in flight, or there is no such bucket.
    pub fn start_all(&mut self, buckets: Range<usize>, lane: usize) {
        self.push(buckets, lane, true);
    }

    /// Waits until a started reduction is complete; returns at once for a bucket that is not in flight. If the group
    /// fails, every rank gets the same root cause, and the bucket stays in flight.
    pub fn wait(&mut self, bucket: usize) -> Result<(), CommError> {
        let Some(InFlight { ticket, started, lane, follows }) = self.in_flight[bucket] else { return Ok(()) };
        let Threads { shared, lanes, .. } = &self.threads;
        let complete =
            lanes[lane].done(ticket) || shared.recorded(Operation::Reduce, bucket as u32, || lanes[lane].wait(ticket));
        if complete {
            self.in_flight[bucket] = None;
            self.timings[bucket] = (!follows).then(|| lanes[lane].timing(bucket, started));
            return Ok(());
        }
        Err(self.threads.shared.root_cause())
    }

    /// Whether the bucket's reduction is not complete yet. Returns at once.
    pub fn is_under_way(&self, bucket: usize) -> bool {
        self.in_flight[bucket].is_some_and(|started| !self.threads.lanes[started.lane].done(started.ticket))
    }

    /// `start` and `wait` in one, on this thread: the fastest way if there is nothing to overlap.
    pub fn all_reduce(&mut self, bucket: usize) -> Result<(), CommError> {
        self.push(bucket..bucket + 1, bucket, false);
        self.wait(bucket)
    }

    fn push(&mut self, buckets: Range<usize>, lane: usize, wake: bool) {
        assert!(!buckets.is_empty(), "at least one bucket is reduced");
        for bucket in buckets.clone() {
            self.at_rest(bucket);
        }
        let (started, lane) = (Instant::now(), lane % self.threads.lanes.len());
        let ticket = self.threads.lanes[lane].push(&buckets, wake && self.threads.shared.world > 1);
        for bucket in buckets.clone() {
            self.in_flight[bucket] = Some(InFlight { ticket, started, lane, follows: bucket > buckets.start });
        }
    }
}

/// Start and length of each bucket, and the size of the arena, in floats.
fn place(lens: &[usize]) -> Result<(Vec<(usize, usize)>, usize), CommError> {
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
