//! The optimizer step and the learning rate.
//!
//! Both give the same bits on every CPU and for any number of threads: ranks on different machines hold the same weights
//! without exchanging them.

mod adamw;
mod schedule;

pub use adamw::{AdamW, gradient_norm, sum_of_squares};
pub use schedule::Schedule;
