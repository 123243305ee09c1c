//! Automatic mixed precision (AMP): 16-bit training with f32 accuracy.
//!
//! The optimizer updates f32 weights; forward and backward read 16-bit copies of them
//! ([`HalfWeights`]), which the optimizer writes in the same pass. Small gradients underflow in
//! f16, so the loss is multiplied by the factor of a [`LossScaler`] (Micikevicius et al. 2018,
//! arXiv 1710.03740). The order of a step is
//!
//! ```text
//! scale loss -> backward -> reduce -> check + unscale -> clip -> step or skip
//! ```
//!
//! 1. The gradient of the loss starts at [`LossScaler::scale`] times the micro-batch's share, in
//!    every micro-batch of a merged batch: the scale changes only between steps.
//! 2. Gradients are reduced in scaled form. An overflow on one rank is infinite or NaN, and so is
//!    every sum that includes it, so all ranks see it.
//! 3. [`sum_of_squares`](crate::optimizer::sum_of_squares) of the reduced gradients is finite
//!    exactly when all of them are finite. Its root divided by the scale is the norm.
//! 4. If finite, [`gradient_scale`](crate::optimizer::gradient_scale) clips by that norm and
//!    removes the scale, in the optimizer's pass. Otherwise the step is skipped: the weights, the
//!    optimizer's state and its step count do not change.
//! 5. [`LossScaler::update`] receives the outcome. Equal gradients on all ranks yield equal scales
//!    on all ranks, so no communication is needed.

mod scaler;
#[cfg(test)]
mod tests;
mod weights;
mod wire;

pub use scaler::{LossScaler, ScalerError, ScalerState};
pub use weights::HalfWeights;
pub use wire::WireScale;
