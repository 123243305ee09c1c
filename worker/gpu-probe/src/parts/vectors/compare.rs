//! Compares the memory after a launch with the executor's.

use half::{bf16, f16};
use std::ops::Range;
use switchyard_cuda::kernels::Format;

/// Allowed difference from the executor. The executor computes approximate instructions exactly; a
/// device also contracts products and sums into FMAs where the compiler may.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tolerance {
    /// Relative to the value.
    pub(super) relative: f64,
    /// Relative to the largest value in its memory.
    pub(super) of_largest: f64,
    pub(super) absolute: f64,
}

impl Tolerance {
    /// In 16-bit formats: one ulp, plus the effect of cancellation in a sum.
    pub(super) fn of(format: Format, is_exact: bool) -> Tolerance {
        let [relative, of_largest, absolute] = match format {
            Format::F32 if !is_exact => [2e-5, 2e-5, 1e-6],
            Format::Bf16 if !is_exact => [2f64.powi(-7), 2f64.powi(-11), 1e-6],
            Format::F16 if !is_exact => [2f64.powi(-10), 2f64.powi(-14), 1e-6],
            _ => [0.0; 3],
        };
        Tolerance { relative, of_largest, absolute }
    }
}

/// An allocation of a launch.
#[derive(Clone, Copy)]
pub(super) struct Memory<'a> {
    pub(super) before: &'a [u8],
    pub(super) expected: &'a [u8],
    pub(super) got: &'a [u8],
}

/// Comparison of one or several allocations.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Comparison {
    pub(super) bytes: usize,
    /// Floats that the launch may have written.
    pub(super) numbers: usize,
    /// Floats whose bits differ, within tolerance or not.
    pub(super) different: usize,
    /// Largest difference relative to the largest value in its memory.
    pub(super) error: f64,
    /// Largest difference relative to the tolerance there.
    pub(super) of_allowed: f64,
    /// The first mismatch.
    pub(super) mismatch: Option<String>,
}

impl Comparison {
    fn report(&mut self, text: impl FnOnce() -> String) {
        self.mismatch.get_or_insert_with(text);
    }

    /// Adds another comparison. `place` adds the location to its mismatch.
    pub(super) fn join(&mut self, other: Comparison, place: impl FnOnce(String) -> String) {
        self.bytes += other.bytes;
        self.numbers += other.numbers;
        self.different += other.different;
        self.error = self.error.max(other.error);
        self.of_allowed = self.of_allowed.max(other.of_allowed);
        if let Some(wrong) = other.mismatch {
            self.report(|| place(wrong));
        }
    }
}

/// Compares all bytes. `written` lists what the launch may write, with its format. Everything else
/// must match to the bit.
pub(super) fn compare(memory: Memory<'_>, written: &[(Range<usize>, Format)], is_exact: bool) -> Comparison {
    let mut comparison = Comparison { bytes: memory.expected.len(), ..Comparison::default() };
    if memory.got.len() != memory.expected.len() || memory.before.len() != memory.expected.len() {
        comparison.report(|| format!("{} bytes, expected {}", memory.got.len(), memory.expected.len()));
        return comparison;
    }
    let mut rest = vec![true; memory.expected.len()];
    for (range, format) in written {
        let Some(size) = size(*format).filter(|_| range.end <= rest.len()) else { continue };
        let whole = range.start..range.end - range.len() % size;
        rest[whole.clone()].fill(false);
        let part = |bytes: &[u8]| bytes[whole.clone()].chunks(size).map(|bytes| number(*format, bytes)).collect();
        let [before, expected, got]: [Vec<Number>; 3] = [memory.before, memory.expected, memory.got].map(part);
        numbers(&before, &expected, &got, Tolerance::of(*format, is_exact), &mut comparison);
    }
    let same = memory.expected.iter().zip(memory.got).map(|(expected, got)| expected == got);
    if let Some(at) = rest.iter().zip(same).position(|(is_rest, same)| *is_rest && !same) {
        let [expected, got] = [memory.expected[at], memory.got[at]];
        comparison.report(|| format!("byte {at}: got {got:#04x}, expected {expected:#04x}"));
    }
    comparison
}

/// Bits and value.
type Number = (u64, f64);

fn size(format: Format) -> Option<usize> {
    match format {
        Format::F64 => Some(8),
        Format::F32 => Some(4),
        Format::Bf16 | Format::F16 => Some(2),
        Format::Bits => None,
    }
}

fn number(format: Format, bytes: &[u8]) -> Number {
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(all);
    let value = match format {
        Format::F64 => f64::from_bits(bits),
        Format::F32 => f32::from_bits(bits as u32).into(),
        Format::Bf16 => bf16::from_bits(bits as u16).into(),
        Format::F16 => f16::from_bits(bits as u16).into(),
        Format::Bits => bits as f64,
    };
    (bits, value)
}

fn numbers(before: &[Number], expected: &[Number], got: &[Number], tolerance: Tolerance, comparison: &mut Comparison) {
    let finite = expected.iter().map(|(_, value)| value.abs()).filter(|value| value.is_finite());
    let largest = finite.fold(0.0, f64::max);
    comparison.numbers += expected.len();
    for (index, ((before, (bits, expected)), (got_bits, got))) in before.iter().zip(expected).zip(got).enumerate() {
        if bits == got_bits {
            continue;
        }
        comparison.different += 1;
        // The format does not define which NaN an operation returns. A NaN that was there before
        // must stay unchanged.
        if expected.is_nan() && got.is_nan() && before.0 != *bits {
            continue;
        }
        let difference = (got - expected).abs();
        let allowed = tolerance.relative * expected.abs() + tolerance.of_largest * largest + tolerance.absolute;
        // Nothing is within tolerance of an infinity.
        if expected.is_finite() && difference <= allowed {
            comparison.error = comparison.error.max(difference / largest.max(f64::MIN_POSITIVE));
            comparison.of_allowed = comparison.of_allowed.max(difference / allowed);
            continue;
        }
        comparison.report(|| {
            let allowed =
                if tolerance.relative > 0.0 { format!("within {allowed:.2e}") } else { "to the bit".to_owned() };
            format!("number {index}: got {got} ({got_bits:#x}), expected {expected} ({bits:#x}) {allowed}")
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    /// All f32 values but the last may be written by the launch.
    fn comparison(before: &[f32], expected: &[f32], got: &[f32], is_exact: bool) -> Comparison {
        let [before, expected, got] = [before, expected, got].map(bytes);
        let written = [(0..expected.len() - 4, Format::F32)];
        compare(Memory { before: &before, expected: &expected, got: &got }, &written, is_exact)
    }

    #[test]
    fn only_approximate_arithmetic_has_a_tolerance() {
        let (before, expected) = ([f32::NAN, f32::NAN, 7.0], [1.0, 100.0, 7.0]);
        assert_eq!(
            comparison(&before, &expected, &expected, true),
            Comparison { bytes: 12, numbers: 2, ..Comparison::default() }
        );
        let near = [1.00001, 100.0, 7.0];
        let judged = comparison(&before, &expected, &near, false);
        assert_eq!((judged.different, &judged.mismatch), (1, &None));
        assert!((judged.error - 1e-7).abs() < 1e-8 && judged.of_allowed < 0.01, "{judged:?}");
        let text = comparison(&before, &expected, &near, true).mismatch.unwrap();
        assert!(
            text.starts_with("number 0: got 1.0000100135803223 (0x3f800054), expected 1 (0x3f800000) to"),
            "{text}"
        );
        let text = comparison(&before, &expected, &[1.0, 101.0, 7.0], false).mismatch.unwrap();
        assert_eq!(text, "number 1: got 101 (0x42ca0000), expected 100 (0x42c80000) within 4.00e-3");
        // A value that the launch must not write.
        let text = comparison(&before, &expected, &[1.0, 100.0, 7.000001], false).mismatch.unwrap();
        assert_eq!(text, "byte 8: got 0x02, expected 0x00");
    }

    #[test]
    fn gaps_must_be_unchanged_and_any_new_nan_is_accepted() {
        let other = f32::from_bits(0x7fff_ffff);
        assert_eq!(comparison(&[1.0, 0.0], &[f32::NAN, 0.0], &[other, 0.0], true).mismatch, None);
        assert!(comparison(&[f32::NAN, 0.0], &[f32::NAN, 0.0], &[other, 0.0], false).mismatch.is_some());
        for (expected, got) in [(1.0, f32::NAN), (f32::NAN, 1.0), (f32::INFINITY, f32::MAX), (1.0, f32::INFINITY)] {
            assert!(
                comparison(&[0.0, 0.0], &[expected, 0.0], &[got, 0.0], false).mismatch.is_some(),
                "{expected} {got}"
            );
        }
    }

    #[test]
    fn one_16_bit_ulp_is_accepted_and_two_are_not() {
        let of = |values: [u16; 2]| values.map(u16::to_le_bytes).concat();
        let expected = of([0x3fff, 0x3f80]);
        for (step, is_right) in [(1, true), (3, false)] {
            let memory = Memory { before: &of([0; 2]), expected: &expected, got: &of([0x3fff + step, 0x3f80]) };
            let comparison = compare(memory, &[(0..4, Format::Bf16)], false);
            assert_eq!(comparison.mismatch.is_none(), is_right, "{step}: {comparison:?}");
        }
    }
}
