use super::{Device, Module, Number, assert_minimal_traffic, compile, line, number, run};
use half::{bf16, f16};
use switchyard_cuda::kernels::Element;
use switchyard_cuda::kernels::elementwise::Elementwise;
use switchyard_cuda_reference::Counts;

const COUNTS: [usize; 5] = [1, 7, 8, 1031, 4096];
const SCALE: f32 = 0.3;

fn module<A: Number, B: Number>() -> (Elementwise, Module) {
    let elementwise = Elementwise { from: A::ELEMENT, to: B::ELEMENT };
    (elementwise, compile(&elementwise.program()))
}

/// Values of all magnitudes, infinities and NaN; 65,519.99 is the last that f16 does not round to
/// infinity.
fn input<T: Number>(seed: u64, count: usize) -> Vec<T> {
    const SPECIAL: [f32; 6] = [f32::NAN, f32::INFINITY, -0.0, 1e-7, 65_519.99, 3.0e38];
    let value = |index: usize| match SPECIAL.get(index % 40) {
        Some(special) if index > 30 => *special,
        _ => number(seed, index) * 2f32.powi(index as i32 % 24 - 12),
    };
    (0..count).map(|index| T::of(value(index))).collect()
}

fn assert_same<T: Number>(what: &str, got: &[T], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let (got, wanted) = (got.get(), T::of(*wanted).get());
        let is_same = got.to_bits() == wanted.to_bits() || (got.is_nan() && wanted.is_nan());
        assert!(is_same, "{what}, number {index}: {got} instead of {wanted}");
    }
}

fn wide<T: Number>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.get() as f32).collect()
}

/// Compares with the CPU bit for bit, for all counts and orders. Returns the costs of the last
/// count: conversion, accumulating conversion, sum, fill.
fn check<A: Number, B: Number>() -> [Counts; 4] {
    let (elementwise, module) = module::<A, B>();
    let mut counts = None;
    for (count, seed) in COUNTS.into_iter().flat_map(|count| (0..super::SEEDS).map(move |seed| (count, seed))) {
        let what = format!("{} to {}, {count}", A::NAME, B::NAME);
        let (a, b, old) = (input::<A>(1, count), input::<A>(2, count), input::<B>(3, count));
        let mut device = Device::default();
        let (on_a, on_b) = (device.upload("a", &a), device.upload("b", &b));
        let y = device.allocate("y", count * size_of::<B>());
        let sums = device.upload("sums", &old);
        let size = count as u32;
        let mut play = |call| run(&mut device, &module, &call, seed);
        let converted = play(elementwise.convert(3, size, on_a, SCALE, y, false).unwrap());
        let added = play(elementwise.convert(3, size, on_a, SCALE, sums, true).unwrap());
        let scaled: Vec<f32> = wide(&a).iter().map(|a| a * SCALE).collect();
        assert_same(&what, &device.download::<B>(y), &scaled);
        let wanted: Vec<f32> = wide(&old).iter().zip(&scaled).map(|(old, scaled)| old + scaled).collect();
        assert_same(&format!("{what}, added"), &device.download::<B>(sums), &wanted);
        let sum = run(&mut device, &module, &elementwise.sum(3, size, [on_a, on_b], y).unwrap(), seed);
        let wanted: Vec<f32> = wide(&a).iter().zip(wide(&b)).map(|(a, b)| a + b).collect();
        assert_same(&format!("{what}, sum"), &device.download::<B>(y), &wanted);
        let filled = run(&mut device, &module, &elementwise.fill(3, size, SCALE, y).unwrap(), seed);
        assert_same(&format!("{what}, filled"), &device.download::<B>(y), &vec![SCALE; count]);
        counts = Some([converted, added, sum, filled]);
    }
    counts.unwrap()
}

/// Like [`check`], and checks that every element is moved once.
fn costs<A: Number, B: Number>() -> String {
    let counts = check::<A, B>();
    let [from, to] = [size_of::<A>(), size_of::<B>()].map(|size| COUNTS[4] * size);
    let floors: [&[(&str, [usize; 2])]; 4] = [
        &[("a", [from, 0]), ("y", [0, to])],
        &[("a", [from, 0]), ("sums", [to, to])],
        &[("a", [from, 0]), ("b", [from, 0]), ("y", [0, to])],
        &[("y", [0, to])],
    ];
    let names = ["convert", "convert and add", "sum", "fill"];
    let lines = counts.iter().zip(floors).zip(names).map(|((counts, floors), name)| {
        let what = format!("{name}, {} to {} {}", A::NAME, B::NAME, COUNTS[4]);
        assert_minimal_traffic(&what, counts, floors);
        line(&what, counts)
    });
    lines.collect()
}

#[test]
fn results_match_the_cpu_bit_for_bit_and_are_moved_once() {
    let table = [
        costs::<f32, f32>(),
        costs::<f32, bf16>(),
        costs::<f32, f16>(),
        costs::<bf16, f32>(),
        costs::<bf16, bf16>(),
        costs::<f16, f32>(),
        costs::<f16, f16>(),
    ]
    .concat();
    insta::assert_snapshot!("elementwise", table);
}

#[test]
fn a_sum_can_be_in_place() {
    let (elementwise, module) = module::<bf16, bf16>();
    let (a, b) = (input::<bf16>(1, 77), input::<bf16>(2, 77));
    let mut device = Device::default();
    let (on_a, on_b) = (device.upload("a", &a), device.upload("b", &b));
    run(&mut device, &module, &elementwise.sum(2, 77, [on_a, on_b], on_b).unwrap(), 0);
    let wanted: Vec<f32> = wide(&a).iter().zip(wide(&b)).map(|(a, b)| a + b).collect();
    assert_same("in place", &device.download::<bf16>(on_b), &wanted);
}

#[test]
fn calls_with_too_little_memory_are_refused() {
    let mut device = Device::default();
    let small = device.allocate("small", 31);
    let elementwise = Elementwise { from: Element::Bf16, to: Element::F32 };
    let refused = elementwise.convert(1, 8, small, 1.0, small, false).unwrap_err().to_string();
    assert_eq!(refused, "convert: y of 31 bytes, expected at least 32");
    let refused = elementwise.sum(1, 16, [small, small], small).unwrap_err().to_string();
    assert_eq!(refused, "sum: a of 31 bytes, expected at least 32");
    let refused = elementwise.fill(1, 8, 0.0, small).unwrap_err().to_string();
    assert_eq!(refused, "fill: y of 31 bytes, expected at least 32");
}
