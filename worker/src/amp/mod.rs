//! Automatic mixed precision: what keeps training in 16 bits as good as in 32.
//!
//! The weights that are stepped are f32; forward and backward read copies of them in 16 bits ([`HalfWeights`]), which the
//! optimizer writes in the same pass. Small gradients vanish in f16, so the loss is multiplied by a [`LossScaler`]'s factor
//! (Micikevicius and others 2018, arXiv 1710.03740). The order of a step is
//!
//! ```text
//! scale loss -> backward -> reduce -> check + unscale -> clip -> step or skip
//! ```
//!
//! 1. The gradient of the loss starts at [`LossScaler::scale`] times the share of the micro-batch, in every micro-batch of a
//!    merged batch: the scale changes between steps only.
//! 2. Gradients are reduced with the scale in them. An overflow of one rank is infinite or not a number there, and a sum
//!    with it is too: all ranks see it.
//! 3. [`sum_of_squares`](crate::optimizer::sum_of_squares) of the reduced gradients is finite exactly when all of them are.
//!    Its root divided by the scale is the norm.
//! 4. Finite: [`gradient_scale`](crate::optimizer::gradient_scale) clips by that norm and takes the scale out, in the
//!    optimizer's pass. Otherwise the step is skipped: no weight, no state of the optimizer and not its count of steps
//!    changes.
//! 5. [`LossScaler::update`] with the outcome. Equal gradients on all ranks give an equal scale on all ranks; nothing is
//!    exchanged for it.

mod scaler;
#[cfg(test)]
mod tests;
mod weights;

pub use scaler::{LossScaler, ScalerError, ScalerState};
pub use weights::HalfWeights;
