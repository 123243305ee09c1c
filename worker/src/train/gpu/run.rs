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
use crate::gpu::{Computation, Costed, Costs, Event, Marked, Pass, Works, marked};
use crate::train::TrainError;
use switchyard_cuda::driver::{self, Context, Span};
use switchyard_cuda::{Error, nvtx};

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
    slot: usize,
    pub forward: driver::Event,
    pub backward: driver::Event,
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
        let costs = computation.costs()?;
        // Nobody else needs them.
        let layers = |adds| if nvtx::is_attached() { computation.layers(adds) } else { Ok(Vec::new()) };
        let layers = [layers(false)?, layers(true)?];
        let mut slot = |number| -> Result<Slot, TrainError> {
            let marks = Marks { slot: number, forward: context.event()?, backward: context.event()? };
            Ok(Slot::new(workshop, (works(number)?, &costs, &layers), merge, staging, marks)?)
        };
        let slots = [slot(0)?, slot(1)?];
        let Works { update, round, evaluation, .. } = works(0)?;
        let update = staging.map(|_| workshop.commands(update)).transpose()?;
        Ok(Run {
            slots,
            merge,
            update: update.map(|update| Segment::new("update", update, costs.update)),
            round: round.map(|round| workshop.commands(vec![round])).transpose()?,
            evaluation: Segment::new("evaluation", workshop.commands(evaluation)?, Vec::new()),
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

/// The name of a micro-batch without the update.
const PASS: &str = "forward and backward";

impl Slot {
    fn new(
        workshop: &mut Workshop,
        (works, costs, layers): (Works<Span>, &Costs, &[Vec<String>; 2]),
        merge: u32,
        staging: Option<&Staging>,
        marks: Marks,
    ) -> Result<Slot, Error> {
        let Works { first, later, update, .. } = works;
        let is_merged = merge > 1;
        let ready = staging
            .map_or((&[][..], &[][..]), |staging| (&staging.complete[usize::from(is_merged)][..], &staging.ready[..]));
        let of_last = if is_merged { later.clone() } else { first.clone() };
        let mut last = commands(workshop, of_last, &marks, ready)?;
        let mut costs_of_last: Vec<Costed> = if is_merged { &costs.later } else { &costs.first }.clone();
        let mut name = PASS;
        if staging.is_none() {
            name = "forward, backward and update";
            last.extend(workshop.commands(update)?);
            costs_of_last.extend(&costs.update);
        }
        Ok(Slot {
            first: Segment::new(PASS, commands(workshop, first, &marks, (&[], &[]))?, costs.first.clone())
                .with_layers(layers[0].clone()),
            later: Segment::new(PASS, commands(workshop, later, &marks, (&[], &[]))?, costs.later.clone())
                .with_layers(layers[1].clone()),
            last: Segment::new(name, last, costs_of_last).with_layers(layers[usize::from(is_merged)].clone()),
            marks,
        })
    }
}

/// Forward and backward with their marks. `ready`: for each bucket an event behind so many works of backward, in order.
fn commands(
    workshop: &mut Workshop,
    pass: Pass<Span>,
    marks: &Marks,
    (complete, ready): (&[usize], &[driver::Event]),
) -> Result<Commands, Error> {
    let event = |event: Event| match event {
        Event::Forward(_) => &marks.forward,
        Event::Ready(bucket) => &ready[bucket],
        _ => &marks.backward,
    };
    let command = |marked: Marked<Span>| match marked {
        Marked::Work(work) => workshop.command(work),
        Marked::Record(mark) => Ok(Command::Record(event(mark).clone())),
    };
    marked(pass, marks.slot, complete).into_iter().map(command).collect()
}
