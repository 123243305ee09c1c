//! Runs the worker itself on the emulated CUDA libraries: whole GPU runs compared with the same
//! runs on CPUs.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)]

mod attention;
mod cache;
#[path = "../collective_support/mod.rs"]
mod collective_support;
mod convolutions;
mod failures;
mod fp8;
mod graphs;
mod health;
mod inspection;
mod kernels;
mod late;
mod losses;
mod nccl;
#[path = "../plain/mod.rs"]
mod plain;
#[path = "../pods/mod.rs"]
mod pods;
mod products;
mod ranges;
mod resume;
mod software;
mod support;
