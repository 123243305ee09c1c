//! Running statistics of batch norms; the same bits on every rank and for all engines.

/// Weight of a batch's statistics in the running ones; PyTorch's default.
const MOMENTUM: f32 = 0.1;

/// Moves the running statistics towards those of the step.
pub(super) fn observe(running: &mut [f32], batch: &[f32]) {
    for (running, batch) in running.iter_mut().zip(batch) {
        *running = (1.0 - MOMENTUM) * *running + MOMENTUM * batch;
    }
}

/// Adds this rank's part of the statistics of a micro-batch to those of the step.
pub(super) fn add_share(sum: &mut [f32], own: &[f32], share: f32) {
    for (sum, own) in sum.iter_mut().zip(own) {
        *sum += share * own;
    }
}
