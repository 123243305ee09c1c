//! What a launch costs, as far as it does not depend on time.

use std::collections::BTreeMap;

/// Bytes of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Sum over all lanes.
    pub asked: u64,
    /// Sectors of 32 bytes, counted once for each instruction of a warp.
    pub moved: u64,
}

/// Accesses to shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Shared {
    /// Instructions of warps.
    pub accesses: u64,
    /// Passes beyond those that the size of the access needs, because lanes want different words of one bank.
    pub conflicts: u64,
}

/// Counts of one launch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// Instructions of warps.
    pub instructions: u64,
    /// Of these, products on tensor cores.
    pub products: u64,
    /// Bytes read and written, by allocation.
    pub memory: BTreeMap<String, [Traffic; 2]>,
    /// Accesses to global memory by warps, and those of them with 16 bytes a lane.
    pub accesses: u64,
    pub wide_accesses: u64,
    pub shared: Shared,
}

impl Counts {
    /// Bytes read and written of one allocation; zero if it was not touched.
    pub fn of(&self, allocation: &str) -> [Traffic; 2] {
        self.memory.get(allocation).copied().unwrap_or_default()
    }
}

const BANKS: usize = 32;

/// Passes that an access to shared memory takes beyond the least: lanes of a quarter (16 bytes), half (8 bytes) or whole warp are
/// served together unless they want different words of one bank. Lanes that want the same word share it, except for atomics.
pub(crate) fn conflicts(offsets: &[Option<u64>; 32], bytes: usize, atomic: bool) -> u64 {
    let lanes_at_once = (128 / bytes.max(4)).min(32);
    let extra = |lanes: &[Option<u64>]| {
        let words_of = |offset: u64| offset / 4..(offset + bytes as u64).div_ceil(4);
        // Each access to shared memory comes here: nothing is allocated. Lanes that are served together want 128 bytes.
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
        // Four lots of eight lanes.
        assert_eq!(conflicts(&stride(16), 16, false), 0);
        assert_eq!(conflicts(&stride(32), 16, false), 4);
        assert_eq!(conflicts(&stride(0), 4, true), 31);
    }
}
