//! Fills a panel lane by lane: from runs, from lines that are adjacent at each step, and from lines
//! whose steps are adjacent.
#![allow(unsafe_code)]

use super::operand::Run;
use super::tile::ROW;
use crate::cpu::{Element, Isa, bf16};

/// Stores one value of k in its lane; with PAIRS, in the given half.
#[inline(always)]
pub(super) fn store<T: Element, const PAIRS: bool>(value: T, lane: *mut f32, half: usize) {
    // SAFETY: `lane` belongs to a panel that the packers own.
    unsafe {
        if PAIRS {
            *lane.cast::<bf16>().add(half) = <bf16 as Element>::of(value.get());
        } else {
            *lane = value.get();
        }
    }
}

/// Zeroes the steps `range` of a row of lanes.
///
/// # Safety
/// The row has the lanes.
pub(super) unsafe fn zero_row<const PAIRS: bool>(row: *mut f32, range: std::ops::Range<usize>) {
    // SAFETY: as promised by the caller; zero bits are 0 in every format.
    unsafe {
        if PAIRS {
            std::ptr::write_bytes(row.cast::<bf16>().add(range.start), 0, range.len());
        } else {
            std::ptr::write_bytes(row.add(range.start), 0, range.len());
        }
    }
}

/// Copies `len` adjacent steps to step `at` of a row of lanes.
///
/// # Safety
/// The source and the row have the elements.
pub(super) unsafe fn copy_row<T: Element, const PAIRS: bool>(
    isa: Isa,
    from: *const T,
    len: usize,
    row: *mut f32,
    at: usize,
) {
    // SAFETY: as promised by the caller.
    unsafe {
        if PAIRS {
            std::ptr::copy_nonoverlapping(from.cast::<bf16>(), row.cast::<bf16>().add(at), len);
            return;
        }
        let to = row.add(at);
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => super::pack_avx512::copy_row(from, len, to),
            _ => {
                for p in 0..len {
                    *to.add(p) = (*from.add(p)).get();
                }
            }
        }
    }
}

/// Packs `len` columns of a panel of `width` from `steps` consecutive runs.
///
/// # Safety
/// The elements of the runs exist; the panel has the lanes.
pub(super) unsafe fn columns<T: Element, const PAIRS: bool>(
    isa: Isa,
    width: usize,
    len: usize,
    steps: usize,
    mut next: impl FnMut() -> Run<T>,
    panel: *mut f32,
) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        // SAFETY: as promised by the caller; kernels only use an ISA that the CPU supports.
        unsafe { super::pack_avx512::columns::<T, PAIRS>(width, len, steps, next, panel) };
        return;
    }
    let _ = isa;
    let per_lane = if PAIRS { 2 } else { 1 };
    for p in 0..steps.next_multiple_of(per_lane) {
        let run = if p < steps { next() } else { Run::EMPTY };
        let lane = panel.wrapping_add(p / per_lane * width);
        for j in (0..run.from).chain(run.to..len) {
            store::<f32, PAIRS>(0.0, lane.wrapping_add(j), p % per_lane);
        }
        for j in run.from..run.to {
            // SAFETY: as promised by the caller.
            store::<T, PAIRS>(unsafe { *run.start.add(j) }, lane.wrapping_add(j), p % per_lane);
        }
    }
}

/// Packs a panel from lines that are adjacent at each step.
///
/// # Safety
/// As [`transpose`].
pub(super) unsafe fn strided<T: Element, const PAIRS: bool>(
    isa: Isa,
    width: usize,
    lines: usize,
    steps: usize,
    start: *const T,
    depth: usize,
    panel: *mut f32,
) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        // SAFETY: as promised by the caller; kernels only use an ISA that the CPU supports.
        unsafe { super::pack_avx512::strided::<T, PAIRS>(width, width, lines, steps, start, depth, panel) };
        return;
    }
    let mut from = start;
    let next = move || {
        let run = Run { start: from, from: 0, to: lines };
        from = from.wrapping_add(depth);
        run
    };
    // SAFETY: as promised by the caller.
    unsafe { columns::<T, PAIRS>(isa, width, width, steps, next, panel) };
}

/// Packs a panel from lines whose steps are adjacent.
///
/// # Safety
/// The source is valid for `lines` x `steps`, the panel for `steps` (or pairs of them) x `width`
/// lanes.
pub(super) unsafe fn transpose<T: Element, const PAIRS: bool>(
    isa: Isa,
    width: usize,
    lines: usize,
    steps: usize,
    start: *const T,
    along: usize,
    panel: *mut f32,
) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: all branches: as promised by the caller; kernels only use an ISA that the CPU
    // supports.
    unsafe {
        if isa == Isa::Avx512 {
            for first in (0..width).step_by(16) {
                let (from, lines) = (start.wrapping_add(first * along), lines.saturating_sub(first));
                let to = panel.add(first);
                super::pack_avx512::transpose::<T, PAIRS>(width, lines.min(16), steps, from, along, to);
            }
            return;
        }
        if isa == Isa::Avx2 && T::FORMAT == f32::FORMAT {
            for first in (0..width).step_by(8) {
                let (from, lines) = (start.wrapping_add(first * along).cast(), lines.saturating_sub(first));
                super::pack_avx2::transpose(width, lines.min(8), steps, from, along, panel.add(first));
            }
            return;
        }
    }
    let _ = isa;
    let per_lane = if PAIRS { 2 } else { 1 };
    for i in 0..width {
        for p in 0..steps.next_multiple_of(per_lane) {
            let lane = panel.wrapping_add(p / per_lane * width + i);
            if i < lines && p < steps {
                // SAFETY: as promised by the caller.
                store::<T, PAIRS>(unsafe { *start.add(i * along + p) }, lane, p % per_lane);
            } else {
                store::<f32, PAIRS>(0.0, lane, p % per_lane);
            }
        }
    }
}

/// Packs rows of pairs from lines that are adjacent at each step.
///
/// # Safety
/// The source is valid for `lines` x `steps`, the panel for `lines` rows of lanes.
pub(super) unsafe fn transpose_rows<T: Element>(
    isa: Isa,
    lines: usize,
    steps: usize,
    start: *const T,
    depth: usize,
    panel: *mut f32,
) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        for first in (0..lines).step_by(16) {
            let (from, to) = (start.wrapping_add(first), panel.wrapping_add(first * ROW));
            // SAFETY: as promised by the caller; kernels only use an ISA that the CPU supports.
            unsafe { super::pack_avx512::transpose_rows((lines - first).min(16), steps, from.cast(), depth, to) };
        }
        return;
    }
    let _ = isa;
    for p in 0..steps {
        for i in 0..lines {
            // SAFETY: as promised by the caller.
            store::<T, true>(unsafe { *start.add(p * depth + i) }, panel.wrapping_add(i * ROW + p / 2), p % 2);
        }
    }
}
