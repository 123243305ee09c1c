//! In-place sums among the ranks of one host, in their shared arenas. Each lane is independent.
//!
//! ```text
//! small (<= 1 KiB)   copy to own slot, Entered(s); wait for all; sum all slots in rank order
//! otherwise          Entered(s); wait for all; reduce own slice of all arenas into all arenas;
//!                    Reduced(s); wait for all
//! scatter            as above, each rank into its own arena only
//! gather             Entered(s); wait for all; copy the others' parts; Reduced(s); wait for all
//! several hosts      Entered(s); wait for all; reduce own slice into the leader's arena;
//!                    Reduced(s);
//!                    leader: wait for all, ring of leaders, Result(s), wait for all Copied(s)
//!                    others: wait for Result(s), copy the bucket, Copied(s)
//! scatter, gather    as above; ranks copy only their own parts out of, or into, the leader's arena
//! ```
//!
//! There are no races because between all Entered(s) and all Reduced(s), slice `i` of every arena
//! belongs to rank `i`. Slots and signatures are double-buffered: a rank that enters `s + 2` has
//! seen all others enter `s + 1`, which they do only after finishing `s`. A rank without a final
//! barrier (small bucket, or not a leader) can be one operation ahead; by then no rank accesses its
//! arena for `s`.
#![allow(unsafe_code)]

use super::{
    kernels,
    op_context::{OpContext, OpError},
    operation::{OpKind, Operation, Shards, StartedOp, desync, shard},
    shm::{Flag, SLOT_FLOATS, Segment, wake},
    socket::timespec,
    wait::{MAX_SLEEP, SpinPolicy, Waiter},
};
use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

/// Floats between progress updates.
const STRIDE: usize = 256 << 10;

/// Pointers to the same offset in every arena; kept to avoid an allocation per operation.
struct Pointers(Vec<*mut f32>);

// SAFETY: the pointers are only a buffer, refilled and used within one operation.
unsafe impl Send for Pointers {}

/// The arenas that receive a sum.
#[derive(Debug, Clone, Copy)]
enum Target {
    All,
    Leader,
    Own,
}

pub(super) struct LocalGroup {
    segment: Arc<Segment>,
    /// Global ranks of the members.
    ranks: Vec<u32>,
    me: usize,
    lane: usize,
    single_host: bool,
    waiter: Waiter,
    pointers: Pointers,
    shards: Arc<Shards>,
}

impl LocalGroup {
    /// `single_host`: all ranks of the group are on this host.
    pub fn new(
        segment: Arc<Segment>,
        ranks: Vec<u32>,
        (me, lane): (usize, usize),
        (single_host, shards): (bool, Arc<Shards>),
        policy: SpinPolicy,
    ) -> LocalGroup {
        assert_eq!(segment.ranks(), ranks.len());
        let pointers = Pointers(Vec::with_capacity(ranks.len()));
        LocalGroup { segment, ranks, me, lane, single_host, waiter: Waiter::new(policy), pointers, shards }
    }

    pub fn is_single_host(&self) -> bool {
        self.single_host
    }

    pub fn is_leader(&self) -> bool {
        self.me == 0
    }

    /// Complete all-reduce if all ranks are on this host.
    pub fn all_reduce(&mut self, op: Operation, ctx: &OpContext<'_>) -> Result<(), OpError> {
        let bucket = self.bucket_pointer(self.me, op);
        let small = op.len <= SLOT_FLOATS;
        if small {
            // SAFETY: this rank's slot for this parity is free (module docs), and its bucket is
            // exclusive to it until Entered.
            unsafe {
                std::ptr::copy_nonoverlapping(bucket, self.segment.slot(self.lane, self.me, op.sequence), op.len)
            };
        }
        self.enter(op, ctx)?;
        if small {
            self.pointers.0.clear();
            for rank in 0..self.ranks.len() {
                self.pointers.0.push(self.segment.slot(self.lane, rank, op.sequence));
            }
            // SAFETY: no rank writes a slot of this parity before all have left this operation, and
            // only this rank accesses its bucket.
            unsafe { kernels::reduce(&self.pointers.0, &[bucket], 0, op.len) };
            return Ok(());
        }
        self.reduce(op.start..op.start + op.len, Target::All, ctx);
        self.finish(op, ctx)
    }

    /// Complete reduce-scatter if all ranks are on this host. `buckets`: start and length of each
    /// bucket of the operation.
    pub fn reduce_scatter(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        ctx: &OpContext<'_>,
    ) -> Result<(), OpError> {
        if op.len <= SLOT_FLOATS {
            return self.all_reduce(op, ctx);
        }
        self.enter(op, ctx)?;
        for bucket in buckets.iter().enumerate() {
            self.reduce(self.part(op, bucket, self.me), Target::Own, ctx);
        }
        self.finish(op, ctx)
    }

    /// Complete all-gather if all ranks are on this host.
    pub fn all_gather(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        ctx: &OpContext<'_>,
    ) -> Result<(), OpError> {
        self.enter(op, ctx)?;
        for bucket in buckets.iter().enumerate() {
            for other in (0..self.ranks.len()).filter(|other| *other != self.me) {
                // SAFETY: between all Entered and all Reduced, no rank writes its own part, and
                // only this rank touches the other parts of its arena.
                unsafe { self.copy(self.part(op, bucket, other), other, self.me) };
            }
        }
        self.finish(op, ctx)
    }

    /// First half with several hosts: leaves this host's sum in the leader's arena.
    pub fn reduce_to_leader(&mut self, op: Operation, ctx: &OpContext<'_>) -> Result<(), OpError> {
        self.enter(op, ctx)?;
        self.reduce(op.start..op.start + op.len, Target::Leader, ctx);
        self.finish_at_leader(op, ctx)
    }

    /// First half of an all-gather with several hosts: leaves the parts of this host's ranks in the
    /// leader's arena.
    pub fn collect_at_leader(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        ctx: &OpContext<'_>,
    ) -> Result<(), OpError> {
        self.enter(op, ctx)?;
        for bucket in buckets.iter().enumerate().filter(|_| self.me != 0) {
            // SAFETY: between all Entered and this rank's Reduced, its part of the leader's arena
            // belongs to this rank.
            unsafe { self.copy(self.part(op, bucket, self.me), self.me, 0) };
        }
        self.finish_at_leader(op, ctx)
    }

    /// Second half with several hosts: every rank copies the leader's buckets, or after a scatter
    /// its parts of them.
    pub fn spread_from_leader(
        &mut self,
        op: Operation,
        buckets: &[(usize, usize)],
        ctx: &OpContext<'_>,
    ) -> Result<(), OpError> {
        if self.is_leader() {
            self.publish(Flag::Result, op.sequence);
            self.publish(Flag::Copied, op.sequence);
            return self.wait_all(Flag::Copied, op.sequence, ctx);
        }
        self.wait(Flag::Result, 0, op.sequence, ctx)?;
        for (index, &(start, len)) in buckets.iter().enumerate() {
            let range = match op.kind {
                OpKind::Scatter => self.part(op, (index, &(start, len)), self.me),
                OpKind::Reduce | OpKind::Gather | OpKind::PackedGather => start..start + len,
            };
            // SAFETY: after Result the leader does not touch its bucket until all have copied it.
            // All ranks of this host have reduced (the leader waited for them), so no rank reads
            // this rank's bucket any more.
            unsafe { self.copy(range, 0, self.me) };
        }
        self.publish(Flag::Copied, op.sequence);
        Ok(())
    }

    /// A rank's part of one of an operation's buckets, in the arena.
    fn part(&self, op: Operation, (index, &(start, len)): (usize, &(usize, usize)), local: usize) -> Range<usize> {
        let part = self.shards.part(op.kind, (op.bucket as usize + index, len), self.ranks[local]);
        start + part.start..start + part.end
    }

    /// Copies a range of one arena to another.
    ///
    /// # Safety
    /// No rank writes the range in the first arena, or touches it in the second one.
    unsafe fn copy(&self, range: Range<usize>, from: usize, to: usize) {
        let [from, to] = [from, to].map(|rank| self.segment.arena(rank).wrapping_add(range.start));
        // SAFETY: as promised by the caller; two arenas do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, range.len()) };
    }

    fn bucket_pointer(&self, rank: usize, op: Operation) -> *mut f32 {
        self.segment.arena(rank).wrapping_add(op.start)
    }

    fn enter(&mut self, op: Operation, ctx: &OpContext<'_>) -> Result<(), OpError> {
        let (bucket, len) = self.segment.signature(self.lane, self.me, op.sequence);
        bucket.store(u64::from(op.tag()), Ordering::Relaxed);
        len.store(op.len as u64, Ordering::Relaxed);
        self.publish(Flag::Entered, op.sequence);
        self.wait_all(Flag::Entered, op.sequence, ctx)?;
        for (local, rank) in self.ranks.iter().enumerate() {
            let (bucket, len) = self.segment.signature(self.lane, local, op.sequence);
            let (tag, len) = (bucket.load(Ordering::Relaxed) as u32, len.load(Ordering::Relaxed));
            if (tag, len) != (op.tag(), op.len as u64) {
                let mine = op.started_by(self.ranks[self.me]);
                return Err(OpError::Known(desync(&StartedOp { rank: *rank, tag, len }, &mine, op.sequence)));
            }
        }
        Ok(())
    }

    /// Sums a range of all arenas: with [`Target::Own`] all of it, otherwise this rank's slice.
    fn reduce(&mut self, range: Range<usize>, target: Target, ctx: &OpContext<'_>) {
        self.pointers.0.clear();
        for rank in 0..self.ranks.len() {
            let pointer = self.segment.arena(rank).wrapping_add(range.start);
            self.pointers.0.push(pointer);
        }
        let sources = self.pointers.0.as_slice();
        let (destinations, slice) = match target {
            Target::All => (sources, shard(range.len(), self.ranks.len(), self.me)),
            Target::Leader => (&sources[..1], shard(range.len(), self.ranks.len(), self.me)),
            Target::Own => (&sources[self.me..=self.me], 0..range.len()),
        };
        let mut at = slice.start;
        while at < slice.end {
            let n = STRIDE.min(slice.end - at);
            // SAFETY: between all Entered and this rank's Reduced, it owns this slice of every
            // arena (module docs).
            unsafe { kernels::reduce(sources, destinations, at, n) };
            at += n;
            ctx.progress.reached(((at - slice.start) * self.ranks.len() * 4).min(range.len() * 4) as u64);
        }
    }

    /// Ends the reduction; no rank touches another arena for this operation any more.
    fn finish(&mut self, op: Operation, ctx: &OpContext<'_>) -> Result<(), OpError> {
        self.publish(Flag::Reduced, op.sequence);
        self.wait_all(Flag::Reduced, op.sequence, ctx)
    }

    /// As [`Self::finish`], but only the leader waits; the others wait for its result later.
    fn finish_at_leader(&mut self, op: Operation, ctx: &OpContext<'_>) -> Result<(), OpError> {
        self.publish(Flag::Reduced, op.sequence);
        if self.is_leader() { self.wait_all(Flag::Reduced, op.sequence, ctx) } else { Ok(()) }
    }

    fn publish(&self, flag: Flag, sequence: u32) {
        let (word, sleepers) = self.segment.flag(flag, self.lane, self.me);
        // Sequentially consistent on both sides: either this rank sees the sleeper, or the sleeper
        // sees the flag.
        word.store(sequence, Ordering::SeqCst);
        if sleepers.load(Ordering::SeqCst) > 0 {
            wake(word);
        }
    }

    fn wait_all(&mut self, flag: Flag, sequence: u32, ctx: &OpContext<'_>) -> Result<(), OpError> {
        (0..self.ranks.len()).try_for_each(|rank| self.wait(flag, rank, sequence, ctx))
    }

    fn wait(&mut self, flag: Flag, rank: usize, sequence: u32, ctx: &OpContext<'_>) -> Result<(), OpError> {
        let (word, sleepers) = self.segment.flag(flag, self.lane, rank);
        let reached = |value: u32| value.wrapping_sub(sequence) as i32 >= 0;
        if self.waiter.spin(ctx.in_foreground(), || reached(word.load(Ordering::Acquire))) {
            return Ok(());
        }
        loop {
            if ctx.shared.failed() || self.segment.poison().load(Ordering::SeqCst) != 0 {
                return Err(OpError::GroupFailed);
            }
            sleepers.fetch_add(1, Ordering::SeqCst);
            let value = word.load(Ordering::SeqCst);
            if !reached(value) {
                let flags = rustix::thread::futex::Flags::empty();
                // Whatever ended the wait, the flag is checked again.
                let _ = rustix::thread::futex::wait(word, flags, value, Some(&timespec(MAX_SLEEP)));
            }
            sleepers.fetch_sub(1, Ordering::SeqCst);
            if reached(word.load(Ordering::SeqCst)) {
                return Ok(());
            }
        }
    }
}
