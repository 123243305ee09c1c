//! Evaluation on the validation set.

use super::TrainError;
use super::step::{StepConsensus, StepRequest};
use super::trainer::Trainer;
use crate::comm::CommError;
use switchyard_worker_contract::recorder::Operation;

/// Loss and accuracy on the validation set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ValidationResult {
    /// Mean loss in nats.
    pub loss: f64,
    /// Share of correct predictions; `None` if the model does not count them.
    pub accuracy: Option<f64>,
}

impl Trainer {
    /// Evaluates the validation set over all ranks; `None` without a validation split.
    ///
    /// # Errors
    /// The group failed, or data can no longer be read.
    pub fn evaluate(&mut self) -> Result<Option<ValidationResult>, TrainError> {
        self.evaluate_unless(&mut StepRequest::default).map(|(result, _)| result)
    }

    /// Like [`Trainer::evaluate`], but stops after a batch once any rank requests to stop, and then
    /// returns no result. `request` is called for each batch.
    ///
    /// # Errors
    /// The group failed, or data can no longer be read.
    pub fn evaluate_unless(
        &mut self,
        request: &mut dyn FnMut() -> StepRequest,
    ) -> Result<(Option<ValidationResult>, StepConsensus), TrainError> {
        self.engine.await_weights()?;
        let Some(set) = &mut self.validation else { return Ok((None, StepConsensus::default())) };
        // Without checkpoints, a stop request ends the group.
        let saves_first = self.training.config.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.on_suspend);
        let (mut loss, mut samples, mut correct, mut predicted) = (0.0, 0, 0, 0);
        let replica = self.training.replica(self.group.rank());
        for index in 0..set.batches() {
            self.recorder.begin(Operation::Evaluate, index);
            let (batch, count) = set.batch(replica, index)?;
            if count > 0
                && let Some(outcome) = self.engine.evaluate(batch)?
            {
                // The mean of a batch, in which each sample has the same number of targets.
                loss += outcome.loss * count as f64;
                samples += count;
                correct += outcome.correct;
                predicted += outcome.predicted;
            }
            // A stopping rank must not finish a long evaluation first.
            if let Some(cause) = self.group.failure() {
                return Err(CommError::Failed(cause).into());
            }
            if saves_first {
                let own = f64::from(u8::from(request().stop));
                let [stop] = self.group.sum("whether to stop", [own])?;
                if stop > 0.0 {
                    return Ok((None, StepConsensus { stop: true }));
                }
            }
        }
        let own = [loss, samples as f64, correct as f64, predicted as f64];
        let [loss, samples, correct, predicted] = self.group.sum("the validation", own)?;
        let loss = loss / samples;
        let accuracy = (predicted > 0.0).then(|| correct / predicted);
        self.recorder.begin(Operation::Between, 0);
        Ok((Some(ValidationResult { loss, accuracy }), StepConsensus::default()))
    }
}
