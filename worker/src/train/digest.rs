//! Digests of bytes.

use xxhash_rust::xxh3::xxh3_128;

/// 32 hexadecimal digits of a digest of these bytes.
pub(super) fn digest(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}
