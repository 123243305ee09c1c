//! Persistent compute threads.
//!
//! ```text
//! caller: publish job -> open -> take tasks -> close -> wait for the workers that joined
//! worker: spin, then park ... join an open job -> take tasks -> leave
//! ```
//!
//! The caller is thread 0 and never waits for a worker that has not joined, so a late worker on a
//! busy machine costs nothing. Between jobs, workers spin for a few microseconds and then sleep.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Pause instructions before a worker parks: a few tens of microseconds.
const SPINS: u32 = 4_000;

/// Low bits of `state`: workers inside the open job.
const JOINED: u64 = 0xffff;
/// Set while the job may be joined.
const OPEN: u64 = 1 << 16;
/// Increment per job.
const GENERATION: u64 = 1 << 32;

type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A job as seen by the workers.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    tasks: usize,
}

struct PoolState {
    /// Generation, open bit and number of joined workers in one word, so that joining and closing
    /// cannot race.
    word: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// Whether workers record their busy spans.
    recording: AtomicBool,
    spans: Mutex<Vec<Span>>,
    shutdown: AtomicBool,
    /// Workers that might be sleeping on `wake`; while it is 0, the publisher needs no system call.
    sleepers: AtomicUsize,
    /// 1 while the caller might be sleeping on `left`.
    caller_sleeps: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    left: Condvar,
}

// SAFETY: `job` is written only by the caller while the job is closed and no worker is joined, and
// read only by workers that joined after the open bit was set (acquire/release through `word`). It
// points to a `Sync` closure.
unsafe impl Sync for PoolState {}
// SAFETY: as above; the raw pointer is the only field that is not `Send`.
unsafe impl Send for PoolState {}

/// A period in which a compute thread worked on one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Thread index, starting at 1.
    pub thread: usize,
    /// When it joined the job.
    pub start: Instant,
    /// When the thread ran out of tasks.
    pub end: Instant,
}

/// A fixed number of compute threads; thread 0 is the caller of [`Pool::run`].
pub struct Pool {
    state: Arc<PoolState>,
    workers: Vec<JoinHandle<()>>,
    /// Held for the duration of a job, so that jobs of concurrent callers run one after another.
    run_lock: Mutex<()>,
}

thread_local! {
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No task panics while one of these locks is held, and the data are valid at every step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// A pool of `threads` (at least 1), including the caller.
    ///
    /// # Panics
    /// If the operating system refuses to start a thread.
    pub fn new(threads: usize) -> Pool {
        let state = Arc::new(PoolState {
            word: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            panic: Mutex::new(None),
            recording: AtomicBool::new(false),
            spans: Mutex::new(Vec::new()),
            shutdown: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            left: Condvar::new(),
        });
        let spawn = |thread: usize| {
            let state = Arc::clone(&state);
            let builder = std::thread::Builder::new().name(format!("compute-{thread}"));
            builder
                .spawn(move || worker_loop(&state, thread))
                .unwrap_or_else(|e| panic!("cannot start compute thread: {e}"))
        };
        let workers = (1..threads.clamp(1, JOINED as usize)).map(spawn).collect();
        Pool { state, workers, run_lock: Mutex::new(()) }
    }

    /// Switches the recording of the workers' busy spans on or off, and returns the spans recorded
    /// so far. The caller (thread 0) times itself.
    pub fn record(&self, on: bool) -> Vec<Span> {
        self.state.recording.store(on, Ordering::Relaxed);
        std::mem::take(&mut *lock(&self.state.spans))
    }

    /// Number of threads that run tasks, including the caller.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i, thread)` once for each `i < tasks`, distributed over the threads, and returns
    /// when all are done. `thread < self.threads()`; concurrently running tasks see different
    /// values.
    ///
    /// # Panics
    /// With the payload of a task that panicked (other tasks can then be skipped), or if called
    /// from within a task.
    pub fn run(&self, tasks: usize, task: &Task<'_>) {
        if self.workers.is_empty() || tasks <= 1 {
            for i in 0..tasks {
                task(i, 0);
            }
            return;
        }
        assert!(!IN_TASK.get(), "Pool::run called from inside a task");
        let _guard = lock(&self.run_lock);
        let state = &*self.state;
        // SAFETY: only the lifetime changes. Only joined workers use the pointer, and this function
        // returns after the job is closed and all of them have left.
        let task: &Task<'static> = unsafe { std::mem::transmute::<&Task<'_>, &Task<'static>>(task) };
        // SAFETY: the job is closed and no worker is joined (end of the last `run`), so nothing
        // else accesses `job`.
        unsafe { *state.job.get() = Some(Job { task, tasks }) };
        state.next.store(0, Ordering::Relaxed);
        state.word.fetch_add(GENERATION | OPEN, Ordering::SeqCst);
        if state.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&state.lock);
            state.wake.notify_all();
        }
        take_tasks(state, Job { task, tasks }, 0);
        state.word.fetch_and(!OPEN, Ordering::SeqCst);
        wait_for_workers(state);
        if let Some(payload) = lock(&state.panic).take() {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.shutdown.store(true, Ordering::SeqCst);
        {
            let _guard = lock(&self.state.lock);
            self.state.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker cannot panic: tasks run under `catch_unwind`.
            let _ = worker.join();
        }
    }
}

fn take_tasks(state: &PoolState, job: Job, thread: usize) {
    IN_TASK.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller keeps the closure alive until every worker that joined has left.
        let task = unsafe { &*job.task };
        loop {
            let i = state.next.fetch_add(1, Ordering::Relaxed);
            if i >= job.tasks {
                break;
            }
            task(i, thread);
        }
    }));
    IN_TASK.set(false);
    if let Err(payload) = outcome {
        // Start no further tasks. Half the range leaves room for the other threads' increments.
        state.next.store(usize::MAX / 2, Ordering::Relaxed);
        lock(&state.panic).get_or_insert(payload);
    }
}

fn wait_for_workers(state: &PoolState) {
    let left = || state.word.load(Ordering::SeqCst) & JOINED == 0;
    for _ in 0..SPINS {
        if left() {
            return;
        }
        std::hint::spin_loop();
    }
    let mut guard = lock(&state.lock);
    state.caller_sleeps.store(1, Ordering::SeqCst);
    while !left() {
        guard = state.left.wait(guard).unwrap_or_else(PoisonError::into_inner);
    }
    state.caller_sleeps.store(0, Ordering::SeqCst);
}

fn worker_loop(state: &PoolState, thread: usize) {
    let mut seen = 0;
    while let Some(generation) = join(state, seen) {
        seen = generation;
        // SAFETY: this worker joined the open job, so the caller does not touch `job` until it has
        // left.
        if let Some(job) = unsafe { *state.job.get() } {
            let start = state.recording.load(Ordering::Relaxed).then(Instant::now);
            take_tasks(state, job, thread);
            if let Some(start) = start {
                lock(&state.spans).push(Span { thread, start, end: Instant::now() });
            }
        }
        let before = state.word.fetch_sub(1, Ordering::SeqCst);
        if before & JOINED == 1 && state.caller_sleeps.load(Ordering::SeqCst) == 1 {
            let _guard = lock(&state.lock);
            state.left.notify_one();
        }
    }
}

/// Waits for an open job newer than `seen` and joins it; `None` at shutdown.
fn join(state: &PoolState, seen: u64) -> Option<u64> {
    let mut spins = 0;
    loop {
        if state.shutdown.load(Ordering::SeqCst) {
            return None;
        }
        let word = state.word.load(Ordering::SeqCst);
        if joinable(word, seen) {
            if state.word.compare_exchange(word, word + 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                return Some(word / GENERATION);
            }
            continue;
        }
        spins += 1;
        if spins < SPINS {
            std::hint::spin_loop();
            continue;
        }
        let mut guard = lock(&state.lock);
        state.sleepers.fetch_add(1, Ordering::SeqCst);
        while !joinable(state.word.load(Ordering::SeqCst), seen) && !state.shutdown.load(Ordering::SeqCst) {
            guard = state.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        state.sleepers.fetch_sub(1, Ordering::SeqCst);
        drop(guard);
        spins = 0;
    }
}

fn joinable(word: u64, seen: u64) -> bool {
    word & OPEN != 0 && word / GENERATION != seen
}

/// A slice whose disjoint pieces are written by the tasks of one [`Pool::run`].
pub struct Shared<'a, T> {
    start: *mut T,
    len: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Shared` hands out `&mut [T]` pieces to several threads, which amounts to sending `T`;
// the caller of `piece` keeps them disjoint.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    /// Borrows the slice for as long as pieces are in use.
    pub fn new(slice: &'a mut [T]) -> Shared<'a, T> {
        Shared { start: slice.as_mut_ptr(), len: slice.len(), owner: PhantomData }
    }

    /// The elements in `range`.
    ///
    /// # Safety
    /// No two pieces alive at the same time may overlap.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn piece(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "piece {range:?} of {}", self.len);
        // SAFETY: in bounds of the slice borrowed in `new`; disjoint, as promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Start of the slice, for kernels with strided access. Every use must justify bounds and
    /// disjointness.
    pub(crate) fn pointer(&self) -> *mut T {
        self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads);
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|i, thread| {
                    assert!(thread < threads);
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn many_short_jobs_and_pauses() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        for round in 0..3000 {
            pool.run(4, &|i, _| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            if round % 1000 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        assert_eq!(sum.load(Ordering::Relaxed), 3000 * 6);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        for threads in [1, 3] {
            let pool = Pool::new(threads);
            for victim in 0..8 {
                let outcome = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(8, &|i, _| assert!(i != victim, "task {i} fails"));
                }));
                let payload = outcome.unwrap_err();
                assert!(payload.downcast_ref::<String>().unwrap().contains("fails"));
            }
            let done = AtomicUsize::new(0);
            pool.run(8, &|_, _| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 8);
        }
    }

    #[test]
    fn idle_workers_sleep() {
        let pool = Pool::new(3);
        pool.run(3, &|_, _| {});
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert_eq!(pool.state.sleepers.load(Ordering::SeqCst), 2);
    }
}
