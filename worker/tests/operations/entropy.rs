//! Softmax and cross entropy versus f64 references, in every format.

use crate::support::{check_gradient, close, cpus, doubles, floats, random, same_bits};
use switchyard_worker::cpu::ops::{self, IGNORE, Targets};
use switchyard_worker::cpu::{Cpu, Element};

fn softmax_of<E: Element>(rows: usize, width: usize) {
    let x = random::<E>(rows * width, 1, 8.0);
    let got = same_bits(|cpu| {
        let mut y = x.clone();
        ops::softmax_rows(cpu, &mut y, width);
        floats(&y)
    });
    let mut want = Vec::new();
    for row in doubles(&x).chunks(width) {
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        want.extend(row.iter().map(|x| x.exp() / sum));
    }
    close::<E>("softmax", &got, &want, 1e-6);
}

#[test]
fn softmax_rows_sum_to_one() {
    for (rows, width) in [(1, 1), (70, 33), (33, 300)] {
        all_formats!(softmax_of(rows, width));
    }
}

/// Losses of all rows, and the gradient of `scale` times their sum.
struct Outcome {
    losses: Vec<f32>,
    correct: Vec<f32>,
    gradient: Vec<f32>,
}

fn entropy<E: Element>(cpu: &Cpu, logits: &[E], targets: Targets<'_>, scale: f32) -> Outcome {
    let rows = targets.classes.len();
    let (mut x, mut saved) = (logits.to_vec(), vec![f32::NAN; 2 * rows]);
    let (mut losses, mut correct) = (vec![f32::NAN; rows], vec![f32::NAN; rows]);
    ops::cross_entropy(cpu, &x, targets, &mut saved, &mut losses, &mut correct);
    ops::cross_entropy_backward(cpu, &mut x, targets, &saved, scale);
    Outcome { losses, correct, gradient: floats(&x) }
}

/// As documented for torch.nn.CrossEntropyLoss: the target is (1 - smoothing) for the class plus
/// smoothing / width for each class.
fn plain_losses(x: &[f64], targets: Targets<'_>) -> Vec<f64> {
    let rows = targets.classes.len();
    let width = x.len() / rows;
    let smoothing = f64::from(targets.smoothing);
    let loss = |(row, &class): (&[f64], &u32)| {
        if class == IGNORE {
            return 0.0;
        }
        let log_sum = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        let mean = row.iter().sum::<f64>() / width as f64;
        (1.0 - smoothing) * (log_sum - row[class as usize]) + smoothing * (log_sum - mean)
    };
    x.chunks(width).zip(targets.classes).map(loss).collect()
}

fn entropy_of<E: Element>(rows: usize, width: usize, smoothing: f32) {
    let logits = random::<E>(rows * width, 1, 5.0);
    let class = |r: usize| if r % 5 == 3 { IGNORE } else { (r * r % width) as u32 };
    let classes: Vec<u32> = (0..rows).map(class).collect();
    let targets = Targets { classes: &classes, smoothing };
    assert_eq!(targets.counted(), (0..rows).filter(|r| r % 5 != 3).count());
    let got = same_bits(|cpu| {
        let outcome = entropy(cpu, &logits, targets, 0.75);
        [outcome.losses, outcome.correct, outcome.gradient].concat()
    });
    let (losses, rest) = got.split_at(rows);
    let (correct, gradient) = rest.split_at(rows);
    let x = doubles(&logits);
    close::<f32>("losses", losses, &plain_losses(&x, targets), 2e-6);
    let loss = |x: &[f64]| 0.75 * plain_losses(x, targets).iter().sum::<f64>();
    check_gradient::<E>("gradient", &loss, &x, gradient, 2e-6);
    for (r, row) in x.chunks(width).enumerate() {
        let first = (0..width).rev().max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        assert_eq!(correct[r] == 1.0, classes[r] as usize == first, "row {r}");
        assert!(correct[r] == 0.0 || correct[r] == 1.0);
    }
}

#[test]
fn cross_entropy_and_its_gradient() {
    for smoothing in [0.0, 0.1, 1.0] {
        // The last size has a vocabulary larger than 16 bits.
        for (rows, width) in [(1, 1), (5, 2), (70, 37), (2, 70_001)] {
            all_formats!(entropy_of(rows, width, smoothing));
        }
    }
}

#[test]
fn smoothed_loss_by_hand() {
    // Logits 0 and ln 3: probabilities 1/4 and 3/4. Target 0 smoothed by 0.2: 0.9 and 0.1.
    let logits = [0.0, 3f32.ln()];
    for cpu in cpus() {
        let outcome = entropy(&cpu, &logits, Targets { classes: &[0], smoothing: 0.2 }, 1.0);
        close::<f32>("loss", &outcome.losses, &[0.9 * 4f64.ln() - 0.1 * 0.75f64.ln()], 1e-6);
        close::<f32>("gradient", &outcome.gradient, &[0.25 - 0.9, 0.75 - 0.1], 1e-6);
        assert_eq!(outcome.correct, [0.0]);
        let outcome = entropy(&cpu, &logits, Targets::plain(&[1]), 1.0);
        close::<f32>("loss", &outcome.losses, &[-0.75f64.ln()], 1e-6);
        close::<f32>("gradient", &outcome.gradient, &[0.25, 0.75 - 1.0], 1e-6);
        assert_eq!(outcome.correct, [1.0]);
    }
}

#[test]
fn ignored_rows_have_no_effect_even_if_they_are_nan() {
    let logits = [f32::NAN, 1.0, 2.0, 1.0, f32::INFINITY, 0.0];
    for cpu in cpus() {
        let outcome = entropy(&cpu, &logits, Targets { classes: &[IGNORE, 0, IGNORE], smoothing: 0.1 }, 1.0);
        assert_eq!((outcome.losses[0], outcome.losses[2]), (0.0, 0.0));
        assert_eq!(outcome.correct, [0.0, 1.0, 0.0]);
        assert_eq!([&outcome.gradient[..2], &outcome.gradient[4..]].concat(), [0.0; 4]);
        assert!(outcome.losses[1] > 0.0 && outcome.gradient[2] < 0.0);
    }
}

#[test]
fn the_first_of_equal_maximal_logits_is_predicted() {
    let logits = [1.0f32, 2.0, 2.0, 0.0].repeat(4);
    let outcome = entropy(&cpus()[0], &logits, Targets::plain(&[0, 1, 2, 3]), 1.0);
    assert_eq!(outcome.correct, [0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn a_nan_logit_affects_only_its_own_row() {
    for bad in [f32::NAN, f32::INFINITY] {
        for column in [0, 3, 20] {
            let mut logits = random::<f32>(3 * 21, 1, 1.0);
            logits[21 + column] = bad;
            for cpu in cpus() {
                let outcome = entropy(&cpu, &logits, Targets::plain(&[3, 3, 3]), 1.0);
                assert!(outcome.losses[1].is_nan() && outcome.correct[1] == 0.0);
                assert!(outcome.losses[0].is_finite() && outcome.losses[2].is_finite());
                let nan = |range: std::ops::Range<usize>| outcome.gradient[range].iter().any(|x| x.is_nan());
                assert_eq!((nan(0..21), nan(21..42), nan(42..63)), (false, true, false));
            }
        }
    }
    // A masked logit is not an error.
    let outcome = entropy(&cpus()[0], &[f32::NEG_INFINITY, 0.0, 0.0], Targets::plain(&[2]), 1.0);
    close::<f32>("loss", &outcome.losses, &[2f64.ln()], 1e-6);
    close::<f32>("gradient", &outcome.gradient, &[0.0, 0.5, -0.5], 1e-6);
}

#[test]
fn zero_rows_are_allowed() {
    let outcome = entropy::<f32>(&cpus()[0], &[], Targets::plain(&[]), 1.0);
    assert!(outcome.losses.is_empty() && outcome.gradient.is_empty());
}
