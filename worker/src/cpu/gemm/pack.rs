//! Packs operands into the panels that the micro-kernels read (see [`super::kernel`]), converting on the way.
//!
//! Missing lines and steps are zeros.
#![allow(unsafe_code)]

use super::kernel::{Kernel, Layout, ROW};
use super::operand::{Operand, Run};
use super::windows::{Windows, window_columns};
use crate::cpu::values::with_format;
use crate::cpu::{Element, Isa, bf16};

/// Lines `line..line + lines` and steps `step..step + steps` of an operand.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub line: usize,
    pub lines: usize,
    pub step: usize,
    pub steps: usize,
}

/// The layout in which [`pack_a`] packs an operand.
pub(super) fn layout(kernel: Kernel, a: &Operand) -> Layout {
    match a {
        Operand::Strided { depth, .. } if *depth != 1 && !kernel.pairs => Layout::Columns,
        _ => Layout::Rows,
    }
}

/// Packs a panel of A in the [`layout`] of the operand.
///
/// # Safety
/// The piece is within the operand; the panel has `mr` x [`ROW`] floats that nothing else uses.
pub(super) unsafe fn pack_a(kernel: Kernel, a: &Operand, piece: Piece, panel: *mut f32) {
    with_format!(a.start().format, T => {
        // SAFETY: as promised by the caller. Pairs are only made of bf16 (`Gemm::product`).
        unsafe {
            if kernel.pairs {
                debug_assert_eq!(T::FORMAT, bf16::FORMAT);
                pack_a_as::<T, true>(kernel, a, piece, panel);
            } else {
                pack_a_as::<T, false>(kernel, a, piece, panel);
            }
        }
    });
}

/// Packs a panel of B.
///
/// # Safety
/// The piece is within the operand; the panel has room for `kernel.lanes(steps)` times `nr` lanes that nothing else
/// uses.
pub(super) unsafe fn pack_b(kernel: Kernel, b: &Operand, piece: Piece, panel: *mut f32) {
    with_format!(b.start().format, T => {
        // SAFETY: as in `pack_a`.
        unsafe {
            if kernel.pairs {
                debug_assert_eq!(T::FORMAT, bf16::FORMAT);
                pack_b_as::<T, true>(kernel, b, piece, panel);
            } else {
                pack_b_as::<T, false>(kernel, b, piece, panel);
            }
        }
    });
}

/// # Safety
/// See [`pack_a`].
unsafe fn pack_a_as<T: Element, const PAIRS: bool>(kernel: Kernel, a: &Operand, piece: Piece, panel: *mut f32) {
    let Piece { line, lines, step, steps } = piece;
    let row = |i: usize| panel.wrapping_add(i * ROW);
    let end = kernel.lanes(steps) * kernel.per_lane();
    // SAFETY: all branches: as promised by the caller.
    unsafe {
        match a {
            Operand::Strided { start, along, depth: 1 } => {
                for i in 0..lines {
                    let from = start.at((line + i) * along + step).cast::<T>();
                    copy_row::<T, PAIRS>(kernel.isa, from, steps, row(i), 0);
                    zero_row::<PAIRS>(row(i), steps..end);
                }
            }
            Operand::Strided { start, depth, .. } => {
                let from = start.at(line + step * depth).cast::<T>().cast_const();
                if PAIRS {
                    transpose_rows::<T>(kernel.isa, lines, steps, from, *depth, panel);
                    (0..lines).for_each(|i| zero_row::<PAIRS>(row(i), steps..end));
                } else {
                    strided::<T, PAIRS>(kernel.isa, kernel.mr, lines, steps, from, *depth, panel);
                    return;
                }
            }
            Operand::Patches(patches) => {
                let mut pixel = patches.pixel(line);
                for i in 0..lines {
                    let mut done = 0;
                    while done < steps {
                        let (tap, first) = ((step + done) / patches.run_length(), (step + done) % patches.run_length());
                        let len = (patches.run_length() - first).min(steps - done);
                        let run = patches.run(patches.row::<T>(pixel, tap), pixel).part(first, first + len);
                        zero_row::<PAIRS>(row(i), done..done + run.from);
                        let from = run.start.wrapping_add(run.from);
                        copy_row::<T, PAIRS>(kernel.isa, from, run.to - run.from, row(i), done + run.from);
                        zero_row::<PAIRS>(row(i), done + run.to..done + len);
                        done += len;
                    }
                    zero_row::<PAIRS>(row(i), steps..end);
                    patches.advance(&mut pixel);
                }
            }
            Operand::Taps(_) => unreachable!("invariant: taps are a B"),
        }
        // Numbers left over could be denormal, which some CPUs multiply slowly.
        (lines..kernel.mr).for_each(|i| zero_row::<PAIRS>(row(i), 0..end));
    }
}

/// # Safety
/// See [`pack_b`].
unsafe fn pack_b_as<T: Element, const PAIRS: bool>(kernel: Kernel, b: &Operand, piece: Piece, panel: *mut f32) {
    let Piece { line, lines, step, steps } = piece;
    let (isa, width) = (kernel.isa, kernel.nr);
    // SAFETY: all branches: as promised by the caller.
    unsafe {
        match b {
            Operand::Strided { start, along: 1, depth } => {
                let from = start.at(line + step * depth).cast::<T>().cast_const();
                strided::<T, PAIRS>(isa, width, lines, steps, from, *depth, panel);
            }
            Operand::Strided { start, along, .. } => {
                let from = start.at(line * along + step).cast::<T>().cast_const();
                transpose::<T, PAIRS>(isa, width, lines, steps, from, *along, panel);
            }
            Operand::Taps(taps) => {
                let mut walk = taps.walk::<T>(step);
                let next = move || Run { start: walk().wrapping_add(line), from: 0, to: lines };
                columns::<T, PAIRS>(isa, width, width, steps, next, panel);
            }
            Operand::Patches(patches) => {
                let mut done = 0;
                while done < lines {
                    let (tap, first) = ((line + done) / patches.run_length(), (line + done) % patches.run_length());
                    let len = (patches.run_length() - first).min(lines - done);
                    let part = Windows { patches, tap, first, len };
                    window_columns::<T, PAIRS>(isa, width, part, step, steps, panel.add(done));
                    done += len;
                }
                columns::<T, PAIRS>(isa, width, width - lines, steps, || Run::EMPTY, panel.add(lines));
            }
        }
        let used = steps.div_ceil(kernel.per_lane());
        std::ptr::write_bytes(panel.add(used * width), 0, (kernel.lanes(steps) - used) * width);
    }
}

/// Position of the value of `step` in a row of lanes.
#[inline(always)]
fn store<T: Element, const PAIRS: bool>(value: T, lane: *mut f32, half: usize) {
    // SAFETY: `lane` belongs to a panel that the packers own.
    unsafe {
        if PAIRS {
            *lane.cast::<bf16>().add(half) = <bf16 as Element>::of(value.get());
        } else {
            *lane = value.get();
        }
    }
}

/// Writes zeros at the steps `range` of a row of lanes.
///
/// # Safety
/// The row has the lanes.
unsafe fn zero_row<const PAIRS: bool>(row: *mut f32, range: std::ops::Range<usize>) {
    // SAFETY: as promised by the caller; zero bits are the number 0 in every format.
    unsafe {
        if PAIRS {
            std::ptr::write_bytes(row.cast::<bf16>().add(range.start), 0, range.len());
        } else {
            std::ptr::write_bytes(row.add(range.start), 0, range.len());
        }
    }
}

/// Writes `len` adjacent steps at step `at` of a row of lanes.
///
/// # Safety
/// Source and row have the elements.
unsafe fn copy_row<T: Element, const PAIRS: bool>(isa: Isa, from: *const T, len: usize, row: *mut f32, at: usize) {
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

/// Packs `len` columns of a panel of `width`: one run after another, `steps` of them.
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
        // SAFETY: as promised by the caller; kernels have an ISA that the CPU has.
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
unsafe fn strided<T: Element, const PAIRS: bool>(
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
        // SAFETY: as promised by the caller; kernels have an ISA that the CPU has.
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
/// The source is valid for `lines` x `steps`, the panel for `steps` (or pairs of them) x `width` lanes.
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
    // SAFETY: all branches: as promised by the caller; kernels have an ISA that the CPU has.
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
unsafe fn transpose_rows<T: Element>(
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
            // SAFETY: as promised by the caller; kernels have an ISA that the CPU has.
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
