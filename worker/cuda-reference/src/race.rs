//! Who touched a piece of memory last, and whether an access by another thread is in order with that.

/// The thread that makes an access, and when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    /// Number of the first block of this launch; blocks are numbered over all launches of a device, from 1 on.
    pub(crate) launch: u32,
    pub(crate) block: u32,
    /// Counts the intervals between barriers of all blocks.
    pub(crate) epoch: u32,
    pub(crate) thread: u16,
    /// Counts the barriers of the warp.
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

/// The accesses of one kind since the last that all others are ordered after.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    /// 0: nobody.
    block: u32,
    epoch: u32,
    thread: u16,
    step: u16,
    /// How many threads this stands for beside the one that is named.
    spread: Spread,
    atomic: bool,
    /// With more than one thread: block and thread of another.
    another: (u32, u16),
}

impl Record {
    fn of(now: &Now, atomic: bool) -> Record {
        let Now { block, epoch, thread, step, .. } = *now;
        Record { block, epoch, thread, step, spread: Spread::Thread, atomic, another: (block, thread) }
    }

    /// Block and thread of one that is not `now`'s, if it stands for one.
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

    /// Adds an access that does not conflict with those before.
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

/// What is known of two bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cell {
    write: Record,
    read: Record,
}

impl Cell {
    /// Notes an access, or returns the one that it races with.
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

    /// The first race of a list of accesses.
    fn race(accesses: &[(Kind, Now)]) -> Option<usize> {
        let mut cell = Cell::default();
        accesses.iter().position(|(kind, now)| cell.touch(*kind, now).is_some())
    }

    use Kind::{Atomic, Read, Write};

    #[test]
    fn a_barrier_orders_the_threads_of_a_block_and_no_others() {
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(0, 1, 1, 0))]), Some(1));
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(0, 2, 1, 0))]), None);
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(1, 2, 1, 0))]), Some(1));
        assert_eq!(race(&[(Read, at(0, 1, 0, 0)), (Read, at(1, 2, 1, 0))]), None);
    }

    #[test]
    fn a_barrier_of_a_warp_orders_its_own_lanes_only() {
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(0, 1, 1, 1))]), None);
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Read, at(0, 1, 32, 1))]), Some(1));
    }

    #[test]
    fn readers_of_another_block_are_not_forgotten() {
        let own = at(1, 3, 5, 0);
        assert_eq!(race(&[(Read, at(0, 1, 0, 0)), (Read, own), (Write, at(1, 4, 5, 0))]), Some(2));
        // The same without the other block.
        assert_eq!(race(&[(Read, own), (Write, at(1, 4, 5, 0))]), None);
    }

    #[test]
    fn one_of_several_readers_may_not_write_before_the_barrier() {
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
        // The reader is one of those that added; the other is a race nevertheless.
        assert_eq!(race(&[(Atomic, at(0, 1, 1, 0)), (Atomic, at(0, 1, 0, 0)), (Read, at(0, 1, 0, 0))]), Some(2));
        assert_eq!(race(&[(Write, at(0, 1, 0, 0)), (Atomic, at(0, 1, 1, 0))]), Some(1));
    }

    #[test]
    fn launches_follow_each_other() {
        let mut cell = Cell::default();
        assert_eq!(cell.touch(Write, &at(0, 1, 0, 0)), None);
        assert_eq!(cell.touch(Read, &Now { launch: 12, block: 12, epoch: 2, thread: 9, step: 0 }), None);
    }
}
