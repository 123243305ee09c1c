//! Numbers that look random and are the same in every run.

/// A generator (SplitMix64; Steele, Lea, Flood, OOPSLA 2014).
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.0)
    }

    /// From -1 to 1, evenly.
    pub fn around(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    /// Waiting times of what happens this often on average, whenever it last did.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        let even = (self.draw() >> 11) as f64 / (1_u64 << 53) as f64;
        -mean * (1.0 - even).ln()
    }

    /// Puts a list in any order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, (self.draw() % (last as u64 + 1)) as usize);
        }
    }
}

/// A number that belongs to another one.
pub fn mixed(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
