//! Pooling versus an f64 reference, in every format.

use crate::support::{check_gradient, close, cpus, doubles, floats, random, same_bits};
use proptest::prelude::*;
use switchyard_worker::cpu::Element;
use switchyard_worker::cpu::ops::{self, Window};

fn plain_max_pool(shape: &Window, x: &[f64]) -> Vec<f64> {
    let (height, width) = shape.output();
    let mut y = vec![f64::NEG_INFINITY; shape.batch * height * width * shape.channels];
    let size = |out: usize, k: usize| (out * shape.stride + k).checked_sub(shape.padding);
    for (i, y) in y.iter_mut().enumerate() {
        let (c, column) = (i % shape.channels, i / shape.channels % width);
        let (line, image) = (i / shape.channels / width % height, i / shape.channels / width / height);
        for k in 0..shape.kernel * shape.kernel {
            let (h, w) = (size(line, k / shape.kernel), size(column, k % shape.kernel));
            if let (Some(h), Some(w)) = (h.filter(|&h| h < shape.height), w.filter(|&w| w < shape.width)) {
                *y = y.max(x[((image * shape.height + h) * shape.width + w) * shape.channels + c]);
            }
        }
    }
    y
}

/// Values that are well separated within each window, so that a small step does not change the
/// maximum: they repeat after 251, and a window spans fewer pixels.
fn distinct<E: Element>(len: usize) -> Vec<E> {
    (0..len).map(|i| E::of((i * 37 % 251) as f32 * 0.25 - 30.0)).collect()
}

fn max_pool_of<E: Element>(shape: Window) {
    let len = shape.batch * shape.height * shape.width * shape.channels;
    let (height, width) = shape.output();
    let outputs = shape.batch * height * width * shape.channels;
    let (x, dy) = (distinct::<E>(len), random::<E>(outputs, 2, 1.0));
    let got = same_bits(|cpu| {
        let (mut y, mut places) = (vec![E::of(f32::NAN); outputs], vec![255; outputs]);
        let mut dx = vec![E::of(f32::NAN); len];
        ops::max_pool(cpu, &shape, &x, &mut y, &mut places);
        ops::max_pool_backward(cpu, &shape, &dy, &places, &mut dx);
        [floats(&y), floats(&dx)].concat()
    });
    let (x, dy) = (doubles(&x), doubles(&dy));
    close::<f32>("y", &got[..outputs], &plain_max_pool(&shape, &x), 0.0);
    let loss = |x: &[f64]| plain_max_pool(&shape, x).iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>();
    check_gradient::<E>("dx", &loss, &x, &got[outputs..], 1e-6);
}

#[test]
fn max_pooling_and_its_gradient() {
    let shape = Window { batch: 1, height: 1, width: 1, channels: 1, kernel: 1, stride: 1, padding: 0 };
    all_formats!(max_pool_of(shape));
    // ResNet's pooling, with overlapping windows.
    let shape = Window { batch: 2, height: 9, width: 12, channels: 19, kernel: 3, stride: 2, padding: 1 };
    all_formats!(max_pool_of(shape));
    all_formats!(max_pool_of(Window { channels: 48, ..shape }));
    assert_eq!(Window { kernel: 12, ..shape }.output(), (0, 2));
    // Pixels outside every window.
    all_formats!(max_pool_of(Window { kernel: 2, stride: 5, padding: 0, channels: 3, ..shape }));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn max_pooling_of_odd_shapes(
        (batch, height, width, channels) in (1usize..3, 1usize..12, 1usize..12, 1usize..40),
        (kernel, stride, padding) in (1usize..5, 1usize..5, 0usize..3),
    ) {
        let padding = padding.min(kernel / 2);
        prop_assume!(height + 2 * padding >= kernel && width + 2 * padding >= kernel);
        let shape = Window { batch, height, width, channels, kernel, stride, padding };
        all_formats!(max_pool_of(shape));
    }
}

#[test]
fn ties_choose_the_first_and_nan_is_the_maximum() {
    let shape = Window { batch: 1, height: 2, width: 2, channels: 2, kernel: 2, stride: 2, padding: 0 };
    for cpu in cpus() {
        let (mut y, mut places, mut dx) = ([0.0; 2], [9; 2], [9.0; 8]);
        let x = [1.0, -f32::INFINITY, 3.0, -f32::INFINITY, 3.0, -f32::INFINITY, 2.0, -f32::INFINITY];
        ops::max_pool(&cpu, &shape, &x, &mut y, &mut places);
        assert_eq!((y, places), ([3.0, -f32::INFINITY], [1, 0]));
        ops::max_pool_backward(&cpu, &shape, &[f32::NAN, 5.0], &places, &mut dx);
        assert!(dx[2].is_nan());
        assert_eq!((&dx[..2], &dx[3..]), (&[0.0, 5.0][..], &[0.0; 5][..]));
        let x = [1.0, 1.0, f32::NAN, 2.0, f32::INFINITY, 3.0, 2.0, f32::NAN];
        ops::max_pool(&cpu, &shape, &x, &mut y, &mut places);
        assert!(y[0].is_nan() && y[1].is_nan());
        assert_eq!(places, [1, 3]);
    }
}

fn average_of<E: Element>(batch: usize, pixels: usize, channels: usize) {
    let (x, dy) = (random::<E>(batch * pixels * channels, 1, 1.0), random::<E>(batch * channels, 2, 1.0));
    let got = same_bits(|cpu| {
        let (mut y, mut dx) = (vec![E::of(f32::NAN); dy.len()], vec![E::of(f32::NAN); x.len()]);
        ops::average_pool(cpu, &x, channels, &mut y);
        ops::average_pool_backward(cpu, &dy, channels, &mut dx);
        [floats(&y), floats(&dx)].concat()
    });
    let (x, dy) = (doubles(&x), doubles(&dy));
    let mean = |x: &[f64]| {
        let mut y = vec![0.0; dy.len()];
        for (i, x) in x.iter().enumerate() {
            y[i / (pixels * channels) * channels + i % channels] += x / pixels as f64;
        }
        y
    };
    close::<E>("y", &got[..dy.len()], &mean(&x), 1e-6);
    let loss = |x: &[f64]| mean(x).iter().zip(&dy).map(|(y, dy)| y * dy).sum::<f64>();
    check_gradient::<E>("dx", &loss, &x, &got[dy.len()..], 1e-6);
}

#[test]
fn average_pooling_and_its_gradient() {
    for (batch, pixels, channels) in [(1, 1, 1), (3, 49, 19), (5, 16, 64)] {
        all_formats!(average_of(batch, pixels, channels));
    }
}
