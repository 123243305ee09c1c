//! AVX-512 packers.
#![allow(unsafe_code)]

use super::operand::Run;
use super::tile::ROW;
use crate::cpu::{Element, Format, bf16};
use std::arch::x86_64::*;

/// The lowest `n` bits; all of them from 16 on.
fn mask(n: usize) -> u16 {
    if n >= 16 { u16::MAX } else { (1u16 << n) - 1 }
}

/// Loads up to 16 adjacent values as f32.
///
/// # Safety
/// The values selected by the mask exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn numbers<T: Element>(mask: u16, from: *const T) -> __m512i {
    // SAFETY: as promised by the caller.
    unsafe {
        match T::FORMAT {
            Format::F32 => _mm512_maskz_loadu_epi32(mask, from.cast()),
            Format::Bf16 => _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from.cast()))),
            Format::F16 => _mm512_castps_si512(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from.cast()))),
        }
    }
}

/// Interleaves two rows into 16 pairs.
///
/// # Safety
/// The values selected by the masks exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn pairs<T>(masks: [u16; 2], from: [*const T; 2]) -> __m512i {
    // SAFETY: as promised by the caller.
    unsafe {
        let even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(masks[0], from[0].cast()));
        let odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(masks[1], from[1].cast()));
        _mm512_or_si512(even, _mm512_slli_epi32::<16>(odd))
    }
}

/// # Safety
/// Source and target have `len` elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn copy_row<T: Element>(from: *const T, len: usize, to: *mut f32) {
    let mut p = 0;
    while p + 16 <= len {
        // SAFETY: 16 more elements exist.
        unsafe { _mm512_storeu_epi32(to.add(p).cast(), numbers(u16::MAX, from.add(p))) };
        p += 16;
    }
    if p < len {
        let rest = mask(len - p);
        // SAFETY: masked to the elements that exist.
        unsafe { _mm512_mask_storeu_epi32(to.add(p).cast(), rest, numbers(rest, from.add(p))) };
    }
}

/// # Safety
/// See [`super::pack`]; at most 32 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn columns<T: Element, const PAIRS: bool>(
    width: usize,
    len: usize,
    steps: usize,
    mut next: impl FnMut() -> Run<T>,
    panel: *mut f32,
) {
    // Mask of the elements that exist.
    let bits = |run: &Run<T>| (1u64 << run.to) - (1u64 << run.from);
    let mut to = panel.cast::<i32>();
    let mut p = 0;
    while p < steps {
        let even = next();
        p += 1;
        let odd = if PAIRS && p < steps { next() } else { Run::EMPTY };
        p += usize::from(PAIRS);
        let exist = [bits(&even), bits(&odd)];
        let mut first = 0;
        while first < len {
            let masks = exist.map(|bits| (bits >> first) as u16);
            let from = [even.start.wrapping_add(first), odd.start.wrapping_add(first)];
            // SAFETY: masked to the existing elements of the runs and to the requested columns.
            unsafe {
                let value = if PAIRS { pairs(masks, from) } else { numbers(masks[0], from[0]) };
                _mm512_mask_storeu_epi32(to.add(first), mask(len - first), value);
            }
            first += 16;
        }
        to = to.wrapping_add(width);
    }
}

/// [`columns`] for runs of `lines` elements `depth` apart, zero-filled up to `written` of the
/// panel's `width`.
///
/// # Safety
/// See [`super::pack`]; `written` at most 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn strided<T: Element, const PAIRS: bool>(
    width: usize,
    written: usize,
    lines: usize,
    steps: usize,
    start: *const T,
    depth: usize,
    panel: *mut f32,
) {
    let masks = |n: usize| [mask(n), mask(n.saturating_sub(16))];
    let (read, write) = (masks(lines), masks(written));
    let mut to = panel.cast::<i32>();
    let mut even = start;
    for p in (0..steps).step_by(if PAIRS { 2 } else { 1 }) {
        let odd = even.wrapping_add(depth);
        let odd_read = if p + 1 < steps { read } else { [0; 2] };
        for half in 0..2 {
            if write[half] != 0 {
                let skip = 16 * half;
                // SAFETY: masked to the lines that exist and to the width of the panel.
                unsafe {
                    let from = even.wrapping_add(skip);
                    let value = if PAIRS {
                        pairs([read[half], odd_read[half]], [from, odd.wrapping_add(skip)])
                    } else {
                        numbers(read[half], from)
                    };
                    _mm512_mask_storeu_epi32(to.add(skip), write[half], value);
                }
            }
        }
        even = if PAIRS { odd.wrapping_add(depth) } else { odd };
        to = to.wrapping_add(width);
    }
}

/// Transposes up to 16 lines, contiguous along the steps, into up to 16 lanes of each `width`.
///
/// # Safety
/// See [`super::pack`]; `lines` at most 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn transpose<T: Element, const PAIRS: bool>(
    width: usize,
    lines: usize,
    steps: usize,
    start: *const T,
    along: usize,
    panel: *mut f32,
) {
    let write = mask(width);
    let per_lane = if PAIRS { 2 } else { 1 };
    for first in (0..steps).step_by(16 * per_lane) {
        let count = (steps - first).min(16 * per_lane);
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            if i < lines {
                let from = start.wrapping_add(i * along + first);
                // SAFETY: line `i` exists; masked to the steps that exist.
                *r = unsafe {
                    if PAIRS {
                        _mm512_maskz_loadu_epi16(((1u64 << count) - 1) as u32, from.cast())
                    } else {
                        numbers(mask(count), from)
                    }
                };
            }
        }
        let columns = transposed_16x16(&r);
        let lane = first / per_lane;
        for (j, column) in columns.iter().enumerate() {
            if j * per_lane < count {
                // SAFETY: lane `lane + j` of the panel; masked to its width.
                unsafe { _mm512_mask_storeu_epi32(panel.add((lane + j) * width).cast(), write, *column) };
            }
        }
    }
}

/// Transposes up to 16 lines, adjacent at each step, into the same number of rows of pairs.
///
/// # Safety
/// See [`super::pack`]; `lines` at most 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn transpose_rows(lines: usize, steps: usize, start: *const bf16, depth: usize, panel: *mut f32) {
    let read = mask(lines);
    for first in (0..steps).step_by(32) {
        let count = (steps - first).min(32);
        let mut r = [_mm512_setzero_si512(); 16];
        for (i, r) in r.iter_mut().enumerate() {
            let step = first + 2 * i;
            if step < steps {
                let masks = [read, if step + 1 < steps { read } else { 0 }];
                let from = [start.wrapping_add(step * depth), start.wrapping_add((step + 1) * depth)];
                // SAFETY: masked to the lines and steps that exist.
                *r = unsafe { pairs(masks, from) };
            }
        }
        for (i, row) in transposed_16x16(&r).iter().enumerate() {
            if i < lines {
                let to = panel.wrapping_add(i * ROW + first / 2);
                // SAFETY: row `i` of the panel; masked to the lanes that hold steps.
                unsafe { _mm512_mask_storeu_epi32(to.cast(), mask(count.div_ceil(2)), *row) };
            }
        }
    }
}

/// Transposes rows to columns: pairs, then quadruples within 128-bit lanes, then the lanes
/// themselves.
#[target_feature(enable = "avx512f")]
#[inline]
fn transposed_16x16(r: &[__m512i; 16]) -> [__m512i; 16] {
    let zero = _mm512_setzero_si512();
    let mut pairs = [zero; 16];
    for i in 0..8 {
        pairs[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        pairs[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    // quads[4 * i + j], lane L: column 4 * L + j of rows 4 * i .. 4 * i + 4
    let mut quads = [zero; 16];
    for i in 0..4 {
        quads[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
        quads[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
        quads[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
        quads[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    }
    let mut out = [zero; 16];
    for j in 0..4 {
        let a = _mm512_shuffle_i32x4::<0x88>(quads[j], quads[4 + j]);
        let b = _mm512_shuffle_i32x4::<0x88>(quads[8 + j], quads[12 + j]);
        let c = _mm512_shuffle_i32x4::<0xdd>(quads[j], quads[4 + j]);
        let d = _mm512_shuffle_i32x4::<0xdd>(quads[8 + j], quads[12 + j]);
        out[j] = _mm512_shuffle_i32x4::<0x88>(a, b);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(a, b);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(c, d);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(c, d);
    }
    out
}
