//! Times each operation of a profiled step on the device, with an event before and after it. The
//! operations are queued eagerly, because events within a graph have no readable times.

use crate::lowering::Costed;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Event, Stream};
use switchyard_worker_contract::kernels::{KernelTimes, Launches};

pub(super) struct OpTimer {
    on: bool,
    operations: Timed<(Costed, Previous)>,
    /// Copies, with their bytes.
    copies: Timed<usize>,
    sum: KernelTimes,
}

/// Whether the operation was queued directly after another one, so that the time between them is a
/// gap.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Previous {
    None,
    Operation,
}

/// Items queued in a step, each between two events. The events are reused.
struct Timed<T> {
    queued: Vec<T>,
    events: Vec<[Event; 2]>,
}

impl<T> Timed<T> {
    const fn new() -> Timed<T> {
        Timed { queued: Vec::new(), events: Vec::new() }
    }

    fn queue(&mut self, item: T, stream: &Stream, queue: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        if self.events.len() == self.queued.len() {
            let context = stream.context();
            self.events.push([context.timed_event()?, context.timed_event()?]);
        }
        let [start, end] = &self.events[self.queued.len()];
        stream.record(start)?;
        queue()?;
        stream.record(end)?;
        self.queued.push(item);
        Ok(())
    }
}

impl OpTimer {
    /// Creates an empty timer for this GPU.
    pub fn new(gpu: &str, tf32: bool) -> OpTimer {
        let sum = KernelTimes { gpu: gpu.to_owned(), tf32, ..KernelTimes::default() };
        OpTimer { on: false, operations: Timed::new(), copies: Timed::new(), sum }
    }

    /// Turns timing of later steps on or off.
    pub fn set_enabled(&mut self, on: bool) {
        self.on = on;
    }

    /// `None` if this step is not timed.
    pub fn if_enabled(&mut self) -> Option<&mut OpTimer> {
        self.on.then_some(self)
    }

    /// Queues and times consecutive operations.
    pub fn queue_all<'a>(
        &mut self,
        operations: impl Iterator<Item = (&'a Costed, impl FnOnce() -> Result<(), Error>)>,
        stream: &Stream,
    ) -> Result<(), Error> {
        let mut previous = Previous::None;
        for (costed, queue) in operations {
            self.operations.queue((*costed, previous), stream, queue)?;
            previous = Previous::Operation;
        }
        Ok(())
    }

    /// Queues and times a copy to the device.
    pub fn copy(
        &mut self,
        bytes: usize,
        stream: &Stream,
        queue: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.copies.queue(bytes, stream, queue)
    }

    /// Collects the times of a completed step.
    ///
    /// # Errors
    /// The device failed.
    pub fn collect(&mut self) -> Result<(), Error> {
        if self.operations.queued.is_empty() {
            return Ok(());
        }
        self.sum.steps += 1;
        let mut last_end: Option<&Event> = None;
        for ((costed, previous), [start, end]) in self.operations.queued.drain(..).zip(&self.operations.events) {
            if let (Previous::Operation, Some(last_end)) = (previous, last_end) {
                let gaps = &mut self.sum.gaps;
                let seconds = start.seconds_since(last_end)?;
                gaps.count += 1;
                gaps.seconds += seconds;
                gaps.longest_seconds = gaps.longest_seconds.max(seconds);
            }
            last_end = Some(end);
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

    /// Totals of all timed steps; `None` if there are none.
    pub fn totals(&self) -> Option<&KernelTimes> {
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
