//! Static checks of a program.
//!
//! A single pass with a vector clock per lane: recording an event stores the lane's clock and
//! waiting merges it, so for any two operations we know whether one completes before the other
//! starts. For every memory range, the pass tracks the last writer and all later readers.

use super::{Access, Event, Lane, Memory, Program, Step, Work};
use std::collections::BTreeMap;

/// The first error in a program. Operations are displayed as in the program's text.
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
    #[error("{step} adds to {access}, which {reader} has already consumed")]
    Late { step: String, access: String, reader: String },
    #[error("{step}: nothing has recorded this event")]
    NoEvent { step: String },
}

/// Bytes with a common history.
#[derive(Debug, Clone)]
struct Interval {
    end: usize,
    /// `None` if the contents predate the step.
    writer: Option<usize>,
    readers: Vec<usize>,
}

/// For each lane, by index, the number of operations that complete before an operation starts.
type Clock = Vec<usize>;

struct Checker<'a> {
    program: &'a Program,
    /// Of each visited operation: its lane, its index in that lane, and its clock.
    seen: Vec<(usize, usize, Clock)>,
    memories: BTreeMap<Memory, BTreeMap<usize, Interval>>,
}

impl Program {
    /// Finds reads of unwritten memory, memory that is reused too early, conflicting operations
    /// that neither a lane nor an event orders, and additions to values that have already been
    /// consumed.
    ///
    /// # Errors
    /// The first error in operation order.
    pub fn check(&self) -> Result<(), Fault> {
        let initial = BTreeMap::from([(0, Interval { end: self.weights, writer: None, readers: Vec::new() })]);
        let memories = BTreeMap::from([(Memory::Weights, initial)]);
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
        for (start, interval) in self.intervals(access) {
            if start > at {
                return Err(unwritten());
            }
            at = interval.end;
            if let Some(writer) = interval.writer {
                self.ordered(writer, index, access)?;
                let writes = &self.program.steps[writer].writes;
                let holds = |write: &Access| {
                    write.content == access.content && write.range.start <= start && interval.end <= write.range.end
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
            // All operations read the weights; they are updated at the end.
            if let Some(reader) =
                interval.readers.iter().find(took).filter(|_| adds && access.memory != Memory::Weights)
            {
                let reader = self.program.steps[*reader].to_string();
                return Err(Fault::Late { step: step.to_string(), access: access.to_string(), reader });
            }
        }
        if at < access.range.end {
            return Err(unwritten());
        }
        let ranges = self.memories.entry(access.memory).or_default();
        for (_, interval) in ranges.range_mut(access.range.clone()) {
            interval.readers.push(index);
        }
        Ok(())
    }

    fn write(&mut self, index: usize, access: &Access) -> Result<(), Fault> {
        for (_, interval) in self.intervals(access) {
            for other in interval.writer.iter().chain(&interval.readers).filter(|other| **other != index) {
                self.ordered(*other, index, access)?;
            }
        }
        let ranges = self.memories.entry(access.memory).or_default();
        let old: Vec<usize> = ranges.range(access.range.clone()).map(|(start, _)| *start).collect();
        old.iter().for_each(|start| drop(ranges.remove(start)));
        let new = Interval { end: access.range.end, writer: Some(index), readers: Vec::new() };
        ranges.insert(access.range.start, new);
        Ok(())
    }

    /// The intervals of an access, split at its ends.
    fn intervals(&mut self, access: &Access) -> Vec<(usize, Interval)> {
        let ranges = self.memories.entry(access.memory).or_default();
        for cut in [access.range.start, access.range.end] {
            if let Some((_, interval)) = ranges.range_mut(..cut).next_back()
                && interval.end > cut
            {
                let rest = interval.clone();
                interval.end = cut;
                ranges.insert(cut, rest);
            }
        }
        ranges.range(access.range.clone()).map(|(start, interval)| (*start, interval.clone())).collect()
    }

    /// Whether one operation completes before another starts.
    fn ordered(&self, first: usize, second: usize, access: &Access) -> Result<(), Fault> {
        let (lane, number, _) = &self.seen[first];
        if self.seen[second].2.get(*lane).is_some_and(|done| done > number) {
            return Ok(());
        }
        let text = |step: usize| self.program.steps[step].to_string();
        Err(Fault::Unordered { first: text(first), second: text(second), access: access.to_string() })
    }
}
