//! GPU optimizers versus the engine's: the references that their kernels are compared with, element
//! by element, match the engine bit for bit.

use crate::TARGET;
use crate::network::mlp;
use crate::trial::cpu;
use switchyard_cuda::kernels::optimizer::{Numbers, Rule};
use switchyard_worker::cpu::Isa;
use switchyard_worker::lowering::{Plan, Update};
use switchyard_worker::nn::Role;
use switchyard_worker::optimizer::{Optimizer, Steps};
use switchyard_worker_contract::config;

const RATE: f64 = 0.003;
const DECAY: f64 = 0.05;
const SCALE: f32 = 0.25;
const ADAM: config::Adam = config::Adam { beta1: 0.9, beta2: 0.99, epsilon: 1e-6 };

/// Counts the weights of both sides that differ in their bits after some steps, and all weights.
/// LAMB and LARS are compared on parameters with a trust ratio of one, because ratios are sums in a
/// different order.
fn different(rule: config::Rule, mutate: impl Fn(&mut Numbers)) -> (usize, usize) {
    let plan = Plan::new(mlp(config::Activation::Relu), TARGET).unwrap();
    let layout = plan.layout();
    let cpu = cpu(1, Isa::Portable);
    let of_engine = config::Optimizer {
        rule,
        learning_rate: RATE,
        weight_decay: DECAY,
        gradient_clip_norm: None,
        decay_exclusions: config::DecayExclusions::Vectors,
    };
    let mut engine = Optimizer::new(layout, &of_engine, cpu.isa);
    let wave = |step: usize, size: f32| -> Vec<f32> {
        (0..layout.len).map(|at| size * ((at * 7 + step * 13) as f32 * 0.37).sin()).collect()
    };
    let mut weights = wave(0, 0.5);
    let (mut own, mut first, mut second) = (weights.clone(), vec![0.0; layout.len], vec![0.0; layout.len]);
    let update = Update::new(layout, &of_engine, config::Precision::Fp32, TARGET).unwrap();
    let rule_of_device = match rule {
        config::Rule::Sgd(_) => Rule::Sgd,
        config::Rule::Adam(_) | config::Rule::AdamW(_) => Rule::Adam,
        config::Rule::Lamb(_) => Rule::Lamb,
        config::Rule::Lars(_) => Rule::Lars,
    };
    let mut steps = Steps::new(&rule);
    for step in 1..=4 {
        let gradients = wave(step, 0.1);
        engine.begin_step(RATE, SCALE);
        engine.apply(0..layout.len, &mut weights, &gradients, None, &cpu.pool);
        steps = steps.next();
        let mut numbers = update.numbers(RATE, &steps);
        mutate(&mut numbers);
        let has_first = engine.state().count() > 0;
        for parameter in &layout.parameters {
            let decays = parameter.role != Role::Vector;
            for at in parameter.range() {
                let state = [has_first.then_some(&mut first[at]), Some(&mut second[at])];
                numbers.apply(rule_of_device, (gradients[at], SCALE), (decays, 1.0), &mut own[at], state);
            }
        }
    }
    let is_layer_wise = matches!(rule, config::Rule::Lamb(_) | config::Rule::Lars(_));
    let compared = layout.parameters.iter().filter(|parameter| !is_layer_wise || parameter.role == Role::Vector);
    let numbers: Vec<usize> = compared.flat_map(|parameter| parameter.range()).collect();
    (numbers.iter().filter(|&&at| own[at].to_bits() != weights[at].to_bits()).count(), numbers.len())
}

#[test]
fn the_reference_of_the_kernels_matches_the_engine_bit_for_bit() {
    let sgd = |momentum: f64, nesterov: bool| config::Rule::Sgd(config::Momentum { momentum, nesterov });
    let lars = |momentum: f64| config::Rule::Lars(config::Lars { momentum, trust_coefficient: 0.02 });
    let adams = [config::Rule::Adam(ADAM), config::Rule::AdamW(ADAM), config::Rule::Lamb(ADAM)];
    let others = [sgd(0.0, false), sgd(0.9, false), sgd(0.9, true), lars(0.0), lars(0.9)];
    for rule in adams.into_iter().chain(others) {
        let (different_bits, of) = different(rule, |_| ());
        assert!(of > 30, "{rule:?}: {of} numbers");
        assert_eq!(different_bits, 0, "{rule:?}: of {of}");
    }
    // A parameter that is off by one bit is detected.
    let (found, _) = different(config::Rule::AdamW(ADAM), |numbers| numbers.keep = numbers.keep.next_down());
    assert!(found > 0);
}
