//! Softmax cross entropy over rows of logits, shared between forward and backward.

use super::ROWS;
use super::sums::softmax_row;
use crate::cpu::Cpu;
use crate::cpu::isa::per_isa;
use crate::cpu::pool::Shared;

#[inline(always)]
fn forward_body(logits: &mut [f32], targets: &[u16], inverses: &mut [f32], losses: &mut [f32]) {
    let width = logits.len() / targets.len();
    let rows = logits.chunks_exact_mut(width).zip(targets);
    for ((row, &target), (inverse, loss)) in rows.zip(inverses.iter_mut().zip(losses)) {
        let at_target = row[usize::from(target)];
        let max;
        (max, *inverse) = softmax_row(row, 1.0);
        *loss = (max - at_target) - inverse.ln();
    }
}

per_isa! {
    fn forward_piece = forward_body(logits: &mut [f32], targets: &[u16], inverses: &mut [f32], losses: &mut [f32])
}

/// `losses` = cross entropy of each row in nats. `logits` becomes `exp(logits - max)`, `inverses` one over its row sums:
/// what [`cross_entropy_backward`] needs.
///
/// # Panics
/// If a target is not below the number of columns.
pub fn cross_entropy(cpu: &Cpu, logits: &mut [f32], targets: &[u16], inverses: &mut [f32], losses: &mut [f32]) {
    let rows = targets.len();
    let width = logits.len() / rows;
    assert_eq!((inverses.len(), losses.len()), (rows, rows), "length of inverses and losses");
    let (logits, inverses, losses) = (Shared::new(logits), Shared::new(inverses), Shared::new(losses));
    cpu.pool.run(rows.div_ceil(ROWS), &|i, _| {
        let (from, to) = (i * ROWS, rows.min((i + 1) * ROWS));
        // SAFETY: each task has its own rows.
        let (x, inverse, loss) =
            unsafe { (logits.piece(from * width..to * width), inverses.piece(from..to), losses.piece(from..to)) };
        forward_piece(cpu.isa, x, &targets[from..to], inverse, loss);
    });
}

#[inline(always)]
fn backward_body(x: &mut [f32], targets: &[u16], inverses: &[f32], scale: f32) {
    let width = x.len() / targets.len();
    for ((row, &target), &inverse) in x.chunks_exact_mut(width).zip(targets).zip(inverses) {
        let factor = inverse * scale;
        for x in row.iter_mut() {
            *x *= factor;
        }
        row[usize::from(target)] -= scale;
    }
}

per_isa! { fn backward_piece = backward_body(x: &mut [f32], targets: &[u16], inverses: &[f32], scale: f32) }

/// Turns what [`cross_entropy`] left in `x` into `scale` times the gradient of the sum of all losses.
pub fn cross_entropy_backward(cpu: &Cpu, x: &mut [f32], targets: &[u16], inverses: &[f32], scale: f32) {
    let rows = targets.len();
    let width = x.len() / rows;
    assert_eq!(inverses.len(), rows, "length of inverses");
    let x = Shared::new(x);
    cpu.pool.run(rows.div_ceil(ROWS), &|i, _| {
        let (from, to) = (i * ROWS, rows.min((i + 1) * ROWS));
        // SAFETY: each task has its own rows.
        let x = unsafe { x.piece(from * width..to * width) };
        backward_piece(cpu.isa, x, &targets[from..to], &inverses[from..to], scale);
    });
}
