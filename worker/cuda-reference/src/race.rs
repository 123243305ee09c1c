//! Race detection: the last accesses to a piece of memory, and whether a new access by another
//! thread is ordered after them.

/// The thread that makes an access, and its position in time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    /// Number of this launch's first block; blocks are numbered across all launches of a device,
    /// from 1.
    pub(crate) launch: u32,
    pub(crate) block: u32,
    /// Counts the intervals between block barriers across all blocks.
    pub(crate) epoch: u32,
    pub(crate) thread: u16,
    /// Counts the warp's barriers.
    pub(crate) step: u16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
enum Spread {
    #[default]
    Thread,
    Warp,
    Block,
    Blocks,
}

/// The latest accesses of one kind. An access that is ordered after all of them replaces them.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    /// 0 if there is none.
    block: u32,
    epoch: u32,
    thread: u16,
    step: u16,
    /// Which other threads this record represents.
    spread: Spread,
    atomic: bool,
    /// Block and thread of another access, if there are several.
    another: (u32, u16),
}

impl Record {
    fn of(now: &Now, atomic: bool) -> Record {
        let Now { block, epoch, thread, step, .. } = *now;
        Record { block, epoch, thread, step, spread: Spread::Thread, atomic, another: (block, thread) }
    }

    /// Block and thread of a recorded access that is not by `now`'s thread, if there is one.
    fn other(&self, now: &Now) -> (u32, u16) {
        if (self.block, self.thread) == (now.block, now.thread) { self.another } else { (self.block, self.thread) }
    }

    fn same_warp(&self, now: &Now) -> bool {
        self.thread >> 5 == now.thread >> 5
    }

    fn conflicts(&self, now: &Now) -> bool {
        if self.block < now.launch {
            return false;
        }
        if self.spread == Spread::Blocks || self.block != now.block {
            return true;
        }
        if self.epoch != now.epoch {
            return false;
        }
        if self.spread == Spread::Block || !self.same_warp(now) {
            return true;
        }
        self.step == now.step && (self.spread == Spread::Warp || self.thread != now.thread)
    }

    /// Merges an access that does not conflict with the earlier ones.
    fn add(&mut self, now: &Now, atomic: bool) {
        let spread = if self.block < now.launch {
            Spread::Thread
        } else if self.spread == Spread::Blocks || self.block != now.block {
            Spread::Blocks
        } else if self.epoch != now.epoch {
            Spread::Thread
        } else if self.spread == Spread::Block || !self.same_warp(now) {
            Spread::Block
        } else if self.step != now.step {
            Spread::Thread
        } else if self.spread == Spread::Warp || self.thread != now.thread {
            Spread::Warp
        } else {
            Spread::Thread
        };
        *self = Record { spread, another: self.other(now), ..Record::of(now, atomic) };
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    Atomic,
}

/// The other side of a race.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Other {
    /// Number of its block within the launch.
    pub(crate) block: u32,
    pub(crate) thread: u16,
    pub(crate) wrote: bool,
}

/// Access history of a cell.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cell {
    write: Record,
    read: Record,
}

impl Cell {
    /// Records an access, or returns the one that it races with.
    pub(crate) fn touch(&mut self, kind: Kind, now: &Now) -> Option<Other> {
        let both_atomic = kind == Kind::Atomic && self.write.atomic;
        let writer = (!both_atomic && self.write.conflicts(now)).then_some((self.write, true));
        let reader = || (kind != Kind::Read && self.read.conflicts(now)).then_some((self.read, false));
        if let Some((record, wrote)) = writer.or_else(reader) {
            let (block, thread) = record.other(now);
            return Some(Other { block: block - now.launch, thread, wrote });
        }
        match kind {
            Kind::Read => self.read.add(now, false),
            Kind::Atomic if self.write.atomic => self.write.add(now, true),
            _ => self.write = Record::of(now, kind == Kind::Atomic),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(block: u32, epoch: u32, thread: u16, step: u16) -> Now {
        Now { launch: 10, block: 10 + block, epoch, thread, step }
    }

    /// Index of the first access that races.
    fn race(accesses: &[(Kind, Now)]) -> Option<usize> {
        let mut cell = Cell::default();
        accesses.iter().position(|(kind, now)| cell.touch(*kind, now).is_some())
    }

    use Kind::{Atomic, Read, Write};

    #[test]
    fn a_barrier_orders_only_the_threads_of_its_block() {
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(0, 1, 1, 0))]), Some(1));
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(0, 2, 1, 0))]), None);
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(1, 2, 1, 0))]), Some(1));
        assert_eq!(race(&[(Read, at(0, 1, 0, 0)), (Read, at(1, 2, 1, 0))]), None);
    }

    #[test]
    fn a_warp_barrier_orders_only_its_own_lanes() {
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(0, 1, 1, 1))]), None);
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(0, 1, 32, 1))]), Some(1));
    }

    #[test]
    fn readers_in_another_block_are_remembered() {
        let own = at(1, 3, 5, 0);
        assert_eq!(race(&[(Read, at(0, 1, 0, 0)), (Read, own), (Write, at(1, 4, 5, 0))]), Some(2));
        // The same without the other block.
        assert_eq!(race(&[(Read, own), (Write, at(1, 4, 5, 0))]), None);
    }

    #[test]
    fn one_of_several_readers_must_not_write_before_the_barrier() {
        assert_eq!(race(&[(Read, at(0, 1, 0, 0)), (Read, at(0, 1, 1, 0)), (Write, at(0, 1, 1, 0))]), Some(2));
        assert_eq!(race(&[(Read, at(0, 1, 1, 0)), (Write, at(0, 1, 1, 0))]), None);
    }

    #[test]
    fn the_other_side_of_a_race_is_another_thread() {
        let mut cell = Cell::default();
        for thread in [3, 4] {
            assert_eq!(cell.touch(Read, &at(0, 1, thread, 0)), None);
        }
        let other = cell.touch(Write, &at(0, 1, 4, 0));
        assert_eq!(other, Some(Other { block: 0, thread: 3, wrote: false }));
    }

    #[test]
    fn atomics_race_with_plain_accesses_only() {
        assert_eq!(race(&[(Atomic, at(0, 1, 0, 0)), (Atomic, at(1, 2, 1, 0))]), None);
        // The reader is one of the adding threads, but the other one still races.
        assert_eq!(race(&[(Atomic, at(0, 1, 1, 0)), (Atomic, at(0, 1, 0, 0)), (Read, at(0, 1, 0, 0))]), Some(2));
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Atomic, at(0, 1, 1, 0))]), Some(1));
    }

    #[test]
    fn launches_are_ordered() {
        let mut cell = Cell::default();
        assert_eq!(cell.touch(Write, &at(0, 1, 0, 0)), None);
        assert_eq!(cell.touch(Read, &Now { launch: 12, block: 12, epoch: 2, thread: 9, step: 0 }), None);
    }
}
