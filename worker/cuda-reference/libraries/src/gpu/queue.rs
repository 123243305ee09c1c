//! Streams: pending operations, their legal orders, and what the host has waited for.
//!
//! One rule governs everything: an operation has a clock, and can run once everything before it has
//! run. Events are clocks too.

use crate::clock::Clock;
use crate::gpu::work::Work;
use std::collections::VecDeque;
use std::sync::Arc;
use switchyard_cuda_reference::Random;

/// The default stream, ordered with all streams that do not opt out.
pub(crate) const DEFAULT: usize = 0;

/// Work in a stream.
pub(crate) struct Operation {
    pub(crate) name: Arc<str>,
    pub(crate) stream: usize,
    /// Position in its stream, from 1.
    pub(crate) index: u64,
    /// Itself, and everything before it.
    pub(crate) clock: Clock,
    pub(crate) work: Work,
}

#[derive(Default)]
struct Stream {
    /// Predecessors of the next operation put into it.
    clock: Clock,
    pending: VecDeque<Operation>,
    /// Ordered with the default stream.
    is_blocking: bool,
    is_destroyed: bool,
}

/// All streams of a device.
pub(crate) struct Queue {
    streams: Vec<Stream>,
    /// Operations that have run.
    done: Clock,
    /// Operations known to the host to have completed.
    pub(crate) host: Clock,
    /// `None` runs everything as late as possible.
    random: Option<Random>,
}

impl Queue {
    pub(crate) fn new(seed: u64) -> Queue {
        let default = Stream { is_blocking: true, ..Stream::default() };
        let mut queue = Queue { streams: vec![default], done: Clock::default(), host: Clock::default(), random: None };
        queue.randomize(seed);
        queue
    }

    /// Switches to a random order with this seed.
    pub(crate) fn randomize(&mut self, seed: u64) {
        self.random = (seed != 0).then(|| Random::new(seed));
    }

    pub(crate) fn create(&mut self, is_blocking: bool) -> usize {
        self.streams.push(Stream { is_blocking, ..Stream::default() });
        self.streams.len() - 1
    }

    /// Operations already in it still run.
    pub(crate) fn destroy(&mut self, stream: usize) {
        self.streams[stream].is_destroyed = true;
    }

    pub(crate) fn exists(&self, stream: usize) -> bool {
        self.streams.get(stream).is_some_and(|stream| !stream.is_destroyed)
    }

    /// Everything now in a stream.
    pub(crate) fn now(&self, stream: usize) -> Clock {
        let mut clock = self.streams[stream].clock.clone();
        if self.streams[stream].is_blocking {
            let others = self.streams.iter().enumerate().filter(|(_, other)| other.is_blocking);
            let others = others.filter(|(other, _)| stream == DEFAULT || *other == DEFAULT);
            others.for_each(|(_, other)| clock.join(&other.clock));
        }
        clock.join(&self.host);
        clock
    }

    /// Everything now in any stream.
    pub(crate) fn all(&self) -> Clock {
        let mut clock = self.host.clone();
        self.streams.iter().for_each(|stream| clock.join(&stream.clock));
        clock
    }

    /// Orders all later operations of a stream after `clock`.
    pub(crate) fn wait(&mut self, stream: usize, clock: &Clock) {
        self.streams[stream].clock.join(clock);
    }

    /// Adds work to a stream; returns its position there.
    pub(crate) fn put(&mut self, stream: usize, name: Arc<str>, work: Work) -> u64 {
        let mut clock = self.now(stream);
        let index = clock.get(stream) + 1;
        clock.set(stream, index);
        self.streams[stream].clock = clock.clone();
        self.streams[stream].pending.push_back(Operation { name, stream, index, clock, work });
        index
    }

    pub(crate) fn is_done(&self, clock: &Clock) -> bool {
        self.done.covers(clock)
    }

    pub(crate) fn pending(&mut self) -> impl Iterator<Item = &mut Operation> {
        self.streams.iter_mut().flat_map(|stream| &mut stream.pending)
    }

    /// Takes the next operation towards `target`; `None` if all have run, or depend on other
    /// devices.
    pub(crate) fn next(&mut self, target: &Clock) -> Option<Operation> {
        if self.is_done(target) {
            return None;
        }
        let ready = |(index, stream): (usize, &Stream)| {
            let operation = stream.pending.front()?;
            let mut before = operation.clock.clone();
            before.set(index, operation.index - 1);
            let is_wanted = self.random.is_some() || operation.index <= target.get(index);
            (is_wanted && self.done.covers(&before) && operation.work.may_run()).then_some(index)
        };
        let ready: Vec<usize> = self.streams.iter().enumerate().filter_map(ready).collect();
        // Newest first is the order that is most likely to expose a missing dependency.
        let last = ready.len().checked_sub(1)?;
        let chosen = ready[self.random.as_mut().map_or(last, |random| random.below(last + 1))];
        let operation = self.streams[chosen].pending.pop_front().expect("invariant: it was ready");
        self.done.set(chosen, operation.index);
        Some(operation)
    }
}

#[cfg(test)]
mod tests;
