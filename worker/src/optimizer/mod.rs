//! Optimizers and learning-rate schedules.
//!
//! ```text
//! reduced gradients -> sum_of_squares -> gradient_scale -> Optimizer::begin_step
//!     -> Optimizer::apply, bucket by bucket
//! ```
//!
//! Both are bit-identical on every CPU and for any number of threads, so ranks on different
//! machines hold the same weights without exchanging them. The results do not depend on the bucket
//! size either.
//!
//! A step is one pass over memory, or two for the layer-wise rules, which need the norms first.
//!
//! With sharding, a rank holds the state of its own parts of the layout and updates only them
//! ([`Ownership`]). Norms are sums over the parts of all ranks.

mod kernels;
mod norm;
mod rules;
mod schedule;
mod state;
mod steps;
#[cfg(test)]
mod tests;

pub use norm::{LANES, add_squares, gradient_norm, gradient_scale, sum_of_squares};
pub use rules::Optimizer;
pub(crate) use rules::{arrays, is_layer_wise};
pub use schedule::Schedule;
pub(crate) use state::decays;
pub use state::{GradientSlice, Ownership};
pub use steps::Steps;
