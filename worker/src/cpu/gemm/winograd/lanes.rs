//! A vector register of channels. Plain arrays would do, but the compiler keeps them in memory.
#![allow(unsafe_code)]

use crate::cpu::{Element, Format};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// A vector of f32.
pub(super) trait Lanes: Copy {
    /// f32 values per vector.
    const WIDE: usize;

    /// # Safety
    /// The CPU has the instructions; `from` points to [`Lanes::WIDE`] values.
    unsafe fn load<E: Element>(from: *const E) -> Self;

    /// # Safety
    /// The CPU has the instructions; `to` points to [`Lanes::WIDE`] values that nothing else uses.
    unsafe fn store<E: Element>(self, to: *mut E);

    /// # Safety
    /// The CPU has the instructions.
    unsafe fn add(self, other: Self) -> Self;

    /// # Safety
    /// The CPU has the instructions.
    unsafe fn sub(self, other: Self) -> Self;

    /// Times 1/2.
    ///
    /// # Safety
    /// The CPU has the instructions.
    unsafe fn half(self) -> Self;

    /// # Safety
    /// The CPU has the instructions.
    unsafe fn zero() -> Self;
}

/// Scalar fallback.
impl Lanes for f32 {
    const WIDE: usize = 1;

    #[inline(always)]
    unsafe fn load<E: Element>(from: *const E) -> f32 {
        // SAFETY: as promised by the caller.
        unsafe { *from }.get()
    }

    #[inline(always)]
    unsafe fn store<E: Element>(self, to: *mut E) {
        // SAFETY: as promised by the caller.
        unsafe { *to = E::of(self) };
    }

    #[inline(always)]
    unsafe fn add(self, other: f32) -> f32 {
        self + other
    }

    #[inline(always)]
    unsafe fn sub(self, other: f32) -> f32 {
        self - other
    }

    #[inline(always)]
    unsafe fn half(self) -> f32 {
        self * 0.5
    }

    #[inline(always)]
    unsafe fn zero() -> f32 {
        0.0
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for __m512 {
    const WIDE: usize = 16;

    #[inline(always)]
    unsafe fn load<E: Element>(from: *const E) -> __m512 {
        // SAFETY: as promised by the caller.
        unsafe {
            match E::FORMAT {
                Format::F32 => _mm512_loadu_ps(from.cast()),
                Format::Bf16 => {
                    let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
                }
                Format::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
            }
        }
    }

    #[inline(always)]
    unsafe fn store<E: Element>(self, to: *mut E) {
        // SAFETY: as promised by the caller.
        unsafe {
            if E::FORMAT == Format::F32 {
                return _mm512_storeu_ps(to.cast(), self);
            }
            let mut numbers = [0.0f32; 16];
            _mm512_storeu_ps(numbers.as_mut_ptr(), self);
            for (i, x) in numbers.into_iter().enumerate() {
                *to.add(i) = E::of(x);
            }
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: __m512) -> __m512 {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: __m512) -> __m512 {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_sub_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn half(self) -> __m512 {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_mul_ps(self, _mm512_set1_ps(0.5)) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_setzero_ps() }
    }
}

#[cfg(target_arch = "x86_64")]
impl Lanes for __m256 {
    const WIDE: usize = 8;

    #[inline(always)]
    unsafe fn load<E: Element>(from: *const E) -> __m256 {
        // SAFETY: as promised by the caller.
        unsafe {
            match E::FORMAT {
                Format::F32 => _mm256_loadu_ps(from.cast()),
                Format::Bf16 => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
                Format::F16 => {
                    let numbers: [f32; 8] = std::array::from_fn(|i| (*from.add(i)).get());
                    _mm256_loadu_ps(numbers.as_ptr())
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store<E: Element>(self, to: *mut E) {
        // SAFETY: as promised by the caller.
        unsafe {
            if E::FORMAT == Format::F32 {
                return _mm256_storeu_ps(to.cast(), self);
            }
            let mut numbers = [0.0f32; 8];
            _mm256_storeu_ps(numbers.as_mut_ptr(), self);
            for (i, x) in numbers.into_iter().enumerate() {
                *to.add(i) = E::of(x);
            }
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: __m256) -> __m256 {
        // SAFETY: as promised by the caller.
        unsafe { _mm256_add_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: __m256) -> __m256 {
        // SAFETY: as promised by the caller.
        unsafe { _mm256_sub_ps(self, other) }
    }

    #[inline(always)]
    unsafe fn half(self) -> __m256 {
        // SAFETY: as promised by the caller.
        unsafe { _mm256_mul_ps(self, _mm256_set1_ps(0.5)) }
    }

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: as promised by the caller.
        unsafe { _mm256_setzero_ps() }
    }
}
