//! All-reduce among the ranks of one host, in place, in their shared arenas; each lane works by itself.
//!
//! ```text
//! small (<= 1 KiB)   copy to my slot, Entered(s); wait for all Entered(s); sum all slots in rank order
//! otherwise          Entered(s); wait for all; reduce my slice of all arenas into all arenas; Reduced(s); wait for all
//! with other hosts   Entered(s); wait for all; reduce my slice into the leader's arena; Reduced(s);
//!                    leader: wait for all, ring with other leaders, Result(s), wait for all Copied(s)
//!                    others: wait for Result(s), copy the bucket, Copied(s)
//! ```
//!
//! There are no races because between all Entered(s) and all Reduced(s), slice `i` of every arena belongs to rank `i`.
//! Slots and signatures exist twice and are used in turn: a rank that enters `s + 2` has seen all others enter `s + 1`,
//! which they do only after they are done with `s`. A rank without a final barrier (small, or not a leader) can be one
//! operation ahead; nobody then reads or writes its arena for `s`.
#![allow(unsafe_code)]

use super::{
    error::Cause,
    kernels,
    shm::{Flag, SLOT_FLOATS, Segment, wake},
    socket::timespec,
    turn::{Broken, Turn},
    wait::{NAP, SpinPolicy, Waiter},
};
use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

/// Floats between two updates of the progress figure and checks of the failure flag.
const STRIDE: usize = 256 << 10;

/// Pointers to the same place in every arena; kept to avoid an allocation per operation.
struct Pointers(Vec<*mut f32>);

// SAFETY: the pointers are only a buffer, refilled and used within one operation.
unsafe impl Send for Pointers {}

pub(super) struct LocalGroup {
    segment: Arc<Segment>,
    /// Global ranks of the members.
    ranks: Vec<u32>,
    me: usize,
    lane: usize,
    alone: bool,
    waiter: Waiter,
    pointers: Pointers,
}

/// An operation: number within its lane, its first bucket, place of its buckets in the arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub sequence: u32,
    pub bucket: u32,
    pub start: usize,
    pub len: usize,
}

impl LocalGroup {
    /// `alone`: there are no other hosts.
    pub fn new(
        segment: Arc<Segment>,
        ranks: Vec<u32>,
        (me, lane): (usize, usize),
        alone: bool,
        policy: SpinPolicy,
    ) -> LocalGroup {
        assert_eq!(segment.ranks(), ranks.len());
        let pointers = Pointers(Vec::with_capacity(ranks.len()));
        LocalGroup { segment, ranks, me, lane, alone, waiter: Waiter::new(policy), pointers }
    }

    pub fn alone(&self) -> bool {
        self.alone
    }

    pub fn leads(&self) -> bool {
        self.me == 0
    }

    /// The whole all-reduce, if all ranks are on this host.
    pub fn all_reduce(&mut self, op: Operation, turn: &Turn<'_>) -> Result<(), Broken> {
        let bucket = self.bucket_pointer(self.me, op);
        let small = op.len <= SLOT_FLOATS;
        if small {
            // SAFETY: my slot for this parity is free (module docs), my bucket is mine until Entered.
            unsafe {
                std::ptr::copy_nonoverlapping(bucket, self.segment.slot(self.lane, self.me, op.sequence), op.len)
            };
        }
        self.enter(op, turn)?;
        if small {
            self.pointers.0.clear();
            for rank in 0..self.ranks.len() {
                self.pointers.0.push(self.segment.slot(self.lane, rank, op.sequence));
            }
            // SAFETY: nobody writes a slot of this parity before all have left this operation; only I touch my bucket.
            unsafe { kernels::reduce(&self.pointers.0, &[bucket], 0, op.len) };
            return Ok(());
        }
        self.reduce_slice(op, turn, false);
        self.publish(Flag::Reduced, op.sequence);
        self.wait_all(Flag::Reduced, op.sequence, turn)
    }

    /// First half, if there are other hosts: leaves the sum of this host in the leader's arena.
    pub fn reduce_to_leader(&mut self, op: Operation, turn: &Turn<'_>) -> Result<(), Broken> {
        self.enter(op, turn)?;
        self.reduce_slice(op, turn, true);
        self.publish(Flag::Reduced, op.sequence);
        if self.leads() { self.wait_all(Flag::Reduced, op.sequence, turn) } else { Ok(()) }
    }

    /// Second half, if there are other hosts: every rank copies the leader's bucket.
    pub fn spread_from_leader(&mut self, op: Operation, turn: &Turn<'_>) -> Result<(), Broken> {
        if self.leads() {
            self.publish(Flag::Result, op.sequence);
            self.publish(Flag::Copied, op.sequence);
            return self.wait_all(Flag::Copied, op.sequence, turn);
        }
        self.wait(Flag::Result, 0, op.sequence, turn)?;
        let (from, to) = (self.bucket_pointer(0, op), self.bucket_pointer(self.me, op));
        // SAFETY: after Result the leader leaves its bucket alone until all have copied. All ranks of this host have
        // reduced (the leader waited for them), so nobody reads my bucket any more.
        unsafe { std::ptr::copy_nonoverlapping(from, to, op.len) };
        self.publish(Flag::Copied, op.sequence);
        Ok(())
    }

    fn bucket_pointer(&self, rank: usize, op: Operation) -> *mut f32 {
        self.segment.arena(rank).wrapping_add(op.start)
    }

    fn enter(&mut self, op: Operation, turn: &Turn<'_>) -> Result<(), Broken> {
        let (bucket, len) = self.segment.signature(self.lane, self.me, op.sequence);
        bucket.store(u64::from(op.bucket), Ordering::Relaxed);
        len.store(op.len as u64, Ordering::Relaxed);
        self.publish(Flag::Entered, op.sequence);
        self.wait_all(Flag::Entered, op.sequence, turn)?;
        for (local, rank) in self.ranks.iter().enumerate() {
            let (bucket, len) = self.segment.signature(self.lane, local, op.sequence);
            let theirs = (bucket.load(Ordering::Relaxed), len.load(Ordering::Relaxed));
            if theirs != (u64::from(op.bucket), op.len as u64) {
                let theirs = Started { rank: *rank, bucket: theirs.0, len: theirs.1 };
                let mine = Started { rank: self.ranks[self.me], bucket: op.bucket.into(), len: op.len as u64 };
                return Err(Broken::Because(desync(theirs, mine, op.sequence)));
            }
        }
        Ok(())
    }

    fn reduce_slice(&mut self, op: Operation, turn: &Turn<'_>, to_leader: bool) {
        self.pointers.0.clear();
        for rank in 0..self.ranks.len() {
            let pointer = self.segment.arena(rank).wrapping_add(op.start);
            self.pointers.0.push(pointer);
        }
        let sources = self.pointers.0.as_slice();
        let destinations = if to_leader { &sources[..1] } else { sources };
        let slice = share(op.len, self.ranks.len(), self.me);
        let mut at = slice.start;
        while at < slice.end {
            let n = STRIDE.min(slice.end - at);
            // SAFETY: between all Entered and my Reduced this slice of every arena is mine (module docs).
            unsafe { kernels::reduce(sources, destinations, at, n) };
            at += n;
            turn.progress.reached(((at - slice.start) * self.ranks.len() * 4).min(op.len * 4) as u64);
        }
    }

    fn publish(&self, flag: Flag, sequence: u32) {
        let (word, sleepers) = self.segment.flag(flag, self.lane, self.me);
        // Sequentially consistent on both sides: either I see the sleeper, or it sees the flag.
        word.store(sequence, Ordering::SeqCst);
        if sleepers.load(Ordering::SeqCst) > 0 {
            wake(word);
        }
    }

    fn wait_all(&mut self, flag: Flag, sequence: u32, turn: &Turn<'_>) -> Result<(), Broken> {
        (0..self.ranks.len()).try_for_each(|rank| self.wait(flag, rank, sequence, turn))
    }

    fn wait(&mut self, flag: Flag, rank: usize, sequence: u32, turn: &Turn<'_>) -> Result<(), Broken> {
        let (word, sleepers) = self.segment.flag(flag, self.lane, rank);
        let reached = |value: u32| value.wrapping_sub(sequence) as i32 >= 0;
        if self.waiter.linger(turn.in_front(), || reached(word.load(Ordering::Acquire))) {
            return Ok(());
        }
        loop {
            if turn.shared.failed() || self.segment.poison().load(Ordering::SeqCst) != 0 {
                return Err(Broken::Elsewhere);
            }
            sleepers.fetch_add(1, Ordering::SeqCst);
            let value = word.load(Ordering::SeqCst);
            if !reached(value) {
                let flags = rustix::thread::futex::Flags::empty();
                // Woken, too late, timed out or interrupted: the flag is checked again in any case.
                let _ = rustix::thread::futex::wait(word, flags, value, Some(&timespec(NAP)));
            }
            sleepers.fetch_sub(1, Ordering::SeqCst);
            if reached(word.load(Ordering::SeqCst)) {
                return Ok(());
            }
        }
    }
}

/// Part `i` of `n` of a bucket, a multiple of 16 floats (a cache line); the last parts take the rest.
pub(super) fn share(len: usize, n: usize, i: usize) -> Range<usize> {
    let each = len.div_ceil(n).next_multiple_of(16);
    (each * i).min(len)..(each * (i + 1)).min(len)
}

/// The operation that a rank has started.
pub(super) struct Started {
    pub rank: u32,
    pub bucket: u64,
    /// Length of the bucket in numbers.
    pub len: u64,
}

/// Two ranks in different operations; the text names both.
pub(super) fn desync(theirs: Started, mine: Started, sequence: u32) -> Cause {
    Cause::failed(
        theirs.rank,
        format!(
            "ranks are out of step: as operation {sequence}, rank {} started the all_reduce of bucket {} ({} numbers) \
             where rank {} started that of bucket {} ({} numbers)",
            theirs.rank, theirs.bucket, theirs.len, mine.rank, mine.bucket, mine.len
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shares_cover_a_bucket_once(len in 0usize..100_000, n in 1usize..17) {
            let mut at = 0;
            for i in 0..n {
                let part = share(len, n, i);
                prop_assert_eq!(part.start, at);
                prop_assert!(part.start.is_multiple_of(16) || part.start == len);
                at = part.end;
            }
            prop_assert_eq!(at, len);
        }
    }
}
