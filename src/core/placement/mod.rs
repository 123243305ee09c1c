#![doc = include_str!("README.md")]

pub mod gpus;
mod model;
mod solve;
#[cfg(test)]
mod tests;

pub use model::{Assignment, Mode, NumaBinding, Place, Reason, Request, Warning};
pub use solve::solve;
