//! 16-bit copies of the weights.
#![allow(unsafe_code)]

use crate::cpu::isa::per_isa;
use crate::cpu::pool::Shared;
use crate::cpu::{Element, Isa, Pool, bf16, f16};
use std::ops::Range;

/// Floats per task.
const PIECE: usize = 16 * 1024;

/// 16-bit weight memory in the flat layout.
pub enum HalfWeights<'a> {
    Bf16(&'a mut [bf16]),
    /// Weights beyond 65,504 become infinite.
    F16(&'a mut [f16]),
}

#[inline(always)]
fn round_body<T: Element>(from: &[f32], to: &mut [T]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = T::of(from);
    }
}

per_isa! { fn round_bf16 = round_body(from: &[f32], to: &mut [bf16]) }
per_isa! { fn round_f16 = round_body(from: &[f32], to: &mut [f16]) }

impl<'a> HalfWeights<'a> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self {
            HalfWeights::Bf16(half) => half.len(),
            HalfWeights::F16(half) => half.len(),
        }
    }

    /// Rounds the `weights` in a range of the layout. Call before the first step, after a restore,
    /// and for what other ranks updated; the optimizer does it for its own updates.
    ///
    /// # Panics
    /// If the lengths differ, or the range is not within them.
    pub fn copy_from(self, range: Range<usize>, weights: &[f32], isa: Isa, pool: &Pool) {
        assert_eq!(self.len(), weights.len(), "lengths of half weights and weights");
        let shared = self.share();
        pool.run(range.len().div_ceil(PIECE), &|i, _| {
            let range = range.start + i * PIECE..range.end.min(range.start + (i + 1) * PIECE);
            // SAFETY: each task has its own piece.
            unsafe { shared.round(isa, range.clone(), &weights[range]) };
        });
    }

    /// A view for tasks that write disjoint ranges.
    pub(crate) fn share(self) -> SharedHalf<'a> {
        match self {
            HalfWeights::Bf16(half) => SharedHalf::Bf16(Shared::new(half)),
            HalfWeights::F16(half) => SharedHalf::F16(Shared::new(half)),
        }
    }
}

/// [`HalfWeights`] for concurrent writes to disjoint ranges.
pub(crate) enum SharedHalf<'a> {
    Bf16(Shared<'a, bf16>),
    F16(Shared<'a, f16>),
}

impl SharedHalf<'_> {
    /// Rounds the weights of a range.
    ///
    /// # Safety
    /// Ranges written concurrently must not overlap.
    pub(crate) unsafe fn round(&self, isa: Isa, range: Range<usize>, weights: &[f32]) {
        match self {
            // SAFETY: as promised by the caller.
            SharedHalf::Bf16(half) => round_bf16(isa, weights, unsafe { half.piece(range) }),
            // SAFETY: as promised by the caller.
            SharedHalf::F16(half) => round_f16(isa, weights, unsafe { half.piece(range) }),
        }
    }
}
