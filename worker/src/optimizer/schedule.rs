//! Learning-rate schedules.

use crate::cpu::math::cos_pi;
use switchyard_worker_contract::config;

/// Upper limit of the default warm-up.
const MAX_DEFAULT_WARMUP_STEPS: u64 = 100;

/// The learning-rate schedule: linear warm-up, then constant, half a cosine, linear or stepwise
/// decay.
pub struct Schedule;

impl Schedule {
    /// Learning rate of step `step` (counted from 0) of `total`.
    ///
    /// Warm-up step i uses `peak * (i + 1) / warmup_steps`. Cosine and linear decay then start at
    /// the peak and reach the final rate exactly in the last step (`total - 1`). A run no longer
    /// than the warm-up ends while the rate is still rising; a single-step run without warm-up uses
    /// the final rate. After the warm-up these match PyTorch's `CosineAnnealingLR`, `LinearLR` and
    /// `StepLR`.
    pub fn learning_rate(schedule: &config::Schedule, peak: f64, step: u64, total: u64) -> f64 {
        let warmup = schedule.warmup_steps.unwrap_or((total / 10).min(MAX_DEFAULT_WARMUP_STEPS));
        if step < warmup {
            return peak * ((step + 1) as f64 / warmup as f64);
        }
        match schedule.kind {
            config::ScheduleKind::Constant => peak,
            config::ScheduleKind::Step { every, factor } => {
                let rate = peak * power(factor, (step - warmup) / every.max(1));
                // A final rate above the peak does not raise the rate.
                rate.max(schedule.final_learning_rate.min(peak))
            }
            config::ScheduleKind::Linear => {
                let last = total.saturating_sub(1);
                if step >= last {
                    return schedule.final_learning_rate;
                }
                let done = (step - warmup) as f64 / (last - warmup) as f64;
                peak + (schedule.final_learning_rate - peak) * done
            }
            config::ScheduleKind::Cosine => {
                let last = total.saturating_sub(1);
                if step >= last {
                    return schedule.final_learning_rate;
                }
                let done = (step - warmup) as f64 / (last - warmup) as f64;
                let share = 0.5 * (1.0 + cos_pi(done));
                schedule.final_learning_rate + (peak - schedule.final_learning_rate) * share
            }
        }
    }
}

/// `factor` to the power `times`, by squaring: `powi` can differ between machines.
fn power(mut factor: f64, mut times: u64) -> f64 {
    let mut product = 1.0;
    while times > 0 {
        if times % 2 == 1 {
            product *= factor;
        }
        factor *= factor;
        times /= 2;
    }
    product
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::ScheduleKind;
    use proptest::prelude::*;

    fn rates(kind: ScheduleKind, warmup_steps: u64, total: u64) -> Vec<f64> {
        let schedule = config::Schedule { kind, warmup_steps: Some(warmup_steps), final_learning_rate: 0.1 };
        (0..total).map(|step| Schedule::learning_rate(&schedule, 1.0, step, total)).collect()
    }

    #[test]
    fn constant_with_warm_up() {
        assert_eq!(rates(ScheduleKind::Constant, 4, 6), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        assert_eq!(rates(ScheduleKind::Constant, 0, 2), [1.0, 1.0]);
        assert_eq!(rates(ScheduleKind::Constant, 4, 2), [0.25, 0.5]);
    }

    #[test]
    fn the_default_warm_up_is_a_tenth_of_the_run_up_to_100_steps() {
        let schedule = config::Schedule { kind: ScheduleKind::Cosine, warmup_steps: None, final_learning_rate: 0.0 };
        for (total, warmup) in [(5, 0), (40, 4), (999, 99), (1000, 100), (50_000, 100)] {
            let rates = (0..total).map(|step| Schedule::learning_rate(&schedule, 1.0, step, total));
            let peak = rates.into_iter().position(|rate| rate == 1.0);
            assert_eq!(peak, Some(std::cmp::max(warmup, 1) - 1), "of {total} steps");
        }
    }

    #[test]
    fn cosine_ends_exactly_at_the_final_rate() {
        let rates = rates(ScheduleKind::Cosine, 2, 11);
        assert_eq!(rates[..3], [0.5, 1.0, 1.0]);
        assert_eq!(rates[10], 0.1);
        assert!((rates[6] - 0.55).abs() < 1e-12);
        assert!(rates[2..].windows(2).all(|pair| pair[1] < pair[0]));
    }

    fn kinds() -> impl Strategy<Value = ScheduleKind> {
        let step = (0u64..40, 0.01f64..0.99).prop_map(|(every, factor)| ScheduleKind::Step { every, factor });
        prop_oneof![Just(ScheduleKind::Constant), Just(ScheduleKind::Cosine), Just(ScheduleKind::Linear), step,]
    }

    proptest! {
        #[test]
        fn rises_to_the_peak_then_never_again(
            kind in kinds(), warmup_steps in 0u64..60, total in 1u64..200, peak in 1e-6f64..10.0, share in 0.0f64..1.0,
        ) {
            let final_learning_rate = peak * share;
            let schedule = config::Schedule { kind, warmup_steps: Some(warmup_steps), final_learning_rate };
            let rates: Vec<f64> =
                (0..total).map(|step| Schedule::learning_rate(&schedule, peak, step, total)).collect();
            let (up, down) = rates.split_at(warmup_steps.min(total) as usize);
            prop_assert!(up.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(up.iter().all(|&rate| rate > 0.0 && rate <= peak));
            if (1..=total).contains(&warmup_steps) {
                prop_assert_eq!(up.last(), Some(&peak));
            }
            prop_assert!(down.windows(2).all(|pair| pair[0] >= pair[1]));
            // The first value of half a cosine can differ in the last bit.
            let most = peak * (1.0 + 1e-15);
            prop_assert!(down.iter().all(|&rate| final_learning_rate <= rate && rate <= most));
            if let (Some(first), Some(last)) = (down.first(), down.last()) {
                let falls = matches!(kind, ScheduleKind::Cosine | ScheduleKind::Linear);
                prop_assert!(!falls || *last == final_learning_rate);
                // A single step after the warm-up is already the last one.
                prop_assert!(*first >= peak * (1.0 - 1e-15) || falls && down.len() == 1);
            }
        }
    }

    #[test]
    fn steps_down_to_the_final_rate() {
        let kind = ScheduleKind::Step { every: 2, factor: 0.5 };
        assert_eq!(rates(kind, 1, 10), [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.1]);
        // As fast at the end of a long run as at its start.
        let schedule = config::Schedule { kind, warmup_steps: Some(0), final_learning_rate: 0.0 };
        assert_eq!(Schedule::learning_rate(&schedule, 1.0, u64::MAX - 1, u64::MAX), 0.0);
    }

    #[test]
    fn linear_ends_exactly_at_the_final_rate() {
        let rates = rates(ScheduleKind::Linear, 2, 11);
        assert_eq!((rates[2], rates[10]), (1.0, 0.1));
        assert!((rates[6] - 0.55).abs() < 1e-12);
    }

    #[test]
    fn short_runs() {
        assert_eq!(rates(ScheduleKind::Cosine, 0, 1), [0.1]);
        assert_eq!(rates(ScheduleKind::Cosine, 0, 2), [1.0, 0.1]);
        assert_eq!(rates(ScheduleKind::Cosine, 2, 3), [0.5, 1.0, 0.1]);
        assert_eq!(rates(ScheduleKind::Cosine, 3, 3), [1.0 / 3.0, 2.0 / 3.0, 1.0]);
    }
}
