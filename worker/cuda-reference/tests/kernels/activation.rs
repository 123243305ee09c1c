use super::{
    Device, Module, Number, assert_close, assert_minimal_traffic, compile, line, matrix, number, numbers, rows, run,
    values,
};
use half::{bf16, f16};
use switchyard_cuda::kernels::activation::{Activation, Backward, Forward, Function};
use switchyard_cuda::kernels::{Element, Rows};
use switchyard_cuda_reference::Counts;

const FUNCTIONS: [Function; 4] = [Function::Identity, Function::Relu, Function::Gelu, Function::Tanh];

fn exact(function: Function, x: f64) -> f64 {
    match function {
        Function::Identity => x,
        Function::Relu => x.max(0.0),
        Function::Gelu => 0.5 * x * (1.0 + inner(x).tanh()),
        Function::Tanh => x.tanh(),
    }
}

/// The argument of tanh in GELU.
fn inner(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)
}

/// The derivative, from the values that forward saved.
fn slope(function: Function, kept: f64) -> f64 {
    match function {
        Function::Identity => 1.0,
        Function::Relu => f64::from(kept > 0.0),
        Function::Gelu => {
            let (tanh, root) = (inner(kept).tanh(), (2.0 / std::f64::consts::PI).sqrt());
            0.5 * (1.0 + tanh) + 0.5 * kept * (1.0 - tanh * tanh) * root * (1.0 + 3.0 * 0.044_715 * kept * kept)
        }
        Function::Tanh => 1.0 - kept * kept,
    }
}

/// Values around which all functions bend.
fn input(index: usize) -> f32 {
    number(1, index) * 5.0
}

/// Results and costs of a run: forward, backward, bias.
struct Output {
    kept: Vec<f64>,
    y: Vec<f64>,
    dx: Vec<f64>,
    d_bias: Vec<f32>,
    counts: [Counts; 3],
}

/// Forward, which saves the argument in place of `x`, and backward. `add` accumulates into a bias
/// gradient of ones.
fn run_case<T: Number>(
    module: &Module,
    activation: Activation,
    rows: Rows,
    count: usize,
    most: u32,
    add: bool,
    seed: u64,
) -> Output {
    let width = rows.width as usize;
    let mut device = Device::default();
    let x = device.upload("x", &matrix::<T>(rows, count, input));
    let dy = device.upload("dy", &matrix::<T>(rows, count, |index| number(2, index)));
    let bias = device.upload("bias", &numbers(3, width, 0.5));
    let y = device.allocate("y", count * rows.pitch as usize * size_of::<T>());
    let partial = device.allocate("partial", activation.partial_bytes(most));
    let d_bias = if add { device.upload("d_bias", &vec![1.0f32; width]) } else { device.allocate("d_bias", 4 * width) };
    let flat = |device: &Device, span| values::<T>(rows, &device.download(span)).concat();
    let forward = activation.forward(most, Forward { x, bias: Some(bias), kept: Some(x), y }).unwrap();
    let forward = run(&mut device, module, &forward, seed);
    let kept = if activation.program() == program::<T>(Function::Gelu, rows) { x } else { y };
    let backward = activation.backward(most, Backward { kept, dy, partial: Some(partial) }).unwrap();
    let backward = run(&mut device, module, &backward, seed);
    let sums = run(&mut device, module, &activation.bias(most, partial, d_bias, add).unwrap(), seed);
    Output {
        kept: flat(&device, x),
        y: flat(&device, y),
        dx: flat(&device, dy),
        d_bias: device.download(d_bias),
        counts: [forward, backward, sums],
    }
}

fn program<T: Number>(function: Function, rows: Rows) -> switchyard_cuda::kernels::Program {
    Activation::new(function, rows, 1).unwrap().program()
}

fn check<T: Number>(width: u32, count: usize) {
    for function in FUNCTIONS {
        let rows = rows::<T>(width);
        let activation = Activation::new(function, rows, count as u32).unwrap();
        let module = compile(&activation.program());
        let what = format!("{function:?}, {} {count} x {width}", T::NAME);
        let bias = numbers(3, width as usize, 0.5);
        let x = values::<T>(rows, &matrix::<T>(rows, count, input)).concat();
        let dy = values::<T>(rows, &matrix::<T>(rows, count, |index| number(2, index))).concat();
        let shifted: Vec<f64> = x.iter().enumerate().map(|(at, x)| x + f64::from(bias[at % width as usize])).collect();
        let y: Vec<f64> = shifted.iter().map(|x| exact(function, *x)).collect();
        let played = |add, seed| run_case::<T>(&module, activation, rows, count, 45, add, seed);
        let first = played(false, 0);
        for seed in 0..super::SEEDS {
            let got = played(false, seed);
            assert_close(&format!("{what}: kept"), &got.kept, &shifted, 1.01 * T::ROUNDING, 1e-6);
            assert_close(&format!("{what}: y"), &got.y, &y, 1.01 * T::ROUNDING, 2e-6);
            let kept = if function == Function::Gelu { &got.kept } else { &got.y };
            let dx: Vec<f64> = dy.iter().zip(kept).map(|(dy, kept)| dy * slope(function, *kept)).collect();
            assert_close(&format!("{what}: dx"), &got.dx, &dx, 1.01 * T::ROUNDING, 2e-6);
            assert_close(
                &format!("{what}: d_bias"),
                &wide(&got.d_bias),
                &sums(&dx, width, 0.0),
                1e-5,
                1e-6 * count as f64,
            );
            // The order of blocks and warps must not change any bit.
            assert_eq!((&got.d_bias, &got.dx), (&first.d_bias, &first.dx), "{what}");
        }
        let added = played(true, 0);
        let kept = if function == Function::Gelu { &added.kept } else { &added.y };
        let dx: Vec<f64> = dy.iter().zip(kept).map(|(dy, kept)| dy * slope(function, *kept)).collect();
        assert_close(
            &format!("{what}: added"),
            &wide(&added.d_bias),
            &sums(&dx, width, 1.0),
            1e-5,
            1e-6 * count as f64,
        );
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|value| f64::from(*value)).collect()
}

/// Column sums, starting from `start`.
fn sums(values: &[f64], width: u32, start: f64) -> Vec<f64> {
    let mut sums = vec![start; width as usize];
    for (at, value) in values.iter().enumerate() {
        sums[at % width as usize] += value;
    }
    sums
}

#[test]
fn narrow_rows_and_odd_remainders_are_exact() {
    for (width, count) in [(1, 3), (33, 5), (257, 19)] {
        check::<f32>(width, count);
        check::<bf16>(width, count);
        check::<f16>(width, count);
    }
}

#[test]
fn sums_over_more_blocks_than_threads_per_column_are_exact() {
    check::<f32>(128, 330);
    check::<bf16>(250, 280);
}

#[test]
fn real_model_widths_are_exact() {
    check::<f32>(768, 35);
    check::<bf16>(768, 35);
    check::<f16>(3072, 10);
}

#[test]
fn omitted_arguments_are_not_touched() {
    let rows = rows::<f32>(40);
    let activation = Activation::new(Function::Tanh, rows, 3).unwrap();
    let module = compile(&activation.program());
    let mut device = Device::default();
    let x = device.upload("x", &matrix::<f32>(rows, 3, input));
    let dy = device.upload("dy", &[1.0f32; 120]);
    // In place.
    let call = activation.forward(1, Forward { x, bias: None, kept: None, y: x }).unwrap();
    run(&mut device, &module, &call, 0);
    let y: Vec<f32> = device.download(x);
    let wanted: Vec<f64> = (0..120).map(|index| f64::from(input(index)).tanh()).collect();
    assert_close("y", &wide(&y), &wanted, 1e-7, 2e-6);
    run(&mut device, &module, &activation.backward(1, Backward { kept: x, dy, partial: None }).unwrap(), 0);
    let wanted: Vec<f64> = y.iter().map(|y| slope(Function::Tanh, f64::from(*y))).collect();
    assert_close("dx", &wide(&device.download(dy)), &wanted, 1e-6, 1e-6);
}

#[test]
fn relu_keeps_nan_and_blocks_infinity() {
    let rows = rows::<f32>(4);
    let activation = Activation::new(Function::Relu, rows, 1).unwrap();
    let module = compile(&activation.program());
    let mut device = Device::default();
    let x = device.upload("x", &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0]);
    let dy = device.upload("dy", &[f32::INFINITY; 4]);
    run(&mut device, &module, &activation.forward(1, Forward { x, bias: None, kept: None, y: x }).unwrap(), 0);
    run(&mut device, &module, &activation.backward(1, Backward { kept: x, dy, partial: None }).unwrap(), 0);
    let y: Vec<f32> = device.download(x);
    assert!(y[0].is_nan() && y[1..] == [f32::INFINITY, 0.0, 0.0], "{y:?}");
    assert_eq!(device.download::<f32>(dy), [f32::INFINITY, f32::INFINITY, 0.0, 0.0]);
}

#[test]
fn rows_are_moved_once() {
    let mut table = String::new();
    for (width, count) in [(768, 64), (1000, 16), (16, 256)] {
        for function in [Function::Identity, Function::Gelu] {
            table += &costs::<f32>(function, width, count);
            table += &costs::<bf16>(function, width, count);
        }
    }
    insta::assert_snapshot!("activation", table);
}

fn costs<T: Number>(function: Function, width: u32, count: usize) -> String {
    let rows = rows::<T>(width);
    let activation = Activation::new(function, rows, count as u32).unwrap();
    let module = compile(&activation.program());
    let got = run_case::<T>(&module, activation, rows, count, 9, false, 0);
    let all = count * width as usize * size_of::<T>();
    let (moved, partial) = (if function == Function::Identity { 0 } else { all }, activation.partial_bytes(9));
    let kept = if function == Function::Gelu { "x" } else { "y" };
    let floors: [&[(&str, [usize; 2])]; 3] = [
        &[("x", [all, all]), ("y", [0, all]), ("bias", [partial.next_multiple_of(32), 0])],
        &[(kept, [moved, 0]), ("dy", [all, moved]), ("partial", [0, partial.next_multiple_of(32)])],
        &[("partial", [partial.next_multiple_of(32), 0])],
    ];
    let names = ["forward", "backward", "bias"];
    let lines = got.counts.iter().zip(floors).zip(names).map(|((counts, floors), name)| {
        let what = format!("activation {name}, {function:?}, {} {count} x {width}", T::NAME);
        assert_minimal_traffic(&what, counts, floors);
        line(&what, counts)
    });
    lines.collect()
}

#[test]
fn calls_with_too_little_memory_are_refused() {
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 31), device.allocate("large", 4096));
    let rows = Rows { element: Element::Bf16, width: 16, pitch: 16 };
    let activation = Activation::new(Function::Gelu, rows, 1).unwrap();
    let on = Forward { x: large, bias: Some(small), kept: Some(large), y: large };
    let refused = activation.forward(1, on).unwrap_err().to_string();
    assert_eq!(refused, "activation: bias of 31 bytes, expected at least 64");
    let refused = activation.backward(1, Backward { kept: small, dy: large, partial: None }).unwrap_err().to_string();
    assert_eq!(refused, "activation_backward: kept of 31 bytes, expected at least 32");
    let refused = Activation::new(Function::Gelu, rows, 0).unwrap_err().to_string();
    assert_eq!(refused, "activation: 0 rows, expected at least one");
}
