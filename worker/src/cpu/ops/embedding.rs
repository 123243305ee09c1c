//! Token, position and segment embeddings.

use super::pieces::{in_pieces, per_task, rows};
use super::sums::{add_pieces, add_rows};
use super::{ROWS, partials_len, scatter_add_rows};
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

#[inline(always)]
fn embed_body<W: Element, E: Element>(token: &[W], position: &[W], segment: Option<&[W]>, x: &mut [E]) {
    let sums = token.iter().zip(position).map(|(t, p)| t.get() + p.get());
    match segment {
        None => x.iter_mut().zip(sums).for_each(|(x, sum)| *x = E::of(sum)),
        Some(segment) => {
            x.iter_mut().zip(sums).zip(segment).for_each(|((x, sum), s)| *x = E::of(sum + s.get()));
        }
    }
}

per_isa! {
    fn embed_row<W: Element, E: Element> = embed_body(
        token: &[W], position: &[W], segment: Option<&[W]>, x: &mut [E],
    )
}

/// `x[r]` = `tokens[inputs[r]]` + `positions[r % positions]`, rows of `width`; with `segments` (an
/// id per row, and their table) plus `table[id[r]]`.
///
/// # Panics
/// If an input is not below the number of token rows, or a segment not below the number of segment
/// rows.
pub fn embed<W: Element, E: Element>(
    cpu: &Cpu,
    inputs: &[u32],
    tokens: &[W],
    positions: &[W],
    segments: Option<(&[u8], &[W])>,
    width: usize,
    x: &mut [E],
) {
    let context = positions.len() / width;
    assert_eq!(x.len(), inputs.len() * width, "length of x");
    assert!(segments.is_none_or(|(numbers, _)| numbers.len() == inputs.len()), "number of segments");
    in_pieces(cpu, inputs.len(), ROWS, rows(x, width), |range, x| {
        for (r, x) in range.zip(x.chunks_exact_mut(width)) {
            let token = &tokens[inputs[r] as usize * width..][..width];
            let position = &positions[r % context * width..][..width];
            let segment = segments.map(|(numbers, table)| &table[usize::from(numbers[r]) * width..][..width]);
            embed_row(cpu.isa, token, position, segment, x);
        }
    });
}

/// Adds row `r` of `dx` to row `inputs[r]` of `d_tokens`, in the order of the rows.
pub fn embed_backward<E: Element>(cpu: &Cpu, inputs: &[u32], dx: &[E], width: usize, d_tokens: &mut [f32]) {
    scatter_add_rows(cpu, inputs, dx, width, d_tokens);
}

/// `d_positions` = (or +=) sum of `dx` over the sequences of a batch.
pub fn position_backward<E: Element>(cpu: &Cpu, dx: &[E], width: usize, d_positions: &mut [f32], accumulate: bool) {
    let len = d_positions.len();
    in_pieces(cpu, len / width, ROWS, rows(d_positions, width), |range, to| {
        if !accumulate {
            to.fill(0.0);
        }
        for sequence in dx.chunks_exact(len) {
            add_rows(cpu.isa, &sequence[range.start * width..range.end * width], to);
        }
    });
}

/// Row `s` of `d_segments` = (or +=) sum of the rows of `dx` whose id in `segments` is `s`.
/// `partials` has at least [`partials_len`]`(segments.len(), d_segments.len())` floats.
///
/// # Panics
/// If a segment is not below the number of rows of `d_segments`.
pub fn segment_backward<E: Element>(
    cpu: &Cpu,
    segments: &[u8],
    dx: &[E],
    width: usize,
    partials: &mut [f32],
    d_segments: &mut [f32],
    accumulate: bool,
) {
    assert_eq!(dx.len(), segments.len() * width, "length of dx");
    let len = d_segments.len();
    let partials = &mut partials[..partials_len(segments.len(), len)];
    in_pieces(cpu, segments.len(), ROWS, per_task(partials, len), |range, sums| {
        sums.fill(0.0);
        for r in range {
            let to = &mut sums[usize::from(segments[r]) * width..][..width];
            add_rows(cpu.isa, &dx[r * width..(r + 1) * width], to);
        }
    });
    add_pieces(cpu.isa, partials, len, 0, d_segments, accumulate);
}
