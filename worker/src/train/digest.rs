//! Digests of bytes.

use super::TrainError;
use super::engine::{Array, Engine, Held};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// Numbers that are read from an engine at once: a copy of a whole array might not fit into memory.
pub(super) const DIGEST_CHUNK: usize = 1 << 18;

/// Returns the digest as 32 hexadecimal digits.
pub(super) fn digest(bytes: &[u8]) -> String {
    format!("{:032x}", xxh3_128(bytes))
}

/// Digest of an engine's weights, in the form of [`digest`]. No step may be in flight.
///
/// # Errors
/// The engine failed.
pub(super) fn weights_digest(engine: &dyn Engine) -> Result<String, TrainError> {
    digest_of(engine, &[(Array::Weights, engine.layout().len)])
}

/// Digest of everything that a checkpoint takes from an engine and all ranks have in common:
/// weights, moments and running statistics. No step may be in flight.
///
/// # Errors
/// The engine failed.
pub(super) fn state_digest(engine: &dyn Engine) -> Result<String, TrainError> {
    let len = engine.layout().len;
    let mut arrays = vec![(Array::Weights, len)];
    let common = engine.moments().into_iter().enumerate().filter(|(_, moment)| moment.held == Held::ByAll);
    arrays.extend(common.map(|(index, _)| (Array::Moments(index), len)));
    arrays.push((Array::Statistics, engine.statistics().iter().map(|(_, len)| len).sum()));
    digest_of(engine, &arrays)
}

fn digest_of(engine: &dyn Engine, arrays: &[(Array, usize)]) -> Result<String, TrainError> {
    let mut hasher = Xxh3::new();
    let mut chunk = vec![0.0; DIGEST_CHUNK];
    for &(array, len) in arrays {
        for from in (0..len).step_by(DIGEST_CHUNK) {
            let numbers = &mut chunk[..DIGEST_CHUNK.min(len - from)];
            engine.read(array, from, numbers)?;
            hasher.update(bytemuck::cast_slice(numbers));
        }
    }
    Ok(format!("{:032x}", hasher.digest128()))
}
