//! Gather and scatter-add of rows by index.
#![allow(unsafe_code)]

use super::ROWS;
use super::pieces::{in_pieces, rows};
use super::sums::add_rows;
use crate::cpu::pool::Shared;
use crate::cpu::{Cpu, Element};

/// Columns per task in [`scatter_add_rows`].
const COLUMNS: usize = 64;

/// Row `r` of `y` = row `index[r]` of `x`, rows of `width`.
///
/// # Panics
/// If an index is not below the number of rows of `x`.
pub fn gather_rows<E: Element>(cpu: &Cpu, index: &[u32], x: &[E], width: usize, y: &mut [E]) {
    assert_eq!(y.len(), index.len() * width, "length of y");
    in_pieces(cpu, index.len(), ROWS, rows(y, width), |range, y| {
        for (&from, y) in index[range].iter().zip(y.chunks_exact_mut(width)) {
            y.copy_from_slice(&x[from as usize * width..][..width]);
        }
    });
}

/// Adds row `r` of `x` to row `index[r]` of `to`, in the order of `r`: the gradient of
/// [`gather_rows`]. If an index can repeat, `to` should be f32, because it is rounded at each
/// addition.
///
/// # Panics
/// If an index is not below the number of rows of `to`.
pub fn scatter_add_rows<E: Element, T: Element>(cpu: &Cpu, index: &[u32], x: &[E], width: usize, to: &mut [T]) {
    assert_eq!(x.len(), index.len() * width, "length of x");
    let shared = Shared::new(to);
    cpu.pool.run(width.div_ceil(COLUMNS), &|i, _| {
        let (from, to) = (i * COLUMNS, width.min((i + 1) * COLUMNS));
        for (&row, x) in index.iter().zip(x.chunks_exact(width)) {
            let start = row as usize * width;
            // SAFETY: each task has its own columns.
            add_rows(cpu.isa, &x[from..to], unsafe { shared.piece(start + from..start + to) });
        }
    });
}
