//! Softmax cross entropy over rows of logits, forward and backward.

use super::ROWS;
use super::pieces::{in_pieces, rows};
use super::sums::{largest, sum_by};
use crate::cpu::isa::per_isa;
use crate::cpu::math::exp;
use crate::cpu::{Cpu, Element};
use std::ops::Range;

/// Target of a row that is excluded from loss, gradient and accuracy.
pub const IGNORE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
pub struct Targets<'a> {
    /// The target column of each row, or [`IGNORE`].
    pub classes: &'a [u32],
    /// Label smoothing: the share of the target spread evenly over all columns, 0 to 1 (Szegedy et
    /// al. 2016, as in PyTorch).
    pub smoothing: f32,
}

impl<'a> Targets<'a> {
    /// Targets without smoothing.
    pub fn plain(classes: &'a [u32]) -> Targets<'a> {
        Targets { classes, smoothing: 0.0 }
    }

    /// Number of rows not ignored, by which the sum of losses is divided for the mean loss.
    pub fn counted(&self) -> usize {
        self.classes.iter().filter(|&&class| class != IGNORE).count()
    }

    fn part(&self, rows: Range<usize>) -> Targets<'a> {
        Targets { classes: &self.classes[rows], ..*self }
    }
}

#[inline(always)]
fn forward_body<E: Element>(
    logits: &[E],
    targets: Targets<'_>,
    saved: &mut [f32],
    losses: &mut [f32],
    correct: &mut [f32],
) {
    let width = logits.len() / targets.classes.len();
    let smoothing = targets.smoothing;
    let rows = logits.chunks_exact(width).zip(targets.classes);
    let results = saved.as_chunks_mut::<2>().0.iter_mut().zip(losses).zip(correct);
    for ((row, &class), ((saved, loss), correct)) in rows.zip(results) {
        if class == IGNORE {
            (*saved, *loss, *correct) = ([0.0; 2], 0.0, 0.0);
            continue;
        }
        let at_target = row[class as usize].get();
        let max = largest(row);
        let inverse = 1.0 / sum_by(row, |x| exp(x - max));
        let mut distance = (1.0 - smoothing) * (max - at_target);
        if smoothing > 0.0 {
            distance += smoothing * (sum_by(row, |x| max - x) / width as f32);
        }
        *saved = [max, inverse];
        *loss = distance - inverse.ln();
        // In a tie, the first column is the prediction; a row with a NaN predicts nothing.
        let first = at_target == max && !row[..class as usize].iter().any(|x| x.get() == max);
        *correct = if first && !inverse.is_nan() { 1.0 } else { 0.0 };
    }
}

per_isa! {
    fn forward_piece<E: Element> = forward_body(
        logits: &[E], targets: Targets<'_>, saved: &mut [f32], losses: &mut [f32], correct: &mut [f32],
    )
}

/// `losses` = cross entropy of each row in nats, 0 for ignored rows; `correct` = 1 if the first of
/// the largest logits is the target, otherwise 0. `saved` receives
/// `[largest logit, 1 / sum of exp(logit - largest)]` of each row for [`cross_entropy_backward`].
///
/// # Panics
/// If a target is neither below the number of columns nor [`IGNORE`].
pub fn cross_entropy<E: Element>(
    cpu: &Cpu,
    logits: &[E],
    targets: Targets<'_>,
    saved: &mut [f32],
    losses: &mut [f32],
    correct: &mut [f32],
) {
    let count = targets.classes.len();
    let width = logits.len() / count.max(1);
    assert_eq!((saved.len(), losses.len()), (2 * count, count), "length of saved and losses");
    let results = (rows(saved, 2), rows(losses, 1), rows(correct, 1));
    in_pieces(cpu, count, ROWS, results, |range, (saved, losses, correct)| {
        let logits = &logits[range.start * width..range.end * width];
        forward_piece(cpu.isa, logits, targets.part(range), saved, losses, correct);
    });
}

#[inline(always)]
fn backward_body<E: Element>(x: &mut [E], targets: Targets<'_>, saved: &[f32], scale: f32) {
    let width = x.len() / targets.classes.len();
    let everywhere = scale * targets.smoothing / width as f32;
    let at_target = scale * (1.0 - targets.smoothing);
    let rows = x.chunks_exact_mut(width).zip(targets.classes).zip(saved.as_chunks::<2>().0);
    for ((row, &class), &[max, inverse]) in rows {
        if class == IGNORE {
            row.fill(E::of(0.0));
            continue;
        }
        let factor = inverse * scale;
        let gradient = |x: E| exp(x.get() - max) * factor - everywhere;
        let target = gradient(row[class as usize]) - at_target;
        for x in row.iter_mut() {
            *x = E::of(gradient(*x));
        }
        row[class as usize] = E::of(target);
    }
}

per_isa! {
    fn backward_piece<E: Element> = backward_body(x: &mut [E], targets: Targets<'_>, saved: &[f32], scale: f32)
}

/// Turns the logits `x` of [`cross_entropy`] into `scale` times the gradient of the sum of all
/// losses. `saved` is its output.
pub fn cross_entropy_backward<E: Element>(cpu: &Cpu, x: &mut [E], targets: Targets<'_>, saved: &[f32], scale: f32) {
    let count = targets.classes.len();
    let width = x.len() / count.max(1);
    assert_eq!(saved.len(), 2 * count, "length of saved");
    in_pieces(cpu, count, ROWS, rows(x, width), |range, x| {
        backward_piece(cpu.isa, x, targets.part(range.clone()), &saved[2 * range.start..2 * range.end], scale);
    });
}
