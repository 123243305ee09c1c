//! Token and position embeddings.

use super::ROWS;
use crate::cpu::Cpu;
use crate::cpu::isa::per_isa;
use crate::cpu::pool::Shared;

/// Columns that one task of [`embed_backward`] scatters.
const COLUMNS: usize = 64;

/// `x[r]` = `tokens[inputs[r]]` + `positions[r % positions]`, rows of `width`.
///
/// # Panics
/// If an input is not below the number of token rows.
pub fn embed(cpu: &Cpu, inputs: &[u16], tokens: &[f32], positions: &[f32], width: usize, x: &mut [f32]) {
    let rows = inputs.len();
    let context = positions.len() / width;
    assert_eq!(x.len(), rows * width, "length of x");
    let x = Shared::new(x);
    cpu.pool.run(rows.div_ceil(ROWS), &|i, _| {
        for r in i * ROWS..rows.min((i + 1) * ROWS) {
            let token = &tokens[usize::from(inputs[r]) * width..][..width];
            let position = &positions[r % context * width..][..width];
            // SAFETY: each task has its own rows.
            let x = unsafe { x.piece(r * width..(r + 1) * width) };
            for ((x, &t), &p) in x.iter_mut().zip(token).zip(position) {
                *x = t + p;
            }
        }
    });
}

#[inline(always)]
fn add_body(x: &[f32], to: &mut [f32]) {
    for (to, &x) in to.iter_mut().zip(x) {
        *to += x;
    }
}

per_isa! { fn add = add_body(x: &[f32], to: &mut [f32]) }

/// Adds row `r` of `dx` to row `inputs[r]` of `d_tokens`, in the order of the rows.
pub fn embed_backward(cpu: &Cpu, inputs: &[u16], dx: &[f32], width: usize, d_tokens: &mut [f32]) {
    assert_eq!(dx.len(), inputs.len() * width, "length of dx");
    let shared = Shared::new(d_tokens);
    cpu.pool.run(width.div_ceil(COLUMNS), &|i, _| {
        let (from, to) = (i * COLUMNS, width.min((i + 1) * COLUMNS));
        for (&token, dx) in inputs.iter().zip(dx.chunks_exact(width)) {
            let start = usize::from(token) * width;
            // SAFETY: each task has its own columns.
            add(cpu.isa, &dx[from..to], unsafe { shared.piece(start + from..start + to) });
        }
    });
}

/// `d_positions` = (or +=) sum of `dx` over the sequences of a batch.
pub fn position_backward(cpu: &Cpu, dx: &[f32], width: usize, d_positions: &mut [f32], accumulate: bool) {
    let context = d_positions.len() / width;
    let sequences = dx.len() / d_positions.len();
    let shared = Shared::new(d_positions);
    cpu.pool.run(context.div_ceil(ROWS), &|i, _| {
        let range = i * ROWS * width..context.min((i + 1) * ROWS) * width;
        // SAFETY: each task has its own positions.
        let to = unsafe { shared.piece(range.clone()) };
        if !accumulate {
            to.fill(0.0);
        }
        for s in 0..sequences {
            add(cpu.isa, &dx[s * context * width..][range.clone()], to);
        }
    });
}
