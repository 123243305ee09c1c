use super::{
    Device, Module, Number, assert_close, assert_minimal_traffic, compile, line, matrix, number, rows, run, values,
};
use half::{bf16, f16};
use switchyard_cuda::kernels::Rows;
use switchyard_cuda::kernels::cross_entropy::{CrossEntropy, IGNORE, On};
use switchyard_cuda_reference::Counts;

/// Shared memory per block on an H200; an A100 has 163 KiB, consumer devices 99 KiB.
const SHARED: u32 = 227 << 10;
const SCALE: f32 = 0.125;

struct Exact {
    losses: Vec<f64>,
    correct: Vec<f32>,
    gradients: Vec<f64>,
}

fn exact(logits: &[Vec<f64>], targets: &[u32], smoothing: f64) -> Exact {
    let mut exact = Exact { losses: Vec::new(), correct: Vec::new(), gradients: Vec::new() };
    for (row, target) in logits.iter().zip(targets) {
        if *target == IGNORE {
            exact.losses.push(0.0);
            exact.correct.push(0.0);
            exact.gradients.extend(row.iter().map(|_| 0.0));
            continue;
        }
        let (target, width) = (*target as usize, row.len() as f64);
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
        let away = largest - row.iter().sum::<f64>() / width;
        exact.losses.push((1.0 - smoothing) * (largest - row[target]) + smoothing * away + sum.ln());
        let first = row.iter().position(|x| *x == largest);
        exact.correct.push(if first == Some(target) { 1.0 } else { 0.0 });
        let wanted = |(column, x): (usize, &f64)| {
            let at_target = if column == target { 1.0 - smoothing } else { 0.0 };
            ((x - largest).exp() / sum - smoothing / width - at_target) * f64::from(SCALE)
        };
        exact.gradients.extend(row.iter().enumerate().map(wanted));
    }
    exact
}

struct Output<T> {
    losses: Vec<f32>,
    correct: Vec<f32>,
    logits: Vec<T>,
    counts: Counts,
}

fn run_case<T: Number>(
    module: &Module,
    rows: Rows,
    logits: &[T],
    targets: &[u32],
    (most, shared, smoothing): (u32, u32, f32),
    seed: u64,
    has_gradient: bool,
) -> Output<T> {
    let mut device = Device::default();
    let on = On {
        logits: device.upload("logits", logits),
        targets: device.upload("targets", targets),
        losses: device.allocate("losses", 4 * targets.len()),
        correct: device.allocate("correct", 4 * targets.len()),
        scale: has_gradient.then(|| device.upload("scale", &[SCALE])),
    };
    let call = CrossEntropy::new(rows, targets.len() as u32).unwrap().call(most, shared, on, smoothing).unwrap();
    let counts = run(&mut device, module, &call, seed);
    Output {
        losses: device.download(on.losses),
        correct: device.download(on.correct),
        logits: device.download(on.logits),
        counts,
    }
}

/// Logits whose maximum occurs twice per row; targets that are right, wrong, the second maximum, or
/// ignored.
fn problem<T: Number>(rows: Rows, count: usize) -> (Vec<T>, Vec<u32>) {
    let width = rows.width as usize;
    let places = |row: usize| ((row * 7 + 3) % width, (row * 7 + 3 + width / 2) % width);
    let value = |index: usize| {
        let (first, second) = places(index / width);
        if [first, second].contains(&(index % width)) { 4.0 } else { number(5, index) * 3.0 }
    };
    let target = |row: usize| {
        let (first, second) = places(row);
        match row % 4 {
            0 => first.min(second) as u32,
            1 => first.max(second) as u32,
            2 => (row * 31 % width) as u32,
            _ => IGNORE,
        }
    };
    (matrix(rows, count, value), (0..count).map(target).collect())
}

fn check<T: Number>(rows: Rows, count: usize, most: u32, shared: u32, smoothing: f32) {
    let module = compile(&CrossEntropy::new(rows, 1).unwrap().program());
    let (logits, targets) = problem::<T>(rows, count);
    let wanted = exact(&values(rows, &logits), &targets, smoothing.into());
    let what = format!("{} {count} x {}, smoothing {smoothing}", T::NAME, rows.width);
    for seed in 0..super::SEEDS {
        let got = run_case(&module, rows, &logits, &targets, (most, shared, smoothing), seed, true);
        let losses: Vec<f64> = got.losses.iter().map(|loss| f64::from(*loss)).collect();
        assert_close(&format!("{what}: loss"), &losses, &wanted.losses, 2e-6, 2e-6);
        assert_eq!(got.correct, wanted.correct, "{what}");
        let gradients = values(rows, &got.logits).concat();
        assert_close(
            &format!("{what}: gradient"),
            &gradients,
            &wanted.gradients,
            T::ROUNDING + 4e-6,
            1e-8 + T::NEAR_ZERO,
        );
        let padding = |row: &[T]| row[rows.width as usize..].iter().all(|x| x.get() == 0.0);
        assert!(got.logits.chunks(rows.pitch as usize).all(padding), "{what}: padding");
        let evaluated = run_case(&module, rows, &logits, &targets, (most, shared, smoothing), seed, false);
        assert_eq!((&evaluated.losses, &evaluated.correct), (&got.losses, &got.correct), "{what}: without a gradient");
        let bytes = |logits: &[T]| bytemuck::cast_slice::<T, u8>(logits).to_vec();
        assert_eq!(bytes(&evaluated.logits), bytes(&logits), "{what}: logits without a gradient");
    }
}

#[test]
fn few_classes_and_odd_remainders_are_exact() {
    for width in [2u32, 10, 257] {
        let pitched = |rows: Rows| Rows { pitch: width.next_multiple_of(64), ..rows };
        check::<f32>(rows::<f32>(width), 9, 2, SHARED, 0.1);
        check::<bf16>(pitched(rows::<bf16>(width)), 9, 2, SHARED, 0.0);
        check::<f16>(rows::<f16>(width), 9, 2, SHARED, 0.1);
        // No part of the row is held in shared memory.
        check::<f32>(pitched(rows::<f32>(width)), 5, 2, 0, 0.1);
    }
}

#[test]
fn the_vocabulary_of_gpt_2_is_exact() {
    let rows = |element| Rows { element, width: 50_257, pitch: 50_304 };
    check::<bf16>(rows(bf16::ELEMENT), 4, 2, SHARED, 0.1);
    check::<f16>(rows(f16::ELEMENT), 4, 2, SHARED, 0.0);
    // Half of the row is held in shared memory.
    check::<f32>(rows(f32::ELEMENT), 3, 2, SHARED / 2, 0.0);
}

#[test]
fn a_row_with_a_nan_predicts_nothing_and_has_a_nan_loss() {
    let rows = rows::<f32>(40);
    let module = compile(&CrossEntropy::new(rows, 1).unwrap().program());
    for place in [0, 17, 39] {
        let mut logits = matrix::<f32>(rows, 1, |index| number(5, index));
        logits[place] = f32::NAN;
        let got = run_case(&module, rows, &logits, &[3], (1, SHARED, 0.0), 0, true);
        assert!(got.losses[0].is_nan() && got.correct == [0.0], "{:?} {:?}", got.losses, got.correct);
    }
}

#[test]
fn an_out_of_range_target_has_a_nan_loss_and_reads_no_other_row() {
    let rows = rows::<f32>(40);
    let module = compile(&CrossEntropy::new(rows, 1).unwrap().program());
    let logits = matrix::<f32>(rows, 1, |index| number(5, index));
    for target in [40, u32::MAX - 1] {
        let got = run_case(&module, rows, &logits, &[target], (1, SHARED, 0.0), 0, true);
        assert!(got.losses[0].is_nan() && got.correct == [0.0], "{:?} {:?}", got.losses, got.correct);
    }
}

#[test]
fn rows_held_in_shared_memory_are_moved_once() {
    let mut table = String::new();
    for (width, pitch) in [(50_257, 50_304), (1000, 1024)] {
        let rows = |element| Rows { element, width, pitch };
        table += &costs::<f32>(rows(f32::ELEMENT), 3);
        table += &costs::<bf16>(rows(bf16::ELEMENT), 3);
    }
    insta::assert_snapshot!("cross_entropy", table);
}

fn costs<T: Number>(rows: Rows, count: usize) -> String {
    let module = compile(&CrossEntropy::new(rows, 1).unwrap().program());
    let (logits, targets) = problem::<T>(rows, count);
    let got = run_case(&module, rows, &logits, &targets, (2, SHARED, 0.0), 0, true);
    let what = format!("cross entropy, {} {count} x {}", T::NAME, rows.width);
    let (read, written) = (count * rows.width as usize, count * rows.pitch as usize);
    assert_minimal_traffic(&what, &got.counts, &[("logits", [read, written].map(|numbers| numbers * size_of::<T>()))]);
    line(&what, &got.counts)
}
