//! Batch normalisation (Ioffe and Szegedy 2015) over rows of channels, fused with the residual
//! addition and the ReLU that often follow; epsilon 1e-5 as in PyTorch.
//!
//! The rows of an image batch are its pixels. Mean and variance are computed around each piece's
//! mean and then combined over the pieces in order, in f64 (Chan, Golub and LeVeque 1979), so that
//! a large mean does not swallow a small variance.

use super::ROWS;
use super::pieces::{in_pieces, per_task, rows};
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

const EPSILON: f64 = 1e-5;
/// Channels per task when combining pieces.
const COLUMNS: usize = 64;

/// Rows per piece: more if there are few channels, so that the partial sums stay small compared to
/// the tensor.
fn piece_rows(channels: usize) -> usize {
    (16_384 / channels).clamp(ROWS, 512)
}

/// Scratch floats for [`batch_norm`] and [`batch_norm_backward`] over `rows` rows.
pub fn batch_norm_partials_len(rows: usize, channels: usize) -> usize {
    (2 * rows.div_ceil(piece_rows(channels)) + 3) * channels
}

/// `y = relu((x - mean) / deviation * gamma + beta + residual)`.
#[derive(Debug, Clone, Copy)]
pub struct BatchNorm<'a, E> {
    /// One factor per channel.
    pub gamma: &'a [f32],
    /// One addend per channel.
    pub beta: &'a [f32],
    /// A tensor of `x`'s shape to add.
    pub residual: Option<&'a [E]>,
    /// Whether to apply ReLU.
    pub relu: bool,
}

#[inline(always)]
fn moments_body<E: Element>(x: &[E], moments: &mut [f32]) {
    let width = moments.len() / 2;
    let (mean, squares) = moments.split_at_mut(width);
    let count = (x.len() / width) as f32;
    // Around the first row: exact for a constant channel, and small values for a channel far from
    // 0.
    let first = &x[..width];
    mean.fill(0.0);
    for row in x.chunks_exact(width) {
        for ((sum, x), first) in mean.iter_mut().zip(row).zip(first) {
            *sum += x.get() - first.get();
        }
    }
    for (mean, first) in mean.iter_mut().zip(first) {
        *mean = first.get() + *mean / count;
    }
    squares.fill(0.0);
    for row in x.chunks_exact(width) {
        for ((sum, x), mean) in squares.iter_mut().zip(row).zip(mean.iter()) {
            let difference = x.get() - mean;
            *sum += difference * difference;
        }
    }
}

per_isa! {
    /// Mean of each channel of a piece, then the sum of squared deviations.
    fn moments_piece<E: Element> = moments_body(x: &[E], moments: &mut [f32])
}

/// Moments of the channels from `channel` on, to combine over all pieces.
#[derive(Clone, Copy)]
struct Pieces<'a> {
    /// [`moments_piece`] output, piece after piece.
    moments: &'a [f32],
    channels: usize,
    channel: usize,
    /// Total number of rows.
    count: usize,
}

#[inline(always)]
fn combine_body(
    pieces: Pieces<'_>,
    mean: &mut [f32],
    inverse: &mut [f32],
    out_mean: &mut [f32],
    out_variance: &mut [f32],
) {
    let Pieces { moments, channels, channel, count } = pieces;
    let width = mean.len();
    let size = piece_rows(channels);
    let each = || {
        moments.chunks_exact(2 * channels).enumerate().map(move |(i, moments)| {
            let rows = size.min(count - i * size) as f64;
            (rows, &moments[channel..][..width], &moments[channels + channel..][..width])
        })
    };
    let (mut means, mut squares) = ([0.0f64; COLUMNS], [0.0f64; COLUMNS]);
    for (rows, piece, _) in each() {
        for (sum, &mean) in means.iter_mut().zip(piece) {
            *sum += rows * f64::from(mean);
        }
    }
    for mean in &mut means {
        *mean /= count as f64;
    }
    for (rows, piece, piece_squares) in each() {
        for (((sum, mean), &piece), &within) in squares.iter_mut().zip(&means).zip(piece).zip(piece_squares) {
            let difference = f64::from(piece) - mean;
            *sum += f64::from(within) + rows * (difference * difference);
        }
    }
    for i in 0..width {
        mean[i] = means[i] as f32;
        inverse[i] = (1.0 / (squares[i] / count as f64 + EPSILON).sqrt()) as f32;
        out_mean[i] = mean[i];
        out_variance[i] = (squares[i] / (count as f64 - 1.0)) as f32;
    }
}

per_isa! {
    fn combine_piece = combine_body(
        pieces: Pieces<'_>, mean: &mut [f32], inverse: &mut [f32], out_mean: &mut [f32], out_variance: &mut [f32],
    )
}

#[inline(always)]
fn apply_body<E: Element>(layer: BatchNorm<'_, E>, saved: &[f32], x: &[E], y: &mut [E]) {
    let width = layer.gamma.len();
    let (mean, inverse) = saved.split_at(width);
    let (gamma, beta) = (&layer.gamma[..width], &layer.beta[..width]);
    let (mean, inverse) = (&mean[..width], &inverse[..width]);
    let floor = if layer.relu { 0.0 } else { f32::NEG_INFINITY };
    for (r, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
        let normal = |i: usize| (x[i].get() - mean[i]) * inverse[i] * gamma[i] + beta[i];
        let rectified = |x: f32| E::of(if x < floor { floor } else { x });
        match layer.residual {
            None => {
                for (i, y) in y.iter_mut().enumerate() {
                    *y = rectified(normal(i));
                }
            }
            Some(residual) => {
                let residual = &residual[r * width..][..width];
                for (i, y) in y.iter_mut().enumerate() {
                    *y = rectified(normal(i) + residual[i].get());
                }
            }
        }
    }
}

per_isa! { fn apply_piece<E: Element> = apply_body(layer: BatchNorm<'_, E>, saved: &[f32], x: &[E], y: &mut [E]) }

fn apply<E: Element>(cpu: &Cpu, layer: BatchNorm<'_, E>, saved: &[f32], x: &[E], y: &mut [E]) {
    let channels = layer.gamma.len();
    assert_eq!((y.len(), layer.beta.len()), (x.len(), channels), "length of y and beta");
    assert!(layer.residual.is_none_or(|residual| residual.len() == x.len()), "length of the residual");
    in_pieces(cpu, x.len() / channels, piece_rows(channels), rows(y, channels), |range, y| {
        let range = range.start * channels..range.end * channels;
        let layer = BatchNorm { residual: layer.residual.map(|residual| &residual[range.clone()]), ..layer };
        apply_piece(cpu.isa, layer, saved, &x[range], y);
    });
}

/// Training: computes `y` from the mean and the biased variance of the batch. `saved` receives each
/// channel's mean, then each 1 / standard deviation; `statistics` each mean, then each unbiased
/// variance, for the running estimate. `partials` has at least [`batch_norm_partials_len`] floats.
///
/// A single row has no unbiased variance: it is NaN and visibly spoils a running estimate. (PyTorch
/// rejects these batches; a model should, too.)
pub fn batch_norm<E: Element>(
    cpu: &Cpu,
    layer: BatchNorm<'_, E>,
    x: &[E],
    y: &mut [E],
    saved: &mut [f32],
    statistics: &mut [f32],
    partials: &mut [f32],
) {
    let channels = layer.gamma.len();
    let (count, size) = (x.len() / channels, piece_rows(channels));
    assert_eq!((saved.len(), statistics.len()), (2 * channels, 2 * channels), "length of saved and statistics");
    let partials = &mut partials[..count.div_ceil(size) * 2 * channels];
    in_pieces(cpu, count, size, per_task(partials, 2 * channels), |range, moments| {
        moments_piece(cpu.isa, &x[range.start * channels..range.end * channels], moments);
    });
    let (mean, inverse) = saved.split_at_mut(channels);
    let (out_mean, out_variance) = statistics.split_at_mut(channels);
    let results = (rows(mean, 1), rows(inverse, 1), rows(out_mean, 1), rows(out_variance, 1));
    in_pieces(cpu, channels, COLUMNS, results, |range, (mean, inverse, out_mean, out_variance)| {
        let pieces = Pieces { moments: partials, channels, channel: range.start, count };
        combine_piece(cpu.isa, pieces, mean, inverse, out_mean, out_variance);
    });
    apply(cpu, layer, saved, x, y);
}

/// Evaluation: computes `y` from `running`, each channel's mean, then each variance. `saved` is
/// scratch memory of the same length.
pub fn batch_norm_evaluate<E: Element>(
    cpu: &Cpu,
    layer: BatchNorm<'_, E>,
    running: &[f32],
    x: &[E],
    y: &mut [E],
    saved: &mut [f32],
) {
    let channels = layer.gamma.len();
    assert_eq!((saved.len(), running.len()), (2 * channels, 2 * channels), "length of saved and running");
    saved.copy_from_slice(running);
    for value in &mut saved[channels..] {
        *value = (1.0 / (f64::from(*value) + EPSILON).sqrt()) as f32;
    }
    apply(cpu, layer, saved, x, y);
}

#[inline(always)]
fn sums_body<E: Element>(dy: &mut [E], y: Option<&[E]>, x: &[E], saved: &[f32], sums: &mut [f32]) {
    let width = sums.len() / 2;
    sums.fill(0.0);
    let (d_gamma, d_beta) = sums.split_at_mut(width);
    let (mean, inverse) = saved.split_at(width);
    let (d_beta, mean, inverse) = (&mut d_beta[..width], &mean[..width], &inverse[..width]);
    for (r, (dy, x)) in dy.chunks_exact_mut(width).zip(x.chunks_exact(width)).enumerate() {
        if let Some(y) = y {
            for (dy, y) in dy.iter_mut().zip(&y[r * width..][..width]) {
                *dy = if y.get() <= 0.0 { E::of(0.0) } else { *dy };
            }
        }
        for i in 0..width {
            let dy = dy[i].get();
            d_gamma[i] += dy * ((x[i].get() - mean[i]) * inverse[i]);
            d_beta[i] += dy;
        }
    }
}

per_isa! {
    /// Applies the ReLU mask to `dy`, and sums the gradients of gamma and beta over a piece.
    fn sums_piece<E: Element> = sums_body(
        dy: &mut [E], y: Option<&[E]>, x: &[E], saved: &[f32], sums: &mut [f32],
    )
}

#[inline(always)]
fn combine_sums_body(sums: &[f32], width: usize, column: usize, to: &mut [f32]) {
    let mut totals = [0.0f64; COLUMNS];
    for piece in sums.chunks_exact(width) {
        for (total, &sum) in totals.iter_mut().zip(&piece[column..][..to.len()]) {
            *total += f64::from(sum);
        }
    }
    for (to, total) in to.iter_mut().zip(totals) {
        *to = total as f32;
    }
}

per_isa! {
    /// Totals over the pieces, for the columns from `column` on.
    fn combine_sums = combine_sums_body(sums: &[f32], width: usize, column: usize, to: &mut [f32])
}

#[inline(always)]
fn inputs_body<E: Element>(dy: &[E], x: &[E], mean: &[f32], factors: &[f32], dx: &mut [E], add: bool) {
    let width = mean.len();
    let (weight, rest) = factors.split_at(width);
    let (offset, slope) = rest.split_at(width);
    for ((dx, dy), x) in dx.chunks_exact_mut(width).zip(dy.chunks_exact(width)).zip(x.chunks_exact(width)) {
        let each = dy.iter().zip(x).zip(mean).zip(weight).zip(offset).zip(slope);
        let each = dx.iter_mut().zip(each);
        if add {
            for (dx, (((((dy, x), mean), weight), offset), slope)) in each {
                *dx = E::of(dx.get() + slope * (dy.get() - offset - (x.get() - mean) * weight));
            }
        } else {
            for (dx, (((((dy, x), mean), weight), offset), slope)) in each {
                *dx = E::of(slope * (dy.get() - offset - (x.get() - mean) * weight));
            }
        }
    }
}

per_isa! {
    /// `slope * (dy - offset - (x - mean) * weight)`; `factors` holds the weights of all channels,
    /// then the offsets, then the slopes.
    fn inputs_piece<E: Element> = inputs_body(
        dy: &[E], x: &[E], mean: &[f32], factors: &[f32], dx: &mut [E], add: bool,
    )
}

/// Gradients of [`batch_norm`]: `dx` = (if `add`: +=) the gradient of `x`, `d_gamma` and `d_beta` =
/// (if `accumulate`: +=) the gradients of the parameters. `y` is the output if there was a ReLU:
/// `dy` is then masked in place and becomes the gradient of the residual. `partials` has at least
/// [`batch_norm_partials_len`] floats.
#[allow(clippy::too_many_arguments)]
pub fn batch_norm_backward<E: Element>(
    cpu: &Cpu,
    dy: &mut [E],
    y: Option<&[E]>,
    x: &[E],
    gamma: &[f32],
    saved: &[f32],
    dx: &mut [E],
    add: bool,
    partials: &mut [f32],
    (d_gamma, d_beta): (&mut [f32], &mut [f32]),
    accumulate: bool,
) {
    let channels = gamma.len();
    let (count, size) = (x.len() / channels, piece_rows(channels));
    assert_eq!((dy.len(), dx.len(), saved.len()), (x.len(), x.len(), 2 * channels), "length of dy, dx and saved");
    assert!(y.is_none_or(|y| y.len() == x.len()), "length of y");
    let partials = &mut partials[..batch_norm_partials_len(count, channels)];
    let (pieces, factors) = partials.split_at_mut(count.div_ceil(size) * 2 * channels);
    in_pieces(cpu, count, size, (rows(dy, channels), per_task(pieces, 2 * channels)), |range, (dy, sums)| {
        let range = range.start * channels..range.end * channels;
        sums_piece(cpu.isa, dy, y.map(|y| &y[range.clone()]), &x[range], saved, sums);
    });
    let (totals, slopes) = factors.split_at_mut(2 * channels);
    in_pieces(cpu, 2 * channels, COLUMNS, rows(totals, 1), |range, totals| {
        combine_sums(cpu.isa, pieces, 2 * channels, range.start, totals);
    });
    let (weights, offsets) = totals.split_at_mut(channels);
    let share = 1.0 / count as f32;
    for c in 0..channels {
        let before = if accumulate { (d_gamma[c], d_beta[c]) } else { (0.0, 0.0) };
        (d_gamma[c], d_beta[c]) = (before.0 + weights[c], before.1 + offsets[c]);
        let inverse = saved[channels + c];
        weights[c] *= share * inverse;
        offsets[c] *= share;
        slopes[c] = gamma[c] * inverse;
    }
    let (mean, factors) = (&saved[..channels], &*factors);
    in_pieces(cpu, count, size, rows(dx, channels), |range, dx| {
        let range = range.start * channels..range.end * channels;
        inputs_piece(cpu.isa, &dy[range.clone()], &x[range], mean, factors, dx, add);
    });
}
