//! Checkpoints of training runs.
//!
//! All ranks of a run hold the same state, so each writes a part of it: its *shard*, a safetensors file. When all
//! shards are on the disk, rank 0 writes the *manifest*, which names every tensor, every shard and a digest of every 4
//! MiB of them. **A checkpoint exists if its manifest does.** Every file appears completely or not at all, even after a
//! crash of the machine, and nothing is handed out before its digest was compared.
//!
//! - [`format`](mod@format) is pure: the division into shards, headers, the manifest, what is refused.
//! - [`disk`] is the interface to a file system, and the real file system.
//! - [`store`] writes, lists, verifies, restores and prunes.
//! - [`export`](mod@export) writes one safetensors file for other programs.
//!
//! The format and its guarantees are described in `docs/dev/checkpoints.md`.
#![forbid(unsafe_code)]

pub mod disk;
mod error;
pub mod export;
pub mod format;
pub mod store;

pub use error::CheckpointError;
pub use format::{CheckpointId, Manifest, Plan, Progress, Role, ShardDigest, TensorSpec};
pub use store::{Checkpoint, Found, State, Store, TensorSink, TensorSource};

// Tensors are written as they are in memory, and safetensors is little-endian.
const _: () = assert!(cfg!(target_endian = "little"), "checkpoints need a little-endian machine");
