//! The optimizer step and the learning rate.
//!
//! ```text
//! reduced gradients -> sum_of_squares -> gradient_scale -> Optimizer::begin_step -> Optimizer::apply, bucket by bucket
//! ```
//!
//! Both give the same bits on every CPU and for any number of threads: ranks on different machines hold the same weights
//! without exchanging them. Nor does the division into buckets change a bit.
//!
//! A step is one pass over memory, two for the layer-wise rules, whose norms must be known first.

mod kernels;
mod norm;
mod rules;
mod schedule;
mod state;
#[cfg(test)]
mod tests;

pub use norm::{gradient_norm, gradient_scale, sum_of_squares};
pub use rules::Optimizer;
pub use schedule::Schedule;
