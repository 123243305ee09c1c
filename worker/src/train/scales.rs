//! The scales of gradients, and whether the weights follow the gradients of a step; the same for all engines.

use super::TrainError;
use super::engine::Counters;
use super::report::StepReport;
use crate::amp::{LossScaler, WireScale};
use switchyard_worker_contract::config::{EngineConfig, LossScaling, Precision, WireType};

/// With a static loss scale, steps that may be skipped in a row before the run gives up.
const MOST_SKIPPED: u64 = 100;

/// The same bits on every rank.
pub(super) struct Scales {
    /// In mixed precision.
    pub loss: Option<LossScaler>,
    /// If gradients travel in f16.
    pub wire: Option<WireScale>,
}

impl Scales {
    pub fn new(config: &EngineConfig) -> Scales {
        let loss = match config.precision {
            Precision::Fp32 => None,
            Precision::Amp(amp) => Some(LossScaler::new(amp.loss_scaling)),
        };
        Scales { loss, wire: (config.overlap.wire_type == WireType::Fp16).then(|| WireScale::new(None)) }
    }

    /// The factor of the loss in the next step.
    pub fn loss_scale(&self) -> f32 {
        self.loss.as_ref().map_or(1.0, LossScaler::scale)
    }

    /// Whether the next step may begin before the outcome of this one is known: its factor of the loss is the same.
    pub fn is_late(&self) -> bool {
        !self.loss.as_ref().is_some_and(|scaler| matches!(scaler.config(), LossScaling::Dynamic { .. }))
    }

    /// In mixed precision.
    pub fn skipped_steps(&self) -> Option<u64> {
        self.loss.as_ref().map(|scaler| scaler.state().skipped_steps)
    }

    /// Moves on after a step. `scaled`: the norm of the reduced gradients, with the loss scale in it. Returns the norm without it; `None`: the
    /// step is skipped.
    ///
    /// # Errors
    /// No later step would do better.
    pub fn judge(&mut self, scaled: f64, report: &StepReport) -> Result<Option<f64>, TrainError> {
        let norm = scaled / report.loss_scale;
        let finite = norm.is_finite() && report.loss.is_finite();
        // Gradients that are much larger than those before them may not fit into f16. The next ones travel in 4 bytes.
        let does_not_fit = report.loss.is_finite() && self.wire.as_ref().is_some_and(|wire| wire.scale().is_some());
        if let Some(wire) = &mut self.wire {
            wire.update(scaled);
        }
        if let Some(scaler) = &mut self.loss {
            let (scale, outcome) = (scaler.scale(), scaler.update(!finite));
            outcome.map_err(|error| TrainError::Overflow(error.to_string()))?;
            let skipped = scaler.state().skipped_in_a_row;
            if skipped >= MOST_SKIPPED {
                let text = format!("gradients overflowed in {skipped} steps in a row with a loss scale of {scale}");
                return Err(TrainError::Overflow(text));
            }
        } else if !finite && !does_not_fit {
            return Err(TrainError::NotFinite { step: report.step, loss: report.loss, norm });
        }
        Ok(finite.then_some(norm))
    }

    /// For a checkpoint; an engine adds what else it counts.
    pub fn counters(&self) -> Counters {
        Counters {
            optimizer_steps: 0,
            scaler: self.loss.as_ref().map(LossScaler::state),
            loss_scaling: self.loss.as_ref().map(LossScaler::config),
            wire_norm: self.wire.as_ref().and_then(WireScale::norm),
            half_kernel: None,
        }
    }

    /// With the scales of a checkpoint. Returns what the configuration has changed since, for the log.
    ///
    /// # Errors
    /// They cannot be used.
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
