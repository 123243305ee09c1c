//! The optimizer step and the learning rate.
//!
//! ```text
//! reduced gradients -> sum_of_squares -> gradient_scale -> Optimizer::begin_step -> Optimizer::apply, bucket by bucket
//! ```
//!
//! Both give the same bits on every CPU and for any number of threads: ranks on different machines hold the same
//! weights without exchanging them. The division into buckets does not change a bit either.
//!
//! A step is one pass over memory, or two for the layer-wise rules, which need the norms first.

mod kernels;
mod norm;
mod rules;
mod schedule;
mod state;
mod steps;
#[cfg(test)]
mod tests;

pub use norm::{gradient_norm, gradient_scale, sum_of_squares};
pub use rules::Optimizer;
pub(crate) use rules::arrays;
pub use schedule::Schedule;
pub(crate) use state::decays;
pub use steps::Steps;
