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

/// Digest of all weights, in the form of [`digest`]. Collective if a rank has only some of them, or
/// updates only some of them. No step may be in flight.
///
/// # Errors
/// The engine or the group failed.
pub(super) fn weights_digest(engine: &mut dyn Engine) -> Result<String, TrainError> {
    engine.complete_weights()?;
    let len = engine.layout().len;
    if engine.has_all_weights() {
        return digest_of(&[(Array::Weights, len)], |array, from, numbers| engine.read(array, from, numbers));
    }
    digest_of(&[(Array::Weights, len)], |array, from, numbers| {
        engine.collect(&[(array, from, 0..numbers.len())], numbers)
    })
}

/// Digest of everything that a checkpoint takes from an engine and that all ranks of its stage have
/// in common: weights, moments and running statistics. No step may be in flight.
///
/// # Errors
/// The engine failed.
pub(super) fn state_digest(engine: &dyn Engine) -> Result<String, TrainError> {
    let len = engine.layout().len;
    let mut arrays = vec![(Array::Weights, len)];
    let common = engine.moments().into_iter().enumerate().filter(|(_, moment)| moment.held == Held::ByAll);
    arrays.extend(common.map(|(index, _)| (Array::Moments(index), len)));
    arrays.push((Array::Statistics, engine.statistics().iter().map(|(_, len)| len).sum()));
    digest_of(&arrays, |array, from, numbers| engine.read(array, from, numbers))
}

fn digest_of(
    arrays: &[(Array, usize)],
    mut read: impl FnMut(Array, usize, &mut [f32]) -> Result<(), TrainError>,
) -> Result<String, TrainError> {
    let mut hasher = Xxh3::new();
    let mut chunk = vec![0.0; DIGEST_CHUNK];
    for &(array, len) in arrays {
        for from in (0..len).step_by(DIGEST_CHUNK) {
            let numbers = &mut chunk[..DIGEST_CHUNK.min(len - from)];
            read(array, from, numbers)?;
            hasher.update(bytemuck::cast_slice(numbers));
        }
    }
    Ok(format!("{:032x}", hasher.digest128()))
}
