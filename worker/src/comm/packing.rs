//! The packed form of a bucket, in which values that all ranks read in 16 bits take 2 bytes instead
//! of 4.

use std::ops::Range;

/// Consecutive values of a bucket with the same width in the packed form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    pub elements: Range<usize>,
    /// 2 bytes per value instead of 4.
    pub is_half: bool,
}

impl Segment {
    /// Length in the packed form, in floats.
    pub fn packed_len(&self) -> usize {
        if self.is_half { self.elements.len() / 2 } else { self.elements.len() }
    }
}

/// The segments of a bucket, from its start; must be equal on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Packing {
    segments: Vec<Segment>,
}

impl Packing {
    /// Whole cache lines of f32 values: no element shares a packed float with another rank's.
    const ALIGNMENT: usize = 16;

    /// Appends the next `len` elements.
    ///
    /// # Panics
    /// If `len` is not a multiple of 16.
    pub fn push(&mut self, len: usize, is_half: bool) {
        assert!(len.is_multiple_of(Packing::ALIGNMENT), "a segment of {len} numbers, expected a multiple of 16");
        match self.segments.last_mut() {
            Some(last) if last.is_half == is_half => last.elements.end += len,
            last => {
                let start = last.map_or(0, |last| last.elements.end);
                self.segments.push(Segment { elements: start..start + len, is_half });
            }
        }
    }

    /// Whether a value takes 2 bytes.
    pub fn has_halves(&self) -> bool {
        self.segments.iter().any(|segment| segment.is_half)
    }

    /// The segments within a range of elements.
    pub fn segments(&self, range: Range<usize>) -> impl Iterator<Item = Segment> {
        let cut = move |Segment { elements, is_half }: &Segment| {
            let (start, end) = (elements.start.max(range.start), elements.end.min(range.end));
            (start < end).then_some(Segment { elements: start..end, is_half: *is_half })
        };
        self.segments.iter().filter_map(cut)
    }

    /// Where an element begins in the packed form, in floats; the packed length for elements after
    /// the last segment.
    pub fn place(&self, element: usize) -> usize {
        self.segments(0..element).map(|segment| segment.packed_len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_follow_each_other_in_the_packed_form(
            segments in prop::collection::vec((0usize..20, any::<bool>()), 0..10),
            mut cuts in prop::collection::vec(0usize..200, 0..5),
        ) {
            let mut packing = Packing::default();
            segments.iter().for_each(|(lines, is_half)| packing.push(16 * lines, *is_half));
            let packed: usize = segments.iter().map(|(lines, is_half)| if *is_half { 8 * lines } else { 16 * lines }).sum();
            prop_assert_eq!(packing.place(usize::MAX), packed);
            cuts.sort_unstable();
            let len = 16 * segments.iter().map(|(lines, _)| lines).sum::<usize>();
            let (mut at, mut start) = (0, 0);
            for end in cuts.into_iter().map(|cut| (16 * cut).min(len)).chain([len]) {
                prop_assert_eq!(packing.place(start), at);
                for segment in packing.segments(start..end) {
                    prop_assert_eq!(segment.elements.start, start);
                    at += segment.packed_len();
                    start = segment.elements.end;
                }
                prop_assert_eq!(start, end);
            }
            prop_assert_eq!(at, packed);
        }
    }
}
