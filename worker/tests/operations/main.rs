//! CPU operations of the engine, each versus a plain f64 reference.

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
