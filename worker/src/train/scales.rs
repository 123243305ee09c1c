//! Loss scale and wire scale, and the overflow check of a step; the same for all engines.
//!
//! A loss or gradient that is not finite ends the run in every precision. A step is skipped instead
//! only if a smaller scale or a wider format could compute it: with a loss scale above 1, with FP16
//! activations, or with FP16 on the wire.

use super::TrainError;
use super::engine::Counters;
use super::report::StepReport;
use crate::amp::{LossScaler, WireScale};
use switchyard_worker_contract::config::{EngineConfig, HalfType, LossScaling, Precision, WireType};

/// With a static loss scale, the run fails after this many skipped steps in a row.
const MAX_SKIPPED_IN_A_ROW: u64 = 100;

/// Identical on all ranks.
pub(super) struct Scales {
    /// In mixed precision.
    pub loss: Option<LossScaler>,
    /// If gradients are sent as f16.
    pub wire: Option<WireScale>,
    /// Whether activations are f16, which have a smaller range than f32.
    has_narrow_range: bool,
}

impl Scales {
    pub fn new(config: &EngineConfig) -> Scales {
        let (loss, has_narrow_range) = match config.precision {
            Precision::Fp32 => (None, false),
            Precision::Amp(amp) => (Some(LossScaler::new(amp.loss_scaling)), amp.compute_type == HalfType::Fp16),
        };
        let wire = (config.overlap.wire_type == WireType::Fp16).then(|| WireScale::new(None));
        Scales { loss, wire, has_narrow_range }
    }

    /// Loss scale of the next step.
    pub fn loss_scale(&self) -> f32 {
        self.loss.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Whether the next step can begin before this one's outcome is known, because its loss scale
    /// does not depend on it.
    pub fn can_overlap_steps(&self) -> bool {
        !self.loss.as_ref().is_some_and(|scaler| matches!(scaler.config(), LossScaling::Dynamic { .. }))
    }

    /// In mixed precision.
    pub fn skipped_steps(&self) -> Option<u64> {
        self.loss.as_ref().map(|scaler| scaler.state().skipped_steps)
    }

    /// Checks a step for overflow and updates the scales. `scaled`: norm of the reduced gradients,
    /// including the loss scale. Returns the norm without it; `None`: skip the step.
    ///
    /// # Errors
    /// The run has diverged: later steps would fail too.
    pub fn check_overflow(&mut self, scaled: f64, report: &StepReport) -> Result<Option<f64>, TrainError> {
        let norm = scaled / report.loss_scale;
        let finite = norm.is_finite() && report.loss.is_finite();
        // Gradients much larger than the previous ones may overflow f16. The next ones are sent as
        // f32.
        let overflowed_wire = report.loss.is_finite() && self.wire.as_ref().is_some_and(|wire| wire.scale().is_some());
        let overflowed_scale = report.loss.is_finite() && report.loss_scale > 1.0;
        if let Some(wire) = &mut self.wire {
            wire.update(scaled);
        }
        if !(finite || overflowed_wire || overflowed_scale || self.has_narrow_range) {
            return Err(TrainError::NotFinite { step: report.step, loss: report.loss, norm });
        }
        if let Some(scaler) = &mut self.loss {
            let (scale, outcome) = (scaler.scale(), scaler.update(!finite));
            outcome.map_err(|error| TrainError::Overflow(error.to_string()))?;
            let skipped = scaler.state().skipped_in_a_row;
            if skipped >= MAX_SKIPPED_IN_A_ROW {
                let text = format!("gradients overflowed in {skipped} steps in a row with a loss scale of {scale}");
                return Err(TrainError::Overflow(text));
            }
        }
        Ok(finite.then_some(norm))
    }

    /// Counters for a checkpoint; the engine adds its own.
    pub fn counters(&self) -> Counters {
        Counters {
            optimizer_steps: 0,
            scaler: self.loss.as_ref().map(LossScaler::state),
            loss_scaling: self.loss.as_ref().map(LossScaler::config),
            wire_norm: self.wire.as_ref().and_then(WireScale::norm),
            half_kernel: None,
        }
    }

    /// Restores the scales of a checkpoint. Returns a note for the log if the configuration has
    /// changed since.
    ///
    /// # Errors
    /// The checkpoint's scales cannot be used.
    pub fn resume(&mut self, counters: &Counters, precision: Precision) -> Result<Option<String>, TrainError> {
        self.wire = self.wire.take().map(|_| WireScale::new(counters.wire_norm));
        let (Precision::Amp(amp), Some(state)) = (precision, counters.scaler) else { return Ok(None) };
        let scaler = LossScaler::restore(amp.loss_scaling, state, counters.loss_scaling);
        let scaler = scaler.map_err(|error| TrainError::Resume(error.to_string()))?;
        let (scale, saved) = (scaler.scale(), state.scale);
        self.loss = Some(scaler);
        Ok((scale != saved).then(|| {
            format!("spec.engine.precision.lossScaling: the loss scale is {scale}; the checkpoint has {saved}")
        }))
    }
}
