//! Operations of the engine on CPUs, each against plain code in double precision.

#![allow(clippy::unwrap_used, reason = "a test may end where a helper fails")]

#[macro_use]
mod support;

mod activation;
mod attention;
mod convolution;
mod embedding;
mod entropy;
mod norm;
mod numbers;
mod pooling;
mod products;
mod tensor;
