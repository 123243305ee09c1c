//! Causal self-attention, one head of one sequence per task.
//!
//! Scores are made for a tile of queries at a time and only for the keys up to the tile's last query. Forward keeps two
//! numbers per query (largest score, one over the sum of exponentials); backward makes the probabilities again from them,
//! so that memory grows with the context and not with its square (Dao and others 2022, without the tiling over keys).
#![allow(unsafe_code)]

use super::gemm::{SMALL_SCRATCH, View, small};
use super::isa::per_isa;
use super::math::exp;
use super::ops::{softmax_row, sum_of_products};
use super::pool::Shared;
use super::{Cpu, Isa};

/// Shape of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// Heads.
    pub heads: usize,
    /// Width of one head.
    pub head_size: usize,
}

impl AttentionShape {
    /// Width of the residual stream.
    pub fn hidden(&self) -> usize {
        self.heads * self.head_size
    }

    /// Floats that forward keeps for backward beside its inputs and outputs.
    pub fn saved_len(&self) -> usize {
        2 * self.batch * self.heads * self.context
    }

    /// Floats of scratch memory for each thread.
    pub fn scratch_len(&self) -> usize {
        SMALL_SCRATCH + 2 * self.tile() * self.context
    }

    /// Queries in a tile.
    fn tile(&self) -> usize {
        if self.context <= 256 { 64 } else { 128 }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_size as f32).sqrt()
    }
}

#[inline(always)]
fn forward_tile_body(scores: &mut [f32], stride: usize, columns: usize, first: usize, scale: f32, saved: &mut [f32]) {
    for (i, saved) in saved.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let row = &mut scores[i * stride..][..columns];
        let (live, masked) = row.split_at_mut(first + i + 1);
        *saved = softmax_row(live, scale).into();
        masked.fill(0.0);
    }
}

per_isa! {
    /// Exponentials of a tile of scores whose first query is `first`; saves the largest score and one over the sum.
    fn forward_tile = forward_tile_body(
        scores: &mut [f32], stride: usize, columns: usize, first: usize, scale: f32, saved: &mut [f32],
    )
}

/// The tile of queries that backward turns into probabilities and their gradients.
#[derive(Clone, Copy)]
struct BackwardTile<'a> {
    stride: usize,
    columns: usize,
    first: usize,
    scale: f32,
    saved: &'a [f32],
    /// Output and its gradient at the tile's first query, and floats from one query to the next.
    out: &'a [f32],
    d_out: &'a [f32],
    out_stride: usize,
    head_size: usize,
}

#[inline(always)]
fn backward_tile_body(scores: &mut [f32], d_scores: &mut [f32], tile: BackwardTile<'_>) {
    for (i, &[max, inverse]) in tile.saved.as_chunks::<2>().0.iter().enumerate() {
        let out = &tile.out[i * tile.out_stride..][..tile.head_size];
        let d_out = &tile.d_out[i * tile.out_stride..][..tile.head_size];
        let mean = sum_of_products(out, d_out);
        let row = &mut scores[i * tile.stride..][..tile.columns];
        let d_row = &mut d_scores[i * tile.stride..][..tile.columns];
        let live = tile.first + i + 1;
        for (s, d) in row[..live].iter_mut().zip(&mut d_row[..live]) {
            let p = exp((*s - max) * tile.scale) * inverse;
            *s = p;
            *d = p * (*d - mean) * tile.scale;
        }
        row[live..].fill(0.0);
        d_row[live..].fill(0.0);
    }
}

per_isa! {
    /// In place: scores become probabilities, gradients of probabilities become gradients of scores.
    fn backward_tile = backward_tile_body(scores: &mut [f32], d_scores: &mut [f32], tile: BackwardTile<'_>)
}

#[inline(always)]
fn scale_rows_body(out: &mut [f32], saved: &[f32]) {
    let width = 2 * out.len() / saved.len();
    for (row, &[_, inverse]) in out.chunks_exact_mut(width).zip(saved.as_chunks::<2>().0) {
        for x in row {
            *x *= inverse;
        }
    }
}

per_isa! { fn scale_rows = scale_rows_body(out: &mut [f32], saved: &[f32]) }

/// One head of one sequence: where its rows start.
#[derive(Clone, Copy)]
struct Head {
    /// Index of its first query in qkv.
    query: usize,
    key: usize,
    value: usize,
    /// Index of its first output.
    out: usize,
    /// Index of its first saved pair.
    saved: usize,
}

impl Head {
    fn new(shape: &AttentionShape, task: usize) -> Head {
        let hidden = shape.hidden();
        let (sequence, head) = (task / shape.heads, task % shape.heads);
        let query = sequence * shape.context * 3 * hidden + head * shape.head_size;
        Head {
            query,
            key: query + hidden,
            value: query + 2 * hidden,
            out: sequence * shape.context * hidden + head * shape.head_size,
            saved: 2 * task * shape.context,
        }
    }
}

fn rows(data: &[f32], start: usize, stride: usize) -> View {
    View { start: data[start..].as_ptr(), down: stride, right: 1 }
}

fn transposed(view: View) -> View {
    View { start: view.start, down: view.right, right: view.down }
}

/// `out` (rows of `hidden`) = attention of `qkv` (rows of queries, keys, values: 3 x `hidden`). `saved` has
/// [`AttentionShape::saved_len`] floats, `scratch` [`AttentionShape::scratch_len`] per thread.
pub fn attention(
    cpu: &Cpu,
    shape: &AttentionShape,
    qkv: &[f32],
    out: &mut [f32],
    saved: &mut [f32],
    scratch: &mut [f32],
) {
    let AttentionShape { batch, context, heads, head_size } = *shape;
    let (hidden, stride) = (shape.hidden(), 3 * shape.hidden());
    let each = shape.scratch_len();
    check(cpu, shape, &[qkv], &[out], saved, scratch);
    let (out, saved, scratch) = (Shared::new(out), Shared::new(saved), Shared::new(scratch));
    cpu.pool.run(batch * heads, &|task, thread| {
        let head = Head::new(shape, task);
        // SAFETY: no two tasks run on the same thread at a time.
        let scratch = unsafe { scratch.piece(thread * each..(thread + 1) * each) };
        let (packing, scores) = scratch.split_at_mut(SMALL_SCRATCH);
        for first in (0..context).step_by(shape.tile()) {
            let count = shape.tile().min(context - first);
            let columns = first + count;
            let query = rows(qkv, head.query + first * stride, stride);
            let key = transposed(rows(qkv, head.key, stride));
            // SAFETY: `check` and `Head` keep all rows inside qkv; scores are this thread's own.
            unsafe {
                small(cpu.isa, (count, columns, head_size), query, key, scores.as_mut_ptr(), context, false, packing);
            }
            // SAFETY: each task has the pairs of its head, each tile those of its queries.
            let saved = unsafe { saved.piece(head.saved + 2 * first..head.saved + 2 * columns) };
            forward_tile(cpu.isa, scores, context, columns, first, shape.scale(), saved);
            let from = head.out + first * hidden;
            let value = rows(qkv, head.value, stride);
            let to = out.pointer().wrapping_add(from);
            // SAFETY: the columns of this head and the rows of this tile belong to this task and lie inside `out`.
            unsafe {
                let p = rows(scores, 0, context);
                small(cpu.isa, (count, head_size, columns), p, value, to, hidden, false, packing);
            }
            for i in 0..count {
                // SAFETY: as above.
                let row = unsafe { out.piece(from + i * hidden..from + i * hidden + head_size) };
                scale_rows(cpu.isa, row, &saved[2 * i..2 * i + 2]);
            }
        }
    });
}

/// What [`attention`] read and wrote.
#[derive(Clone, Copy)]
pub struct AttentionForward<'a> {
    /// Queries, keys, values.
    pub qkv: &'a [f32],
    /// The result.
    pub out: &'a [f32],
    /// What forward kept.
    pub saved: &'a [f32],
}

/// `d_qkv` = gradient of `qkv` from `d_out`, the gradient of `out`. Scratch as in [`attention`].
pub fn attention_backward(
    cpu: &Cpu,
    shape: &AttentionShape,
    forward: AttentionForward<'_>,
    d_out: &[f32],
    d_qkv: &mut [f32],
    scratch: &mut [f32],
) {
    let AttentionForward { qkv, out, saved } = forward;
    let AttentionShape { batch, context, heads, head_size } = *shape;
    let (hidden, stride) = (shape.hidden(), 3 * shape.hidden());
    let each = shape.scratch_len();
    check(cpu, shape, &[qkv, d_qkv], &[out, d_out], saved, scratch);
    let (d_qkv, scratch) = (Shared::new(d_qkv), Shared::new(scratch));
    cpu.pool.run(batch * heads, &|task, thread| {
        let head = Head::new(shape, task);
        let isa: Isa = cpu.isa;
        // SAFETY: no two tasks run on the same thread at a time.
        let scratch = unsafe { scratch.piece(thread * each..(thread + 1) * each) };
        let (packing, tiles) = scratch.split_at_mut(SMALL_SCRATCH);
        let (scores, d_scores) = tiles.split_at_mut(shape.tile() * context);
        let to = |index: usize| d_qkv.pointer().wrapping_add(index);
        // The last tile reaches all keys: it overwrites the gradients of keys and values, the others add.
        for first in (0..context).step_by(shape.tile()).rev() {
            let count = shape.tile().min(context - first);
            let columns = first + count;
            let add = columns < context;
            let query = rows(qkv, head.query + first * stride, stride);
            let (key, value) = (rows(qkv, head.key, stride), rows(qkv, head.value, stride));
            let from = head.out + first * hidden;
            let d_tile = rows(d_out, from, hidden);
            let shape_s = (count, columns, head_size);
            // SAFETY: `check` and `Head` keep all rows inside the inputs; the tiles are this thread's own.
            unsafe {
                small(isa, shape_s, query, transposed(key), scores.as_mut_ptr(), context, false, packing);
                small(isa, shape_s, d_tile, transposed(value), d_scores.as_mut_ptr(), context, false, packing);
            }
            let tile = BackwardTile {
                stride: context,
                columns,
                first,
                scale: shape.scale(),
                saved: &saved[head.saved + 2 * first..head.saved + 2 * columns],
                out: &out[from..],
                d_out: &d_out[from..],
                out_stride: hidden,
                head_size,
            };
            backward_tile(isa, scores, d_scores, tile);
            let (p, ds) = (rows(scores, 0, context), rows(d_scores, 0, context));
            let shape_k = (columns, head_size, count);
            let shape_q = (count, head_size, columns);
            // SAFETY: the columns of this head in its sequence belong to this task and lie inside `d_qkv`.
            unsafe {
                small(isa, shape_k, transposed(p), d_tile, to(head.value), stride, add, packing);
                small(isa, shape_k, transposed(ds), query, to(head.key), stride, add, packing);
                small(isa, shape_q, ds, key, to(head.query + first * stride), stride, false, packing);
            }
        }
    });
}

fn check(cpu: &Cpu, shape: &AttentionShape, qkv: &[&[f32]], out: &[&[f32]], saved: &[f32], scratch: &[f32]) {
    let tokens = shape.batch * shape.context;
    assert!(qkv.iter().all(|x| x.len() == tokens * 3 * shape.hidden()), "size of qkv");
    assert!(out.iter().all(|x| x.len() == tokens * shape.hidden()), "size of out");
    assert_eq!(saved.len(), shape.saved_len(), "size of saved");
    assert!(scratch.len() >= cpu.pool.threads() * shape.scratch_len(), "size of scratch");
}
