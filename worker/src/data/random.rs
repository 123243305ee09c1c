//! Random numbers as functions of their purpose, so that no state has to be kept, shared or restored.

/// A bijection of 64 bits in which every input bit flips about half of the output bits: Stafford's thirteenth variant
/// of the finalizer of MurmurHash3, as in SplitMix64.
pub(super) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(GAMMA);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The odd number nearest to 2^64 divided by the golden ratio.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// The random numbers of a key, in sequence: SplitMix64 (Steele, Lea and Flood 2014).
#[derive(Debug, Clone, Copy)]
pub(super) struct Random {
    state: u64,
}

impl Random {
    /// Keys are used unchanged: make them with [`mix`].
    pub(super) fn new(key: u64) -> Self {
        Random { state: key }
    }

    /// The next 64 bits.
    pub(super) fn bits(&mut self) -> u64 {
        let bits = mix(self.state);
        self.state = self.state.wrapping_add(GAMMA);
        bits
    }

    /// The next number below `limit` (which is above 0). The bias of the multiplication is below `limit` / 2^64.
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
