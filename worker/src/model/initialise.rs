//! Weight initialisation with a counter-based generator.
//!
//! A value depends only on the seed, the parameter's name and its index: there is no drawing order
//! and no state. The arithmetic uses no library functions, so all ranks get the same bits.

use crate::cpu::math::ln;
use crate::nn::{Initial, Layout};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Initialises `weights`, whose length is the layout's; gaps become 0.
pub fn initialise(layout: &Layout, seed: u64, weights: &mut [f32]) {
    assert_eq!(weights.len(), layout.len, "length of the weights");
    weights.fill(0.0);
    for parameter in &layout.parameters {
        let values = &mut weights[parameter.range()];
        match parameter.initial {
            Initial::Constant(value) => values.fill(value),
            Initial::Uniform(bound) => {
                let key = xxh3_64_with_seed(parameter.name.as_bytes(), seed);
                for (index, value) in values.iter_mut().enumerate() {
                    *value = (Uniform(mix(key ^ mix(index as u64))).next() * f64::from(bound)) as f32;
                }
            }
            Initial::Normal(deviation) => {
                let key = xxh3_64_with_seed(parameter.name.as_bytes(), seed);
                for (index, value) in values.iter_mut().enumerate() {
                    *value = (normal(key, index as u64) * f64::from(deviation)) as f32;
                }
            }
        }
    }
}

/// The SplitMix64 finalizer (Steele, Lea and Flood 2014): a bijection that mixes well.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Uniform values between -1 and 1.
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        // 53 bits, centred in their interval: never 0.
        ((mix(self.0) >> 11) as f64 + 0.5) / (1u64 << 52) as f64 - 1.0
    }
}

/// Standard normal value `index` of the stream `key`, by Marsaglia's polar method.
fn normal(key: u64, index: u64) -> f64 {
    let mut uniform = Uniform(mix(key ^ mix(index)));
    loop {
        let (x, y) = (uniform.next(), uniform.next());
        let square = x * x + y * y;
        if square < 1.0 {
            return x * (-2.0 * ln(square) / square).sqrt();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_normal_moments() {
        let n = 200_000;
        let (mut sum, mut square, mut fourth) = (0.0, 0.0, 0.0);
        for i in 0..n {
            let x = normal(7, i);
            sum += x;
            square += x * x;
            fourth += x.powi(4);
        }
        let n = n as f64;
        assert!((sum / n).abs() < 0.01);
        assert!((square / n - 1.0).abs() < 0.01);
        assert!((fourth / n - 3.0).abs() < 0.1);
    }

    #[test]
    fn values_are_pinned() {
        let mut layout = Layout::default();
        layout.push("a".to_owned(), &[3], crate::nn::Role::Matrix, Initial::Normal(0.02));
        let mut one = vec![0.0; layout.len];
        initialise(&layout, 1, &mut one);
        let mut other = vec![0.0; layout.len];
        initialise(&layout, 2, &mut other);
        assert_ne!(one, other);
        assert_eq!(one[..3].iter().map(|x| x.to_bits()).collect::<Vec<_>>(), PINNED);
    }

    /// Changing this changes every training run with a given seed.
    const PINNED: [u32; 3] = [997_982_605, 3_149_227_289, 1_016_861_809];
}
