//! A permutation of 0..N in constant memory.

use super::random::mix;

/// Feistel rounds. Four mix well for large sizes; more are needed if a half has only a few bits.
const ROUNDS: u64 = 8;

/// A pseudo-random permutation of `0..len`, determined by a key: maps a position to a value in
/// constant time and memory.
///
/// A balanced Feistel network permutes the smallest power of 4 that is at least `len`. Values out
/// of range are permuted again until they are in range (cycle walking), on average less than four
/// times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// The permutation of `0..len` with this key.
    ///
    /// # Panics
    /// `len` is above 2^62.
    pub fn new(len: u64, key: u64) -> Self {
        assert!(len <= 1 << 62, "permutation of {len}: expected at most 2^62");
        let bits = 64 - len.saturating_sub(1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2), key }
    }

    /// The value at `position`.
    ///
    /// # Panics
    /// `position` is not below the length.
    pub fn at(&self, position: u64) -> u64 {
        assert!(position < self.len, "position {position} of a permutation of {}", self.len);
        let mut value = position;
        loop {
            value = self.once(value);
            if value < self.len {
                return value;
            }
        }
    }

    fn once(&self, value: u64) -> u64 {
        let mask = (1_u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(self.key ^ mix(right ^ (round << 56))) & mask));
        }
        left << self.half_bits | right
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn is_a_bijection(len in 1u64..3000, key in any::<u64>()) {
            let permutation = Permutation::new(len, key);
            let mut values: Vec<u64> = (0..len).map(|position| permutation.at(position)).collect();
            values.sort_unstable();
            prop_assert!(values.into_iter().eq(0..len));
        }
    }

    #[test]
    fn keys_give_different_orders() {
        let order = |key| (0..1000).map(|position| Permutation::new(1000, key).at(position)).collect::<Vec<_>>();
        let (a, b) = (order(1), order(2));
        assert_ne!(a, b);
        let fixed = a.iter().zip(0..).filter(|(value, position)| **value == *position).count();
        assert!(fixed < 10, "{fixed} values stay where they are");
        // Neighbours are spread out: in a random order their mean distance is a third of the
        // length.
        let distance: u64 = a.windows(2).map(|pair| pair[0].abs_diff(pair[1])).sum::<u64>() / 999;
        assert!((280..390).contains(&distance), "{distance}");
    }

    #[test]
    fn every_order_of_four_appears() {
        let mut seen = std::collections::BTreeMap::new();
        for key in 0..24_000 {
            let permutation = Permutation::new(4, key);
            *seen.entry([0, 1, 2, 3].map(|position| permutation.at(position))).or_insert(0) += 1;
        }
        assert_eq!(seen.len(), 24);
        assert!(seen.values().all(|count| (500..2000).contains(count)), "{seen:?}");
    }

    #[test]
    fn large_and_single() {
        assert_eq!(Permutation::new(1, 7).at(0), 0);
        let large = Permutation::new(1 << 62, 7);
        assert!(large.at((1 << 62) - 1) < 1 << 62);
    }
}
