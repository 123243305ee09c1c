//! The one type that the step loop sees.
#![allow(unsafe_code)]

use super::{
    config::GroupConfig,
    engine::{Engine, Queue},
    error::{Cause, CommError},
    host,
    hub::Ballot,
    join::{BucketPlan, Parts, join, spawn},
    options::Options,
    probe::Probed,
    shm::{Mapping, Memory},
    state::{Request, Shared},
    timing::Timing,
};
use crate::recorder::Recorder;
use std::{ops::Range, sync::Arc, thread::JoinHandle, time::Instant};
use switchyard_worker_contract::{config::Transport, event::Link, recorder::Operation};

/// Most bytes that `agree` compares.
const MAX_AGREE: usize = 4096;
/// Buckets start at multiples of this many floats (128 bytes).
const BUCKET_ALIGN: usize = 32;

/// A rank's membership in its group.
pub struct Communicator {
    // Fields are dropped in this order: first the threads that use the rest.
    threads: Threads,
    lanes: Vec<Arc<Queue>>,
    memory: Arc<Memory>,
    shared: Arc<Shared>,
    buckets: Vec<(usize, usize)>,
    /// The reduction in flight, by bucket.
    in_flight: Vec<Option<InFlight>>,
    /// Times of the last completed reduction, by its first bucket.
    timings: Vec<Option<Timing>>,
    clock_offset: i64,
    transport: Transport,
    links: Vec<Link>,
    probed: Option<Probed>,
    local_address: String,
    host: String,
    agreements: u32,
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

/// Ends the group from another thread (signals, panic hook).
#[derive(Clone)]
pub struct Aborter(Arc<Shared>);

impl Aborter {
    /// See [`Communicator::abort`].
    pub fn abort(&self, cause: Cause) {
        self.0.abort(cause);
    }

    /// See [`Communicator::failure`].
    pub fn failure(&self) -> Option<Cause> {
        self.0.failure()
    }
}

/// Ends the threads of a rank, in order and in bounded time.
struct Threads {
    shared: Arc<Shared>,
    lanes: Vec<Arc<Queue>>,
    control: Option<JoinHandle<()>>,
    workers: Vec<JoinHandle<()>>,
    left: bool,
}

impl Drop for Threads {
    fn drop(&mut self) {
        if !self.left && self.control.is_some() {
            // Returns at once if the group has already failed.
            let word = if std::thread::panicking() { "panicked" } else { "gave up without saying why" };
            self.shared.abort(Cause::failed(self.shared.rank, word));
        }
        for lane in &self.lanes {
            lane.stop();
        }
        if self.control.is_some() {
            self.shared.request(Request::Stop);
        }
        for thread in self.workers.drain(..).chain(self.control.take()) {
            // A panic in that thread was reported there.
            let _ = thread.join();
        }
        self.shared.forget_wakers();
    }
}

impl Communicator {
    /// Joins the group. Returns when all ranks are connected, or with an error that says what is missing.
    ///
    /// `bucket_lens` are the lengths of the gradient buckets in numbers; they and the options must be equal on all ranks.
    pub fn connect(config: &GroupConfig, bucket_lens: &[usize], options: &Options) -> Result<Communicator, CommError> {
        config.check()?;
        options.check()?;
        let (buckets, arena) = place(bucket_lens)?;
        let plan = BucketPlan { bucket_lens, arena, options: *options };
        let lanes = plan.lanes() as usize;
        let shared = Arc::new(Shared::new((config.rank(), config.world()), lanes, config.connect_timeout)?);
        let mut threads =
            Threads { shared: Arc::clone(&shared), lanes: Vec::new(), control: None, workers: Vec::new(), left: false };
        if config.world() == 1 {
            let memory = Arc::new(Memory::Private(Mapping::anonymous(arena * 4)?));
            let engines = (0..lanes).map(|_| Engine { local: None, ring: None }).collect();
            let (transport, local_address) = (Transport::None, config.rendezvous.clone());
            let parts =
                Parts { memory, engines, transport, links: Vec::new(), probed: None, local_address, clock_offset: 0 };
            return Communicator::assemble(threads, parts, buckets);
        }
        let result = join(config, &plan, &shared, &mut threads.control);
        match result.and_then(|parts| Communicator::finish(threads, parts, buckets)) {
            Ok(communicator) => Ok(communicator),
            // The root cause says more than what this rank saw of it.
            Err(error @ (CommError::Failed(_) | CommError::Missing { .. })) => Err(error),
            Err(error) => {
                Err(shared.failure().filter(|c| c.origin_rank != shared.rank).map_or(error, CommError::Failed))
            }
        }
    }

    fn finish(threads: Threads, parts: Parts, buckets: Vec<(usize, usize)>) -> Result<Communicator, CommError> {
        let mut communicator = Communicator::assemble(threads, parts, buckets)?;
        communicator.agree("the end of the set-up", &[])?;
        Ok(communicator)
    }

    fn assemble(mut threads: Threads, parts: Parts, buckets: Vec<(usize, usize)>) -> Result<Communicator, CommError> {
        let Parts { memory, engines, transport, links, probed, local_address, clock_offset } = parts;
        let shared = Arc::clone(&threads.shared);
        let mut lanes = Vec::with_capacity(engines.len());
        for (lane, engine) in engines.into_iter().enumerate() {
            let (memory, buckets) = (Arc::clone(&memory), buckets.clone());
            let queue = Arc::new(Queue::new((engine, lane), memory, buckets, Arc::clone(&shared)));
            threads.lanes.push(Arc::clone(&queue));
            let waking = Arc::downgrade(&queue);
            shared.on_failure(Box::new(move || {
                if let Some(queue) = waking.upgrade() {
                    queue.wake_caller();
                }
            }));
            if shared.world > 1 {
                let working = Arc::clone(&queue);
                threads.workers.push(spawn(&format!("collectives-{lane}"), move || working.run())?);
            }
            lanes.push(queue);
        }
        let (in_flight, timings) = (vec![None; buckets.len()], vec![None; buckets.len()]);
        let host = host::name();
        Ok(Communicator {
            threads,
            lanes,
            memory,
            shared,
            buckets,
            in_flight,
            timings,
            clock_offset,
            transport,
            links,
            probed,
            local_address,
            host,
            agreements: 0,
        })
    }

    /// Rank of this process among all ranks.
    pub fn rank(&self) -> u32 {
        self.shared.rank
    }

    pub fn world(&self) -> u32 {
        self.shared.world
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

    /// Local address of the control connection; on rank 0 the rendezvous address.
    pub fn local_address(&self) -> &str {
        &self.local_address
    }

    /// Host name of this process.
    pub fn host(&self) -> &str {
        &self.host
    }

    pub fn buckets(&self) -> usize {
        self.buckets.len()
    }

    /// All-reduces that can be in flight at a time: as many as asked for, but at most one per bucket.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Bytes that this rank has sent to other hosts in completed reductions, including headers. Traffic within a host
    /// does not count.
    pub fn bytes_sent(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.bytes_sent()).sum()
    }

    /// The times of the last completed reduction that began with this bucket.
    ///
    /// # Panics
    /// If there is no such bucket.
    pub fn timing(&self, bucket: usize) -> Option<Timing> {
        self.timings[bucket]
    }

    /// Microseconds to add to this host's wall clock to get that of rank 0's host, estimated when the group formed; 0
    /// on that host itself. The error is at most half of the fastest round trip, plus the drift of the clocks since
    /// then.
    pub fn clock_offset(&self) -> i64 {
        self.clock_offset
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
    /// See [`Communicator::bucket`].
    pub fn bucket_mut(&mut self, bucket: usize) -> &mut [f32] {
        let (start, len) = self.at_rest(bucket);
        // SAFETY: as in `bucket`, and `&mut self` excludes other references.
        unsafe { self.memory.slice_mut(start, len) }
    }

    /// Two different buckets, for writing at the same time.
    ///
    /// # Panics
    /// See [`Communicator::bucket`]; also if both are the same.
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
        self.shared.set_wire_scale(scale);
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
        let complete = self.lanes[lane].done(ticket)
            || self.recorded(Operation::Reduce, bucket as u32, || self.lanes[lane].wait(ticket));
        if complete {
            self.in_flight[bucket] = None;
            self.timings[bucket] = (!follows).then(|| self.lanes[lane].timing(bucket, started));
            return Ok(());
        }
        Err(self.root_cause())
    }

    /// Whether the bucket's reduction is not complete yet. Returns at once.
    pub fn is_under_way(&self, bucket: usize) -> bool {
        self.in_flight[bucket].is_some_and(|started| !self.lanes[started.lane].done(started.ticket))
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
        let (started, lane) = (Instant::now(), lane % self.lanes.len());
        let ticket = self.lanes[lane].push(&buckets, wake && self.shared.world > 1);
        for bucket in buckets.clone() {
            self.in_flight[bucket] = Some(InFlight { ticket, started, lane, follows: bucket > buckets.start });
        }
    }

    /// From now on, waits and progress are recorded there, and heartbeats say what it holds.
    pub(crate) fn record_to(&self, recorder: &Arc<Recorder>) {
        self.shared.record_to(Arc::clone(recorder));
        let shared = Arc::downgrade(&self.shared);
        recorder.count(move || shared.upgrade().map_or(0, |shared| shared.moved()));
    }

    /// Waits for other ranks, and then goes on with what the rank did before.
    fn recorded<T>(&self, operation: Operation, index: u32, wait: impl FnOnce() -> T) -> T {
        let Some(recorder) = self.shared.recorder() else { return wait() };
        let before = recorder.latest();
        recorder.begin(operation, index);
        let result = wait();
        // In a group that has failed this is what the rank did last.
        if !self.shared.failed() {
            recorder.begin(before.operation, before.index);
        }
        result
    }

    fn root_cause(&self) -> CommError {
        let cause = self.shared.failure().unwrap_or_else(|| Cause::failed(self.shared.rank, "unknown"));
        CommError::Failed(cause)
    }

    /// Returns `Ok` if every rank passes the same bytes (at most 4096) under the same name; otherwise every rank gets an
    /// error that names the ranks and their values. The group stays usable.
    pub fn agree(&mut self, what: &str, value: &[u8]) -> Result<(), CommError> {
        if value.len() > MAX_AGREE || what.len() > 256 {
            return Err(CommError::Group {
                got: format!("{} bytes to agree on under a name of {} bytes", value.len(), what.len()),
                expected: format!("at most {MAX_AGREE} and 256"),
            });
        }
        self.shared.check()?;
        self.agreements = self.agreements.wrapping_add(1);
        if self.shared.world == 1 {
            return Ok(());
        }
        self.shared.set_doing(&format!("agreement on {what}"));
        let (sequence, subject, value) = (self.agreements, what.to_owned(), value.to_owned());
        let result = self.recorded(Operation::Agree, 0, || {
            self.shared.request(Request::Agree(Ballot { sequence, subject, value }));
            self.shared.wait_agreed()
        });
        self.shared.set_doing("");
        result
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), CommError> {
        self.agree("a barrier", &[])
    }

    /// Ends the group: every rank gets this cause, unless an earlier one is known. Returns when rank 0 has confirmed, at
    /// most half a second later. Empty fields of the cause are filled in.
    pub fn abort(&self, cause: Cause) {
        self.shared.abort(cause);
    }

    /// A handle for another thread.
    pub fn aborter(&self) -> Aborter {
        Aborter(Arc::clone(&self.shared))
    }

    /// The root cause, once the group has failed.
    pub fn failure(&self) -> Option<Cause> {
        self.shared.failure()
    }

    /// What this rank's communication is doing, as text for people.
    pub fn activity(&self) -> String {
        self.shared.activity()
    }

    /// Connections that rank 0 refused, with reasons; at most 32.
    pub fn refusals(&self) -> Vec<String> {
        self.shared.refusals()
    }

    /// Leaves in good order: waits for reductions in flight, then for all ranks to leave. Until then the failure of any
    /// rank is an error here; afterwards nothing is.
    pub fn leave(mut self) -> Result<(), CommError> {
        for bucket in 0..self.buckets.len() {
            self.wait(bucket)?;
        }
        self.shared.check()?;
        if self.shared.world > 1 {
            self.shared.set_doing("the end of the job");
            self.recorded(Operation::Leave, 0, || {
                self.shared.request(Request::Leave);
                self.shared.wait_left()
            })?;
        }
        self.threads.left = true;
        Ok(())
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
