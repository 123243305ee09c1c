//! Running statistics of batch norms; identical on all ranks and for all engines.

/// Weight of a batch's statistics in the running ones; PyTorch's default.
const MOMENTUM: f32 = 0.1;

/// Updates the running statistics with those of the step.
pub(super) fn update_running(running: &mut [f32], batch: &[f32]) {
    for (running, batch) in running.iter_mut().zip(batch) {
        *running = (1.0 - MOMENTUM) * *running + MOMENTUM * batch;
    }
}

/// Adds this rank's share of a micro-batch's statistics to those of the step.
pub(super) fn add_share(sum: &mut [f32], own: &[f32], share: f32) {
    for (sum, own) in sum.iter_mut().zip(own) {
        *sum += share * own;
    }
}
