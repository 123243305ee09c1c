//! Activations, sums and conversions versus f64 references, in every format.

use crate::support::{check_gradient, close, cpus, doubles, floats, noise, random, same_bits};
use switchyard_worker::cpu::{Cpu, Element, bf16, f16, ops};

fn plain_gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

type Backward<E> = fn(&Cpu, &[E], &mut [E], &mut [f32], &mut [f32], bool);

/// Checks `dy` times the slope of `function` at `x`, and the bias gradient.
fn check_backward<E: Element>(function: fn(f64) -> f64, backward: Backward<E>, x: &[E], kept: &[E], width: usize) {
    let rows = x.len() / width;
    let dy = random::<E>(x.len(), 2, 1.0);
    for accumulate in [false, true] {
        let got = same_bits(|cpu| {
            let (mut dx, mut bias) = (dy.clone(), vec![0.5; width]);
            backward(cpu, kept, &mut dx, &mut vec![7.0; ops::partials_len(rows, width)], &mut bias, accumulate);
            [floats(&dx), bias].concat()
        });
        let (dx, d_bias) = got.split_at(x.len());
        let (x, dy) = (doubles(x), doubles(&dy));
        let loss = |x: &[f64]| x.iter().zip(&dy).map(|(&x, dy)| function(x) * dy).sum::<f64>();
        check_gradient::<E>("dx", &loss, &x, dx, 2e-6);
        let before = if accumulate { 0.5 } else { 0.0 };
        let loss = |bias: &[f64]| {
            let moved: Vec<f64> = x.iter().enumerate().map(|(i, x)| x + bias[i % width]).collect();
            loss(&moved) + before * bias.iter().sum::<f64>()
        };
        check_gradient::<f32>("bias", &loss, &vec![0.0; width], d_bias, 1e-5);
    }
}

fn gelu_of<E: Element>(rows: usize, width: usize) {
    let x = random::<E>(rows * width, 1, 6.0);
    let got = same_bits(|cpu| {
        let mut y = vec![E::of(f32::NAN); x.len()];
        ops::gelu(cpu, &x, &mut y);
        floats(&y)
    });
    close::<E>("gelu", &got, &doubles(&x).into_iter().map(plain_gelu).collect::<Vec<_>>(), 1e-6);
    check_backward::<E>(plain_gelu, ops::gelu_backward, &x, &x, width);
}

fn relu_of<E: Element>(rows: usize, width: usize) {
    let x = random::<E>(rows * width, 1, 6.0);
    let mut y = Vec::new();
    let got = same_bits(|cpu| {
        let mut y = x.clone();
        ops::relu(cpu, &mut y);
        floats(&y)
    });
    y.extend(got.iter().map(|&y| E::of(y)));
    assert_eq!(got, floats(&x).into_iter().map(|x| x.max(0.0)).collect::<Vec<_>>());
    check_backward::<E>(|x| x.max(0.0), ops::relu_backward, &x, &y, width);
}

fn tanh_of<E: Element>(rows: usize, width: usize) {
    let x = random::<E>(rows * width, 1, 3.0);
    let got = same_bits(|cpu| {
        let mut y = x.clone();
        ops::tanh(cpu, &mut y);
        floats(&y)
    });
    close::<E>("tanh", &got, &doubles(&x).into_iter().map(f64::tanh).collect::<Vec<_>>(), 1e-6);
    // The slope is computed from the output, so it is exact only in f32.
    if rows * width > 0 && E::FORMAT == f32::FORMAT {
        let y: Vec<E> = got.iter().map(|&y| E::of(y)).collect();
        check_backward::<E>(f64::tanh, ops::tanh_backward, &x, &y, width);
    }
    let y = random::<E>(rows * width, 3, 1.0);
    let dx = same_bits(|cpu| {
        let (mut dx, mut bias) = (y.clone(), vec![0.0; width]);
        ops::tanh_backward(cpu, &y, &mut dx, &mut vec![7.0; ops::partials_len(rows, width)], &mut bias, false);
        floats(&dx)
    });
    close::<E>("tanh", &dx, &doubles(&y).iter().map(|y| y * (1.0 - y * y)).collect::<Vec<_>>(), 1e-6);
}

#[test]
fn activations_and_their_gradients() {
    // The last size has several chunks of elements (8192) and of rows (32).
    for (rows, width) in [(1, 1), (5, 37), (70, 129)] {
        all_formats!(gelu_of(rows, width));
        all_formats!(relu_of(rows, width));
        all_formats!(tanh_of(rows, width));
    }
}

fn sums_of<E: Element>(len: usize) {
    let (a, b) = (random::<E>(len, 1, 1.0), random::<E>(len, 2, 1.0));
    let got = same_bits(|cpu| {
        let (mut y, mut to) = (vec![E::of(f32::NAN); len], a.clone());
        ops::add(cpu, &a, &b, &mut y);
        ops::add_to(cpu, &b, &mut to);
        assert_eq!(floats(&y), floats(&to));
        floats(&y)
    });
    close::<E>("sum", &got, &doubles(&a).iter().zip(doubles(&b)).map(|(a, b)| a + b).collect::<Vec<_>>(), 1e-7);
    for (rows, width) in [(1, 1), (33, 7), (1000, 100)] {
        let x = random::<E>(rows * width, 1, 1.0);
        let got = same_bits(|cpu| {
            let mut sums = vec![f32::NAN; width];
            ops::column_sums(cpu, &x, &mut vec![7.0; ops::partials_len(rows, width)], &mut sums, false);
            sums
        });
        let want: Vec<f64> = (0..width).map(|j| (0..rows).map(|r| f64::from(x[r * width + j].get())).sum()).collect();
        close::<f32>("column sums", &got, &want, 1e-5);
    }
}

#[test]
fn sums_of_tensors_and_of_columns() {
    for len in [0, 1, 37, 20_001] {
        all_formats!(sums_of(len));
    }
}

/// Subnormals of each format, the smallest and largest values, and NaN.
const SPECIAL: [f32; 12] = [
    0.0,
    -0.0,
    1e-45,
    -1e-40,
    6e-8,
    3e-5,
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
];

#[test]
fn conversions_keep_subnormals_infinities_and_nan() {
    let mut x = noise(20_000, 1);
    x.extend(SPECIAL);
    let same = |got: f32, want: f32| (got.is_nan() && want.is_nan()) || got.to_bits() == want.to_bits();
    for cpu in cpus() {
        let (mut b, mut h) = (vec![bf16::ONE; x.len()], vec![f16::ONE; x.len()]);
        ops::convert(&cpu, &x, &mut b);
        ops::convert(&cpu, &x, &mut h);
        let (mut from_b, mut from_h) = (vec![1.0f32; x.len()], vec![1.0f32; x.len()]);
        ops::convert(&cpu, &b, &mut from_b);
        ops::convert(&cpu, &h, &mut from_h);
        for i in 0..x.len() {
            assert!(same(from_b[i], bf16::from_f32(x[i]).to_f32()), "bf16 of {:e}: {:e}", x[i], from_b[i]);
            assert!(same(from_h[i], f16::from_f32(x[i]).to_f32()), "f16 of {:e}: {:e}", x[i], from_h[i]);
        }
    }
}

fn specials_of<E: Element>() {
    let x: Vec<E> = SPECIAL.iter().map(|&x| E::of(x)).collect();
    let same = |what: &str, got: f32, want: f64, x: E| {
        let fits = (f64::from(got) - want).abs() <= (rounding_of::<E>() + 1e-6) * want.abs() + 6e-8;
        assert!(fits || f64::from(got) == want || (got.is_nan() && want.is_nan()), "{what} of {:e}: {got:e}", x.get());
    };
    for cpu in cpus() {
        let mut y = vec![E::of(1.0); x.len()];
        ops::gelu(&cpu, &x, &mut y);
        let (mut relu, mut tanh) = (x.clone(), x.clone());
        ops::relu(&cpu, &mut relu);
        ops::tanh(&cpu, &mut tanh);
        for i in 0..x.len() {
            let value = f64::from(x[i].get());
            let relu_want = if value < 0.0 { 0.0 } else { value };
            same("relu", relu[i].get(), relu_want, x[i]);
            same("tanh", tanh[i].get(), value.tanh(), x[i]);
            if value.is_nan() || value.abs() < 10.0 {
                same("gelu", y[i].get(), plain_gelu(value), x[i]);
            }
        }
    }
}

fn rounding_of<E: Element>() -> f64 {
    2.0 * crate::support::rounding::<E>()
}

#[test]
fn activations_of_subnormals_infinities_and_nan() {
    all_formats!(specials_of());
    // An inactive unit passes nothing back, whatever the gradient; a NaN unit passes the gradient
    // through.
    let (y, mut dy, mut bias) = ([0.0, 0.0, f32::NAN, 1.0], [f32::INFINITY, f32::NAN, 2.0, f32::INFINITY], [0.0; 4]);
    ops::relu_backward(&cpus()[0], &y, &mut dy, &mut [0.0; 4], &mut bias, false);
    assert_eq!(dy, [0.0, 0.0, 2.0, f32::INFINITY]);
}

fn pixels_of<E: Element>(count: usize, channels: usize) {
    let pixels: Vec<u8> = (0..count * channels).map(|i| (i * i * 7 + i) as u8).collect();
    let (mean, deviation) = ([0.485f32, 0.456, 0.406, 0.5], [0.229f32, 0.224, 0.225, 0.5]);
    let tables: Vec<_> = (0..channels).map(|c| ops::pixel_table::<E>(mean[c], deviation[c])).collect();
    let got = same_bits(|cpu| {
        let mut y = vec![E::of(f32::NAN); pixels.len()];
        ops::normalise(cpu, &pixels, &tables, &mut y);
        floats(&y)
    });
    let want = |(i, &value): (usize, &u8)| {
        let c = i % channels;
        (f64::from(value) / 255.0 - f64::from(mean[c])) / f64::from(deviation[c])
    };
    close::<E>("pixels", &got, &pixels.iter().enumerate().map(want).collect::<Vec<_>>(), 1e-6);
}

#[test]
fn pixels_are_normalised() {
    for (count, channels) in [(0, 3), (1, 1), (20_000, 3), (300, 4)] {
        all_formats!(pixels_of(count, channels));
    }
}
