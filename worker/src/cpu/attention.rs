//! Self-attention, one head of one sequence per task. Inputs have any format; arithmetic is in f32.
//!
//! Scores are computed for a tile of queries at a time and, if causal, only for the keys up to the
//! tile's last query. Forward saves two values per query (largest score, 1 / sum of exponentials).
//! Backward recomputes the probabilities from them, so memory grows linearly with the context, not
//! quadratically (Dao et al. 2022, without tiling over keys).
#![allow(unsafe_code)]

use super::gemm::{SMALL_SCRATCH, Size, View, small};
use super::isa::per_isa;
use super::math::exp;
use super::ops::{softmax_row, sum_of_products};
use super::pool::Shared;
use super::values::Pointer;
use super::{Cpu, Element, Isa};

/// Shape of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    pub batch: usize,
    /// Tokens per sequence.
    pub context: usize,
    pub heads: usize,
    /// Width of one head.
    pub head_size: usize,
    /// Whether a token attends only to itself and earlier tokens instead of the whole sequence.
    pub causal: bool,
}

impl AttentionShape {
    /// Width of the residual stream: `heads * head_size`.
    pub fn hidden(&self) -> usize {
        self.heads * self.head_size
    }

    /// Floats that forward saves for backward in addition to its inputs and outputs.
    pub fn saved_len(&self) -> usize {
        2 * self.batch * self.heads * self.context
    }

    /// Scratch floats per thread.
    pub fn scratch_len(&self) -> usize {
        let tiles = self.tile() * (2 * self.context + self.head_size);
        SMALL_SCRATCH + tiles + 2 * self.context * self.head_size
    }

    /// Number of keys visible to the queries `..end`.
    fn visible_keys(&self, end: usize) -> usize {
        if self.causal { end } else { self.context }
    }

    /// Queries per tile.
    fn tile(&self) -> usize {
        if self.context <= 256 { 64 } else { TILE }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_size as f32).sqrt()
    }
}

/// Number of keys visible to each query of a tile: `first` for the first query and, if `causal`,
/// one more for each following query.
#[derive(Clone, Copy)]
struct VisibleKeys {
    first: usize,
    causal: bool,
}

impl VisibleKeys {
    #[inline(always)]
    fn for_query(self, query: usize) -> usize {
        if self.causal { self.first + query } else { self.first }
    }
}

#[inline(always)]
fn forward_tile_body(
    scores: &mut [f32],
    stride: usize,
    columns: usize,
    visible: VisibleKeys,
    scale: f32,
    saved: &mut [f32],
) {
    for (i, saved) in saved.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let row = &mut scores[i * stride..][..columns];
        let (live, masked) = row.split_at_mut(visible.for_query(i));
        *saved = softmax_row(live, scale).into();
        masked.fill(0.0);
    }
}

per_isa! {
    /// Exponentials of a tile of scores; saves the largest score and one over the sum.
    fn forward_tile = forward_tile_body(
        scores: &mut [f32], stride: usize, columns: usize, visible: VisibleKeys, scale: f32, saved: &mut [f32],
    )
}

/// The tile of queries that backward turns into probabilities and their gradients.
#[derive(Clone, Copy)]
struct BackwardTile<'a> {
    stride: usize,
    columns: usize,
    visible: VisibleKeys,
    scale: f32,
    saved: &'a [f32],
    /// For each query, the inner product of the output and its gradient.
    means: &'a [f32],
}

#[inline(always)]
fn backward_tile_body(scores: &mut [f32], d_scores: &mut [f32], tile: BackwardTile<'_>) {
    for (i, (&[max, inverse], &mean)) in tile.saved.as_chunks::<2>().0.iter().zip(tile.means).enumerate() {
        let row = &mut scores[i * tile.stride..][..tile.columns];
        let d_row = &mut d_scores[i * tile.stride..][..tile.columns];
        let live = tile.visible.for_query(i);
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
    /// In place: scores become probabilities, gradients of probabilities become gradients of
    /// scores.
    fn backward_tile = backward_tile_body(scores: &mut [f32], d_scores: &mut [f32], tile: BackwardTile<'_>)
}

/// Accumulated rows to store in a tensor.
#[derive(Clone, Copy)]
struct Rows<'a> {
    sums: &'a [f32],
    width: usize,
    /// If set, each row is scaled by the second value of its pair.
    pairs: Option<&'a [f32]>,
}

/// # Panics
/// If a row is out of bounds.
#[inline(always)]
fn store_rows_body<T: Element>(rows: Rows<'_>, to: &Shared<'_, T>, start: usize, stride: usize) {
    for (i, sums) in rows.sums.chunks_exact(rows.width).enumerate() {
        let factor = rows.pairs.map_or(1.0, |pairs| pairs[2 * i + 1]);
        let first = start + i * stride;
        // SAFETY: a head's columns of a sequence belong to one task, which holds no other piece of
        // them.
        let row = unsafe { to.piece(first..first + rows.width) };
        row.iter_mut().zip(sums).for_each(|(to, x)| *to = T::of(x * factor));
    }
}

per_isa! {
    /// Stores rows of this task's head from `start` on, with the given stride.
    fn store_rows<T: Element> = store_rows_body(rows: Rows<'_>, to: &Shared<'_, T>, start: usize, stride: usize)
}

#[inline(always)]
fn means_body<T: Element>(out: &[T], d_out: &[T], stride: usize, buffer: &mut [f32], means: &mut [f32]) {
    let width = buffer.len() / 2;
    let (a, b) = buffer.split_at_mut(width);
    for (i, mean) in means.iter_mut().enumerate() {
        for (row, from) in [(&mut *a, out), (&mut *b, d_out)] {
            row.iter_mut().zip(&from[i * stride..][..width]).for_each(|(to, x)| *to = x.get());
        }
        *mean = sum_of_products(a, b);
    }
}

per_isa! {
    /// For each query, the inner product of the output and its gradient. Rows are `stride` apart;
    /// `buffer` has room for two rows.
    fn means<T: Element> = means_body(out: &[T], d_out: &[T], stride: usize, buffer: &mut [f32], means: &mut [f32])
}

/// Largest number of queries in a tile.
const TILE: usize = 128;

/// Offsets of one head of one sequence.
#[derive(Clone, Copy)]
struct Head {
    /// Index of its first query in `qkv`.
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

fn rows<T: Element>(data: &[T], start: usize, stride: usize) -> View {
    View { start: Pointer::new(data[start..].as_ptr()), down: stride, right: 1 }
}

fn transposed(view: View) -> View {
    View { start: view.start, down: view.right, right: view.down }
}

/// `out` (rows of `hidden`) = attention of `qkv` (rows of queries, keys, values: 3 x `hidden`).
/// `saved` has [`AttentionShape::saved_len`] floats, `scratch` [`AttentionShape::scratch_len`] per
/// thread.
///
/// # Panics
/// If a length does not match the shape.
pub fn attention<T: Element>(
    cpu: &Cpu,
    shape: &AttentionShape,
    qkv: &[T],
    out: &mut [T],
    saved: &mut [f32],
    scratch: &mut [f32],
) {
    let AttentionShape { batch, context, heads, head_size, causal } = *shape;
    let (hidden, stride) = (shape.hidden(), 3 * shape.hidden());
    let each = shape.scratch_len();
    check(cpu, shape, &[qkv], &[out], saved, scratch);
    let (out, saved, scratch) = (Shared::new(out), Shared::new(saved), Shared::new(scratch));
    cpu.pool.run(batch * heads, &|task, thread| {
        let head = Head::new(shape, task);
        // SAFETY: no two tasks run on the same thread at a time.
        let scratch = unsafe { scratch.piece(thread * each..(thread + 1) * each) };
        let (packing, rest) = scratch.split_at_mut(SMALL_SCRATCH);
        let (scores, sums) = rest.split_at_mut(shape.tile() * context);
        for first in (0..context).step_by(shape.tile()) {
            let count = shape.tile().min(context - first);
            let columns = shape.visible_keys(first + count);
            let query = rows(qkv, head.query + first * stride, stride);
            let key = transposed(rows(qkv, head.key, stride));
            let size = Size { m: count, n: columns, k: head_size };
            // SAFETY: `check` and `Head` keep all rows inside qkv; scores are this thread's own.
            unsafe {
                small(cpu.isa, size, query, key, scores.as_mut_ptr(), context, false, packing);
            }
            // SAFETY: each task has the pairs of its head, each tile those of its queries.
            let saved = unsafe { saved.piece(head.saved + 2 * first..head.saved + 2 * (first + count)) };
            let visible = VisibleKeys { first: shape.visible_keys(first + 1), causal };
            forward_tile(cpu.isa, scores, context, columns, visible, shape.scale(), saved);
            let (p, value) = (rows(scores, 0, context), rows(qkv, head.value, stride));
            let size = Size { m: count, n: head_size, k: columns };
            // SAFETY: as above; the sums are this thread's own.
            unsafe {
                small(cpu.isa, size, p, value, sums.as_mut_ptr(), head_size, false, packing);
            }
            let rows = Rows { sums: &sums[..count * head_size], width: head_size, pairs: Some(saved) };
            store_rows(cpu.isa, rows, &out, head.out + first * hidden, hidden);
        }
    });
}

/// Inputs and outputs of [`attention`] that backward needs.
#[derive(Clone, Copy)]
pub struct AttentionForward<'a, T> {
    /// Queries, keys, values.
    pub qkv: &'a [T],
    /// The output.
    pub out: &'a [T],
    /// The pairs saved by forward.
    pub saved: &'a [f32],
}

/// Computes `d_qkv`, the gradient of `qkv`, from `d_out`, the gradient of `out`. Scratch as in
/// [`attention`].
///
/// # Panics
/// If a length does not match the shape.
pub fn attention_backward<T: Element>(
    cpu: &Cpu,
    shape: &AttentionShape,
    forward: AttentionForward<'_, T>,
    d_out: &[T],
    d_qkv: &mut [T],
    scratch: &mut [f32],
) {
    let AttentionForward { qkv, out, saved } = forward;
    let AttentionShape { batch, context, heads, head_size, causal } = *shape;
    let (hidden, stride) = (shape.hidden(), 3 * shape.hidden());
    let each = shape.scratch_len();
    check(cpu, shape, &[qkv, d_qkv], &[out, d_out], saved, scratch);
    let (d_qkv, scratch) = (Shared::new(d_qkv), Shared::new(scratch));
    cpu.pool.run(batch * heads, &|task, thread| {
        let head = Head::new(shape, task);
        let isa: Isa = cpu.isa;
        // SAFETY: no two tasks run on the same thread at a time.
        let scratch = unsafe { scratch.piece(thread * each..(thread + 1) * each) };
        let (packing, rest) = scratch.split_at_mut(SMALL_SCRATCH);
        let (scores, rest) = rest.split_at_mut(shape.tile() * context);
        let (d_scores, rest) = rest.split_at_mut(shape.tile() * context);
        let (d_query, rest) = rest.split_at_mut(shape.tile() * head_size);
        // Gradients of keys and values are summed in f32 over the tiles of queries.
        let (d_key, d_value) = rest.split_at_mut(context * head_size);
        let store = |sums: &[f32], start: usize| {
            store_rows(isa, Rows { sums, width: head_size, pairs: None }, &d_qkv, start, stride);
        };
        // The last tile reaches all keys: it overwrites the gradients of keys and values, and the
        // others add.
        for first in (0..context).step_by(shape.tile()).rev() {
            let count = shape.tile().min(context - first);
            let columns = shape.visible_keys(first + count);
            let add = first + count < context;
            let query = rows(qkv, head.query + first * stride, stride);
            let (key, value) = (rows(qkv, head.key, stride), rows(qkv, head.value, stride));
            let from = head.out + first * hidden;
            let d_tile = rows(d_out, from, hidden);
            let shape_s = Size { m: count, n: columns, k: head_size };
            // SAFETY: `check` and `Head` keep all rows inside the inputs; the tiles are this
            // thread's own.
            unsafe {
                small(isa, shape_s, query, transposed(key), scores.as_mut_ptr(), context, false, packing);
                small(isa, shape_s, d_tile, transposed(value), d_scores.as_mut_ptr(), context, false, packing);
            }
            let mut sums = [0.0; TILE];
            // `d_query` is written last, so until then its memory can buffer two rows.
            means(isa, &out[from..], &d_out[from..], hidden, &mut d_query[..2 * head_size], &mut sums[..count]);
            let tile = BackwardTile {
                stride: context,
                columns,
                visible: VisibleKeys { first: shape.visible_keys(first + 1), causal },
                scale: shape.scale(),
                saved: &saved[head.saved + 2 * first..head.saved + 2 * (first + count)],
                means: &sums,
            };
            backward_tile(isa, scores, d_scores, tile);
            let (p, ds) = (rows(scores, 0, context), rows(d_scores, 0, context));
            let shape_k = Size { m: columns, n: head_size, k: count };
            let shape_q = Size { m: count, n: head_size, k: columns };
            // SAFETY: as above.
            unsafe {
                small(isa, shape_k, transposed(p), d_tile, d_value.as_mut_ptr(), head_size, add, packing);
                small(isa, shape_k, transposed(ds), query, d_key.as_mut_ptr(), head_size, add, packing);
                small(isa, shape_q, ds, key, d_query.as_mut_ptr(), head_size, false, packing);
            }
            store(&d_query[..count * head_size], head.query + first * stride);
        }
        store(&d_key[..context * head_size], head.key);
        store(&d_value[..context * head_size], head.value);
    });
}

fn check<T>(cpu: &Cpu, shape: &AttentionShape, qkv: &[&[T]], out: &[&[T]], saved: &[f32], scratch: &[f32]) {
    let tokens = shape.batch * shape.context;
    assert!(qkv.iter().all(|x| x.len() == tokens * 3 * shape.hidden()), "size of qkv");
    assert!(out.iter().all(|x| x.len() == tokens * shape.hidden()), "size of out");
    assert_eq!(saved.len(), shape.saved_len(), "size of saved");
    assert!(scratch.len() >= cpu.pool.threads() * shape.scratch_len(), "size of scratch");
}
