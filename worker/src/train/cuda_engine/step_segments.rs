//! The commands queued in a step and in an evaluation.
//!
//! ```text
//! one rank       [first] [later] .. [last, update]      a segment each, and so a graph
//! several ranks  [first] [later] .. [last] <- gradients are summed -> [update]
//! ```
//!
//! Events are recorded within segments, where a graph can record them too: after forward and
//! backward, and after each gradient bucket in the last micro-batch. Thus neither profiling nor
//! multi-rank reductions split a graph.

use super::SLOTS;
use super::commands::{Command, Commands, Dispatcher};
use super::memories::Memories;
use super::segment::Segment;
use super::staging::Staging;
use crate::lowering::{Computation, Costed, Costs, Event, Marked, Pass, Works, marked};
use crate::train::TrainError;
use switchyard_cuda::driver::{self, Context, Span};
use switchyard_cuda::{Error, nvtx};

/// The segments of a step and an evaluation.
pub(super) struct StepSegments {
    slots: [Slot; SLOTS],
    merge: u32,
    /// With several ranks, queued after the gradient reduction.
    pub update: Option<Segment>,
    /// Rounds the weights to 16 bits.
    pub round: Option<Commands>,
    pub evaluation: Segment,
}

/// The segments of a micro-batch whose input is in one of the slots.
struct Slot {
    first: Segment,
    later: Segment,
    /// Includes the update with a single rank.
    last: Segment,
    marks: Marks,
}

/// Events after forward and backward of a micro-batch.
pub(super) struct Marks {
    slot: usize,
    pub forward: driver::Event,
    pub backward: driver::Event,
}

impl StepSegments {
    /// `merge`: micro-batches per step.
    ///
    /// # Errors
    /// No algorithm multiplies matrices of some shape, or the driver refuses.
    pub fn new(
        (context, dispatcher): (&Context, &mut Dispatcher),
        (computation, memories): (&Computation, &Memories),
        merge: u32,
        staging: Option<&Staging>,
    ) -> Result<StepSegments, TrainError> {
        let works = |slot: usize| computation.works(|span| memories.place(computation, slot, span));
        let costs = computation.costs()?;
        // Only profilers use layer names.
        let layers = |adds| if nvtx::is_attached() { computation.layers(adds) } else { Ok(Vec::new()) };
        let layers = [layers(false)?, layers(true)?];
        let mut slot = |number| -> Result<Slot, TrainError> {
            let marks = Marks { slot: number, forward: context.event()?, backward: context.event()? };
            Ok(Slot::new(dispatcher, (works(number)?, &costs, &layers), merge, staging, marks)?)
        };
        let slots = [slot(0)?, slot(1)?];
        let Works { update, round, evaluation, .. } = works(0)?;
        let update = staging.map(|_| dispatcher.commands(update)).transpose()?;
        Ok(StepSegments {
            slots,
            merge,
            update: update.map(|update| Segment::new("update", update, costs.update)),
            round: round.map(|round| dispatcher.commands(vec![round])).transpose()?,
            evaluation: Segment::new("evaluation", dispatcher.commands(evaluation)?, Vec::new()),
        })
    }

    /// The segment of a micro-batch.
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

    /// Number of kernels, matrix products and copies of a step.
    pub fn operations(&self) -> usize {
        let Slot { first, later, last, .. } = &self.slots[0];
        let (micro_batches, merge) = ([first, later].map(Segment::operations), self.merge as usize);
        let before_last = (0..merge - 1).map(|number| micro_batches[number.min(1)]).sum::<usize>();
        before_last + last.operations() + self.update.as_ref().map_or(0, Segment::operations)
    }
}

/// Name of a micro-batch without the update.
const PASS: &str = "forward and backward";

impl Slot {
    fn new(
        dispatcher: &mut Dispatcher,
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
        let mut last = commands(dispatcher, of_last, &marks, ready)?;
        let mut costs_of_last: Vec<Costed> = if is_merged { &costs.later } else { &costs.first }.clone();
        let mut name = PASS;
        if staging.is_none() {
            name = "forward, backward and update";
            last.extend(dispatcher.commands(update)?);
            costs_of_last.extend(&costs.update);
        }
        Ok(Slot {
            first: Segment::new(PASS, commands(dispatcher, first, &marks, (&[], &[]))?, costs.first.clone())
                .with_layers(layers[0].clone()),
            later: Segment::new(PASS, commands(dispatcher, later, &marks, (&[], &[]))?, costs.later.clone())
                .with_layers(layers[1].clone()),
            last: Segment::new(name, last, costs_of_last).with_layers(layers[usize::from(is_merged)].clone()),
            marks,
        })
    }
}

/// Commands of forward and backward with their events. `complete` and `ready`: for each bucket, the
/// number of backward operations after which it is complete, in order, and its event.
fn commands(
    dispatcher: &mut Dispatcher,
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
        Marked::Work(work) => dispatcher.command(work),
        Marked::Record(mark) => Ok(Command::Record(event(mark).clone())),
    };
    marked(pass, marks.slot, complete).into_iter().map(command).collect()
}
