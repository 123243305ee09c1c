//! Prefetches micro-batches: reader threads fill the next ones while the current one is in use.
//!
//! ```text
//!   reader threads:   free buffer + next number -> fill -> ready
//!   training thread:  ready, by number -> use -> free buffer
//! ```
//!
//! Each thread fills a whole micro-batch, so the threads are independent. Numbers are assigned and
//! delivered in order, and the content of a batch depends only on its number. There is one buffer
//! per thread and one in use. Idle threads wait on a condition variable. After startup the training
//! thread does not allocate.

use super::bad::{BadSamples, Side};
use super::batch::{Batch, Making};
use super::dataset::Dataset;
use super::error::DataError;
use super::order::{Order, StepShape};
use super::part::Scratch;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::Reader;

/// A filled buffer, or the error.
type Filled = Result<Batch, DataError>;

#[derive(Debug)]
struct Queues {
    free: Vec<Batch>,
    /// Filled batches with their numbers, in any order.
    ready: Vec<(u64, Filled)>,
    /// The next number to assign: micro-batches counted from the first one of step 0.
    next: u64,
    /// Numbers from here on must not be assigned yet.
    end: u64,
    /// The threads must exit.
    stop: bool,
    /// The panic message of a thread that ended unexpectedly.
    ended: Option<String>,
}

#[derive(Debug)]
struct Shared {
    queues: Mutex<Queues>,
    /// Signalled when `queues` changes.
    changed: Condvar,
    /// Mirrors `stop` in `queues`, for threads that are filling a batch.
    stop: AtomicBool,
    /// Total filling time of all threads in nanoseconds.
    busy: AtomicU64,
    /// Samples produced in that time.
    produced: AtomicU64,
    /// Samples started.
    begun: Arc<AtomicU64>,
    dataset: Arc<Dataset>,
    order: Order,
    rank: u32,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // No critical section can leave the queues inconsistent.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while(&self, condition: impl FnMut(&mut Queues) -> bool) -> MutexGuard<'_, Queues> {
        self.changed.wait_while(self.lock(), condition).unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rank's infinite stream of micro-batches: the last step of an epoch is followed by the first
/// step of the next.
#[derive(Debug)]
pub struct Prefetcher {
    shared: Arc<Shared>,
    /// The batch lent to the caller.
    current: Option<Batch>,
    /// The next number to deliver.
    next: u64,
    /// Whether the threads run ahead into the next epoch without waiting.
    infinite: bool,
    bad: BadSamples,
    threads: Vec<JoinHandle<()>>,
    measurement: Option<Measurement>,
}

/// Micro-batches before the measurement: the first ones wait for caches, compilers and connections.
const WARM: usize = 2;
/// Micro-batches that are measured before threads are added.
const MEASURED: usize = 9;
/// Reading speed relative to the training, so that the reader recovers from a slow batch.
const HEADROOM: f64 = 1.25;
/// Most threads without a setting.
const MOST: u32 = 16;

/// Most threads of a reader without `reader.workers`: on a GPU all CPUs of the rank but the one
/// that launches kernels, otherwise every second, because computing needs all of them.
pub fn most_threads(cpus: u32, on_gpu: bool) -> u32 {
    let free = if on_gpu { cpus.saturating_sub(1) } else { cpus / 2 };
    free.clamp(1, MOST)
}

/// Threads that read a micro-batch as fast as it is trained on. `read` is the time that one thread
/// takes, `train` the time that the training takes.
fn enough_threads(read: Duration, train: Duration, most: u32) -> u32 {
    let ratio = HEADROOM * read.as_secs_f64() / train.as_secs_f64().max(1e-9);
    (ratio.ceil() as u32).clamp(1, most)
}

/// Measures one reader thread against the training.
#[derive(Debug)]
struct Measurement {
    most: u32,
    /// Whether to log the result.
    logs: bool,
    /// When the last micro-batch was delivered.
    delivered: Option<Instant>,
    /// Times that the training took for a micro-batch.
    train: Vec<Duration>,
}

/// Number of buffers of a reader: without double buffering, a batch is filled after the previous
/// one is returned.
fn buffers(reader: &Reader) -> u32 {
    if reader.double_buffer { reader.workers.unwrap_or(1).max(1).saturating_add(1) } else { 1 }
}

impl Prefetcher {
    /// Starts the reader of one rank at the first micro-batch of `first_step` (counted from 0).
    ///
    /// # Errors
    /// A thread cannot be started.
    ///
    /// # Panics
    /// `rank` is not below the world of the order's shape.
    pub fn start(
        dataset: Arc<Dataset>,
        order: Order,
        rank: u32,
        first_step: u64,
        reader: &Reader,
    ) -> Result<Self, DataError> {
        let StepShape { batch_size, merge, world } = order.shape();
        assert!(rank < world, "rank {rank} of {world}");
        let next = first_step * u64::from(merge);
        let buffers = buffers(reader);
        let infinite = reader.infinite;
        let bad = dataset.bad_samples();
        let shared = Arc::new(Shared {
            queues: Mutex::new(Queues {
                free: (0..buffers).map(|_| dataset.batch(batch_size)).collect(),
                ready: Vec::with_capacity(buffers as usize),
                next,
                end: end(&order, infinite, next),
                stop: false,
                ended: None,
            }),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            busy: AtomicU64::new(0),
            produced: AtomicU64::new(0),
            begun: Arc::default(),
            dataset,
            order,
            rank,
        });
        let mut prefetcher =
            Prefetcher { shared, current: None, next, infinite, bad, threads: Vec::new(), measurement: None };
        (0..reader.workers.unwrap_or(1).max(1)).try_for_each(|_| prefetcher.add_thread())?;
        Ok(prefetcher)
    }

    fn add_thread(&mut self) -> Result<(), DataError> {
        let (shared, number) = (Arc::clone(&self.shared), self.threads.len() as u32);
        let thread = Builder::new().name("reader".to_owned()).spawn(move || shared.work(number));
        self.threads.push(thread.map_err(DataError::Thread)?);
        Ok(())
    }

    /// Adds threads and buffers, at most to `most` threads, once some micro-batches show that one
    /// thread cannot keep up with the training. `logs`: whether to log the measured times. The
    /// samples stay the same.
    pub fn adapt(&mut self, most: u32, logs: bool) {
        let train = Vec::with_capacity(MEASURED);
        self.measurement = (most > 1).then_some(Measurement { most, logs, delivered: None, train });
    }

    pub fn thread_count(&self) -> u32 {
        self.threads.len() as u32
    }

    /// Notes how long the training took for the last micro-batch, and adds threads after enough of
    /// them.
    fn measure(&mut self) -> Result<(), DataError> {
        let Some(measurement) = &mut self.measurement else { return Ok(()) };
        measurement.train.extend(measurement.delivered.map(|delivered| delivered.elapsed()));
        if measurement.train.len() < WARM + MEASURED {
            return Ok(());
        }
        let Some(Measurement { most, logs, mut train, .. }) = self.measurement.take() else { return Ok(()) };
        let busy = Duration::from_nanos(self.shared.busy.load(Ordering::Relaxed));
        let batch_size = u64::from(self.shared.order.shape().batch_size);
        let read = busy / u32::try_from(self.samples_made() / batch_size).unwrap_or(u32::MAX).max(1);
        // An evaluation or a checkpoint lengthens some of the times.
        train.drain(..WARM);
        train.sort_unstable();
        let train = train[train.len() / 2];
        let threads = enough_threads(read, train, most);
        if logs && threads > 1 {
            let [read, train] = [read, train].map(|time| 1e3 * time.as_secs_f64());
            eprintln!(
                "note: the reader has {threads} threads: one reads a micro-batch in {read:.1} ms, and training on it \
                 takes {train:.1} ms; at most {most} for the CPUs of the rank; spec.engine.reader.workers overrides this"
            );
        }
        for _ in 1..threads {
            let batch = self.shared.dataset.batch(self.shared.order.shape().batch_size);
            self.shared.lock().free.push(batch);
            self.add_thread()?;
        }
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Buffer memory of a reader in bytes.
    pub fn memory_bytes(dataset: &Dataset, batch_size: u32, reader: &Reader) -> u64 {
        u64::from(buffers(reader)) * dataset.batch_bytes(batch_size)
    }

    /// Returns the next micro-batch once it is filled, and recycles the previous one.
    ///
    /// # Errors
    /// The data can no longer be read, more samples are unreadable than allowed, or a thread ended,
    /// which is a bug.
    #[allow(clippy::should_implement_trait)] // An iterator cannot lend its items.
    pub fn next(&mut self) -> Result<&Batch, DataError> {
        self.measure()?;
        let number = self.next;
        let mut queues = self.shared.lock();
        queues.end = end(&self.shared.order, self.infinite, number);
        queues.free.extend(self.current.take());
        drop(queues);
        self.shared.changed.notify_all();
        let place = |queues: &Queues| queues.ready.iter().position(|(ready, _)| *ready == number);
        let mut queues = self.shared.wait_while(|queues| place(queues).is_none() && queues.ended.is_none());
        let Some(place) = place(&queues) else {
            return Err(DataError::ReaderEnded(queues.ended.clone().unwrap_or_default()));
        };
        let (_, filled) = queues.ready.swap_remove(place);
        drop(queues);
        match filled.and_then(|batch| self.accept(batch)) {
            Ok(batch) => {
                self.next += 1;
                if let Some(measurement) = &mut self.measurement {
                    measurement.delivered = Some(Instant::now());
                }
                Ok(self.current.insert(batch))
            }
            Err(error) => {
                // This number will not be assigned again, so a second call must not wait for it.
                self.shared.lock().ended = Some(error.to_string());
                Err(error)
            }
        }
    }

    /// Counts a batch's bad samples.
    fn accept(&self, mut batch: Batch) -> Result<Batch, DataError> {
        batch.bad.drain(..).try_for_each(|bad| self.bad.record(Side::Training, bad))?;
        Ok(batch)
    }

    /// Samples per second that the threads could produce together if they never waited for the
    /// training, each on its own core; `None` before the first batch.
    pub fn capacity(&self) -> Option<f64> {
        let busy = Duration::from_nanos(self.shared.busy.load(Ordering::Relaxed)).as_secs_f64();
        let made = self.samples_made();
        (made > 0 && busy > 0.0).then(|| made as f64 / busy * self.threads.len() as f64)
    }

    /// Samples produced so far, including undelivered batches.
    pub fn samples_made(&self) -> u64 {
        self.shared.produced.load(Ordering::Relaxed)
    }

    /// A counter of samples started, for use by another thread.
    pub fn begun(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.shared.begun)
    }

    /// The bad-sample counter, which the validation set shares.
    pub fn bad_samples(&self) -> &BadSamples {
        &self.bad
    }
}

/// The first number that must not be assigned while `number` is awaited: unless the stream is
/// infinite, the first number of the next epoch.
fn end(order: &Order, infinite: bool, number: u64) -> u64 {
    let merge = u64::from(order.shape().merge);
    if infinite { u64::MAX } else { order.end_of_epoch(number / merge) * merge }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            // Panics were caught and reported.
            let _ = thread.join();
        }
    }
}

/// The thread side.
impl Shared {
    fn work(&self, thread: u32) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.fill_until_stopped(thread))) {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic");
            // A call waiting for a batch must not hang.
            self.lock().ended = Some(text.to_owned());
            self.changed.notify_all();
        }
    }

    fn fill_until_stopped(&self, thread: u32) {
        let mut scratch = Scratch::default();
        loop {
            let mut queues =
                self.wait_while(|queues| (queues.free.is_empty() || queues.next >= queues.end) && !queues.stop);
            if queues.stop {
                return;
            }
            let Some(mut batch) = queues.free.pop() else { return };
            let number = queues.next;
            queues.next += 1;
            drop(queues);
            let start = Instant::now();
            let filled = self.fill(number, &mut batch, &mut scratch);
            let making = Making { thread, start, end: Instant::now() };
            batch.making = Some(making);
            self.busy.fetch_add(making.took().as_nanos() as u64, Ordering::Relaxed);
            self.produced.fetch_add(self.order.shape().batch_size.into(), Ordering::Relaxed);
            self.lock().ready.push((number, filled.map(|()| batch)));
            self.changed.notify_all();
        }
    }

    fn fill(&self, number: u64, batch: &mut Batch, scratch: &mut Scratch) -> Result<(), DataError> {
        let merge = u64::from(self.order.shape().merge);
        (batch.step, batch.micro_batch) = (number / merge, (number % merge) as u32);
        let epoch = self.order.epoch_order(self.order.epoch(batch.step));
        let positions = self.order.positions(batch.step, self.rank, batch.micro_batch);
        let stop = || {
            // Called before each sample.
            self.begun.fetch_add(1, Ordering::Relaxed);
            self.stop.load(Ordering::Relaxed)
        };
        self.dataset.fill_training(batch, positions, |position| epoch.draw(position), scratch, stop)
    }
}

#[cfg(test)]
mod tests;
