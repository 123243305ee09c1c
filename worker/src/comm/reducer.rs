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
    packing::Packing,
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

/// Consecutive buckets that follow each other in memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BucketRun {
    pub buckets: Range<usize>,
    /// Runs in the same place share its memory: only one of them is in use at a time.
    pub place: usize,
}

/// Reduces a rank's buckets and owns their memory.
pub struct Reducer {
    // Dropped first: the threads use the other fields.
    threads: Threads,
    memory: Arc<Memory>,
    buckets: Vec<(usize, usize)>,
    /// Run and place of each bucket.
    runs: Vec<(usize, usize)>,
    /// For each place, a run and how many of its buckets are in flight.
    busy: Vec<(usize, usize)>,
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
        let whole = BucketRun { buckets: 0..bucket_lens.len(), place: 0 };
        let shared = Arc::clone(group.shared());
        Reducer::try_connect(group, members, (bucket_lens, &[whole], &[]), options)
            .map_err(|error| shared.setup_failed(error))
    }

    /// As [`Reducer::connect`], with buckets that share memory, and with packed forms of the first
    /// buckets. The runs, also equal on all ranks, cover all buckets in order. An operation is on
    /// buckets of one run.
    pub fn connect_in_places(
        group: &mut Group,
        bucket_lens: &[usize],
        (runs, packings): (&[BucketRun], &[Packing]),
        options: &Options,
    ) -> Result<Reducer, CommError> {
        let shared = Arc::clone(group.shared());
        Reducer::try_connect(group, &[], (bucket_lens, runs, packings), options)
            .map_err(|error| shared.setup_failed(error))
    }

    fn try_connect(
        group: &mut Group,
        members: &[u32],
        (bucket_lens, runs, packings): (&[usize], &[BucketRun], &[Packing]),
        options: &Options,
    ) -> Result<Reducer, CommError> {
        options.check()?;
        let (buckets, arena) = layout(bucket_lens, runs)?;
        let parts = connect(group, &BucketPlan { bucket_lens, arena, packings, options: *options, members })?;
        let reducer = Reducer::assemble(group.shared(), parts, buckets, runs)?;
        group.agree("the end of the set-up", &[])?;
        Ok(reducer)
    }

    fn assemble(
        shared: &Arc<Shared>,
        parts: Parts,
        buckets: Vec<(usize, usize)>,
        runs: &[BucketRun],
    ) -> Result<Reducer, CommError> {
        let Parts { memory, engines, transport, links, probed, algorithms, shards } = parts;
        let mut threads = Threads { shared: Arc::clone(shared), lanes: Vec::new(), workers: Vec::new() };
        for (lane, engine) in engines.into_iter().enumerate() {
            let packed = buckets.iter().zip(shards.packed()).map(|((start, _), parts)| (*start, parts.len));
            let buckets = [buckets.clone(), packed.collect()];
            let queue = Arc::new(Queue::new((engine, lane), Arc::clone(&memory), buckets, Arc::clone(shared)));
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
        let busy = vec![(0, 0); places(runs)];
        let runs = runs.iter().enumerate().flat_map(|(run, of)| of.buckets.clone().map(move |_| (run, of.place)));
        let runs = runs.collect();
        Ok(Reducer {
            threads,
            memory,
            buckets,
            runs,
            busy,
            in_flight,
            timings,
            transport,
            links,
            probed,
            algorithms,
            shards,
        })
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
    /// If its reduction is in flight (or was when the group failed), or one of another run in its
    /// place, or if there is no such bucket.
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
        assert!(
            self.runs[a].0 == self.runs[b].0 || self.runs[a].1 != self.runs[b].1,
            "buckets {a} and {b} share memory"
        );
        // SAFETY: as in `bucket_mut`; two buckets of a run, or of two places, do not overlap.
        unsafe { (self.memory.slice_mut(a_start, a_len), self.memory.slice_mut(b_start, b_len)) }
    }

    fn idle_bucket(&self, bucket: usize) -> (usize, usize) {
        assert!(self.in_flight[bucket].is_none(), "bucket {bucket} is used while its all_reduce is in flight");
        let (run, place) = self.runs[bucket];
        let (other, in_flight) = self.busy[place];
        assert!(in_flight == 0 || other == run, "bucket {bucket} is used while run {other} has its place");
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

    /// As [`Reducer::gather_all`], in the packed form: each rank writes its part of it to
    /// `place(shard.start)..place(shard.end)` of the bucket, see [`Packing::place`]. The rest of a
    /// bucket is undefined afterwards.
    ///
    /// # Panics
    /// See [`Reducer::start_all`]; also if a bucket has no packed form.
    pub fn gather_packed(&mut self, buckets: Range<usize>, lane: usize) {
        assert!(buckets.end <= self.shards.packed().len(), "buckets {buckets:?} have a packed form");
        self.push(OpKind::PackedGather, buckets, lane, true);
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
            self.busy[self.runs[bucket].1].1 -= 1;
            let offset = if kind.is_gather() { self.buckets.len() } else { 0 };
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
        let (run, place) = self.runs[buckets.start];
        for bucket in buckets.clone() {
            self.idle_bucket(bucket);
            assert_eq!(self.runs[bucket].0, run, "run of bucket {bucket}");
        }
        let in_flight = self.busy[place].1;
        self.busy[place] = (run, in_flight + buckets.len());
        let (started, lane) = (Instant::now(), lane % self.threads.lanes.len());
        let ticket = self.threads.lanes[lane].push(kind, &buckets, wake && self.threads.shared.world > 1);
        for bucket in buckets.clone() {
            self.in_flight[bucket] =
                Some(InFlight { kind, ticket, started, lane, is_follower: bucket > buckets.start });
        }
    }
}

fn places(runs: &[BucketRun]) -> usize {
    runs.iter().map(|run| run.place + 1).max().unwrap_or(0)
}

/// Start and length of each bucket, and the arena size, in floats.
fn layout(lens: &[usize], runs: &[BucketRun]) -> Result<(Vec<(usize, usize)>, usize), CommError> {
    let end = |at: usize, len: usize| {
        let next = len.checked_next_multiple_of(BUCKET_ALIGN).and_then(|len| at.checked_add(len));
        next.filter(|next| next.checked_mul(8).is_some()).ok_or_else(|| CommError::Group {
            got: format!("a bucket of {len} numbers"),
            expected: "buckets that fit into the address space".to_owned(),
        })
    };
    let mut sizes = vec![0; places(runs)];
    for run in runs {
        let size = lens[run.buckets.clone()].iter().try_fold(0, |at, len| end(at, *len))?;
        sizes[run.place] = size.max(sizes[run.place]);
    }
    let mut arena = 0;
    let mut starts = Vec::with_capacity(sizes.len());
    for size in sizes {
        starts.push(arena);
        arena = end(arena, size)?;
    }
    let mut buckets = Vec::with_capacity(lens.len());
    for run in runs {
        assert_eq!(run.buckets.start, buckets.len(), "runs cover all buckets in order");
        let mut at = starts[run.place];
        for &len in &lens[run.buckets.clone()] {
            buckets.push((at, len));
            at = end(at, len)?;
        }
    }
    assert_eq!(buckets.len(), lens.len(), "runs cover all buckets");
    Ok((buckets, arena))
}

#[cfg(test)]
mod tests {
    use super::*;
    fn run(buckets: Range<usize>, place: usize) -> BucketRun {
        BucketRun { buckets, place }
    }

    #[test]
    fn runs_in_a_place_begin_at_the_same_address() {
        let runs = [run(0..1, 0), run(1..3, 1), run(3..4, 0), run(4..5, 2)];
        let (buckets, arena) = layout(&[16, 40, 100, 50, 1], &runs).unwrap();
        assert_eq!((buckets, arena), (vec![(0, 16), (64, 40), (128, 100), (0, 50), (256, 1)], 288));
    }
}
