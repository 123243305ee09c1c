//! What each work of a profiled step takes by the clock of the device: an event before it and one behind it. The works are then queued one by
//! one, since events within a graph have no times that anybody could read.

use crate::gpu::Costed;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Event, Stream};
use switchyard_worker_contract::kernels::{KernelTimes, Launches};

pub(super) struct Times {
    on: bool,
    works: Marked<(Costed, Follows)>,
    /// With their bytes.
    copies: Marked<usize>,
    sum: KernelTimes,
}

/// Whether the work before was queued at once with a work, so that what lies between them is a gap.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Follows {
    Nothing,
    Work,
}

/// What was queued in a step between two events each; the events are used again.
struct Marked<T> {
    queued: Vec<T>,
    events: Vec<[Event; 2]>,
}

impl<T> Marked<T> {
    const fn new() -> Marked<T> {
        Marked { queued: Vec::new(), events: Vec::new() }
    }

    fn queue(&mut self, what: T, stream: &Stream, queue: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if self.events.len() == self.queued.len() {
            let context = stream.context();
            self.events.push([context.timed_event()?, context.timed_event()?]);
        }
        let [start, end] = &self.events[self.queued.len()];
        stream.record(start)?;
        queue()?;
        stream.record(end)?;
        self.queued.push(what);
        Ok(())
    }
}

impl Times {
    /// Of nothing yet, on this GPU.
    pub fn new(gpu: &str, tf32: bool) -> Times {
        let sum = KernelTimes { gpu: gpu.to_owned(), tf32, ..KernelTimes::default() };
        Times { on: false, works: Marked::new(), copies: Marked::new(), sum }
    }

    /// Whether the steps from now on are timed.
    pub fn set(&mut self, on: bool) {
        self.on = on;
    }

    /// `None` if this step is not timed.
    pub fn of_step(&mut self) -> Option<&mut Times> {
        self.on.then_some(self)
    }

    /// Queues works that belong together.
    pub fn works<'a>(
        &mut self,
        works: impl Iterator<Item = (&'a Costed, impl FnOnce() -> Result<(), Error>)>,
        stream: &Stream,
    ) -> Result<(), Error> {
        let mut follows = Follows::Nothing;
        for (costed, queue) in works {
            self.works.queue((*costed, follows), stream, queue)?;
            follows = Follows::Work;
        }
        Ok(())
    }

    /// Queues a copy of so many bytes to the device.
    pub fn copy(
        &mut self,
        bytes: usize,
        stream: &Stream,
        queue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.copies.queue(bytes, stream, queue)
    }

    /// Takes the times of a step that is over.
    ///
    /// # Errors
    /// The device failed.
    pub fn take(&mut self) -> Result<(), Error> {
        if self.works.queued.is_empty() {
            return Ok(());
        }
        self.sum.steps += 1;
        let mut last: Option<&Event> = None;
        for ((costed, follows), [start, end]) in self.works.queued.drain(..).zip(&self.works.events) {
            if let (Follows::Work, Some(last)) = (follows, last) {
                let gaps = &mut self.sum.gaps;
                let seconds = start.seconds_since(last)?;
                gaps.count += 1;
                gaps.seconds += seconds;
                gaps.longest_seconds = gaps.longest_seconds.max(seconds);
            }
            last = Some(end);
            add(&mut self.sum.kernels, &costed, end.seconds_since(start)?);
        }
        for (bytes, [start, end]) in self.copies.queued.drain(..).zip(&self.copies.events) {
            let copies = &mut self.sum.copies;
            copies.count += 1;
            copies.bytes += bytes as u64;
            copies.seconds += end.seconds_since(start)?;
        }
        Ok(())
    }

    /// Of all steps so far; `None` if no step was timed.
    pub fn told(&self) -> Option<&KernelTimes> {
        (self.sum.steps > 0).then_some(&self.sum)
    }
}

fn add(all: &mut Vec<Launches>, of: &Costed, seconds: f64) {
    let Costed { part, name, cost, half, aligned } = *of;
    let is_same = |known: &&mut Launches| {
        known.part == part && known.name == name && known.cost == cost && (known.half, known.aligned) == (half, aligned)
    };
    match all.iter_mut().find(is_same) {
        Some(known) => {
            known.launches += 1;
            known.seconds += seconds;
        }
        None => all.push(Launches { part, name: name.to_owned(), launches: 1, cost, half, aligned, seconds }),
    }
}
