//! What is wrong with a program, found without running it.
//!
//! One pass with a clock per lane: a record stores the lane's clock, a wait joins it, so of any two operations it is known whether one is
//! done when the other starts. For every range of memory the pass keeps who wrote it last and who has read it since.

use super::{Access, Event, Lane, Memory, Program, Step, Work};
use std::collections::BTreeMap;

/// The first thing that is wrong with a program. Operations are shown as in its text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("{step} uses {access}, which ends beyond its memory of {bytes} bytes")]
    Outside { step: String, access: String, bytes: usize },
    #[error("{step} reads {access}, which nothing has written")]
    Unwritten { step: String, access: String },
    #[error("{step} reads {access}, but {writer} has written something else there")]
    Overwritten { step: String, access: String, writer: String },
    #[error("{second} uses {access}, and nothing makes it wait for {first}")]
    Unordered { first: String, second: String, access: String },
    #[error("{step} adds to {access}, which {reader} has taken already")]
    Late { step: String, access: String, reader: String },
    #[error("{step}: nothing has recorded that")]
    NoEvent { step: String },
}

/// Bytes with one history.
#[derive(Debug, Clone)]
struct Stretch {
    end: usize,
    /// `None`: since before the step.
    writer: Option<usize>,
    readers: Vec<usize>,
}

/// Operations of each lane that are done before an operation starts, by the number of the lane.
type Clock = Vec<usize>;

struct Checker<'a> {
    program: &'a Program,
    /// Of each operation seen: its lane, its number in that lane, and its clock.
    seen: Vec<(usize, usize, Clock)>,
    memories: BTreeMap<Memory, BTreeMap<usize, Stretch>>,
}

impl Program {
    /// Finds reads of what was not written, memory that is used again too early, operations that conflict and are not ordered by a lane or
    /// an event, and additions to what has already been taken.
    ///
    /// # Errors
    /// The first fault in the order of the operations.
    pub fn check(&self) -> Result<(), Fault> {
        let given = BTreeMap::from([(0, Stretch { end: self.weights, writer: None, readers: Vec::new() })]);
        let memories = BTreeMap::from([(Memory::Weights, given)]);
        let mut checker = Checker { program: self, seen: Vec::with_capacity(self.steps.len()), memories };
        let mut lanes: Vec<(Lane, Clock)> = Vec::new();
        let mut events: Vec<(Event, Clock)> = Vec::new();
        for (index, step) in self.steps.iter().enumerate() {
            let lane = lanes.iter().position(|(lane, _)| *lane == step.lane).unwrap_or_else(|| {
                lanes.push((step.lane, Clock::new()));
                lanes.len() - 1
            });
            let clock = &mut lanes[lane].1;
            if let Work::Wait(event) = &step.work {
                let recorded = events.iter().rev().find(|(recorded, _)| recorded == event);
                let (_, other) = recorded.ok_or_else(|| Fault::NoEvent { step: step.to_string() })?;
                join(clock, other);
            }
            let before = clock.clone();
            let number = before.get(lane).copied().unwrap_or(0);
            clock.resize(clock.len().max(lane + 1), 0);
            clock[lane] = number + 1;
            if let Work::Record(event) = step.work {
                events.push((event, clock.clone()));
            }
            checker.seen.push((lane, number, before));
            checker.step(index, step)?;
        }
        Ok(())
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.resize(clock.len().max(other.len()), 0);
    for (own, other) in clock.iter_mut().zip(other) {
        *own = (*own).max(*other);
    }
}

impl Checker<'_> {
    fn step(&mut self, index: usize, step: &Step) -> Result<(), Fault> {
        for access in step.reads.iter().chain(&step.writes) {
            let bytes = self.program.bytes(access.memory);
            if access.range.end > bytes {
                return Err(Fault::Outside { step: step.to_string(), access: access.to_string(), bytes });
            }
        }
        for access in &step.reads {
            self.read(index, step, access)?;
        }
        for access in &step.writes {
            self.write(index, access)?;
        }
        Ok(())
    }

    fn read(&mut self, index: usize, step: &Step, access: &Access) -> Result<(), Fault> {
        let adds = step.writes.iter().any(|write| write.content == access.content);
        let unwritten = || Fault::Unwritten { step: step.to_string(), access: access.to_string() };
        let mut at = access.range.start;
        for (start, stretch) in self.stretches(access) {
            if start > at {
                return Err(unwritten());
            }
            at = stretch.end;
            if let Some(writer) = stretch.writer {
                self.ordered(writer, index, access)?;
                let writes = &self.program.steps[writer].writes;
                let holds = |write: &Access| {
                    write.content == access.content && write.range.start <= start && stretch.end <= write.range.end
                };
                if !writes.iter().any(holds) {
                    let writer = self.program.steps[writer].to_string();
                    return Err(Fault::Overwritten { step: step.to_string(), access: access.to_string(), writer });
                }
            }
            let took = |reader: &&usize| {
                let other = &self.program.steps[**reader];
                let of = |list: &[Access]| list.iter().any(|other| other.content == access.content);
                **reader != index && of(&other.reads) && !of(&other.writes)
            };
            // Weights are read by all, and moved at the end.
            if let Some(reader) = stretch.readers.iter().find(took).filter(|_| adds && access.memory != Memory::Weights)
            {
                let reader = self.program.steps[*reader].to_string();
                return Err(Fault::Late { step: step.to_string(), access: access.to_string(), reader });
            }
        }
        if at < access.range.end {
            return Err(unwritten());
        }
        let ranges = self.memories.entry(access.memory).or_default();
        for (_, stretch) in ranges.range_mut(access.range.clone()) {
            stretch.readers.push(index);
        }
        Ok(())
    }

    fn write(&mut self, index: usize, access: &Access) -> Result<(), Fault> {
        for (_, stretch) in self.stretches(access) {
            for other in stretch.writer.iter().chain(&stretch.readers).filter(|other| **other != index) {
                self.ordered(*other, index, access)?;
            }
        }
        let ranges = self.memories.entry(access.memory).or_default();
        let old: Vec<usize> = ranges.range(access.range.clone()).map(|(start, _)| *start).collect();
        old.iter().for_each(|start| drop(ranges.remove(start)));
        let new = Stretch { end: access.range.end, writer: Some(index), readers: Vec::new() };
        ranges.insert(access.range.start, new);
        Ok(())
    }

    /// The stretches of an access, cut at its ends.
    fn stretches(&mut self, access: &Access) -> Vec<(usize, Stretch)> {
        let ranges = self.memories.entry(access.memory).or_default();
        for cut in [access.range.start, access.range.end] {
            if let Some((_, stretch)) = ranges.range_mut(..cut).next_back()
                && stretch.end > cut
            {
                let rest = stretch.clone();
                stretch.end = cut;
                ranges.insert(cut, rest);
            }
        }
        ranges.range(access.range.clone()).map(|(start, stretch)| (*start, stretch.clone())).collect()
    }

    /// Whether an operation is done when another starts.
    fn ordered(&self, first: usize, second: usize, access: &Access) -> Result<(), Fault> {
        let (lane, number, _) = &self.seen[first];
        if self.seen[second].2.get(*lane).is_some_and(|done| done > number) {
            return Ok(());
        }
        let text = |step: usize| self.program.steps[step].to_string();
        Err(Fault::Unordered { first: text(first), second: text(second), access: access.to_string() })
    }
}
