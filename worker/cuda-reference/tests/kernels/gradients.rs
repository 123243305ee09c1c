use super::{Device, Module, assert_close, assert_minimal_traffic, compile, line, numbers, run};
use switchyard_cuda::kernels::gradients::{self, On, Rules, Scaler, partial_bytes};
use switchyard_cuda::kernels::optimizer::{Numbers, Scaling};
use switchyard_cuda_reference::Counts;

const STATIC: Rules =
    Rules { most: f64::INFINITY, growth: 2.0, backoff: 0.5, growth_interval: 3, is_dynamic: 0, unused: 0 };
const DYNAMIC: Rules = Rules { is_dynamic: 1, ..STATIC };

fn start(scale: f32) -> Scaler {
    Scaler { norm: 0.0, good_steps: 0, skipped_steps: 0, skipped_in_a_row: 0, scale, unused: 0 }
}

/// Step-dependent optimizer factors if the previous step was applied, and if it was skipped.
const CANDIDATES: [f32; 2] = [0.5, 0.25];

/// Runs both kernels in sequence.
fn step(
    module: &Module,
    gradient: &[f32],
    loss: f32,
    rules: Rules,
    state: Scaler,
    seed: u64,
) -> (Scaler, Scaling, [Counts; 2]) {
    let count = gradient.len() as u32;
    let mut device = Device::default();
    let gradient = device.upload("gradient", gradient);
    let partial = device.allocate("partial", partial_bytes(count));
    let on = On {
        partial,
        loss: device.upload("loss", &[loss]),
        rules: device.upload("rules", &[rules]),
        state: device.upload("state", &[state]),
        scaling: device.allocate("scaling", size_of::<Scaling>()),
        candidates: device.upload("candidates", &CANDIDATES.map(|rate| Numbers { rate, ..Numbers::default() })),
        numbers: device.allocate("numbers", size_of::<Numbers>()),
    };
    let calls = [gradients::sum_of_squares(count, gradient, partial).unwrap(), gradients::scaler(count, on).unwrap()];
    let counts = calls.map(|call| run(&mut device, module, &call, seed));
    let rate = device.download::<Numbers>(on.numbers)[0].rate;
    assert_eq!(rate, CANDIDATES[usize::from(state.skipped_in_a_row > 0)]);
    (device.download(on.state)[0], device.download(on.scaling)[0], counts)
}

#[test]
fn the_norm_is_exact_and_independent_of_the_order() {
    let module = compile(&gradients::program());
    for count in [1, 3, 1023, 4096, 4099, 70_001] {
        let gradient = numbers(1, count, 0.3);
        let norm = gradient.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
        let of = |seed| step(&module, &gradient, 1.0, STATIC, start(4.0), seed).0.norm;
        assert_close("norm", &[of(0)], &[norm / 4.0], 1e-13, 0.0);
        assert_eq!((of(1).to_bits(), of(2).to_bits()), (of(0).to_bits(), of(0).to_bits()), "{count}");
    }
}

#[test]
fn the_norm_is_finite_exactly_when_all_gradients_are() {
    let module = compile(&gradients::program());
    let skips = |gradient: &[f32], loss| step(&module, gradient, loss, STATIC, start(1.0), 0).1.skip;
    let largest = vec![f32::MAX; 5000];
    assert_eq!(skips(&largest, 1.0), 0);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for place in [0, 4097, 4999] {
            let mut gradient = vec![1.0; 4999 + 1];
            gradient[place] = value;
            assert_eq!(skips(&gradient, 1.0), 1, "{value} at {place}");
        }
        assert_eq!(skips(&largest, value), 1, "loss {value}");
    }
}

#[test]
fn gradients_are_unscaled_and_clipped_to_the_norm() {
    let module = compile(&gradients::program());
    // Norm 5 without the scale.
    let scale = |most| step(&module, &[24.0, 0.0, -32.0], 1.0, Rules { most, ..STATIC }, start(8.0), 0).1;
    assert_eq!(scale(f64::INFINITY), Scaling { gradient_scale: 0.125, skip: 0 });
    assert_eq!(scale(6.0), Scaling { gradient_scale: 0.125, skip: 0 });
    assert_eq!(scale(2.0), Scaling { gradient_scale: (2.0 / (5.0 + 1e-6) / 8.0) as f32, skip: 0 });
}

/// Accumulates onto an earlier mean of 1.5 if `add`.
fn mean(module: &Module, losses: &[f32], add: bool, seed: u64) -> (f32, Counts) {
    let mut device = Device::default();
    let (losses_at, mean) = (device.upload("losses", losses), device.allocate("mean", 4));
    if add {
        device.write(mean, &[1.5f32]);
    }
    let factor = device.upload("factor", &[0.125f32]);
    let call = gradients::mean_loss(losses.len() as u32, losses_at, factor, mean, add).unwrap();
    let counts = run(&mut device, module, &call, seed);
    (device.download(mean)[0], counts)
}

#[test]
fn the_mean_loss_is_independent_of_the_order_and_accumulates() {
    let module = compile(&gradients::program());
    for count in [1, 255, 256, 1000] {
        let losses = numbers(2, count, 3.0);
        let expected = 0.125 * losses.iter().copied().map(f64::from).sum::<f64>();
        let (got, counts) = mean(&module, &losses, false, 0);
        assert_close("mean", &[f64::from(got)], &[expected], 1e-6, 1e-7);
        let (added, _) = mean(&module, &losses, true, 1);
        assert_eq!(added.to_bits(), (1.5 + got).to_bits(), "{count}");
        assert_minimal_traffic("mean loss", &counts, &[("losses", [(4 * count).next_multiple_of(32), 0])]);
    }
    assert!(mean(&module, &[1.0, f32::NAN], false, 0).0.is_nan());
}

/// The states after each outcome; `true` is an overflow.
fn states(module: &Module, rules: Rules, mut state: Scaler, outcomes: &[bool]) -> Vec<Scaler> {
    let mut next = |&overflowed: &bool| {
        let gradient = if overflowed { f32::INFINITY } else { 1.0 };
        let (new, scaling, _) = step(module, &[gradient], 1.0, rules, state, 0);
        assert_eq!(scaling.skip, u32::from(overflowed));
        state = new;
        new
    };
    outcomes.iter().map(&mut next).collect()
}

#[test]
fn the_scale_grows_after_good_steps_in_a_row_and_backs_off_at_each_overflow() {
    let module = compile(&gradients::program());
    let (good, bad) = (false, true);
    // Outcomes and scales of the engine's own test, `worker/src/amp/scaler.rs`.
    let outcomes = [good, good, good, good, bad, good, good, bad, bad, good, good, good];
    let got = states(&module, DYNAMIC, start(8.0), &outcomes);
    let scales: Vec<f32> = got.iter().map(|state| state.scale).collect();
    assert_eq!(scales, [8.0, 8.0, 16.0, 16.0, 8.0, 8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0]);
    let in_a_row: Vec<u64> = got.iter().map(|state| state.skipped_in_a_row).collect();
    assert_eq!(in_a_row, [0, 0, 0, 0, 1, 0, 0, 1, 2, 0, 0, 0]);
    assert_eq!(got.last().unwrap().skipped_steps, 3);
    // A static scale only counts.
    let got = states(&module, STATIC, start(8.0), &outcomes);
    assert!(got.iter().all(|state| state.scale == 8.0), "{got:?}");
    assert_eq!(got.last().unwrap().skipped_steps, 3);
}

#[test]
fn the_scale_stays_between_its_floor_and_infinity() {
    let module = compile(&gradients::program());
    let at_once = Rules { growth_interval: 1, ..DYNAMIC };
    let largest = 2f32.powi(127);
    assert_eq!(states(&module, at_once, start(largest), &[false])[0].scale, largest);
    let smallest = 2f32.powi(-14);
    let got: Vec<f32> = states(&module, DYNAMIC, start(2.0 * smallest), &[true; 3]).iter().map(|s| s.scale).collect();
    assert_eq!(got, [smallest; 3]);
}

#[test]
fn gradients_are_read_once() {
    let module = compile(&gradients::program());
    let mut table = String::new();
    for count in [70_001, 65_536] {
        let (_, _, counts) = step(&module, &numbers(1, count, 1.0), 1.0, DYNAMIC, start(1.0), 0);
        let sums = partial_bytes(count as u32);
        assert_minimal_traffic("sum of squares", &counts[0], &[("gradient", [4 * count, 0])]);
        assert_minimal_traffic("scaler", &counts[1], &[("partial", [sums.next_multiple_of(32), 0])]);
        table += &line(&format!("sum of squares [{count}]"), &counts[0]);
        table += &line(&format!("scaler [{count}]"), &counts[1]);
        let (_, counts) = mean(&module, &numbers(2, count, 3.0), false, 0);
        table += &line(&format!("mean loss [{count}]"), &counts);
    }
    insta::assert_snapshot!("gradients", table);
}

#[test]
fn calls_with_too_little_memory_are_refused() {
    let mut device = Device::default();
    let (small, large) = (device.allocate("small", 31), device.allocate("large", 1 << 20));
    let refused = gradients::sum_of_squares(8, small, large).unwrap_err().to_string();
    assert_eq!(refused, "sum_of_squares: gradient of 31 bytes, expected at least 32");
    let refused = gradients::mean_loss(8, small, large, large, false).unwrap_err().to_string();
    assert_eq!(refused, "mean_loss: losses of 31 bytes, expected at least 32");
    let [candidates, numbers] = [large; 2];
    let on = On { partial: large, loss: large, rules: small, state: large, scaling: large, candidates, numbers };
    let refused = gradients::scaler(8, on).unwrap_err().to_string();
    assert_eq!(refused, "scaler: rules of 31 bytes, expected at least 32");
}
