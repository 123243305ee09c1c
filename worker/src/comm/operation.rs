//! An operation of a lane, and the part of each bucket that a rank owns.

use super::{error::Cause, packing::Packing, plan::Layout};
use std::ops::Range;

/// What an operation does with its buckets. A scatter followed by a gather is a reduce, bit for
/// bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpKind {
    /// All-reduce.
    Reduce,
    /// Reduce-scatter: each rank gets the sum of the part that it owns.
    Scatter,
    /// All-gather: each rank gets all parts from their owners.
    Gather,
    /// All-gather of the packed form.
    PackedGather,
}

impl OpKind {
    pub const ALL: [OpKind; 4] = [OpKind::Reduce, OpKind::Scatter, OpKind::Gather, OpKind::PackedGather];

    fn name(self) -> &'static str {
        match self {
            OpKind::Reduce => "all_reduce",
            OpKind::Scatter => "reduce_scatter",
            OpKind::Gather => "all_gather",
            OpKind::PackedGather => "packed all_gather",
        }
    }

    pub fn is_gather(self) -> bool {
        matches!(self, OpKind::Gather | OpKind::PackedGather)
    }

    /// From its number; `Reduce` for a number of no kind.
    pub fn of(number: u32) -> OpKind {
        OpKind::ALL.get(number as usize).copied().unwrap_or(OpKind::Reduce)
    }
}

/// An operation: its number within the lane, its first bucket, and its range of the arena.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub kind: OpKind,
    pub sequence: u32,
    pub bucket: u32,
    pub start: usize,
    pub len: usize,
}

/// Bits of a bucket's number in a tag.
const BUCKET_BITS: u32 = 30;

impl Operation {
    /// OpKind and first bucket as ranks compare them.
    pub fn tag(self) -> u32 {
        (self.kind as u32) << BUCKET_BITS | self.bucket
    }

    pub fn started_by(self, rank: u32) -> StartedOp {
        StartedOp { rank, tag: self.tag(), len: self.len as u64 }
    }
}

/// An operation as one rank started it.
pub(super) struct StartedOp {
    pub rank: u32,
    /// See [`Operation::tag`].
    pub tag: u32,
    /// In elements.
    pub len: u64,
}

impl StartedOp {
    fn name(&self) -> &'static str {
        OpKind::of(self.tag >> BUCKET_BITS).name()
    }

    fn bucket(&self) -> u32 {
        self.tag & ((1 << BUCKET_BITS) - 1)
    }
}

/// Two ranks started different operations; the text names both.
pub(super) fn desync(theirs: &StartedOp, mine: &StartedOp, sequence: u32) -> Cause {
    let which = if theirs.name() == mine.name() { "that" } else { mine.name() };
    Cause::failed(
        theirs.rank,
        format!(
            "ranks are out of step: as operation {sequence}, rank {} started the {} of bucket {} ({} numbers) where \
             rank {} started {which} of bucket {} ({} numbers)",
            theirs.rank,
            theirs.name(),
            theirs.bucket(),
            theirs.len,
            mine.rank,
            mine.bucket(),
            mine.len
        ),
    )
}

/// The part of a bucket that each rank owns: its share of its host's share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shards {
    hosts: usize,
    /// Of each rank: its host, its number on the host, and the ranks of the host.
    places: Vec<(usize, usize, usize)>,
    /// By bucket; those without a packed form are absent.
    packed: Vec<PackedParts>,
}

/// The parts of a bucket's packed form, in floats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PackedParts {
    pub by_rank: Vec<Range<usize>>,
    pub by_host: Vec<Range<usize>>,
    pub len: usize,
}

impl Shards {
    /// `layout`: the hosts between which values are exchanged.
    pub fn new(layout: &Layout) -> Shards {
        let by_host = layout.by_host();
        let place = |(rank, &host): (usize, &usize)| {
            let ranks = &by_host[host];
            (host, ranks.iter().position(|other| *other == rank).unwrap_or(0), ranks.len())
        };
        let places = layout.hosts.iter().enumerate().map(place).collect();
        Shards { hosts: by_host.len(), places, packed: Vec::new() }
    }

    /// With the packed forms of the first buckets, whose lengths are `lens`.
    pub fn with_packings(mut self, lens: &[usize], packings: &[Packing]) -> Shards {
        let parts = |(&len, packing): (&usize, &Packing)| {
            let place = |part: Range<usize>| packing.place(part.start)..packing.place(part.end);
            PackedParts {
                by_rank: (0..self.places.len()).map(|rank| place(self.range(len, rank as u32))).collect(),
                by_host: (0..self.hosts).map(|host| place(shard(len, self.hosts, host))).collect(),
                len: packing.place(len),
            }
        };
        self.packed = lens.iter().zip(packings).map(parts).collect();
        self
    }

    /// The packed forms, from the first bucket on.
    pub fn packed(&self) -> &[PackedParts] {
        &self.packed
    }

    /// What a rank owns of a bucket of `len` elements, in the form in which this kind of operation
    /// moves it.
    pub fn part(&self, kind: OpKind, (bucket, len): (usize, usize), rank: u32) -> Range<usize> {
        match kind {
            OpKind::PackedGather => self.packed[bucket].by_rank[rank as usize].clone(),
            OpKind::Reduce | OpKind::Scatter | OpKind::Gather => self.range(len, rank),
        }
    }

    /// Elements of a bucket of `len` elements that belong to a rank.
    pub fn range(&self, len: usize, rank: u32) -> Range<usize> {
        let (host, local, ranks) = self.places[rank as usize];
        let host = shard(len, self.hosts, host);
        let own = shard(host.len(), ranks, local);
        host.start + own.start..host.start + own.end
    }
}

/// Shard `i` of `n` of a bucket. Sizes are multiples of 16 floats (a cache line), except that the
/// last shards can be smaller or empty.
pub(super) fn shard(len: usize, n: usize, i: usize) -> Range<usize> {
    let each = len.div_ceil(n).next_multiple_of(16);
    (each * i).min(len)..(each * (i + 1)).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_element_has_one_owner(
            len in 0usize..100_000, hosts in prop::collection::vec(0usize..4, 1..9),
        ) {
            // Hosts are numbered in order of first appearance.
            let mut seen: Vec<usize> = Vec::new();
            let hosts = hosts.into_iter().map(|host| match seen.iter().position(|other| *other == host) {
                Some(number) => number,
                None => { seen.push(host); seen.len() - 1 }
            }).collect::<Vec<_>>();
            let shards = Shards::new(&Layout { rank: 0, hosts: hosts.clone() });
            let mut parts: Vec<_> = (0..hosts.len() as u32).map(|rank| shards.range(len, rank)).collect();
            parts.sort_by_key(|part| (part.start, part.end));
            let mut at = 0;
            for part in parts.into_iter().filter(|part| !part.is_empty()) {
                prop_assert_eq!(part.start, at);
                at = part.end;
            }
            prop_assert_eq!(at, len);
        }

        #[test]
        fn shards_cover_a_bucket_exactly_once(len in 0usize..100_000, n in 1usize..17) {
            let mut at = 0;
            for i in 0..n {
                let part = shard(len, n, i);
                prop_assert_eq!(part.start, at);
                prop_assert!(part.start.is_multiple_of(16) || part.start == len);
                at = part.end;
            }
            prop_assert_eq!(at, len);
        }
    }
}
