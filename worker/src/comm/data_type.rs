//! Element types of collectives, and how their values are combined.

use super::kernels::detect;
use crate::cpu::{element::Element, isa::per_isa};
use bytemuck::Pod;
use half::{bf16, f16};

/// Element type of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataType {
    F32,
    F16,
    Bf16,
    I32,
    I64,
    U8,
}

impl DataType {
    pub const ALL: [DataType; 6] =
        [DataType::F32, DataType::F16, DataType::Bf16, DataType::I32, DataType::I64, DataType::U8];

    pub fn name(self) -> &'static str {
        match self {
            DataType::F32 => "f32",
            DataType::F16 => "f16",
            DataType::Bf16 => "bf16",
            DataType::I32 => "i32",
            DataType::I64 => "i64",
            DataType::U8 => "u8",
        }
    }

    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DataType::I64 => 8,
            DataType::F32 | DataType::I32 => 4,
            DataType::F16 | DataType::Bf16 => 2,
            DataType::U8 => 1,
        }
    }
}

/// How the values of all ranks are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// Integers wrap around. Sums of 16-bit floats are rounded after every addition.
    Sum,
    /// The sum divided by the number of ranks; for integers, truncated towards zero. 16-bit floats
    /// are divided before they are added, so that an average in their range does not overflow.
    Average,
    /// NaN if any value is.
    Min,
    /// NaN if any value is.
    Max,
}

impl Reduction {
    pub const ALL: [Reduction; 4] = [Reduction::Sum, Reduction::Average, Reduction::Min, Reduction::Max];

    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Average => "avg",
            Reduction::Min => "min",
            Reduction::Max => "max",
        }
    }
}

/// An element that collectives can move and combine. Combining two values gives the same bits in
/// either order: zeros and NaNs are ordered, and a sum that is not a number is the canonical NaN.
pub trait Number: Pod + Send + Sync + private::Combine {
    const DATA_TYPE: DataType;
}

mod private {
    /// Operations on two values.
    pub trait Combine: Copy {
        /// 16-bit floats are divided before the sum.
        const DIVIDES_FIRST: bool = false;
        fn sum(self, other: Self) -> Self;
        fn min(self, other: Self) -> Self;
        fn max(self, other: Self) -> Self;
        fn divide(self, ranks: u32) -> Self;
    }
}

use private::Combine;

macro_rules! integers {
    ($($type:ty => $data_type:ident),+) => {$(
        impl Number for $type {
            const DATA_TYPE: DataType = DataType::$data_type;
        }

        impl Combine for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn min(self, other: Self) -> Self {
                Ord::min(self, other)
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                Ord::max(self, other)
            }

            #[inline(always)]
            fn divide(self, ranks: u32) -> Self {
                (i128::from(self) / i128::from(ranks)) as $type
            }
        }
    )+};
}

integers!(i32 => I32, i64 => I64, u8 => U8);

/// `f32::minimum` of IEEE 754-2019: -0 is below +0, and NaN wins.
#[inline(always)]
fn minimum(a: f32, b: f32) -> f32 {
    let smaller = if a < b || (a == b && a.is_sign_negative()) { a } else { b };
    canonical(if a.is_nan() || b.is_nan() { f32::NAN } else { smaller })
}

/// Which of two NaNs survives an addition depends on the order of its operands.
#[inline(always)]
fn canonical(value: f32) -> f32 {
    if value.is_nan() { f32::NAN } else { value }
}

macro_rules! floats {
    ($($type:ty => $data_type:ident, divides first: $first:literal),+) => {$(
        impl Number for $type {
            const DATA_TYPE: DataType = DataType::$data_type;
        }

        impl Combine for $type {
            const DIVIDES_FIRST: bool = $first;

            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                <Self as Element>::of(canonical(self.get() + other.get()))
            }

            #[inline(always)]
            fn min(self, other: Self) -> Self {
                <Self as Element>::of(minimum(self.get(), other.get()))
            }

            #[inline(always)]
            fn max(self, other: Self) -> Self {
                <Self as Element>::of(-minimum(-self.get(), -other.get()))
            }

            #[inline(always)]
            fn divide(self, ranks: u32) -> Self {
                <Self as Element>::of(self.get() / ranks as f32)
            }
        }
    )+};
}

floats!(
    f32 => F32, divides first: false,
    f16 => F16, divides first: true,
    bf16 => Bf16, divides first: true
);

per_isa! { fn sums<T: Number> = sum_body(from: &[T], to: &mut [T]) }
per_isa! { fn minima<T: Number> = min_body(from: &[T], to: &mut [T]) }
per_isa! { fn maxima<T: Number> = max_body(from: &[T], to: &mut [T]) }
per_isa! { fn quotients<T: Number> = divide_body(values: &mut [T], ranks: u32) }

#[inline(always)]
fn sum_body<T: Number>(from: &[T], to: &mut [T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = to.sum(*from));
}

#[inline(always)]
fn min_body<T: Number>(from: &[T], to: &mut [T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = to.min(*from));
}

#[inline(always)]
fn max_body<T: Number>(from: &[T], to: &mut [T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = to.max(*from));
}

#[inline(always)]
fn divide_body<T: Number>(values: &mut [T], ranks: u32) {
    values.iter_mut().for_each(|value| *value = value.divide(ranks));
}

fn combine_as<T: Number>(reduction: Reduction, from: &[u8], to: &mut [u8]) {
    let (from, to): (&[T], &mut [T]) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
    match reduction {
        Reduction::Sum | Reduction::Average => sums(detect(), from, to),
        Reduction::Min => minima(detect(), from, to),
        Reduction::Max => maxima(detect(), from, to),
    }
}

/// Combines `from` into `to`: equally many whole elements, both aligned to the type.
pub(super) fn combine(data_type: DataType, reduction: Reduction, from: &[u8], to: &mut [u8]) {
    match data_type {
        DataType::F32 => combine_as::<f32>(reduction, from, to),
        DataType::F16 => combine_as::<f16>(reduction, from, to),
        DataType::Bf16 => combine_as::<bf16>(reduction, from, to),
        DataType::I32 => combine_as::<i32>(reduction, from, to),
        DataType::I64 => combine_as::<i64>(reduction, from, to),
        DataType::U8 => combine_as::<u8>(reduction, from, to),
    }
}

/// The part of an average that precedes the sum.
pub(super) fn before_sum<T: Number>(reduction: Reduction, values: &mut [T], ranks: u32) {
    if reduction == Reduction::Average && T::DIVIDES_FIRST {
        quotients(detect(), values, ranks);
    }
}

/// The part of an average that follows the sum.
pub(super) fn after_sum<T: Number>(reduction: Reduction, values: &mut [T], ranks: u32) {
    if reduction == Reduction::Average && !T::DIVIDES_FIRST {
        quotients(detect(), values, ranks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    fn floats() -> Vec<f32> {
        let all = (0..1000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9) ^ (i << 20)));
        all.chain([0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY]).collect()
    }

    #[test]
    fn every_combination_gives_the_same_bits_in_either_order_on_every_instruction_set() {
        let (a, b) = (floats(), floats().into_iter().rev().collect::<Vec<f32>>());
        type Combination = fn(Isa, &[f32], &mut [f32]);
        for operation in [sums as Combination, minima, maxima] {
            let results = Isa::ALL.into_iter().filter(|isa| isa.available()).flat_map(|isa| {
                let (mut left, mut right) = (a.clone(), b.clone());
                operation(isa, &b, &mut left);
                operation(isa, &a, &mut right);
                [left, right]
            });
            let mut bits = results.map(|values| values.into_iter().map(f32::to_bits).collect::<Vec<u32>>());
            let first = bits.next().unwrap();
            assert!(bits.all(|other| other == first));
        }
    }

    #[test]
    fn zeros_are_ordered_and_nan_wins() {
        assert_eq!(Combine::min(0.0f32, -0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(Combine::max(-0.0f32, 0.0).to_bits(), 0.0f32.to_bits());
        assert!(Combine::max(f32::NAN, 1.0).is_nan() && Combine::min(1.0, f32::NAN).is_nan());
        assert_eq!(Combine::sum(f16::MAX, f16::MAX), f16::INFINITY);
        assert_eq!((Combine::sum(250u8, 10), Combine::divide(-7i32, 2)), (4, -3));
    }
}
