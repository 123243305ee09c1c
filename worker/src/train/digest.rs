//! Digests of bytes.

use xxhash_rust::xxh3::xxh3_128;

/// Returns the digest as 32 hexadecimal digits.
pub(super) fn digest(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}
