//! Learning rate over the steps.

use crate::cpu::math::cos_pi;
use switchyard_worker_contract::config;

/// The learning-rate schedule: linear warm-up, then constant or half a cosine.
pub struct Schedule;

impl Schedule {
    /// Learning rate of step `step` (from 0) of `total`.
    ///
    /// Warm-up step i uses `peak * (i + 1) / warmup_steps`. A cosine then starts at the peak and reaches the final rate
    /// exactly at the last step (`total - 1`).
    pub fn learning_rate(schedule: &config::Schedule, peak: f64, step: u64, total: u64) -> f64 {
        let warmup = schedule.warmup_steps;
        if step < warmup {
            return peak * ((step + 1) as f64 / warmup as f64);
        }
        match schedule.kind {
            config::ScheduleKind::Constant => peak,
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

#[cfg(test)]
mod tests {
    use super::*;
    use config::ScheduleKind;

    fn rates(kind: ScheduleKind, warmup_steps: u64, total: u64) -> Vec<f64> {
        let schedule = config::Schedule { kind, warmup_steps, final_learning_rate: 0.1 };
        (0..total).map(|step| Schedule::learning_rate(&schedule, 1.0, step, total)).collect()
    }

    #[test]
    fn constant_with_warm_up() {
        assert_eq!(rates(ScheduleKind::Constant, 4, 6), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
        assert_eq!(rates(ScheduleKind::Constant, 0, 2), [1.0, 1.0]);
        assert_eq!(rates(ScheduleKind::Constant, 4, 2), [0.25, 0.5]);
    }

    #[test]
    fn cosine_ends_exactly_at_the_final_rate() {
        let rates = rates(ScheduleKind::Cosine, 2, 11);
        assert_eq!(rates[..3], [0.5, 1.0, 1.0]);
        assert_eq!(rates[10], 0.1);
        assert!((rates[6] - 0.55).abs() < 1e-12);
        assert!(rates[2..].windows(2).all(|pair| pair[1] < pair[0]));
    }

    #[test]
    fn short_runs() {
        assert_eq!(rates(ScheduleKind::Cosine, 0, 1), [0.1]);
        assert_eq!(rates(ScheduleKind::Cosine, 0, 2), [1.0, 0.1]);
        assert_eq!(rates(ScheduleKind::Cosine, 2, 3), [0.5, 1.0, 0.1]);
        assert_eq!(rates(ScheduleKind::Cosine, 3, 3), [1.0 / 3.0, 2.0 / 3.0, 1.0]);
    }
}
