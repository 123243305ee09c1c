//! Collectives between ranks as threads of the test, over every transport.

#![allow(clippy::unwrap_used, reason = "a test may end where a helper fails")]

mod attempts;
#[path = "../collective_support/mod.rs"]
mod collective_support;
mod numerics;
mod operations;
mod packed;
mod wire;
