//! Assigns arena offsets to buffers with known lifetimes.

/// The size and lifetime of a buffer; both ends are inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub bytes: usize,
    pub from: usize,
    pub to: usize,
}

impl Span {
    fn overlaps(&self, other: &Span) -> bool {
        self.from <= other.to && other.from <= self.to
    }
}

/// Assigns offsets so that no two buffers share memory at the same time; also returns the total
/// bytes. All are multiples of `alignment` bytes. `None` if the total overflows.
///
/// Largest first, each into the lowest gap that fits. For our layer graphs this is within a few
/// percent of the lower bound (the largest sum of live buffers at any time; see `tests`).
pub(super) fn place(spans: &[Span], alignment: usize) -> Option<(Vec<usize>, usize)> {
    let mut order: Vec<usize> = (0..spans.len()).filter(|&i| spans[i].bytes > 0).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(spans[i].bytes), spans[i].from, i));
    let mut offsets = vec![0; spans.len()];
    // Placed buffers by offset.
    let mut placed: Vec<usize> = Vec::with_capacity(order.len());
    let mut total = 0;
    for i in order {
        let mut at = 0usize;
        for &j in &placed {
            if !spans[i].overlaps(&spans[j]) {
                continue;
            }
            if at.checked_add(spans[i].bytes)? <= offsets[j] {
                break;
            }
            let end = offsets[j].checked_add(spans[j].bytes)?.checked_next_multiple_of(alignment)?;
            at = at.max(end);
        }
        offsets[i] = at;
        total = total.max(at.checked_add(spans[i].bytes)?.checked_next_multiple_of(alignment)?);
        let position = placed.partition_point(|&j| offsets[j] <= at);
        placed.insert(position, i);
    }
    (total <= isize::MAX as usize / 2).then_some((offsets, total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The largest sum of live buffers at any time.
    fn lower_bound(spans: &[Span]) -> usize {
        let sum = |time: usize| spans.iter().filter(|s| s.from <= time && time <= s.to).map(|s| s.bytes).sum();
        (0..=spans.iter().map(|s| s.to).max().unwrap_or(0)).map(sum).max().unwrap_or(0)
    }

    #[test]
    fn activations_and_gradients_of_a_chain_are_packed_tightly() {
        // Forward i keeps its output until backward i; gradients live for two steps.
        let n = 40;
        let mut spans: Vec<Span> = (0..n).map(|i| Span { bytes: 640, from: i, to: 2 * n - 1 - i }).collect();
        spans.extend((0..n).map(|i| Span { bytes: 640, from: n + i, to: n + i + 1 }));
        let (_, total) = place(&spans, 64).unwrap();
        assert!(total as f64 <= 1.03 * lower_bound(&spans) as f64, "{total} of {}", lower_bound(&spans));
    }

    proptest! {
        #[test]
        fn live_buffers_do_not_overlap(
            raw in proptest::collection::vec((0usize..5_000, 0usize..30, 0usize..15), 1..60),
            alignment in proptest::sample::select(vec![64usize, 256])
        ) {
            let spans: Vec<Span> = raw.iter().map(|&(bytes, from, len)| Span { bytes, from, to: from + len }).collect();
            let (offsets, total) = place(&spans, alignment).unwrap();
            prop_assert_eq!(total % alignment, 0);
            prop_assert!(total >= lower_bound(&spans));
            for i in 0..spans.len() {
                prop_assert_eq!(offsets[i] % alignment, 0);
                prop_assert!(offsets[i] + spans[i].bytes <= total);
                for j in 0..i {
                    let apart = offsets[i] + spans[i].bytes <= offsets[j] || offsets[j] + spans[j].bytes <= offsets[i];
                    let empty = spans[i].bytes == 0 || spans[j].bytes == 0;
                    prop_assert!(apart || empty || !spans[i].overlaps(&spans[j]), "{} and {}", i, j);
                }
            }
        }
    }

    #[test]
    fn too_large_is_none() {
        let huge = Span { bytes: usize::MAX / 2, from: 0, to: 1 };
        assert!(place(&[huge, huge, huge], 64).is_none());
    }
}
