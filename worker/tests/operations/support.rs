//! Helpers shared by the tests of `cpu::ops`.

pub use crate::numbers::{cpus, noise};

use crate::numbers::bits;
use switchyard_worker::cpu::{Cpu, Element, Format};

/// Noise times `size` in a format.
pub fn random<E: Element>(len: usize, salt: usize, size: f32) -> Vec<E> {
    noise(len, salt).iter().map(|x| E::of(x * size)).collect()
}

pub fn floats<E: Element>(x: &[E]) -> Vec<f32> {
    x.iter().map(|x| x.get()).collect()
}

pub fn doubles<E: Element>(x: &[E]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.get())).collect()
}

/// Runs `f` on every CPU variant and checks that all results are bit-identical.
pub fn same_bits(f: impl Fn(&Cpu) -> Vec<f32>) -> Vec<f32> {
    let cpus = cpus();
    let results: Vec<Vec<f32>> = cpus.iter().map(&f).collect();
    for (result, cpu) in results.iter().zip(&cpus) {
        assert_eq!(bits(result), bits(&results[0]), "{:?} with {} threads", cpu.isa, cpu.pool.threads());
    }
    results.into_iter().next().unwrap()
}

/// Largest relative rounding error of the format.
pub fn rounding<E: Element>() -> f64 {
    match E::FORMAT {
        Format::F32 => 2f64.powi(-24),
        Format::Bf16 => 2f64.powi(-8),
        Format::F16 => 2f64.powi(-11),
    }
}

/// Asserts agreement within one rounding to the format of `E`, plus `tolerance`.
pub fn close<E: Element>(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let allowed = rounding::<E>() * want.abs() + tolerance * (1.0 + want.abs());
        assert!((f64::from(got) - want).abs() <= allowed, "{what} at {i} ({:?}): {got}, expected {want}", E::FORMAT);
    }
}

/// Compares a gradient of `f` at `x` with finite differences: for single elements, and in
/// directions through all of them.
pub fn check_gradient<E: Element>(what: &str, f: &dyn Fn(&[f64]) -> f64, x: &[f64], got: &[f32], tolerance: f64) {
    const STEP: f64 = 1e-6;
    assert_eq!(got.len(), x.len(), "{what}");
    let moved =
        |direction: &[f64], step: f64| f(&x.iter().zip(direction).map(|(x, d)| x + step * d).collect::<Vec<_>>());
    let slope = |direction: &[f64]| (moved(direction, STEP) - moved(direction, -STEP)) / (2.0 * STEP);
    let mut direction = vec![0.0; x.len()];
    for i in (0..x.len()).step_by(x.len().div_ceil(60)) {
        direction[i] = 1.0;
        close::<E>(&format!("{what} ({i})"), &got[i..=i], &[slope(&direction)], tolerance);
        direction[i] = 0.0;
    }
    for salt in [91, 92] {
        let direction = doubles(&noise(x.len(), salt));
        let (want, terms): (f64, Vec<f64>) =
            (slope(&direction), got.iter().zip(&direction).map(|(&g, d)| f64::from(g) * d).collect());
        let size = terms.iter().map(|term| term * term).sum::<f64>().sqrt();
        let allowed = 4.0 * rounding::<E>() * size + tolerance * (1.0 + size + want.abs());
        let sum: f64 = terms.iter().sum();
        assert!((sum - want).abs() <= allowed, "{what} in a direction ({:?}): {sum}, expected {want}", E::FORMAT);
    }
}

/// Calls a format-generic function for all formats.
macro_rules! all_formats {
    ($function:ident($($argument:expr),*)) => {
        $function::<f32>($($argument),*);
        $function::<switchyard_worker::cpu::bf16>($($argument),*);
        $function::<switchyard_worker::cpu::f16>($($argument),*);
    };
}
