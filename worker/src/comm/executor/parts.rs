//! Where the chunks of a plan are in memory, and their format on the wire.

use super::super::{
    data_type::{self, DataType, Reduction},
    operation::{PackedParts, shard},
    plan::Action,
    wire::{Combine, Wire},
};
use std::ops::Range;

/// Buckets, each divided into the chunks of a plan.
#[derive(Clone, Copy)]
pub(in crate::comm) struct Parts<'a> {
    /// Start and length of each bucket, in elements.
    pub buckets: &'a [(usize, usize)],
    pub chunks: usize,
    pub division: Division<'a>,
}

/// How buckets are divided into chunks.
#[derive(Clone, Copy)]
pub(in crate::comm) enum Division<'a> {
    /// Chunks are equally long.
    Equal,
    /// Chunks are whole cache lines of f32 values.
    CacheLines,
    /// A chunk is a host's part of the packed form of each bucket.
    Packed(&'a [PackedParts]),
}

impl Parts<'_> {
    /// Elements of a chunk of a bucket, counted from the first bucket's start.
    pub fn range(&self, bucket: usize, chunk: usize) -> Range<usize> {
        let (start, len) = self.buckets[bucket];
        let part = match self.division {
            Division::Equal => {
                let each = len / self.chunks;
                each * chunk..each * (chunk + 1)
            }
            Division::CacheLines => shard(len, self.chunks, chunk),
            Division::Packed(parts) => parts[bucket].by_host[chunk].clone(),
        };
        let start = start - self.buckets[0].0;
        start + part.start..start + part.end
    }
}

/// Format of the elements in memory and on the wire.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::comm) enum Format {
    /// The same on the wire as in memory.
    Plain(DataType, Reduction),
    /// Sums of f32 values that are rounded to a 2-byte format on the wire, multiplied by `scale`, a
    /// power of two. Values are rounded once per rank that forwards a partial sum, and the final
    /// sum once more by the last rank that adds to it, each time by at most half a unit in the last
    /// place. Rounded values convert back and forth unchanged, so all ranks end with its bits.
    Rounded { wire: Wire, scale: f32 },
}

impl Format {
    /// Bytes of an element in memory.
    pub fn memory_size(self) -> usize {
        match self {
            Format::Plain(data_type, _) => data_type.size(),
            Format::Rounded { .. } => 4,
        }
    }

    /// Bytes of an element on the wire.
    pub fn wire_size(self) -> usize {
        match self {
            Format::Plain(data_type, _) => data_type.size(),
            Format::Rounded { wire, .. } => wire.size(),
        }
    }

    /// Combines received elements with this rank's.
    pub fn combine(self, from: &[u8], to: &mut [u8], action: Action) {
        match self {
            Format::Plain(..) if action == Action::Copy => to.copy_from_slice(from),
            Format::Plain(data_type, reduction) => data_type::combine(data_type, reduction, from, to),
            Format::Rounded { wire, scale } => {
                let mode = match action {
                    Action::ReduceLast => Combine::AddRounded,
                    Action::Copy => Combine::Replace,
                    Action::Reduce | Action::Send => Combine::Add,
                };
                wire.combine(from, bytemuck::cast_slice_mut(to), mode, scale);
            }
        }
    }
}
