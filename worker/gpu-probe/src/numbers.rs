//! Test values, and how results are compared.

/// Test value at `index` of stream `seed`: one of the 16 odd multiples of 1/16 between -1 and 1,
/// all exact in bf16 and TF32. Computable per index, so that a few elements of a large result can
/// be recomputed.
pub(crate) fn pattern(seed: u32, index: usize) -> f32 {
    // MurmurHash3 finalizer.
    let mut bits = (index as u32).wrapping_add(seed.wrapping_mul(0x9E37_79B9));
    bits = (bits ^ (bits >> 16)).wrapping_mul(0x85EB_CA6B);
    bits = (bits ^ (bits >> 13)).wrapping_mul(0xC2B2_AE35);
    ((bits >> 28) as f32 * 2.0 - 15.0) / 16.0
}

/// The largest difference between two arrays, relative to the largest magnitude in the second;
/// infinite if there is a NaN.
pub(crate) fn relative_error(got: &[f32], wanted: &[f32]) -> f64 {
    let scale = wanted.iter().fold(0.0f64, |largest, value| largest.max(f64::from(value.abs())));
    let difference = got.iter().zip(wanted).map(|(got, wanted)| f64::from(got - wanted).abs());
    let largest =
        difference.fold(0.0, |largest: f64, value| if value.is_nan() { f64::INFINITY } else { largest.max(value) });
    largest / scale.max(f64::MIN_POSITIVE)
}

/// At most `count` indices spread over `0..len`.
pub(crate) fn sample_indices(len: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(len);
    (0..count).map(move |index| index * (len - 1) / count.max(2).saturating_sub(1))
}

/// Rounds to four significant digits, for reporting.
pub(crate) fn short(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let digits = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * digits).round() / digits
}

/// Whole MiB, for reporting.
pub(crate) fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pattern_is_exact_in_16_bits_and_balanced() {
        let values: Vec<f32> = (0..4096).map(|index| pattern(7, index)).collect();
        assert!(values.iter().all(|value| half::bf16::from_f32(*value).to_f32() == *value && value.abs() < 1.0));
        let mean = values.iter().sum::<f32>() / 4096.0;
        assert!(mean.abs() < 0.05, "mean {mean}");
        assert_ne!(values, (0..4096).map(|index| pattern(8, index)).collect::<Vec<_>>());
    }

    #[test]
    fn errors_are_relative_to_the_largest_value_and_nan_is_infinite() {
        assert_eq!(relative_error(&[1.0, 4.5], &[1.0, 5.0]), 0.1);
        assert_eq!(relative_error(&[1.0, f32::NAN], &[1.0, 5.0]), f64::INFINITY);
        assert_eq!(relative_error(&[0.0], &[0.0]), 0.0);
    }

    #[test]
    fn sample_indices_include_the_first_and_the_last() {
        assert_eq!(sample_indices(100, 4).collect::<Vec<_>>(), [0, 33, 66, 99]);
        assert_eq!(sample_indices(2, 9).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(sample_indices(1, 9).collect::<Vec<_>>(), [0]);
    }

    #[test]
    fn short_keeps_four_digits() {
        assert_eq!(short(123_456.0), 123_500.0);
        assert_eq!(short(0.001_234_56), 0.001_235);
        assert_eq!(short(0.0), 0.0);
    }
}
