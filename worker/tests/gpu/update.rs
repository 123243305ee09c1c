//! Optimizer updates on the executor compared with the engine's: every rule, clipping, loss scales,
//! skipped steps, 16-bit copies.

use crate::TARGET;
use crate::executed::Gpu;
use crate::network::mlp;
use crate::trial::cpu;
use switchyard_cuda::kernels::gradients::Scaler;
use switchyard_worker::amp::LossScaler;
use switchyard_worker::cpu::{Isa, bf16};
use switchyard_worker::lowering::{Memory, Plan, Update};
use switchyard_worker::nn::Layout;
use switchyard_worker::optimizer::{Optimizer, Steps, gradient_scale, sum_of_squares};
use switchyard_worker_contract::config::{self, Amp, HalfType, LossScaling, Precision};

const RATE: f64 = 0.003;
const STEPS: usize = 5;
const ADAM: config::Adam = config::Adam { beta1: 0.9, beta2: 0.99, epsilon: 1e-6 };

fn optimizer(rule: config::Rule, gradient_clip_norm: Option<f64>) -> config::Optimizer {
    let decay_exclusions = config::DecayExclusions::Vectors;
    config::Optimizer { rule, learning_rate: RATE, weight_decay: 0.05, gradient_clip_norm, decay_exclusions }
}

/// The mean loss and the gradients of each step as the backward pass leaves them: scaled, with
/// zeros in the gaps.
type GradientSource<'a> = &'a dyn Fn(&Layout, usize, f32) -> (f32, Vec<f32>);

fn wave(layout: &Layout, step: usize, scale: f32) -> (f32, Vec<f32>) {
    let mut gradients = vec![0.0; layout.len];
    for at in layout.parameters.iter().flat_map(|parameter| parameter.range()) {
        gradients[at] = scale * 0.1 * ((at * 7 + step * 13) as f32 * 0.37).sin();
    }
    (1.5, gradients)
}

/// The state of one side after the last step.
#[derive(Debug)]
struct FinalState {
    weights: Vec<f32>,
    half: Vec<u16>,
    /// The device's scaler state after each step.
    scalers: Vec<Scaler>,
}

fn layout() -> Layout {
    Plan::new(mlp(config::Activation::Relu), TARGET).unwrap().layout().clone()
}

fn initial(layout: &Layout) -> Vec<f32> {
    wave(layout, 0, 5.0).1
}

fn on_gpu(config: &config::Optimizer, precision: Precision, gradient_source: GradientSource<'_>) -> FinalState {
    let layout = layout();
    let update = Update::new(&layout, config, precision, TARGET).unwrap();
    let mut gpu = Gpu::new(1);
    update.memory().iter().for_each(|contents| gpu.hold(contents));
    gpu.device.write(gpu.at(Memory::Weights), &initial(&layout));
    let launches = update.launches(|span| gpu.place(span)).unwrap();
    let round = update.round(|span| gpu.place(span)).unwrap();
    round.iter().for_each(|round| gpu.launch(round));
    let (mut steps, mut scalers) = (Steps::new(&config.rule), Vec::new());
    for step in 1..=STEPS {
        let state: Scaler = gpu.device.download(gpu.at(Memory::Scaler))[0];
        let (loss, gradients) = gradient_source(&layout, step, state.scale);
        gpu.device.write(gpu.at(Memory::Loss), &[loss]);
        gpu.device.write(gpu.at(Memory::Gradients), &gradients);
        // The host is one step behind, so the device chooses.
        let counted = if step > 1 { steps.next() } else { steps };
        let candidates = [counted, steps].map(|steps| update.numbers(RATE, &steps.next()));
        gpu.device.write(gpu.at(Memory::Candidates), &candidates);
        if scalers.last().is_some_and(|scaler: &Scaler| scaler.skipped_in_a_row == 0) {
            steps = steps.next();
        }
        launches.iter().for_each(|launch| gpu.launch(launch));
        scalers.push(gpu.device.download::<Scaler>(gpu.at(Memory::Scaler))[0]);
    }
    let half = round.map(|_| gpu.device.download(gpu.at(Memory::Half))).unwrap_or_default();
    FinalState { weights: gpu.device.download(gpu.at(Memory::Weights)), half, scalers }
}

fn on_cpu(config: &config::Optimizer, scaling: LossScaling, gradient_source: GradientSource<'_>) -> FinalState {
    let (layout, cpu) = (layout(), cpu(1, Isa::Portable));
    let (mut weights, mut scalers) = (initial(&layout), Vec::new());
    let mut optimizer = Optimizer::new(&layout, config, cpu.isa);
    let mut scaler = LossScaler::new(scaling);
    for step in 1..=STEPS {
        let scale = scaler.scale();
        let (loss, gradients) = gradient_source(&layout, step, scale);
        let norm = sum_of_squares(&gradients).sqrt() / f64::from(scale);
        let is_finite = norm.is_finite() && loss.is_finite();
        scaler.update(!is_finite).unwrap();
        if is_finite {
            optimizer.begin_step(RATE, gradient_scale(norm, config.gradient_clip_norm, scale.into()));
            optimizer.apply(0..layout.len, &mut weights, &gradients, None, &cpu.pool);
        }
        scalers.push(Scaler { norm, ..Update::scaler(&scaler.state()) });
    }
    FinalState { half: weights.iter().map(|weight| bf16::from_f32(*weight).to_bits()).collect(), weights, scalers }
}

/// The largest difference of a weight.
fn largest_difference(got: &FinalState, expected: &FinalState) -> f32 {
    got.weights.iter().zip(&expected.weights).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn every_rule_updates_as_on_the_cpu() {
    let sgd = |momentum, nesterov| config::Rule::Sgd(config::Momentum { momentum, nesterov });
    let lars = |momentum| config::Rule::Lars(config::Lars { momentum, trust_coefficient: 0.02 });
    let adams = [config::Rule::Adam(ADAM), config::Rule::AdamW(ADAM), config::Rule::Lamb(ADAM)];
    let others = [sgd(0.0, false), sgd(0.9, false), sgd(0.9, true), lars(0.0), lars(0.9)];
    for rule in adams.into_iter().chain(others) {
        for clip in [None, Some(0.1)] {
            let config = optimizer(rule, clip);
            let expected = on_cpu(&config, LossScaling::Static { scale: 1.0 }, &wave);
            let got = on_gpu(&config, Precision::Fp32, &wave);
            // Norms are sums in a different order, so the clipping factor and the trust ratios of
            // LAMB and LARS may differ in the last bit.
            let is_exact = clip.is_none() && !matches!(rule, config::Rule::Lamb(_) | config::Rule::Lars(_));
            let most = if is_exact { 0.0 } else { 1e-6 };
            assert!(
                largest_difference(&got, &expected) <= most,
                "{rule:?}, {clip:?}: {}",
                largest_difference(&got, &expected)
            );
            let near = |(got, expected): (&Scaler, &Scaler)| (got.norm - expected.norm).abs() < 1e-12 * expected.norm;
            assert!(got.scalers.iter().zip(&expected.scalers).all(near), "{rule:?}: {got:?}");
        }
    }
    // Missing clipping is detected.
    let (adam, sgd) = (config::Rule::AdamW(ADAM), sgd(0.9, false));
    let got = on_gpu(&optimizer(sgd, None), Precision::Fp32, &wave);
    assert!(
        largest_difference(&got, &on_cpu(&optimizer(sgd, Some(0.1)), LossScaling::Static { scale: 1.0 }, &wave)) > 1e-4
    );
    assert!(
        largest_difference(&got, &on_cpu(&optimizer(adam, None), LossScaling::Static { scale: 1.0 }, &wave)) > 1e-4
    );
}

#[test]
fn overflowing_steps_are_skipped_and_the_scale_follows_as_on_the_cpu() {
    let dynamic =
        LossScaling::Dynamic { initial_scale: 64.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval_steps: 2 };
    let precision = |loss_scaling| Precision::Amp(Amp { compute_type: HalfType::Bf16, loss_scaling });
    let overflows = |layout: &Layout, step: usize, scale: f32| {
        let (loss, mut gradients) = wave(layout, step, scale);
        match step {
            2 => gradients[3] = f32::INFINITY,
            4 => return (f32::NAN, gradients),
            _ => {}
        }
        (loss, gradients)
    };
    let config = optimizer(config::Rule::AdamW(ADAM), Some(0.1));
    for scaling in [dynamic, LossScaling::Static { scale: 8.0 }] {
        let expected = on_cpu(&config, scaling, &overflows);
        let got = on_gpu(&config, precision(scaling), &overflows);
        assert!(largest_difference(&got, &expected) <= 1e-6, "{scaling:?}: {}", largest_difference(&got, &expected));
        for (step, (got, expected)) in got.scalers.iter().zip(&expected.scalers).enumerate() {
            let near = (got.norm - expected.norm).abs() <= 1e-12 * expected.norm;
            assert!(near || !got.norm.is_finite() && !expected.norm.is_finite(), "step {step}: {got:?}, {expected:?}");
            assert_eq!(Scaler { norm: 0.0, ..*got }, Scaler { norm: 0.0, ..*expected }, "{scaling:?}, step {step}");
        }
        // The copies are the rounded weights.
        let copies: Vec<u16> = got.weights.iter().map(|weight| bf16::from_f32(*weight).to_bits()).collect();
        assert_eq!(got.half, copies);
        assert_eq!(got.scalers.last().unwrap().skipped_steps, 2);
        // Without the skipped step, the run would differ.
        assert!(largest_difference(&got, &on_cpu(&config, scaling, &wave)) > 1e-4);
    }
}
