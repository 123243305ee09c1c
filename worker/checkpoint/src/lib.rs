//! Checkpoints of training runs.
//!
//! All ranks of a run hold the same state, so each writes a part of it: its *shard*, a safetensors
//! file. Once all shards are durable, rank 0 writes the *manifest*, which names every tensor and
//! every shard, with a digest of every 4 MiB. **A checkpoint exists if its manifest does.** Every
//! file appears completely or not at all, even after a crash of the machine, and no data is
//! returned before its digest has been verified.
//!
//! - [`format`](mod@format) is pure: sharding, headers, the manifest, validation.
//! - [`disk`] is the file system interface and its real implementation.
//! - [`store`] writes, lists, verifies, restores and prunes.
//! - [`lock`] keeps a second run out of a directory.
//! - [`export`](mod@export) writes one safetensors file for other programs.
//!
//! `docs/dev/checkpoints.md` describes the format and its guarantees.
#![forbid(unsafe_code)]

pub mod disk;
mod error;
pub mod export;
pub mod format;
pub mod lock;
pub mod store;

pub use error::CheckpointError;
pub use format::{CheckpointId, Manifest, Plan, Progress, Role, ShardDigest, TensorSpec};
pub use store::{Checkpoint, Chunk, ChunkReader, State, Store, StoreEntry, TensorSink, TensorSource};

// Tensors are written in their in-memory representation, and safetensors is little-endian.
const _: () = assert!(cfg!(target_endian = "little"), "checkpoints need a little-endian machine");
