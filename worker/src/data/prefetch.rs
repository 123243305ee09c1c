//! The next micro-batch is ready when the current one is done: a thread fills it meanwhile.
//!
//! ```text
//!   reader's thread:  free buffer -> fill -> ready
//!   training thread:  ready -> use -> free buffer         two buffers in all
//! ```
//!
//! Whoever has nothing to do waits in a condition variable. After the start no memory is allocated.

use super::corpus::Corpus;
use super::error::DataError;
use super::sampler::{Sampler, Shape, fill};
use super::validation::TokenBatch;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

/// One is used while the other is filled.
const BUFFERS: usize = 2;

/// One rank's next micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch<'a> {
    /// Tokens, `batch_size` rows of `context_length`.
    pub inputs: &'a [u16],
    /// The token that follows each of them.
    pub targets: &'a [u16],
    /// The optimizer step it is for.
    pub step: u64,
    /// Which one of that step, below `merge`.
    pub micro_batch: u32,
}

/// A filled buffer, and what it is for.
#[derive(Debug)]
struct Buffer {
    tokens: TokenBatch,
    step: u64,
    micro_batch: u32,
}

#[derive(Debug)]
struct Queues {
    free: Vec<Buffer>,
    ready: VecDeque<Buffer>,
    /// The reader is to end.
    stop: bool,
    /// The reader has ended.
    ended: bool,
}

#[derive(Debug)]
struct Shared {
    queues: Mutex<Queues>,
    /// Something in `queues` changed.
    changed: Condvar,
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
    /// The one whose tokens the caller may be using.
    current: Option<Buffer>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetcher {
    /// Starts the reader of one rank at the first micro-batch of `first_step`.
    ///
    /// # Errors
    /// The thread cannot be started.
    ///
    /// # Panics
    /// `rank` is not below the world of the sampler's shape.
    pub fn start(corpus: Arc<Corpus>, sampler: Sampler, rank: u32, first_step: u64) -> Result<Self, DataError> {
        let Shape { batch_size, context_length, world, .. } = sampler.shape();
        assert!(rank < world, "rank {rank} of {world}");
        let buffer = || Buffer { tokens: TokenBatch::new(batch_size, context_length), step: 0, micro_batch: 0 };
        let shared = Arc::new(Shared {
            queues: Mutex::new(Queues {
                free: (0..BUFFERS).map(|_| buffer()).collect(),
                ready: VecDeque::with_capacity(BUFFERS),
                stop: false,
                ended: false,
            }),
            changed: Condvar::new(),
        });
        let reader = Reader { shared: Arc::clone(&shared), corpus, sampler, rank };
        let thread = Builder::new().name("reader".to_owned()).spawn(move || reader.run(first_step));
        Ok(Self { shared, current: None, thread: Some(thread.map_err(DataError::Thread)?) })
    }

    /// The next micro-batch; waits until it is filled. The one before is given back and filled anew.
    ///
    /// # Errors
    /// The reader's thread has ended, which is a bug.
    #[allow(clippy::should_implement_trait)] // An iterator could not lend what it returns.
    pub fn next(&mut self) -> Result<Batch<'_>, DataError> {
        if let Some(used) = self.current.take() {
            self.shared.lock().free.push(used);
            self.shared.changed.notify_all();
        }
        let mut queues = self.shared.wait_while(|queues| queues.ready.is_empty() && !queues.ended);
        let buffer = queues.ready.pop_front().ok_or(DataError::ReaderEnded)?;
        drop(queues);
        let buffer = self.current.insert(buffer);
        Ok(Batch {
            inputs: &buffer.tokens.inputs,
            targets: &buffer.tokens.targets,
            step: buffer.step,
            micro_batch: buffer.micro_batch,
        })
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic of the reader was printed and reported as `ReaderEnded`.
            let _ = thread.join();
        }
    }
}

/// The thread's side.
struct Reader {
    shared: Arc<Shared>,
    corpus: Arc<Corpus>,
    sampler: Sampler,
    rank: u32,
}

impl Reader {
    fn run(self, first_step: u64) {
        for step in first_step.. {
            for micro_batch in 0..self.sampler.shape().merge {
                let mut queues = self.shared.wait_while(|queues| queues.free.is_empty() && !queues.stop);
                if queues.stop {
                    return;
                }
                let Some(mut buffer) = queues.free.pop() else { return };
                drop(queues);
                let starts = self.sampler.micro_batch(step, self.rank, micro_batch);
                fill(self.corpus.train(), starts, &mut buffer.tokens.inputs, &mut buffer.tokens.targets);
                (buffer.step, buffer.micro_batch) = (step, micro_batch);
                self.shared.lock().ready.push_back(buffer);
                self.shared.changed.notify_all();
            }
        }
    }
}

impl Drop for Reader {
    /// Also after a panic: who waits for a batch must not wait for ever.
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests;
