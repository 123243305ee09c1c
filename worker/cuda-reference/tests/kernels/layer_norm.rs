use super::{
    Device, Module, Number, assert_close, assert_minimal_traffic, compile, line, matrix, number, numbers, rows, run,
    values,
};
use half::{bf16, f16};
use switchyard_cuda::kernels::layer_norm::{Backward, LayerNorm};
use switchyard_cuda::kernels::{Element, Rows};
use switchyard_cuda_reference::Counts;

const EPSILON: f64 = 1e-5;

/// Rows with a nonzero mean.
fn input(index: usize) -> f32 {
    number(1, index) * 2.0 + 0.5
}

/// Reference results.
struct Exact {
    y: Vec<f64>,
    dx: Vec<f64>,
    d_gamma: Vec<f64>,
    d_beta: Vec<f64>,
    saved: Vec<f64>,
}

fn exact(x: &[Vec<f64>], dy: &[Vec<f64>], gamma: &[f32], beta: &[f32]) -> Exact {
    let width = gamma.len() as f64;
    let mut exact = Exact {
        y: Vec::new(),
        dx: Vec::new(),
        d_gamma: vec![0.0; gamma.len()],
        d_beta: vec![0.0; gamma.len()],
        saved: Vec::new(),
    };
    for (x, dy) in x.iter().zip(dy) {
        let mean = x.iter().sum::<f64>() / width;
        let inverse = 1.0 / (x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / width + EPSILON).sqrt();
        let normal: Vec<f64> = x.iter().map(|x| (x - mean) * inverse).collect();
        let scaled: Vec<f64> = dy.iter().zip(gamma).map(|(dy, gamma)| dy * f64::from(*gamma)).collect();
        let plain = scaled.iter().sum::<f64>() / width;
        let weighted = scaled.iter().zip(&normal).map(|(dy, normal)| dy * normal).sum::<f64>() / width;
        for column in 0..gamma.len() {
            exact.y.push(normal[column] * f64::from(gamma[column]) + f64::from(beta[column]));
            exact.dx.push(inverse * (scaled[column] - plain - normal[column] * weighted));
            exact.d_gamma[column] += dy[column] * normal[column];
            exact.d_beta[column] += dy[column];
        }
        exact.saved.extend([mean, inverse]);
    }
    exact
}

/// Results and costs of a run: forward, backward, parameters.
struct Output {
    y: Vec<f64>,
    dx: Vec<f64>,
    gradients: [Vec<f32>; 2],
    saved: Vec<f32>,
    counts: [Counts; 3],
}

/// Forward and backward on at most `most` blocks. `add` accumulates into gradients of ones.
fn run_case<T: Number>(
    module: &Module,
    norm: LayerNorm,
    rows: Rows,
    count: usize,
    most: u32,
    add: bool,
    seed: u64,
) -> Output {
    let width = rows.width as usize;
    let all = count * rows.pitch as usize * size_of::<T>();
    let mut device = Device::default();
    let x = device.upload("x", &matrix::<T>(rows, count, input));
    let dy = device.upload("dy", &matrix::<T>(rows, count, |index| number(2, index)));
    let (gamma, beta) = parameters(width);
    let gamma = device.upload("gamma", &gamma);
    let beta = device.upload("beta", &beta);
    let (y, saved) = (device.allocate("y", all), device.allocate("saved", 8 * count));
    let partial = device.allocate("partial", norm.partial_bytes(most));
    let (dx, d_gamma, d_beta) = if add {
        let ones = vec![1.0f32; width];
        (
            device.upload("dx", &matrix::<T>(rows, count, |_| 1.0)),
            device.upload("d_gamma", &ones),
            device.upload("d_beta", &ones),
        )
    } else {
        (device.allocate("dx", all), device.allocate("d_gamma", 4 * width), device.allocate("d_beta", 4 * width))
    };
    let forward = norm.forward(most, x, [gamma, beta], y, saved).unwrap();
    let backward = norm.backward(most, Backward { dy, x, gamma, saved, dx, partial }, add).unwrap();
    let sums = norm.parameters(most, partial, [d_gamma, d_beta], add).unwrap();
    let counts = [&forward, &backward, &sums].map(|call| run(&mut device, module, call, seed));
    let flat = |span| values::<T>(rows, &device.download(span)).concat();
    Output {
        y: flat(y),
        dx: flat(dx),
        gradients: [device.download(d_gamma), device.download(d_beta)],
        saved: device.download(saved),
        counts,
    }
}

fn parameters(width: usize) -> (Vec<f32>, Vec<f32>) {
    (numbers(3, width, 0.5).into_iter().map(|value| value + 1.0).collect(), numbers(4, width, 0.1))
}

fn check<T: Number>(width: u32, count: usize, most: u32) {
    let rows = rows::<T>(width);
    let norm = LayerNorm::new(rows, count as u32).unwrap();
    let module = compile(&norm.program());
    let (gamma, beta) = parameters(width as usize);
    let x = values::<T>(rows, &matrix::<T>(rows, count, input));
    let dy = values::<T>(rows, &matrix::<T>(rows, count, |index| number(2, index)));
    let wanted = exact(&x, &dy, &gamma, &beta);
    let what = format!("{} {count} x {width}", T::NAME);
    let plain: Vec<Output> =
        (0..super::SEEDS).map(|seed| run_case::<T>(&module, norm, rows, count, most, false, seed)).collect();
    let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
    for got in &plain {
        assert_close(&format!("{what}: y"), &got.y, &wanted.y, 1.01 * T::ROUNDING, 4e-6);
        assert_close(&format!("{what}: saved"), &wide(&got.saved), &wanted.saved, 2e-6, 1e-6);
        assert_close(&format!("{what}: dx"), &got.dx, &wanted.dx, 1.01 * T::ROUNDING, 4e-6);
        assert_close(&format!("{what}: d_gamma"), &wide(&got.gradients[0]), &wanted.d_gamma, 1e-5, 1e-5 * count as f64);
        assert_close(&format!("{what}: d_beta"), &wide(&got.gradients[1]), &wanted.d_beta, 1e-5, 1e-6 * count as f64);
        // The order of blocks and warps must not change any bit.
        assert_eq!((&got.gradients, &got.dx), (&plain[0].gradients, &plain[0].dx), "{what}");
    }
    let added = run_case::<T>(&module, norm, rows, count, most, true, 0);
    let plus_one = |values: &[f64]| values.iter().map(|value| value + 1.0).collect::<Vec<_>>();
    assert_close(&format!("{what}: added dx"), &added.dx, &plus_one(&wanted.dx), 1.01 * T::ROUNDING, 4e-6);
    assert_close(
        &format!("{what}: added d_beta"),
        &wide(&added.gradients[1]),
        &plus_one(&wanted.d_beta),
        1e-5,
        1e-6 * count as f64,
    );
}

#[test]
fn narrow_rows_and_odd_remainders_are_exact() {
    for (width, count) in [(1, 3), (33, 5), (100, 17), (257, 9)] {
        check::<f32>(width, count, 2);
        check::<bf16>(width, count, 2);
        check::<f16>(width, count, 2);
    }
}

#[test]
fn sums_over_more_blocks_than_threads_per_column_are_exact() {
    check::<f32>(40, 360, 45);
    check::<bf16>(40, 360, 33);
}

#[test]
fn real_model_widths_are_exact() {
    check::<f32>(768, 35, 3);
    check::<bf16>(768, 35, 3);
    check::<f16>(768, 35, 3);
    check::<f32>(1600, 19, 2);
    check::<bf16>(1600, 19, 2);
    check::<bf16>(4090, 5, 2);
}

#[test]
fn rows_are_moved_once() {
    let mut table = String::new();
    for (width, count, most) in [(768, 64, 4), (1000, 16, 2), (1600, 8, 2)] {
        table += &costs::<f32>(width, count, most);
        table += &costs::<bf16>(width, count, most);
    }
    insta::assert_snapshot!("layer_norm", table);
}

fn costs<T: Number>(width: u32, count: usize, most: u32) -> String {
    let rows = rows::<T>(width);
    let norm = LayerNorm::new(rows, count as u32).unwrap();
    let module = compile(&norm.program());
    let got = run_case::<T>(&module, norm, rows, count, most, false, 0);
    let all = count * width as usize * size_of::<T>();
    // Every block reads the parameters once.
    let partial = norm.partial_bytes(most);
    let parameter = [partial / 2, 0];
    let floors: [&[(&str, [usize; 2])]; 3] = [
        &[("x", [all, 0]), ("y", [0, all]), ("gamma", parameter), ("beta", parameter)],
        &[("x", [all, 0]), ("dy", [all, 0]), ("dx", [0, all]), ("gamma", parameter), ("partial", [0, partial])],
        &[("partial", [partial, 0]), ("d_gamma", [0, 4 * width as usize]), ("d_beta", [0, 4 * width as usize])],
    ];
    let names = ["forward", "backward", "parameters"];
    let lines = got.counts.iter().zip(floors).zip(names).map(|((counts, floors), name)| {
        let what = format!("layer norm {name}, {} {count} x {width}", T::NAME);
        assert_minimal_traffic(&what, counts, floors);
        line(&what, counts)
    });
    lines.collect()
}

#[test]
fn unsupported_rows_are_refused() {
    let refused = |width, pitch, count| {
        LayerNorm::new(Rows { element: Element::Bf16, width, pitch }, count).unwrap_err().to_string()
    };
    let pitch = "layer_norm: width 100 and pitch 100, expected a pitch that is a multiple of 8, not below the width";
    assert_eq!(refused(100, 100, 1), pitch);
    assert_eq!(refused(4104, 4104, 1), "layer_norm: 1 rows of width 4104, expected at least one of at most 4096");
}
