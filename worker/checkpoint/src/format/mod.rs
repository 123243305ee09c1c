//! The format, independent of any disk: names, sharding, headers and the manifest.

mod header;
mod id;
mod manifest;
mod plan;
#[cfg(test)]
mod tests;

pub use id::CheckpointId;
pub(crate) use id::{MANIFEST_FILE, is_ours, shard_file, temporary};
pub use manifest::{CheckpointInfo, Digest, Manifest, Progress, ShardDigest};
pub use plan::{Piece, Plan, Role, TensorSpec};

pub(crate) use header::{ShardLabel, TensorEntry, decode as decode_header, encode as encode_header};

/// Format version that this crate writes and reads.
pub const FORMAT: u32 = 1;
/// Shard bytes covered by one digest.
pub const CHUNK: usize = 4 << 20;
/// Longest shard header in bytes: room for 100,000 tensors. safetensors itself allows 100 MB.
pub const HEADER_LIMIT: u64 = 16 << 20;
/// Longest manifest in bytes: room for the digests of 7 TiB.
pub const MANIFEST_LIMIT: u64 = 64 << 20;
/// Largest world size.
pub const WORLD_LIMIT: usize = 1 << 16;

/// A value that is not as expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: got {got}; expected {expected}")]
pub struct Fault {
    pub what: String,
    pub got: String,
    pub expected: String,
}

/// Longest quotation of the actual value, in characters.
const GOT_LIMIT: usize = 300;

impl Fault {
    /// Describes a fault. The actual value may come from an untrusted file and ends up in terminals
    /// and logs, so it is truncated and its control characters are replaced.
    pub(crate) fn new(what: impl Into<String>, got: impl ToString, expected: impl ToString) -> Fault {
        let got = got.to_string();
        let mut text: String = got.chars().take(GOT_LIMIT).map(|c| if c.is_control() { '?' } else { c }).collect();
        if text.len() < got.len() {
            text.push_str(" ...");
        }
        Fault { what: what.into(), got: text, expected: expected.to_string() }
    }
}
