//! Whole training runs with ranks as threads of the test.

#![allow(clippy::unwrap_used, reason = "a test may end where a helper fails")]

mod accuracy;
mod algorithms;
#[path = "../../../tests/src/chaos.rs"]
mod chaos;
mod export;
mod gpu_seeds;
mod local;
mod mixed;
mod options;
mod parameter_servers;
mod pipelines;
#[path = "../plain/mod.rs"]
mod plain;
#[path = "../ranks/mod.rs"]
mod ranks;
mod resume;
mod same_bits;
mod sharded;
mod shared_checkpoint;
mod shared_data;
mod top_k;
mod training;
