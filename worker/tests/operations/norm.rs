//! Layer and batch normalisation versus f64 references, in every format.

use crate::support::{check_gradient, close, cpus, doubles, floats, noise, random, same_bits};
use switchyard_worker::cpu::ops::{self, BatchNorm};
use switchyard_worker::cpu::{Cpu, Element};

/// Mean and biased variance.
fn moments(x: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let n = x.clone().count() as f64;
    let mean = x.clone().sum::<f64>() / n;
    (mean, x.map(|x| (x - mean) * (x - mean)).sum::<f64>() / n)
}

fn plain_layer_norm(x: &[f64], gamma: &[f64], beta: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| {
        let (mean, variance) = moments(row.iter().copied());
        let inverse = 1.0 / (variance + 1e-5).sqrt();
        (0..row.len()).map(|i| (row[i] - mean) * inverse * gamma[i] + beta[i]).collect::<Vec<_>>()
    };
    x.chunks(gamma.len()).flat_map(row).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn layer_norm_of<E: Element>(rows: usize, width: usize) {
    let (x, dy) = (random::<E>(rows * width, 1, 3.0), random::<E>(rows * width, 2, 1.0));
    let (gamma, beta, before) = (noise(width, 3), noise(width, 4), random::<E>(rows * width, 5, 1.0));
    let run = |cpu: &Cpu, add: bool| {
        let (mut y, mut saved) = (vec![E::of(f32::NAN); x.len()], vec![f32::NAN; 2 * rows]);
        ops::layer_norm(cpu, &x, &gamma, &beta, &mut y, &mut saved);
        let (mut dx, mut d_gamma, mut d_beta) = (before.clone(), vec![0.5; width], vec![0.25; width]);
        let mut partials = vec![7.0; ops::partials_len(rows, 2 * width)];
        let gradients = (&mut d_gamma[..], &mut d_beta[..]);
        ops::layer_norm_backward(cpu, &dy, &x, &gamma, &saved, &mut dx, add, &mut partials, gradients, add);
        [floats(&y), floats(&dx), d_gamma, d_beta].concat()
    };
    let (x64, gamma64, beta64, dy64) = (doubles(&x), doubles(&gamma), doubles(&beta), doubles(&dy));
    for add in [false, true] {
        let got = same_bits(|cpu| run(cpu, add));
        let (y, rest) = got.split_at(x.len());
        let (dx, rest) = rest.split_at(x.len());
        let (d_gamma, d_beta) = rest.split_at(width);
        close::<E>("y", y, &plain_layer_norm(&x64, &gamma64, &beta64), 1e-6);
        let kept = if add { 1.0 } else { 0.0 };
        // A linear term whose gradient is the previous content.
        let loss = |x: &[f64]| dot(&dy64, &plain_layer_norm(x, &gamma64, &beta64)) + kept * dot(x, &doubles(&before));
        check_gradient::<E>("dx", &loss, &x64, dx, 1e-5);
        let loss = |g: &[f64]| dot(&dy64, &plain_layer_norm(&x64, g, &beta64)) + kept * 0.5 * g.iter().sum::<f64>();
        check_gradient::<f32>("d_gamma", &loss, &gamma64, d_gamma, 1e-5);
        let loss = |b: &[f64]| dot(&dy64, &plain_layer_norm(&x64, &gamma64, b)) + kept * 0.25 * b.iter().sum::<f64>();
        check_gradient::<f32>("d_beta", &loss, &beta64, d_beta, 1e-5);
    }
}

#[test]
fn layer_norm_and_its_gradients() {
    for (rows, width) in [(1, 1), (5, 37), (70, 16), (33, 129)] {
        all_formats!(layer_norm_of(rows, width));
    }
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    channels: usize,
    residual: bool,
    relu: bool,
}

fn plain_batch_norm(shape: Shape, x: &[f64], gamma: &[f64], beta: &[f64], residual: &[f64]) -> Vec<f64> {
    let mut y = vec![0.0; x.len()];
    for c in 0..shape.channels {
        let column = || (0..shape.rows).map(|r| r * shape.channels + c);
        let (mean, variance) = moments(column().map(|i| x[i]));
        for i in column() {
            let residual = if shape.residual { residual[i] } else { 0.0 };
            let value = (x[i] - mean) / (variance + 1e-5).sqrt() * gamma[c] + beta[c] + residual;
            y[i] = if shape.relu { value.max(0.0) } else { value };
        }
    }
    y
}

fn batch_norm_of<E: Element>(shape: Shape) {
    let Shape { rows, channels, relu, .. } = shape;
    let len = rows * channels;
    let (x, dy, residual) = (random::<E>(len, 1, 3.0), random::<E>(len, 2, 1.0), random::<E>(len, 3, 1.0));
    let (gamma, beta, before) = (noise(channels, 4), noise(channels, 5), random::<E>(len, 6, 1.0));
    let layer = BatchNorm { gamma: &gamma, beta: &beta, residual: shape.residual.then_some(&residual[..]), relu };
    let run = |cpu: &Cpu, add: bool| {
        let (mut y, mut saved) = (vec![E::of(f32::NAN); len], vec![f32::NAN; 2 * channels]);
        let mut statistics = vec![f32::NAN; 2 * channels];
        let mut partials = vec![7.0; ops::batch_norm_partials_len(rows, channels)];
        ops::batch_norm(cpu, layer, &x, &mut y, &mut saved, &mut statistics, &mut partials);
        let (mut masked, mut dx) = (dy.clone(), before.clone());
        let (mut d_gamma, mut d_beta) = (vec![0.5; channels], vec![0.25; channels]);
        let (output, gradients) = (relu.then_some(&y[..]), (&mut d_gamma[..], &mut d_beta[..]));
        ops::batch_norm_backward(
            cpu,
            &mut masked,
            output,
            &x,
            &gamma,
            &saved,
            &mut dx,
            add,
            &mut partials,
            gradients,
            add,
        );
        [floats(&y), floats(&masked), floats(&dx), statistics, d_gamma, d_beta].concat()
    };
    let (x64, dy64, residual64) = (doubles(&x), doubles(&dy), doubles(&residual));
    let (gamma64, beta64) = (doubles(&gamma), doubles(&beta));
    for add in [false, true] {
        let got = same_bits(|cpu| run(cpu, add));
        let (y, rest) = got.split_at(len);
        let (masked, rest) = rest.split_at(len);
        let (dx, rest) = rest.split_at(len);
        let (statistics, rest) = rest.split_at(2 * channels);
        let (d_gamma, d_beta) = rest.split_at(channels);
        close::<E>("y", y, &plain_batch_norm(shape, &x64, &gamma64, &beta64, &residual64), 2e-6);
        for c in 0..channels {
            let (mean, variance) = moments((0..rows).map(|r| x64[r * channels + c]));
            close::<f32>("mean", &statistics[c..=c], &[mean], 1e-6);
            let unbiased = variance * rows as f64 / (rows as f64 - 1.0);
            close::<f32>("variance", &statistics[channels + c..=channels + c], &[unbiased], 1e-6);
        }
        let kept = if add { 1.0 } else { 0.0 };
        let of = |x: &[f64], g: &[f64], b: &[f64], r: &[f64]| dot(&dy64, &plain_batch_norm(shape, x, g, b, r));
        let loss = |x: &[f64]| of(x, &gamma64, &beta64, &residual64) + kept * dot(x, &doubles(&before));
        check_gradient::<E>("dx", &loss, &x64, dx, 1e-5);
        let loss = |g: &[f64]| of(&x64, g, &beta64, &residual64) + kept * 0.5 * g.iter().sum::<f64>();
        check_gradient::<f32>("d_gamma", &loss, &gamma64, d_gamma, 1e-5);
        let loss = |b: &[f64]| of(&x64, &gamma64, b, &residual64) + kept * 0.25 * b.iter().sum::<f64>();
        check_gradient::<f32>("d_beta", &loss, &beta64, d_beta, 1e-5);
        if shape.residual {
            check_gradient::<E>("d_residual", &|r| of(&x64, &gamma64, &beta64, r), &residual64, masked, 1e-6);
        }
    }
}

#[test]
fn batch_norm_and_its_gradients() {
    for (residual, relu) in [(false, false), (false, true), (true, false), (true, true)] {
        // Several chunks of rows (at most 512, at least 32) and of channels (64).
        for (rows, channels) in [(2, 1), (7, 19), (600, 3), (40, 530), (1100, 16)] {
            all_formats!(batch_norm_of(Shape { rows, channels, residual, relu }));
        }
    }
}

/// Returns y, and the mean with the unbiased variance.
fn batch_norm(cpu: &Cpu, x: &[f32], channels: usize) -> (Vec<f32>, Vec<f32>) {
    let (gamma, beta) = (vec![2.0; channels], vec![0.5; channels]);
    let layer = BatchNorm { gamma: &gamma, beta: &beta, residual: None, relu: false };
    let (mut y, mut saved, mut statistics) = (vec![9.0; x.len()], vec![9.0; 2 * channels], vec![9.0; 2 * channels]);
    let mut partials = vec![7.0; ops::batch_norm_partials_len(x.len() / channels, channels)];
    ops::batch_norm(cpu, layer, x, &mut y, &mut saved, &mut statistics, &mut partials);
    (y, statistics)
}

#[test]
fn batch_norm_of_one_row_and_of_constant_channels() {
    for cpu in cpus() {
        let (y, statistics) = batch_norm(&cpu, &[3.0, -1e6], 2);
        assert_eq!(y, [0.5, 0.5]);
        assert_eq!(statistics[..2], [3.0, -1e6]);
        assert!(statistics[2..].iter().all(|variance| variance.is_nan()));
        // 0.1 times the number of rows is not exact in f32; the variance is still 0.
        let (y, statistics) = batch_norm(&cpu, &[0.1f32, 1e8].repeat(1234), 2);
        assert!(y.iter().all(|&y| y == 0.5));
        assert_eq!(statistics, [0.1, 1e8, 0.0, 0.0]);
    }
}

#[test]
fn a_large_mean_does_not_cancel_the_variance() {
    let x: Vec<f32> = noise(3000, 1).iter().map(|x| 4000.0 + x).collect();
    let (mean, variance) = moments(doubles(&x).into_iter());
    let (_, statistics) = batch_norm(&cpus()[0], &x, 1);
    assert!((f64::from(statistics[0]) - mean).abs() < 3e-4);
    // Squares of 4000 in f32 would be off by 1 each.
    assert!((f64::from(statistics[1]) / (variance * 3000.0 / 2999.0) - 1.0).abs() < 1e-4);
}

#[test]
fn batch_norm_in_evaluation_uses_the_running_statistics() {
    let (rows, channels) = (70, 19);
    let x = noise(rows * channels, 1);
    let running: Vec<f32> = noise(2 * channels, 2).iter().map(|x| x.abs()).collect();
    let (gamma, beta, residual) = (noise(channels, 3), noise(channels, 4), noise(rows * channels, 5));
    let got = same_bits(|cpu| {
        let layer = BatchNorm { gamma: &gamma, beta: &beta, residual: Some(&residual), relu: true };
        let (mut y, mut saved) = (vec![f32::NAN; x.len()], vec![f32::NAN; 2 * channels]);
        ops::batch_norm_evaluate(cpu, layer, &running, &x, &mut y, &mut saved);
        y
    });
    let value = |i: usize| {
        let c = i % channels;
        let [x, mean, variance] = [x[i], running[c], running[channels + c]].map(f64::from);
        let normal = (x - mean) / (variance + 1e-5).sqrt();
        (normal * f64::from(gamma[c]) + f64::from(beta[c]) + f64::from(residual[i])).max(0.0)
    };
    close::<f32>("y", &got, &(0..x.len()).map(value).collect::<Vec<_>>(), 1e-6);
}

#[test]
fn a_nan_stays_in_its_row_or_channel() {
    for bad in [f32::NAN, f32::INFINITY] {
        for cpu in cpus() {
            let (rows, width) = (40, 33);
            let mut x = noise(rows * width, 1);
            x[35 * width + 20] = bad;
            let (mut y, mut saved) = (vec![0.0; x.len()], vec![0.0; 2 * rows]);
            ops::layer_norm(&cpu, &x, &vec![1.0; width], &vec![0.0; width], &mut y, &mut saved);
            assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (i / width == 35)), "{bad}");
            let (y, statistics) = batch_norm(&cpu, &x, width);
            assert!(y.iter().enumerate().all(|(i, y)| y.is_nan() == (i % width == 20)), "{bad}");
            assert!(statistics[width + 20].is_nan() && !statistics[width + 19].is_nan());
        }
    }
}
