//! Whether memory is after a launch as it was on the executor.

use half::{bf16, f16};
use std::ops::Range;
use switchyard_cuda::kernels::Format;

/// How far numbers may be from those of the executor: it adds the products of tensor cores and rounds once, and computes approximate
/// instructions exactly; a device also joins a product and a sum where the compiler may.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Tolerance {
    /// Of the number.
    pub(super) relative: f64,
    /// Of the largest number of its memory.
    pub(super) of_largest: f64,
    pub(super) absolute: f64,
}

impl Tolerance {
    /// In 16 bits, one step to the next number, and what rounded factors of a sum may add.
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

/// What was found of one allocation or of several.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Found {
    pub(super) bytes: usize,
    /// Floats that the launch may have written.
    pub(super) numbers: usize,
    /// Those that have other bits, within their tolerance or not.
    pub(super) different: usize,
    /// The largest difference, as a share of the largest number of its memory.
    pub(super) error: f64,
    /// The largest difference, as a share of what is allowed there.
    pub(super) of_allowed: f64,
    /// The first that is wrong.
    pub(super) wrong: Option<String>,
}

impl Found {
    fn wrong(&mut self, text: impl FnOnce() -> String) {
        self.wrong.get_or_insert_with(text);
    }

    /// Adds what was found elsewhere. `place`: says where, of what is wrong there.
    pub(super) fn join(&mut self, other: Found, place: impl FnOnce(String) -> String) {
        self.bytes += other.bytes;
        self.numbers += other.numbers;
        self.different += other.different;
        self.error = self.error.max(other.error);
        self.of_allowed = self.of_allowed.max(other.of_allowed);
        if let Some(wrong) = other.wrong {
            self.wrong(|| place(wrong));
        }
    }
}

/// Compares all bytes. `written`: what the launch may write, and what is in it. All else must be as it was expected, to the bit.
pub(super) fn judge(memory: Memory<'_>, written: &[(Range<usize>, Format)], is_exact: bool) -> Found {
    let mut found = Found { bytes: memory.expected.len(), ..Found::default() };
    if memory.got.len() != memory.expected.len() || memory.before.len() != memory.expected.len() {
        found.wrong(|| format!("{} bytes, expected {}", memory.got.len(), memory.expected.len()));
        return found;
    }
    let mut rest = vec![true; memory.expected.len()];
    for (range, format) in written {
        let Some(size) = size(*format).filter(|_| range.end <= rest.len()) else { continue };
        let whole = range.start..range.end - range.len() % size;
        rest[whole.clone()].fill(false);
        let part = |bytes: &[u8]| bytes[whole.clone()].chunks(size).map(|bytes| number(*format, bytes)).collect();
        let [before, expected, got]: [Vec<Number>; 3] = [memory.before, memory.expected, memory.got].map(part);
        numbers(&before, &expected, &got, Tolerance::of(*format, is_exact), &mut found);
    }
    let same = memory.expected.iter().zip(memory.got).map(|(expected, got)| expected == got);
    if let Some(at) = rest.iter().zip(same).position(|(is_rest, same)| *is_rest && !same) {
        let [expected, got] = [memory.expected[at], memory.got[at]];
        found.wrong(|| format!("byte {at}: got {got:#04x}, expected {expected:#04x}"));
    }
    found
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

fn numbers(before: &[Number], expected: &[Number], got: &[Number], tolerance: Tolerance, found: &mut Found) {
    let finite = expected.iter().map(|(_, value)| value.abs()).filter(|value| value.is_finite());
    let largest = finite.fold(0.0, f64::max);
    found.numbers += expected.len();
    for (index, ((before, (bits, expected)), (got_bits, got))) in before.iter().zip(expected).zip(got).enumerate() {
        if bits == got_bits {
            continue;
        }
        found.different += 1;
        // Which NaN an operation gives, its format leaves open. One that was there before is not touched.
        if expected.is_nan() && got.is_nan() && before.0 != *bits {
            continue;
        }
        let difference = (got - expected).abs();
        let allowed = tolerance.relative * expected.abs() + tolerance.of_largest * largest + tolerance.absolute;
        // Beside what is infinite nothing is near.
        if expected.is_finite() && difference <= allowed {
            found.error = found.error.max(difference / largest.max(f64::MIN_POSITIVE));
            found.of_allowed = found.of_allowed.max(difference / allowed);
            continue;
        }
        found.wrong(|| {
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

    /// Of f32 that the launch may write, but for the last.
    fn found(before: &[f32], expected: &[f32], got: &[f32], is_exact: bool) -> Found {
        let [before, expected, got] = [before, expected, got].map(bytes);
        let written = [(0..expected.len() - 4, Format::F32)];
        judge(Memory { before: &before, expected: &expected, got: &got }, &written, is_exact)
    }

    #[test]
    fn numbers_may_differ_a_little_where_arithmetic_is_approximate_and_nowhere_else() {
        let (before, expected) = ([f32::NAN, f32::NAN, 7.0], [1.0, 100.0, 7.0]);
        assert_eq!(found(&before, &expected, &expected, true), Found { bytes: 12, numbers: 2, ..Found::default() });
        let near = [1.00001, 100.0, 7.0];
        let judged = found(&before, &expected, &near, false);
        assert_eq!((judged.different, &judged.wrong), (1, &None));
        assert!((judged.error - 1e-7).abs() < 1e-8 && judged.of_allowed < 0.01, "{judged:?}");
        let text = found(&before, &expected, &near, true).wrong.unwrap();
        assert!(
            text.starts_with("number 0: got 1.0000100135803223 (0x3f800054), expected 1 (0x3f800000) to"),
            "{text}"
        );
        let text = found(&before, &expected, &[1.0, 101.0, 7.0], false).wrong.unwrap();
        assert_eq!(text, "number 1: got 101 (0x42ca0000), expected 100 (0x42c80000) within 4.00e-3");
        // What the launch may not write.
        let text = found(&before, &expected, &[1.0, 100.0, 7.000001], false).wrong.unwrap();
        assert_eq!(text, "byte 8: got 0x02, expected 0x00");
    }

    #[test]
    fn a_gap_is_not_touched_and_a_new_nan_is_any_nan() {
        let other = f32::from_bits(0x7fff_ffff);
        assert_eq!(found(&[1.0, 0.0], &[f32::NAN, 0.0], &[other, 0.0], true).wrong, None);
        assert!(found(&[f32::NAN, 0.0], &[f32::NAN, 0.0], &[other, 0.0], false).wrong.is_some());
        for (expected, got) in [(1.0, f32::NAN), (f32::NAN, 1.0), (f32::INFINITY, f32::MAX), (1.0, f32::INFINITY)] {
            assert!(found(&[0.0, 0.0], &[expected, 0.0], &[got, 0.0], false).wrong.is_some(), "{expected} {got}");
        }
    }

    #[test]
    fn a_step_of_sixteen_bits_is_allowed_and_two_are_not() {
        let of = |values: [u16; 2]| values.map(u16::to_le_bytes).concat();
        let expected = of([0x3fff, 0x3f80]);
        for (step, is_right) in [(1, true), (3, false)] {
            let memory = Memory { before: &of([0; 2]), expected: &expected, got: &of([0x3fff + step, 0x3f80]) };
            let found = judge(memory, &[(0..4, Format::Bf16)], false);
            assert_eq!(found.wrong.is_none(), is_right, "{step}: {found:?}");
        }
    }
}
