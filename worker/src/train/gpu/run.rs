//! What is queued in a step, and in an evaluation.
//!
//! ```text
//! one rank       [first] [later] .. [last, update]      a segment each, and so a graph
//! several ranks  [first] [later] .. [last] <- the host sums gradients -> [update]
//! ```
//!
//! Events are recorded within segments, where a graph records them too: behind forward and backward, and behind each bucket of gradients
//! in the last micro-batch. So neither the profile nor the reductions of several ranks cut a graph into pieces.

use super::SLOTS;
use super::commands::{Command, Commands, Workshop};
use super::memories::Memories;
use super::segment::Segment;
use super::staging::Staging;
use crate::gpu::{Computation, Pass, Works};
use crate::train::TrainError;
use switchyard_cuda::Error;
use switchyard_cuda::driver::{Context, Event, Span};

/// What is queued.
pub(super) struct Run {
    slots: [Slot; SLOTS],
    merge: u32,
    /// With several ranks, once they have summed their gradients.
    pub update: Option<Segment>,
    /// Copies the weights into 16 bits.
    pub round: Option<Commands>,
    pub evaluation: Segment,
}

/// What is queued for a micro-batch whose input is in one of the slots.
struct Slot {
    first: Segment,
    later: Segment,
    /// With the update, if there is one rank.
    last: Segment,
    marks: Marks,
}

/// Recorded behind forward and backward of a micro-batch.
pub(super) struct Marks {
    pub forward: Event,
    pub backward: Event,
}

impl Run {
    /// `merge`: micro-batches of a step.
    ///
    /// # Errors
    /// No algorithm multiplies matrices of some shape, or the driver refuses.
    pub fn new(
        (context, workshop): (&Context, &mut Workshop),
        (computation, memories): (&Computation, &Memories),
        merge: u32,
        staging: Option<&Staging>,
    ) -> Result<Run, TrainError> {
        let works = |slot: usize| computation.works(|span| memories.place(computation, slot, span));
        let mut slot = |number| -> Result<Slot, TrainError> {
            let marks = Marks { forward: context.event()?, backward: context.event()? };
            Ok(Slot::new(workshop, works(number)?, merge, staging, marks)?)
        };
        let slots = [slot(0)?, slot(1)?];
        let Works { update, round, evaluation, .. } = works(0)?;
        let update = staging.map(|_| workshop.commands(update)).transpose()?;
        Ok(Run {
            slots,
            merge,
            update: update.map(Segment::new),
            round: round.map(|round| workshop.commands(vec![round])).transpose()?,
            evaluation: Segment::new(workshop.commands(evaluation)?),
        })
    }

    /// What is queued for a micro-batch.
    pub fn micro_batch(&mut self, number: u32, slot: usize) -> &mut Segment {
        let Slot { first, later, last, .. } = &mut self.slots[slot];
        match number {
            number if number + 1 == self.merge => last,
            0 => first,
            _ => later,
        }
    }

    pub fn marks(&self, slot: usize) -> &Marks {
        &self.slots[slot].marks
    }

    /// Kernels, products and copies of a step.
    pub fn works(&self) -> usize {
        let Slot { first, later, last, .. } = &self.slots[0];
        let (micro_batches, merge) = ([first, later].map(Segment::works), self.merge as usize);
        let before_last = (0..merge - 1).map(|number| micro_batches[number.min(1)]).sum::<usize>();
        before_last + last.works() + self.update.as_ref().map_or(0, Segment::works)
    }
}

impl Slot {
    fn new(
        workshop: &mut Workshop,
        works: Works<Span>,
        merge: u32,
        staging: Option<&Staging>,
        marks: Marks,
    ) -> Result<Slot, Error> {
        let Works { first, later, update, .. } = works;
        let is_merged = merge > 1;
        let ready: Vec<(usize, Event)> = staging.map_or_else(Vec::new, |staging| {
            staging.complete[usize::from(is_merged)].iter().copied().zip(staging.ready.iter().cloned()).collect()
        });
        let mut last = commands(workshop, if is_merged { &later } else { &first }, &marks, &ready)?;
        if staging.is_none() {
            last.extend(workshop.commands(update)?);
        }
        Ok(Slot {
            first: Segment::new(commands(workshop, &first, &marks, &[])?),
            later: Segment::new(commands(workshop, &later, &marks, &[])?),
            last: Segment::new(last),
            marks,
        })
    }
}

/// Forward and backward with their marks. `ready`: events, each behind so many works of backward, in order.
fn commands(
    workshop: &mut Workshop,
    pass: &Pass<Span>,
    marks: &Marks,
    ready: &[(usize, Event)],
) -> Result<Commands, Error> {
    let mut all = workshop.commands(pass.forward.clone())?;
    all.push(Command::Record(marks.forward.clone()));
    let mut ready = ready.iter().peekable();
    for (number, command) in workshop.commands(pass.backward.clone())?.into_iter().enumerate() {
        while let Some((_, event)) = ready.next_if(|(end, _)| *end <= number) {
            all.push(Command::Record(event.clone()));
        }
        all.push(command);
    }
    all.extend(ready.map(|(_, event)| Command::Record(event.clone())));
    all.push(Command::Record(marks.backward.clone()));
    Ok(all)
}
