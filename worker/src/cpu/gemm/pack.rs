//! Packs operands into the panels that the micro-kernels read (see [`super::kernel`]), converting
//! on the way.
//!
//! Missing lines and steps are zero-filled.
#![allow(unsafe_code)]

use super::kernel::Kernel;
use super::operand::{Operand, Run};
use super::panel::{columns, copy_row, strided, transpose, transpose_rows, zero_row};
use super::tile::{Layout, ROW};
use super::windows::{Windows, window_columns};
use crate::cpu::values::with_format;
use crate::cpu::{Element, bf16};

/// Lines `line..line + lines` and steps `step..step + steps` of an operand.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub line: usize,
    pub lines: usize,
    pub step: usize,
    pub steps: usize,
}

/// The layout [`pack_a`] uses for an operand.
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
/// The piece is within the operand; the panel has room for `kernel.lanes(steps)` times `nr` lanes
/// that nothing else uses.
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
        // Zero unused rows: stale values could be denormals, which some CPUs multiply slowly.
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
