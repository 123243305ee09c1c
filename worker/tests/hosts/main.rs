//! Ranks as real processes: pods, their signals, devices, links and faults.

#![allow(clippy::unwrap_used, reason = "a test may end where a helper fails")]

mod bandwidth;
#[path = "../../../tests/src/chaos.rs"]
mod chaos;
#[path = "../collective_support/mod.rs"]
mod collective_support;
mod devices;
mod faults;
#[path = "../network/mod.rs"]
mod network;
#[path = "../plain/mod.rs"]
mod plain;
mod pod;
#[path = "../pods/mod.rs"]
mod pods;
#[path = "../../../tests/src/random.rs"]
mod random;
mod signals;
