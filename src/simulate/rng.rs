//! Reproducible pseudo-random numbers.

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Uniform in -1 to 1.
    pub fn around(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    /// An exponentially distributed interval.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        let even = (self.draw() >> 11) as f64 / (1_u64 << 53) as f64;
        -mean * (1.0 - even).ln()
    }

    /// Shuffles a list.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, (self.draw() % (last as u64 + 1)) as usize);
        }
    }
}

/// Hashes a number.
pub fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
