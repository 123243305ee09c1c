//! Streams: what waits in them, in which order it may run, and who has waited for it.
//!
//! There is one rule for all of it: an operation has a clock, and may run when everything before it has run. Events are clocks too.

use crate::clock::Clock;
use crate::gpu::work::Work;
use std::collections::VecDeque;
use std::sync::Arc;
use switchyard_cuda_reference::Random;

/// The default stream, which is in order with all that do not say otherwise.
pub(crate) const DEFAULT: usize = 0;

/// Work that was put into a stream.
pub(crate) struct Operation {
    pub(crate) name: Arc<str>,
    pub(crate) stream: usize,
    /// From 1 on.
    pub(crate) index: u64,
    /// Itself, and everything before it.
    pub(crate) clock: Clock,
    pub(crate) work: Work,
}

#[derive(Default)]
struct Stream {
    /// Everything that what is put into it next comes after.
    clock: Clock,
    pending: VecDeque<Operation>,
    /// In order with the default stream.
    is_blocking: bool,
    is_destroyed: bool,
}

/// All streams of a device.
pub(crate) struct Queue {
    streams: Vec<Stream>,
    /// What has run.
    done: Clock,
    /// What the host knows to be done.
    pub(crate) host: Clock,
    /// Nothing: as late as possible.
    random: Option<Random>,
}

impl Queue {
    pub(crate) fn new(seed: u64) -> Queue {
        let default = Stream { is_blocking: true, ..Stream::default() };
        let mut queue = Queue { streams: vec![default], done: Clock::default(), host: Clock::default(), random: None };
        queue.draw(seed);
        queue
    }

    /// From now on the order is that of a seed.
    pub(crate) fn draw(&mut self, seed: u64) {
        self.random = (seed != 0).then(|| Random::new(seed));
    }

    pub(crate) fn create(&mut self, is_blocking: bool) -> usize {
        self.streams.push(Stream { is_blocking, ..Stream::default() });
        self.streams.len() - 1
    }

    /// What is in it runs nevertheless.
    pub(crate) fn destroy(&mut self, stream: usize) {
        self.streams[stream].is_destroyed = true;
    }

    pub(crate) fn exists(&self, stream: usize) -> bool {
        self.streams.get(stream).is_some_and(|stream| !stream.is_destroyed)
    }

    /// Everything that is in a stream now.
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

    /// Everything that is in any stream.
    pub(crate) fn all(&self) -> Clock {
        let mut clock = self.host.clone();
        self.streams.iter().for_each(|stream| clock.join(&stream.clock));
        clock
    }

    /// What is put into a stream from now on comes after `clock`.
    pub(crate) fn wait(&mut self, stream: usize, clock: &Clock) {
        self.streams[stream].clock.join(clock);
    }

    /// Puts work into a stream; returns its number there.
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

    /// Takes out the next operation on the way to `target`; nothing if all of that has run, or waits for other devices.
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
        // The newest first is the order that a program would notice.
        let last = ready.len().checked_sub(1)?;
        let chosen = ready[self.random.as_mut().map_or(last, |random| random.below(last + 1))];
        let operation = self.streams[chosen].pending.pop_front().expect("invariant: it was ready");
        self.done.set(chosen, operation.index);
        Some(operation)
    }
}

#[cfg(test)]
mod tests;
