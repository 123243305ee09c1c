//! Stateless random numbers: each is a function of its purpose, so there is no state to keep, share
//! or restore.

/// A 64-bit bijection in which every input bit flips about half of the output bits: Stafford's
/// Mix13 variant of the MurmurHash3 finalizer, as in SplitMix64.
pub(super) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(GAMMA);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The odd integer nearest to 2^64 divided by the golden ratio.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The random sequence of a key: SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Debug, Clone, Copy)]
pub(super) struct Random {
    state: u64,
}

impl Random {
    /// Keys are used as is: derive them with [`mix`].
    pub(super) fn new(key: u64) -> Self {
        Random { state: key }
    }

    /// The next 64 bits.
    pub(super) fn bits(&mut self) -> u64 {
        let bits = mix(self.state);
        self.state = self.state.wrapping_add(GAMMA);
        bits
    }

    /// The next integer below `limit`, which must be positive. The multiplication's bias is below
    /// `limit` / 2^64.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn below_is_even() {
        let mut random = Random::new(3);
        let mut counts = [0; 7];
        for _ in 0..70_000 {
            counts[random.below(7) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (9_600..10_400).contains(count)), "{counts:?}");
        assert_eq!(Random::new(9).below(1), 0);
    }
}
