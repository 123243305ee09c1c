//! The next micro-batch is ready when the current one is done: threads fill the next ones meanwhile.
//!
//! ```text
//!   reader's threads:  free buffer + next number -> fill -> ready
//!   training thread:   ready, by number -> use -> free buffer
//! ```
//!
//! A thread makes a whole micro-batch, so that the threads need nothing of each other; the numbers are given out in
//! order and delivered in order, and what is in a batch depends on its number only. There is a buffer for each thread
//! and one that is in use. Whoever has nothing to do waits in a condition variable. After the start the training thread
//! allocates no memory.

use super::bad::{BadSamples, Side};
use super::batch::{Batch, Making};
use super::dataset::Dataset;
use super::error::DataError;
use super::order::{Order, Shape};
use super::part::Scratch;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use switchyard_worker_contract::config::Reader;

/// A filled buffer, or why there is none.
type Filled = Result<Batch, DataError>;

#[derive(Debug)]
struct Queues {
    free: Vec<Batch>,
    /// Not in order; each with its number.
    ready: Vec<(u64, Filled)>,
    /// The number that is given out next: micro-batches from the first one of step 0.
    next: u64,
    /// No number from here on is given out yet.
    end: u64,
    /// The threads are to end.
    stop: bool,
    /// A thread has ended by itself: its last words.
    ended: Option<String>,
}

#[derive(Debug)]
struct Shared {
    queues: Mutex<Queues>,
    /// Something in `queues` changed.
    changed: Condvar,
    /// As `stop` in `queues`, for a thread that is in the middle of a batch.
    stop: AtomicBool,
    /// Time that the threads worked, ns.
    busy: AtomicU64,
    /// Samples they made in it.
    made: AtomicU64,
    dataset: Arc<Dataset>,
    order: Order,
    rank: u32,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queues> {
        // Nothing in the critical sections can leave the queues half changed.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_while(&self, condition: impl FnMut(&mut Queues) -> bool) -> MutexGuard<'_, Queues> {
        self.changed.wait_while(self.lock(), condition).unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rank's stream of micro-batches, without an end: after the last step of an epoch comes the first of the next one.
#[derive(Debug)]
pub struct Prefetcher {
    shared: Arc<Shared>,
    /// The one that the caller may be using.
    current: Option<Batch>,
    /// The number of the one that is asked for next.
    next: u64,
    /// The threads do not wait at the end of an epoch.
    infinite: bool,
    bad: BadSamples,
    threads: Vec<JoinHandle<()>>,
}

/// Buffers of a reader: without a double buffer a batch is made when the one before is given back.
fn buffers(reader: &Reader) -> u32 {
    if reader.double_buffer { reader.workers.max(1).saturating_add(1) } else { 1 }
}

impl Prefetcher {
    /// Starts the reader of one rank at the first micro-batch of `first_step`, from 0. Any step can be the first.
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
        let Shape { batch_size, merge, world } = order.shape();
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
            made: AtomicU64::new(0),
            dataset,
            order,
            rank,
        });
        let mut prefetcher = Prefetcher { shared, current: None, next, infinite, bad, threads: Vec::new() };
        for number in 0..reader.workers.max(1) {
            let shared = Arc::clone(&prefetcher.shared);
            let thread = Builder::new().name("reader".to_owned()).spawn(move || shared.work(number));
            prefetcher.threads.push(thread.map_err(DataError::Thread)?);
        }
        Ok(prefetcher)
    }

    /// Bytes of the buffers of a reader.
    pub fn memory_bytes(dataset: &Dataset, batch_size: u32, reader: &Reader) -> u64 {
        u64::from(buffers(reader)) * dataset.batch_bytes(batch_size)
    }

    /// The next micro-batch; waits until it is filled. The one before is given back and filled anew.
    ///
    /// # Errors
    /// The data cannot be read any more, more samples than are allowed cannot be, or a thread ended, which is a bug.
    #[allow(clippy::should_implement_trait)] // An iterator could not lend what it returns.
    pub fn next(&mut self) -> Result<&Batch, DataError> {
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
                Ok(self.current.insert(batch))
            }
            Err(error) => {
                // This number is not given out again: who asks once more must not wait for it.
                self.shared.lock().ended = Some(error.to_string());
                Err(error)
            }
        }
    }

    /// Counts the bad samples of a batch.
    fn accept(&self, mut batch: Batch) -> Result<Batch, DataError> {
        batch.bad.drain(..).try_for_each(|bad| self.bad.note(Side::Training, bad))?;
        Ok(batch)
    }

    /// Samples per second that the threads can make together when they never wait for the training; `None` before the
    /// first batch. It counts on a core for each thread.
    pub fn capacity(&self) -> Option<f64> {
        let busy = Duration::from_nanos(self.shared.busy.load(Ordering::Relaxed)).as_secs_f64();
        let made = self.samples_made();
        (made > 0 && busy > 0.0).then(|| made as f64 / busy * self.threads.len() as f64)
    }

    /// Samples made so far, those of batches that were not asked for yet included.
    pub fn samples_made(&self) -> u64 {
        self.shared.made.load(Ordering::Relaxed)
    }

    /// The count of samples that cannot be read, which the validation set shares.
    pub fn bad_samples(&self) -> &BadSamples {
        &self.bad
    }
}

/// The first number that may not be given out while `number` is asked for: with an end of epochs, the first one of the next.
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
            // Its panics were caught and told.
            let _ = thread.join();
        }
    }
}

/// The threads' side.
impl Shared {
    fn work(&self, thread: u32) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.fill_until_stopped(thread))) {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("panic");
            // Who waits for a batch must not wait for ever.
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
            self.made.fetch_add(self.order.shape().batch_size.into(), Ordering::Relaxed);
            self.lock().ready.push((number, filled.map(|()| batch)));
            self.changed.notify_all();
        }
    }

    fn fill(&self, number: u64, batch: &mut Batch, scratch: &mut Scratch) -> Result<(), DataError> {
        let merge = u64::from(self.order.shape().merge);
        (batch.step, batch.micro_batch) = (number / merge, (number % merge) as u32);
        let epoch = self.order.epoch_order(self.order.epoch(batch.step));
        let positions = self.order.positions(batch.step, self.rank, batch.micro_batch);
        let stop = || self.stop.load(Ordering::Relaxed);
        self.dataset.fill_training(batch, positions, |position| epoch.draw(position), scratch, stop)
    }
}

#[cfg(test)]
mod tests;
