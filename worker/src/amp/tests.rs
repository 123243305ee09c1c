//! Tests the order of a step, with overflows at random steps.

use super::*;
use crate::cpu::{Isa, Pool};
use crate::nn::{Initial, Layout, Role};
use crate::optimizer::{Optimizer, gradient_scale, sum_of_squares};
use proptest::prelude::*;
use switchyard_worker_contract::config::{self, DecayExclusions, LossScaling, Rule};

const RANKS: usize = 4;
const LEN: usize = 48;

fn optimizer(rule: Rule) -> (Optimizer, Vec<f32>) {
    let mut layout = Layout::default();
    layout.push("matrix".to_owned(), &[32], Role::Matrix, Initial::Constant(0.0));
    layout.push("vector".to_owned(), &[LEN - 32], Role::Vector, Initial::Constant(0.0));
    let config = config::Optimizer {
        rule,
        learning_rate: 0.1,
        weight_decay: 0.1,
        gradient_clip_norm: None,
        decay_exclusions: DecayExclusions::Vectors,
    };
    (Optimizer::new(&layout, &config, Isa::Portable), (0..LEN).map(|i| i as f32 * 0.1 - 2.0).collect())
}

/// Runs the optimizer if the reduced gradients, which are multiplied by `scale`, are finite;
/// returns whether it did.
fn step(optimizer: &mut Optimizer, weights: &mut [f32], reduced: &[f32], scale: f32) -> bool {
    let squares = sum_of_squares(reduced);
    if squares.is_finite() {
        let scale = f64::from(scale);
        optimizer.begin_step(0.1, gradient_scale(squares.sqrt() / scale, Some(1.0), scale));
        optimizer.apply(0..LEN, weights, reduced, None, &Pool::new(1));
    }
    squares.is_finite()
}

/// Gradient of a rank in a step, times `scale`.
fn gradient(rank: usize, step: usize, scale: f32) -> Vec<f32> {
    (0..LEN).map(|i| (((i + 7 * rank + 13 * step) * 37 % 101) as f32 * 0.01 - 0.5) * scale).collect()
}

fn reduce(ranks: &[Vec<f32>]) -> Vec<f32> {
    (0..LEN).map(|i| ranks.iter().map(|gradients| gradients[i]).sum()).collect()
}

fn rules() -> impl Strategy<Value = Rule> {
    let adam = config::Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };
    let momentum = config::Momentum { momentum: 0.9, nesterov: true };
    let lars = config::Lars { momentum: 0.9, trust_coefficient: 0.01 };
    prop::sample::select(vec![Rule::Sgd(momentum), Rule::AdamW(adam), Rule::Lamb(adam), Rule::Lars(lars)])
}

proptest! {
    /// Powers of 2 scale exactly, so the bits match an f32 run over the steps that were not
    /// skipped.
    #[test]
    fn an_overflow_on_one_rank_skips_the_step_on_all_without_a_trace(
        rule in rules(),
        overflows in prop::collection::vec(
            prop::option::weighted(0.2, (0..RANKS, 0..LEN, prop::sample::select(vec![f32::INFINITY, f32::NEG_INFINITY, f32::NAN]))),
            1..60,
        ),
    ) {
        let config = LossScaling::Dynamic {
            initial_scale: 65_536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval_steps: 4,
        };
        let mut scalers = vec![LossScaler::new(config); RANKS];
        let (mut scaled, mut weights) = optimizer(rule);
        let (mut plain, mut want) = optimizer(rule);
        for (at, overflow) in overflows.iter().enumerate() {
            let mut gradients: Vec<Vec<f32>> =
                scalers.iter().enumerate().map(|(rank, scaler)| gradient(rank, at, scaler.scale())).collect();
            if let Some((rank, index, value)) = *overflow {
                gradients[rank][index] = value;
            }
            let stepped = step(&mut scaled, &mut weights, &reduce(&gradients), scalers[0].scale());
            prop_assert_eq!(stepped, overflow.is_none());
            if stepped {
                let unscaled: Vec<Vec<f32>> = (0..RANKS).map(|rank| gradient(rank, at, 1.0)).collect();
                prop_assert!(step(&mut plain, &mut want, &reduce(&unscaled), 1.0));
            }
            for scaler in &mut scalers {
                prop_assert_eq!(scaler.update(!stepped), Ok(()));
            }
            prop_assert!(scalers.windows(2).all(|pair| pair[0] == pair[1]));
            prop_assert_eq!(&weights, &want);
        }
        let skipped = overflows.iter().flatten().count();
        prop_assert_eq!(scalers[0].state().skipped_steps as usize, skipped);
        prop_assert_eq!(scaled.steps() as usize, overflows.len() - skipped);
        prop_assert!(scaled.state().zip(plain.state()).all(|(a, b)| a == b));
    }
}
