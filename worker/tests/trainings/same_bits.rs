//! Trainings that must have the weights of another one, bit for bit.

use crate::ranks::History;
use switchyard_worker_contract::config::*;

const ADAM: Adam = Adam { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 };

/// Every optimizer, with a learning rate that suits it.
pub fn rules() -> [(&'static str, Rule, f64); 7] {
    let sgd = |momentum, nesterov| Rule::Sgd(Momentum { momentum, nesterov });
    [
        ("SGD", sgd(0.0, false), 0.1),
        ("momentum", sgd(0.9, true), 0.05),
        ("Adam", Rule::Adam(ADAM), 0.003),
        ("AdamW", Rule::AdamW(ADAM), 0.003),
        ("LAMB", Rule::Lamb(ADAM), 0.01),
        ("LARS", Rule::Lars(Lars { momentum: 0.9, trust_coefficient: 0.01 }), 1.0),
        ("LARS without momentum", Rule::Lars(Lars { momentum: 0.0, trust_coefficient: 0.01 }), 1.0),
    ]
}

/// AMP with a dynamic loss scale.
pub fn dynamic(compute_type: HalfType, initial_scale: f64) -> Precision {
    let loss_scaling =
        LossScaling::Dynamic { initial_scale, growth_factor: 2.0, backoff_factor: 0.5, growth_interval_steps: 3 };
    Precision::Amp(Amp { compute_type, loss_scaling })
}

/// Checks that two trainings have the same weights after every step, and nearly the same losses.
pub fn assert_same_steps(name: &str, got: &History, expected: &History) {
    let digests = |history: &History| history.steps.iter().map(|(_, digest)| digest.clone()).collect::<Vec<_>>();
    assert_eq!(digests(got), digests(expected), "{name}");
    // The loss travels in a message of its own, which adds in another order.
    for ((got, _), (expected, _)) in got.steps.iter().zip(&expected.steps) {
        assert!((got - expected).abs() <= 1e-6 * expected, "{name}: {got}, not {expected}");
    }
}
