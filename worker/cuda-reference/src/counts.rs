//! Costs of a launch that do not depend on time.

use std::collections::BTreeMap;

/// Traffic in one direction, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes requested, summed over all lanes.
    pub requested: u64,
    /// Bytes of 32-byte sectors, each counted once per warp instruction.
    pub moved: u64,
}

/// Shared memory accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shared {
    /// Warp instructions.
    pub accesses: u64,
    /// Passes beyond those that the access size requires, caused by lanes that need different words
    /// of one bank.
    pub conflicts: u64,
}

/// Counts of one launch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// Warp instructions.
    pub instructions: u64,
    /// Bytes read and written, by allocation.
    pub memory: BTreeMap<String, [Traffic; 2]>,
    /// Global memory accesses of warps.
    pub accesses: u64,
    /// Those of them with 16 bytes per lane.
    pub wide_accesses: u64,
    pub shared: Shared,
}

impl Counts {
    /// Bytes read and written in one allocation; zero if it was not touched.
    pub fn of(&self, allocation: &str) -> [Traffic; 2] {
        self.memory.get(allocation).copied().unwrap_or_default()
    }
}

const BANKS: usize = 32;

/// Extra passes of a shared memory access. The lanes of a quarter warp (16 bytes), half warp (8
/// bytes) or whole warp are served together unless they need different words of one bank. Lanes
/// that need the same word share it, except for atomics.
pub(crate) fn conflicts(offsets: &[Option<u64>; 32], bytes: usize, atomic: bool) -> u64 {
    let lanes_at_once = (128 / bytes.max(4)).min(32);
    let extra = |lanes: &[Option<u64>]| {
        let words_of = |offset: u64| offset / 4..(offset + bytes as u64).div_ceil(4);
        // A hot path: every shared memory access comes here, so nothing is allocated. Lanes that
        // are served together request 128 bytes.
        let (mut words, mut count) = ([0; BANKS], 0);
        for word in lanes.iter().flatten().flat_map(|offset| words_of(*offset)) {
            words[count] = word;
            count += 1;
        }
        let words = &mut words[..count];
        if !words.is_sorted() {
            words.sort_unstable();
        }
        let mut passes = [0u64; BANKS];
        for (index, word) in words.iter().enumerate() {
            let is_another = index == 0 || words[index - 1] != *word;
            passes[*word as usize % BANKS] += u64::from(atomic || is_another);
        }
        passes.into_iter().max().unwrap_or(0).saturating_sub(1)
    };
    offsets.chunks(lanes_at_once).map(extra).sum()
}

#[cfg(test)]
mod tests {
    use super::conflicts;

    fn stride(bytes: u64) -> [Option<u64>; 32] {
        std::array::from_fn(|lane| Some(lane as u64 * bytes))
    }

    #[test]
    fn conflicts_are_counted_by_bank_and_width() {
        assert_eq!(conflicts(&stride(4), 4, false), 0);
        assert_eq!(conflicts(&stride(0), 4, false), 0);
        assert_eq!(conflicts(&stride(8), 4, false), 1);
        assert_eq!(conflicts(&stride(128), 4, false), 31);
        // Four groups of eight lanes.
        assert_eq!(conflicts(&stride(16), 16, false), 0);
        assert_eq!(conflicts(&stride(32), 16, false), 4);
        assert_eq!(conflicts(&stride(0), 4, true), 31);
    }
}
