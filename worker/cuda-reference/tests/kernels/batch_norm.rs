use super::{
    Device, Module, Number, assert_close, assert_minimal_traffic, compile, line, matrix, number, numbers, rows, run,
    values,
};
use half::{bf16, f16};
use switchyard_cuda::kernels::batch_norm::{Backward, BatchNorm, Forward};
use switchyard_cuda::kernels::{Element, Rows};
use switchyard_cuda_reference::Counts;

const EPSILON: f64 = 1e-5;

/// Channels with a nonzero mean.
fn input(index: usize) -> f32 {
    number(1, index) * 2.0 + 0.5
}

/// Reference results.
#[derive(Default)]
struct Exact {
    y: Vec<f64>,
    dx: Vec<f64>,
    /// The gradient before ReLU.
    masked: Vec<f64>,
    d_gamma: Vec<f64>,
    d_beta: Vec<f64>,
    statistics: Vec<f64>,
}

/// The mean of `of` over each column.
fn means(rows: usize, columns: usize, of: impl Fn(usize, usize) -> f64) -> Vec<f64> {
    (0..columns).map(|column| (0..rows).map(|row| of(row, column)).sum::<f64>() / rows as f64).collect()
}

/// `residual` is empty if there is none. The rounded results `y` decide which gradients pass ReLU.
fn exact(x: &[Vec<f64>], residual: &[Vec<f64>], dy: &[Vec<f64>], y: &[Vec<f64>], parameters: &[Vec<f32>; 2]) -> Exact {
    let (count, columns) = (x.len(), x[0].len());
    let [gamma, beta] = parameters;
    let mean = means(count, columns, |row, column| x[row][column]);
    let variance = means(count, columns, |row, column| (x[row][column] - mean[column]).powi(2));
    let inverse: Vec<f64> = variance.iter().map(|variance| 1.0 / (variance + EPSILON).sqrt()).collect();
    let normal = |row: usize, column: usize| (x[row][column] - mean[column]) * inverse[column];
    let relu = !y.is_empty();
    let masked = |row: usize, column: usize| if relu && y[row][column] <= 0.0 { 0.0 } else { dy[row][column] };
    let plain = means(count, columns, masked);
    let weighted = means(count, columns, |row, column| masked(row, column) * normal(row, column));
    let mut exact = Exact::default();
    for row in 0..count {
        for column in 0..columns {
            let (gamma, beta) = (f64::from(gamma[column]), f64::from(beta[column]));
            let before = normal(row, column) * gamma + beta + residual.get(row).map_or(0.0, |row| row[column]);
            exact.y.push(if relu { before.max(0.0) } else { before });
            exact.masked.push(masked(row, column));
            let centred = masked(row, column) - plain[column] - normal(row, column) * weighted[column];
            exact.dx.push(gamma * inverse[column] * centred);
        }
    }
    exact.d_gamma = weighted.iter().map(|mean| mean * count as f64).collect();
    exact.d_beta = plain.iter().map(|mean| mean * count as f64).collect();
    let unbiased = variance.iter().map(|variance| variance * count as f64 / (count - 1) as f64);
    exact.statistics = mean.iter().copied().chain(unbiased).collect();
    exact
}

/// Whether there is a residual, whether ReLU follows, and whether gradients accumulate into ones.
#[derive(Debug, Clone, Copy)]
struct Options {
    residual: bool,
    relu: bool,
    adds: bool,
}

const FULL: Options = Options { residual: true, relu: true, adds: false };
const PLAIN: Options = Options { residual: false, relu: false, adds: false };

struct Output<T> {
    y: Vec<T>,
    /// With running statistics equal to the batch's, but with the biased variance.
    evaluated: Vec<T>,
    masked: Vec<T>,
    dx: Vec<T>,
    gradients: [Vec<f32>; 2],
    statistics: Vec<f32>,
    /// Moments, statistics, forward; backward, parameters, input.
    counts: Vec<Counts>,
}

fn parameters(width: usize) -> [Vec<f32>; 2] {
    [numbers(3, width, 0.5).into_iter().map(|value| value + 1.0).collect(), numbers(4, width, 0.4)]
}

fn run_case<T: Number>(
    module: &Module,
    norm: BatchNorm,
    rows: Rows,
    (count, most): (usize, u32),
    options: Options,
    value: fn(usize) -> f32,
    seed: u64,
) -> Output<T> {
    let width = rows.width as usize;
    let mut device = Device::default();
    let x = device.upload("x", &matrix::<T>(rows, count, value));
    let dy = device.upload("dy", &matrix::<T>(rows, count, |index| number(2, index)));
    let other = device.upload("residual", &matrix::<T>(rows, count, |index| number(5, index)));
    let [gamma, beta] = parameters(width);
    let (gamma, beta) = (device.upload("gamma", &gamma), device.upload("beta", &beta));
    let all = count * rows.pitch as usize * size_of::<T>();
    let [y, evaluated] = ["y", "evaluated"].map(|name| device.allocate(name, all));
    let saved = device.allocate("saved", norm.saved_bytes());
    let partial = device.allocate("partial", norm.partial_bytes(most));
    let factors = device.allocate("factors", norm.factors_bytes());
    let statistics = device.allocate("statistics", 8 * width);
    let (dx, [d_gamma, d_beta]) = match options.adds {
        true => {
            let ones = vec![1.0f32; width];
            let dx = device.upload("dx", &matrix::<T>(rows, count, |_| 1.0));
            (dx, ["d_gamma", "d_beta"].map(|name| device.upload(name, &ones)))
        }
        false => (device.allocate("dx", all), ["d_gamma", "d_beta"].map(|name| device.allocate(name, 4 * width))),
    };
    let residual = options.residual.then_some(other);
    let forward = Forward { x, residual, gamma, beta, saved, y };
    let y = options.relu.then_some(y);
    let backward = Backward { x, y, dy, gamma, saved, partial, factors, d_gamma, d_beta, dx };
    let mut calls = norm.statistics(most, x, partial, saved, statistics).unwrap().to_vec();
    calls.push(norm.forward(most, forward, options.relu).unwrap());
    calls.extend(norm.backward(most, backward, options.adds, options.adds).unwrap());
    let counts = calls.iter().map(|call| run(&mut device, module, call, seed)).collect();
    let given: Vec<f32> = device.download(statistics);
    let biased = |variance: &f32| variance * (count - 1) as f32 / count as f32;
    let running: Vec<f32> = given[..width].iter().copied().chain(given[width..].iter().map(biased)).collect();
    let running = device.upload("running", &running);
    run(&mut device, module, &norm.running(running, saved).unwrap(), seed);
    let forward = Forward { y: evaluated, ..forward };
    run(&mut device, module, &norm.forward(most, forward, options.relu).unwrap(), seed);
    Output {
        y: device.download(Forward { y: y.unwrap_or(evaluated), ..forward }.y),
        evaluated: device.download(evaluated),
        masked: device.download(dy),
        dx: device.download(dx),
        gradients: [device.download(d_gamma), device.download(d_beta)],
        statistics: given,
        counts,
    }
}

fn check<T: Number>(width: u32, count: usize, most: u32, options: Options) {
    let rows = rows::<T>(width);
    let norm = BatchNorm::new(rows, count as u32).unwrap();
    let module = compile(&norm.program());
    let all: Vec<Output<T>> =
        (0..super::SEEDS).map(|seed| run_case::<T>(&module, norm, rows, (count, most), options, input, seed)).collect();
    let of = |matrix: &[T]| values::<T>(rows, matrix);
    let given =
        |seed: u64| of(&matrix::<T>(rows, count, |index| if seed == 1 { input(index) } else { number(seed, index) }));
    let y = if options.relu { of(&all[0].y) } else { Vec::new() };
    let residual = if options.residual { given(5) } else { Vec::new() };
    let wanted = exact(&given(1), &residual, &given(2), &y, &parameters(width as usize));
    let what = format!("{} {count} x {width}, {options:?}", T::NAME);
    let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
    let sum = |values: &[f64]| values.iter().map(|value| value + f64::from(u8::from(options.adds))).collect::<Vec<_>>();
    for got in &all {
        assert_close(&format!("{what}: y"), &of(&got.y).concat(), &wanted.y, 1.01 * T::ROUNDING, 4e-6);
        assert_close(&format!("{what}: evaluated"), &of(&got.evaluated).concat(), &wanted.y, 1.01 * T::ROUNDING, 6e-6);
        assert_eq!(of(&got.masked).concat(), wanted.masked, "{what}");
        assert_close(&format!("{what}: statistics"), &wide(&got.statistics), &wanted.statistics, 1e-6, 2e-7);
        assert_close(&format!("{what}: dx"), &of(&got.dx).concat(), &sum(&wanted.dx), 1.01 * T::ROUNDING, 6e-6);
        let [d_gamma, d_beta] = [&got.gradients[0], &got.gradients[1]].map(|gradient| wide(gradient));
        assert_close(&format!("{what}: d_gamma"), &d_gamma, &sum(&wanted.d_gamma), 2e-6, 1e-6 * count as f64);
        assert_close(&format!("{what}: d_beta"), &d_beta, &sum(&wanted.d_beta), 2e-6, 1e-6 * count as f64);
        // The order of blocks and warps must not change any bit.
        let bits = |got: &Output<T>| (got.gradients.clone(), got.statistics.clone(), of(&got.dx));
        assert_eq!(bits(got), bits(&all[0]), "{what}");
    }
}

#[test]
fn few_channels_and_odd_remainders_are_exact() {
    for (width, count) in [(1, 300), (3, 2), (5, 1031), (33, 70), (300, 9)] {
        check::<f32>(width, count, 3, FULL);
        check::<bf16>(width, count, 3, FULL);
        check::<f16>(width, count, 3, PLAIN);
    }
    check::<f32>(5, 64, 2, Options { adds: true, ..FULL });
    check::<bf16>(16, 64, 2, Options { adds: true, ..PLAIN });
}

#[test]
fn real_channel_counts_are_exact() {
    check::<bf16>(64, 1500, 7, FULL);
    check::<f16>(64, 700, 40, FULL);
    check::<f32>(512, 98, 11, Options { residual: false, ..FULL });
    check::<bf16>(2048, 49, 20, PLAIN);
}

#[test]
fn a_small_variance_around_a_large_mean_is_accurate() {
    let rows = rows::<f32>(4);
    let norm = BatchNorm::new(rows, 3000).unwrap();
    let module = compile(&norm.program());
    // Channels far from zero, one with a single value among thousands of another, and a constant
    // one.
    fn value(index: usize) -> f32 {
        match index % 4 {
            0 => 4096.0 + number(1, index),
            1 => -1000.0 + 0.01 * number(1, index),
            2 => {
                if index == 2 {
                    1.0e4
                } else {
                    0.0
                }
            }
            _ => 0.1,
        }
    }
    let got = run_case::<f32>(&module, norm, rows, (3000, 5), PLAIN, value, 0);
    let x = values::<f32>(rows, &matrix::<f32>(rows, 3000, value));
    let wanted = exact(&x, &[], &x, &[], &parameters(4)).statistics;
    let statistics: Vec<f64> = got.statistics.iter().map(|value| f64::from(*value)).collect();
    assert_close("means", &statistics[..4], &wanted[..4], 1e-6, 0.0);
    assert_close("variances", &statistics[4..7], &wanted[4..7], 1e-3, 0.0);
    assert_eq!(statistics[7], 0.0);
}

#[test]
fn rows_are_moved_once_in_each_pass() {
    let mut table = String::new();
    for (width, count, most) in [(64, 2048, 4), (512, 128, 8)] {
        table += &costs::<f32>(width, count, most);
        table += &costs::<bf16>(width, count, most);
    }
    insta::assert_snapshot!("batch_norm", table);
}

fn costs<T: Number>(width: u32, count: usize, most: u32) -> String {
    let rows = rows::<T>(width);
    let norm = BatchNorm::new(rows, count as u32).unwrap();
    let module = compile(&norm.program());
    let got = run_case::<T>(&module, norm, rows, (count, most), FULL, input, 0);
    let all = count * width as usize * size_of::<T>();
    // Every block reads its channels' parameters once; the variance reads the partial sums of all
    // blocks twice.
    let (partial, channels) = (norm.partial_bytes(most), norm.partial_bytes(most) / 2);
    let floors: [&[(&str, [usize; 2])]; 6] = [
        &[("x", [all, 0]), ("partial", [0, partial])],
        &[("partial", [3 * partial / 2, 0])],
        &[("x", [all, 0]), ("residual", [all, 0]), ("y", [0, all]), ("saved", [2 * channels, 0])],
        &[("x", [all, 0]), ("y", [all, 0]), ("dy", [all, all]), ("partial", [0, partial])],
        &[("partial", [partial, 0])],
        &[("x", [all, 0]), ("dy", [all, 0]), ("dx", [0, all]), ("factors", [3 * channels, 0])],
    ];
    let names = ["moments", "statistics", "forward", "backward", "parameters", "input"];
    let lines = got.counts.iter().zip(floors).zip(names).map(|((counts, floors), name)| {
        let what = format!("batch norm {name}, {} {count} x {width}", T::NAME);
        assert_minimal_traffic(&what, counts, floors);
        line(&what, counts)
    });
    lines.collect()
}

#[test]
fn unsupported_rows_are_refused() {
    let narrow = Rows { element: Element::F32, width: 4, pitch: 4 };
    let text = BatchNorm::new(narrow, 1).unwrap_err().to_string();
    assert_eq!(text, "batch_norm: 1 rows, expected at least two and fewer than 2^31");
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 31), device.allocate("large", 64));
    let text = BatchNorm::new(narrow, 2).unwrap().running(small, large).unwrap_err().to_string();
    assert_eq!(text, "batch_norm_running: statistics of 31 bytes, expected at least 32");
}
