//! Memory that an operation of a library reads and writes.

use crate::gpu::Gpu;
use crate::shadow::Stamp;
use std::ops::Range;
use switchyard_cuda_reference::Touched;

/// Byte ranges by how an operation uses them.
#[derive(Debug, Default)]
pub(crate) struct Access {
    pub(crate) reads: Vec<Range<u64>>,
    pub(crate) writes: Vec<Range<u64>>,
    /// Added to.
    pub(crate) updates: Vec<Range<u64>>,
}

impl Access {
    /// Checks that the operation overwrites nothing that it reads, and returns all its uses.
    pub(crate) fn touched(self, gpu: &Gpu, stamp: &Stamp) -> Vec<Touched> {
        let Access { reads, mut writes, updates } = self;
        writes.extend(updates.iter().cloned());
        if let Some(range) = overlap(writes.clone(), reads.clone()) {
            gpu.report(&format!("{} writes what it reads: {}", stamp.name, gpu.describe(&range)));
        }
        let touched = |writes: bool| move |range: Range<u64>| Touched { range, writes };
        reads.into_iter().chain(updates).map(touched(false)).chain(writes.into_iter().map(touched(true))).collect()
    }
}

/// An overlap of written with read memory.
fn overlap(mut written: Vec<Range<u64>>, mut read: Vec<Range<u64>>) -> Option<Range<u64>> {
    read.retain(|range| !range.is_empty());
    written.retain(|range| !range.is_empty());
    read.sort_by_key(|range| range.start);
    // Ranges are processed in order, and overlapping ones merged.
    let mut joined: Vec<Range<u64>> = Vec::new();
    for range in read {
        match joined.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    written.into_iter().find(|range| {
        let before = joined.partition_point(|one| one.start < range.end);
        before.checked_sub(1).is_some_and(|last| joined[last].end > range.start)
    })
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn overlaps_of_reads_and_writes_are_found() {
        assert_eq!(overlap(vec![0..4, 10..12], vec![4..6, 12..20]), None);
        assert_eq!(overlap(vec![0..4, 10..13], vec![12..20, 4..6]), Some(10..13));
        assert_eq!(overlap(vec![5..6, 7..7], vec![0..10, 2..3]), Some(5..6));
    }
}
