//! The program of a GPU step: the operations of each stream with the memory they read and write,
//! and the events between streams.
//!
//! ```text
//! input    copy(0)          copy(1)                        one memory block per slot
//!              └─ arrived(0)    └─ arrived(1)
//! compute  forward, backward .. forward, .. ready(0) .. ready(1) ..             update
//! reduce                                        └ sum(0)     └ sum(1) ─ reduced ──┘
//! ```
//!
//! The engine queues the output of [`marked`]; the other streams are described here as
//! `train::cuda_engine` uses them. [`Program::check`] needs no device.

use super::computation::{Computation, Pass};
use super::launch::{Memory, Span, Work};
use super::refused::Refused;
use crate::nn::Bucket;
use std::fmt;
use std::ops::Range;

/// Number of batch blocks, which micro-batches use alternately.
const SLOTS: usize = 2;

/// A stream, or a sequence of host actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lane {
    Compute,
    /// Copies batches to the device.
    Input,
    /// Copies batch-norm statistics to the host.
    Statistics,
    /// Sums gradients over all ranks.
    Reduce,
}

/// A signal between lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A slot's batch is on the device.
    Arrived(usize),
    /// A slot's forward pass is done.
    Forward(usize),
    /// A slot's backward pass is done.
    Backward(usize),
    /// The statistics are on the host.
    Copied,
    /// A bucket's gradients are complete on this rank.
    Ready(usize),
    /// A bucket's gradients are summed over all ranks; the index after the last bucket stands for
    /// the loss.
    Reduced(usize),
}

/// An op of a micro-batch, or an event between ops.
#[derive(Debug, Clone)]
pub enum Marked<M> {
    Work(Work<M>),
    Record(Event),
}

/// The contents of the compute stream for a slot's micro-batch. `complete`: for each bucket in
/// order, the number of backward ops that complete it; empty if no other stream waits for buckets.
pub fn marked<M>(pass: Pass<M>, slot: usize, complete: &[usize]) -> Vec<Marked<M>> {
    let mut all: Vec<Marked<M>> = pass.forward.into_iter().map(Marked::Work).collect();
    all.push(Marked::Record(Event::Forward(slot)));
    let mut buckets = complete.iter().enumerate().peekable();
    for (number, work) in pass.backward.into_iter().enumerate() {
        while let Some((bucket, _)) = buckets.next_if(|(_, end)| **end <= number) {
            all.push(Marked::Record(Event::Ready(bucket)));
        }
        all.push(Marked::Work(work));
    }
    all.extend(buckets.map(|(bucket, _)| Marked::Record(Event::Ready(bucket))));
    all.push(Marked::Record(Event::Backward(slot)));
    all
}

/// A step's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A kernel, GEMM or copy, by name.
    Work(&'static str),
    /// Copies a batch or statistics.
    Transfer,
    Sum,
    Record(Event),
    Wait(Event),
}

/// A byte range of a memory. `slot`: the batch block; 0 for other memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    pub memory: Memory,
    pub slot: usize,
    pub range: Range<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub lane: Lane,
    pub action: Action,
    pub reads: Vec<Access>,
    pub writes: Vec<Access>,
}

/// The steps in an order in which a single thread can queue them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Program {
    pub steps: Vec<Step>,
}

/// Two unordered steps that use the same memory, or a wait for an event that no step records.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unordered {
    #[error("nothing makes `{second}` wait for `{first}`: both use {access}")]
    Steps { first: String, second: String, access: String },
    #[error("`{step}`: nothing has recorded this event")]
    Event { step: String },
}

impl Program {
    /// The program of a training step with `micro_batches` micro-batches. `buckets`: gradient
    /// buckets reduced over ranks; empty for a single rank.
    ///
    /// # Errors
    /// None for a computation returned by [`Computation::new`].
    pub fn new(computation: &Computation, micro_batches: usize, buckets: &[Bucket]) -> Result<Program, Refused> {
        let works = computation.works(|span| span)?;
        let complete = computation.complete(buckets)?;
        let mut program = Program::default();
        for micro_batch in 0..micro_batches {
            let (slot, adds, is_last) = (micro_batch % SLOTS, micro_batch > 0, micro_batch + 1 == micro_batches);
            let pass = if adds { &works.later } else { &works.first };
            program.input(computation, slot, micro_batch);
            let complete = if is_last { &complete[usize::from(adds)][..] } else { &[] };
            for marked in marked(pass.clone(), slot, complete) {
                match marked {
                    Marked::Work(work) => program.work(computation, slot, &work),
                    Marked::Record(event) => program.push_event(Lane::Compute, Action::Record(event)),
                }
            }
            program.statistics(computation, slot);
        }
        program.reduce(computation, buckets, (micro_batches - 1) % SLOTS);
        for work in &works.update {
            program.work(computation, 0, work);
        }
        Ok(program)
    }

    fn push_event(&mut self, lane: Lane, action: Action) {
        self.steps.push(Step { lane, action, reads: Vec::new(), writes: Vec::new() });
    }

    fn work(&mut self, computation: &Computation, slot: usize, work: &Work<Span>) {
        let access = |span: &Span| {
            let is_input = computation.inputs().place(*span).is_some();
            Access { memory: span.memory, slot: if is_input { slot } else { 0 }, range: span.at..span.at + span.bytes }
        };
        let [reads, writes] = [work.reads(), work.writes()].map(|spans| spans.iter().map(access).collect());
        self.steps.push(Step { lane: Lane::Compute, action: Action::Work(work.name()), reads, writes });
    }

    /// A slot's batch is copied once the device has finished with the slot's previous contents.
    fn input(&mut self, computation: &Computation, slot: usize, micro_batch: usize) {
        if micro_batch >= SLOTS {
            self.push_event(Lane::Input, Action::Wait(Event::Backward(slot)));
        }
        let parts = computation.inputs().parts();
        let writes = parts.map(|(memory, bytes)| Access { memory, slot, range: 0..bytes }).collect();
        self.steps.push(Step { lane: Lane::Input, action: Action::Transfer, reads: Vec::new(), writes });
        self.push_event(Lane::Input, Action::Record(Event::Arrived(slot)));
        self.push_event(Lane::Compute, Action::Wait(Event::Arrived(slot)));
    }

    /// Batch-norm statistics are copied while backward runs; the next forward waits for the copy.
    fn statistics(&mut self, computation: &Computation, slot: usize) {
        let len: usize = computation.plan().statistics().map(|(_, len)| len).sum();
        if len == 0 {
            return;
        }
        self.push_event(Lane::Statistics, Action::Wait(Event::Forward(slot)));
        let reads = vec![Access { memory: Memory::BatchStatistics, slot: 0, range: 0..4 * len }];
        self.steps.push(Step { lane: Lane::Statistics, action: Action::Transfer, reads, writes: Vec::new() });
        self.push_event(Lane::Statistics, Action::Record(Event::Copied));
        self.push_event(Lane::Compute, Action::Wait(Event::Copied));
    }

    /// Reduces each bucket once it is complete, then the loss. `slot`: slot of the last
    /// micro-batch.
    fn reduce(&mut self, computation: &Computation, buckets: &[Bucket], slot: usize) {
        if buckets.is_empty() {
            return;
        }
        let gradients = |bucket: &Bucket| (Memory::Gradients, 4 * bucket.range.start..4 * bucket.range.end);
        let loss = computation.contents().iter().find(|contents| contents.memory == Memory::Loss);
        let loss = (Memory::Loss, 0..loss.map_or(0, |contents| contents.bytes));
        let sums = buckets.iter().map(gradients).chain([loss]);
        for (number, (memory, range)) in sums.enumerate() {
            let ready = if number < buckets.len() { Event::Ready(number) } else { Event::Backward(slot) };
            self.push_event(Lane::Reduce, Action::Wait(ready));
            let own = vec![Access { memory, slot: 0, range }];
            self.steps.push(Step { lane: Lane::Reduce, action: Action::Sum, reads: own.clone(), writes: own });
            self.push_event(Lane::Reduce, Action::Record(Event::Reduced(number)));
        }
        for number in 0..=buckets.len() {
            self.push_event(Lane::Compute, Action::Wait(Event::Reduced(number)));
        }
    }

    /// Checks that any two steps that use the same bytes, one of them writing, are ordered by their
    /// lane or by events.
    ///
    /// # Errors
    /// The first unordered pair.
    pub fn check(&self) -> Result<(), Unordered> {
        const LANES: [Lane; 4] = [Lane::Compute, Lane::Input, Lane::Statistics, Lane::Reduce];
        // For each lane, how many steps of every lane are done before its next step.
        let mut clocks = [[0; LANES.len()]; LANES.len()];
        let mut events: Vec<(Event, [usize; LANES.len()])> = Vec::new();
        let mut seen: [Vec<&Step>; LANES.len()] = Default::default();
        for step in &self.steps {
            let lane = LANES.iter().position(|lane| *lane == step.lane).expect("invariant: these are all lanes");
            if let Action::Wait(event) = step.action {
                let recorded = events.iter().rev().find(|(recorded, _)| *recorded == event);
                let (_, clock) = recorded.ok_or_else(|| Unordered::Event { step: step.to_string() })?;
                clocks[lane].iter_mut().zip(clock).for_each(|(own, other)| *own = (*own).max(*other));
            }
            for (other, seen) in seen.iter().enumerate().filter(|(other, _)| *other != lane) {
                if let Some((first, access)) =
                    seen[clocks[lane][other]..].iter().find_map(|first| Some((first, conflict(first, step)?)))
                {
                    return Err(Unordered::Steps {
                        first: first.to_string(),
                        second: step.to_string(),
                        access: access.to_string(),
                    });
                }
            }
            seen[lane].push(step);
            clocks[lane][lane] = seen[lane].len();
            if let Action::Record(event) = step.action {
                events.push((event, clocks[lane]));
            }
        }
        Ok(())
    }
}

/// A memory range that both use and at least one writes.
fn conflict<'a>(first: &Step, second: &'a Step) -> Option<&'a Access> {
    let meet = |access: &&Access, others: &[Access]| {
        others.iter().any(|other| {
            (other.memory, other.slot) == (access.memory, access.slot)
                && other.range.start < access.range.end
                && access.range.start < other.range.end
        })
    };
    let read = second.reads.iter().find(|access| meet(access, &first.writes));
    read.or_else(|| second.writes.iter().find(|access| meet(access, &first.writes) || meet(access, &first.reads)))
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.steps.iter().try_for_each(|step| writeln!(f, "{step}"))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lane = format!("{:?}", self.lane).to_lowercase();
        match self.action {
            Action::Work(name) => write!(f, "{lane} {name}")?,
            Action::Transfer => write!(f, "{lane} transfer")?,
            Action::Sum => write!(f, "{lane} sum")?,
            Action::Record(event) => write!(f, "{lane} record {event:?}")?,
            Action::Wait(event) => write!(f, "{lane} wait {event:?}")?,
        }
        for (sign, accesses) in [("<", &self.reads), (">", &self.writes)] {
            for (index, access) in accesses.iter().enumerate() {
                write!(f, "{}{access}", if index == 0 { format!(" {sign} ") } else { ", ".into() })?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slot = if self.slot == 0 { String::new() } else { format!("'{}", self.slot) };
        write!(f, "{:?}{slot} {}..{}", self.memory, self.range.start, self.range.end)
    }
}
