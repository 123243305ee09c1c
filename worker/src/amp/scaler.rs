//! Loss scaling.

use serde::{Deserialize, Serialize};
use switchyard_worker_contract::config::LossScaling;

/// Minimum scale: the smallest normal f16. The gradient of the loss starts at the scale (times a
/// share of the batch), so below it gradients lose bits from the start; and gradients that overflow
/// at 2^-14 would be above 2^29 unscaled, which no smaller scale can fix. PyTorch has no minimum:
/// there the scale falls to 0, and gradients become 0/0.
const MIN_SCALE: f32 = f32::from_bits((127 - 14) << 23);

/// A loss scale is unusable.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum ScalerError {
    /// The scale is already at its minimum.
    #[error("gradients are not finite even with a loss scale of {scale}, after {steps} skipped steps in a row")]
    Exhausted { scale: f32, steps: u64 },
    /// The saved scale is not a finite positive number.
    #[error("saved loss scale {0}, expected a finite number above 0")]
    Saved(f32),
}

/// Static or dynamic loss scaling; the dynamic scale evolves as in PyTorch's `GradScaler`, also in
/// f32.
///
/// A pure function of the outcomes passed to it: ranks that see the same reduced gradients have the
/// same scale.
#[derive(Debug, Clone, PartialEq)]
pub struct LossScaler {
    config: LossScaling,
    state: ScalerState,
}

/// The checkpointed state of a [`LossScaler`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ScalerState {
    pub scale: f32,
    /// Steps without overflow since the last overflow or growth.
    pub good_steps: u64,
    /// Total skipped steps.
    pub skipped_steps: u64,
    /// Consecutive skipped steps.
    pub skipped_in_a_row: u64,
}

impl LossScaler {
    pub fn new(config: LossScaling) -> LossScaler {
        let state = ScalerState { scale: first(config), good_steps: 0, skipped_steps: 0, skipped_in_a_row: 0 };
        LossScaler { config, state }
    }

    /// Restores a saved scaler. If the configured initial scale differs from `saved`, the
    /// configuration under which the state was saved, the configuration wins: the scale restarts
    /// from there. Checkpoints of older versions do not record that configuration; then only a
    /// static scale wins.
    ///
    /// # Errors
    /// The saved scale is not a finite positive number.
    pub fn restore(
        config: LossScaling,
        mut state: ScalerState,
        saved: Option<LossScaling>,
    ) -> Result<LossScaler, ScalerError> {
        if !(state.scale.is_finite() && state.scale > 0.0) {
            return Err(ScalerError::Saved(state.scale));
        }
        let is_dynamic = |config: LossScaling| matches!(config, LossScaling::Dynamic { .. });
        let changed =
            saved.is_some_and(|saved| (is_dynamic(saved), first(saved)) != (is_dynamic(config), first(config)));
        if changed || !is_dynamic(config) && state.scale != first(config) {
            state = ScalerState { scale: first(config), good_steps: 0, skipped_in_a_row: 0, ..state };
        }
        Ok(LossScaler { config, state })
    }

    pub fn config(&self) -> LossScaling {
        self.config
    }

    pub fn state(&self) -> ScalerState {
        self.state
    }

    /// Loss factor for all micro-batches of this step.
    pub fn scale(&self) -> f32 {
        self.state.scale
    }

    /// Ends a step. `overflowed`: a reduced gradient was not finite, and the step was skipped.
    ///
    /// # Errors
    /// A dynamic scale overflowed at its minimum: the gradients are not finite for a reason other
    /// than the scale, so no later step would succeed. A static scale has no alternative: see
    /// [`ScalerState::skipped_in_a_row`].
    pub fn update(&mut self, overflowed: bool) -> Result<(), ScalerError> {
        let state = &mut self.state;
        state.skipped_steps += u64::from(overflowed);
        state.skipped_in_a_row = if overflowed { state.skipped_in_a_row + 1 } else { 0 };
        let LossScaling::Dynamic { growth_factor, backoff_factor, growth_interval_steps, .. } = self.config else {
            return Ok(());
        };
        if overflowed {
            state.good_steps = 0;
            if state.scale <= MIN_SCALE {
                return Err(ScalerError::Exhausted { scale: state.scale, steps: state.skipped_in_a_row });
            }
            state.scale = (state.scale * backoff_factor as f32).max(MIN_SCALE);
            return Ok(());
        }
        state.good_steps += 1;
        if state.good_steps >= growth_interval_steps {
            state.good_steps = 0;
            let grown = state.scale * growth_factor as f32;
            if grown.is_finite() {
                state.scale = grown;
            }
        }
        Ok(())
    }
}

/// The scale of the first step, in f32.
fn first(config: LossScaling) -> f32 {
    match config {
        LossScaling::Static { scale } => scale as f32,
        LossScaling::Dynamic { initial_scale, .. } => initial_scale as f32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn dynamic(initial_scale: f64, growth_interval_steps: u64) -> LossScaling {
        LossScaling::Dynamic { initial_scale, growth_factor: 2.0, backoff_factor: 0.5, growth_interval_steps }
    }

    /// The scale after each outcome.
    fn scales(config: LossScaling, outcomes: &[bool]) -> Vec<f32> {
        let mut scaler = LossScaler::new(config);
        let mut next = |&overflowed| {
            scaler.update(overflowed).unwrap();
            scaler.scale()
        };
        outcomes.iter().map(&mut next).collect()
    }

    #[test]
    fn grows_after_good_steps_in_a_row_and_backs_off_at_each_overflow() {
        let (good, bad) = (false, true);
        let outcomes = [good, good, good, good, bad, good, good, bad, bad, good, good, good];
        let want = [8.0, 8.0, 16.0, 16.0, 8.0, 8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 4.0];
        assert_eq!(scales(dynamic(8.0, 3), &outcomes), want);
    }

    #[test]
    fn a_static_scale_only_counts() {
        let mut scaler = LossScaler::new(LossScaling::Static { scale: 128.0 });
        for overflowed in [true, false, true, true] {
            scaler.update(overflowed).unwrap();
            assert_eq!(scaler.scale(), 128.0);
        }
        assert_eq!((scaler.state().skipped_steps, scaler.state().skipped_in_a_row), (3, 2));
        for _ in 0..1000 {
            scaler.update(true).unwrap();
        }
    }

    #[test]
    fn stays_finite() {
        let scales = scales(dynamic(1.0, 1), &[false; 200]);
        assert_eq!(scales[126..], [2f32.powi(127); 74]);
    }

    #[test]
    fn gives_up_when_the_minimum_overflows() {
        let mut scaler = LossScaler::new(dynamic(65_536.0, 10));
        for _ in 0..30 {
            scaler.update(true).unwrap();
        }
        assert_eq!(scaler.scale(), 2f32.powi(-14));
        // The minimum itself is tried, and one good step is enough to continue.
        scaler.update(false).unwrap();
        let error = scaler.update(true).unwrap_err();
        assert_eq!(error, ScalerError::Exhausted { scale: MIN_SCALE, steps: 1 });
        assert_eq!(scaler.state().skipped_steps, 31);
    }

    #[test]
    fn a_saved_scale_must_be_valid() {
        for scale in [0.0, -1.0, f32::INFINITY, f32::NAN] {
            let state = ScalerState { scale, ..LossScaler::new(dynamic(1.0, 1)).state() };
            assert!(matches!(LossScaler::restore(dynamic(1.0, 1), state, None), Err(ScalerError::Saved(_))), "{scale}");
        }
    }

    #[test]
    fn a_changed_configuration_wins_over_the_saved_scale() {
        let fixed = |scale| LossScaling::Static { scale };
        let grown = |saved| {
            let mut scaler = LossScaler::new(saved);
            (0..3).for_each(|_| scaler.update(false).unwrap());
            scaler.update(true).unwrap();
            scaler.state()
        };
        let faster = LossScaling::Dynamic {
            initial_scale: 8.0,
            growth_factor: 4.0,
            backoff_factor: 0.25,
            growth_interval_steps: 1,
        };
        // 8 -> 16, 32, 64, and back to 32.
        for (saved, config, scale) in [
            (fixed(128.0), fixed(1024.0), 1024.0),
            (dynamic(8.0, 1), fixed(128.0), 128.0),
            (fixed(128.0), dynamic(8.0, 1), 8.0),
            (dynamic(8.0, 1), dynamic(512.0, 1), 512.0),
            (dynamic(8.0, 1), faster, 32.0),
            (dynamic(8.0, 1), dynamic(8.0, 1), 32.0),
            (fixed(128.0), fixed(128.0), 128.0),
        ] {
            let restored = LossScaler::restore(config, grown(saved), Some(saved)).unwrap();
            assert_eq!(restored.scale(), scale, "{saved:?} to {config:?}");
            assert_eq!(restored.state().skipped_steps, 1, "counts stay");
            let old = LossScaler::restore(config, grown(saved), None).unwrap();
            let is_static = matches!(config, LossScaling::Static { .. });
            assert_eq!(old.scale(), if is_static { scale } else { grown(saved).scale }, "{saved:?} to {config:?}");
        }
    }

    fn config() -> impl Strategy<Value = LossScaling> {
        (1.0f64..1e9, 1.0001f64..4.0, 0.05f64..0.95, 1u64..20).prop_map(
            |(initial_scale, growth_factor, backoff_factor, growth_interval_steps)| LossScaling::Dynamic {
                initial_scale,
                growth_factor,
                backoff_factor,
                growth_interval_steps,
            },
        )
    }

    proptest! {
        /// PyTorch 2's `_amp_update_scale_`, with a minimum.
        #[test]
        fn matches_pytorch(config in config(), outcomes in prop::collection::vec(any::<bool>(), 0..300)) {
            let LossScaling::Dynamic { initial_scale, growth_factor, backoff_factor, growth_interval_steps } = config
            else { unreachable!() };
            let (mut scale, mut tracker, mut skipped) = (initial_scale as f32, 0, 0);
            let mut scaler = LossScaler::new(config);
            for overflowed in outcomes {
                prop_assert_eq!(scaler.update(overflowed).is_err(), overflowed && scale == MIN_SCALE);
                if overflowed {
                    scale = (scale * backoff_factor as f32).max(MIN_SCALE);
                    skipped += 1;
                }
                tracker = if overflowed { 0 } else { tracker + 1 };
                if tracker == growth_interval_steps {
                    let grown = scale * growth_factor as f32;
                    scale = if grown.is_finite() { grown } else { scale };
                    tracker = 0;
                }
                prop_assert_eq!((scaler.scale(), scaler.state().skipped_steps), (scale, skipped));
                prop_assert!(scaler.scale().is_finite() && scaler.scale() >= MIN_SCALE);
            }
        }

        #[test]
        fn a_restored_scaler_continues_identically(
            config in config(), before in prop::collection::vec(prop::bool::weighted(0.1), 0..100),
            after in prop::collection::vec(prop::bool::weighted(0.1), 0..100),
        ) {
            let mut scaler = LossScaler::new(config);
            // An exhausted scale is valid here.
            for overflowed in before {
                let _ = scaler.update(overflowed);
            }
            let text = serde_json::to_string(&scaler.state()).unwrap();
            let mut restored = LossScaler::restore(config, serde_json::from_str(&text).unwrap(), Some(config)).unwrap();
            for overflowed in after {
                prop_assert_eq!(&restored, &scaler);
                prop_assert_eq!(scaler.update(overflowed), restored.update(overflowed));
            }
            prop_assert_eq!(restored, scaler);
        }
    }
}
