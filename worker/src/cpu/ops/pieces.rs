//! Slices that the tasks of a kernel write piece by piece.
#![allow(unsafe_code)]

use crate::cpu::Cpu;
use crate::cpu::pool::Shared;
use std::ops::Range;

/// Memory that a task can write: [`rows`], [`per_task`], or a tuple of them.
pub trait Pieces: Sync {
    type Piece;

    /// The piece of task `task`, whose rows are `rows`.
    ///
    /// # Safety
    /// Called once per task, and no two tasks share a row.
    unsafe fn piece(&self, task: usize, rows: Range<usize>) -> Self::Piece;
}

/// A slice of rows in which each task has its own rows.
pub struct Rows<'a, T>(Shared<'a, T>, usize);

/// `slice` as rows of `width`.
pub fn rows<T>(slice: &mut [T], width: usize) -> Rows<'_, T> {
    Rows(Shared::new(slice), width)
}

impl<'a, T: Send> Pieces for Rows<'a, T> {
    type Piece = &'a mut [T];

    unsafe fn piece(&self, _: usize, rows: Range<usize>) -> &'a mut [T] {
        // SAFETY: rows of different tasks do not overlap, as promised by the caller; an overflowing
        // product saturates and is out of bounds.
        unsafe { self.0.piece(rows.start.saturating_mul(self.1)..rows.end.saturating_mul(self.1)) }
    }
}

/// A slice with one row per task, for its partial sums.
pub struct PerTask<'a, T>(Shared<'a, T>, usize);

/// `slice` as one row of `width` per task.
pub fn per_task<T>(slice: &mut [T], width: usize) -> PerTask<'_, T> {
    PerTask(Shared::new(slice), width)
}

impl<'a, T: Send> Pieces for PerTask<'a, T> {
    type Piece = &'a mut [T];

    unsafe fn piece(&self, task: usize, _: Range<usize>) -> &'a mut [T] {
        // SAFETY: task indices are unique, as promised by the caller; otherwise as above.
        unsafe { self.0.piece(task.saturating_mul(self.1)..(task + 1).saturating_mul(self.1)) }
    }
}

macro_rules! tuples {
    ($($name:ident: $place:tt),+) => {
        impl<$($name: Pieces),+> Pieces for ($($name,)+) {
            type Piece = ($($name::Piece,)+);

            unsafe fn piece(&self, task: usize, rows: Range<usize>) -> Self::Piece {
                // SAFETY: as promised by the caller.
                unsafe { ($(self.$place.piece(task, rows.clone()),)+) }
            }
        }
    };
}

tuples!(A: 0, B: 1);
tuples!(A: 0, B: 1, C: 2);
tuples!(A: 0, B: 1, C: 2, D: 3);

/// Calls `task(rows, piece)` for `size` rows at a time out of `count`, distributed over the
/// threads. If `size` depends only on the shape, and sums stay within a task, the results do not
/// depend on the number of threads.
///
/// # Panics
/// If `size` is 0, or a slice has fewer rows than the tasks cover.
pub fn in_pieces<P: Pieces>(
    cpu: &Cpu,
    count: usize,
    size: usize,
    pieces: P,
    task: impl Fn(Range<usize>, P::Piece) + Sync,
) {
    cpu.pool.run(count.div_ceil(size), &|i, _| {
        let rows = i * size..count.min((i + 1) * size);
        // SAFETY: the pool hands out each index once, and different indices have disjoint rows.
        let piece = unsafe { pieces.piece(i, rows.clone()) };
        task(rows, piece);
    });
}
