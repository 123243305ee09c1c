//! Synthetic text: tokens computed from the seed.

use super::random::mix;

/// Tokens of a phrase.
const PHRASE: u64 = 8;
/// Different phrases.
const PHRASES: u64 = 64;

/// A text of phrases in random order: after the first token or two of a phrase the rest is predictable.
#[derive(Debug)]
pub(super) struct MadeTokens {
    seed: u64,
    vocabulary: u64,
    len: u64,
}

impl MadeTokens {
    pub(super) fn new(seed: u64, vocabulary: u32, len: u64) -> Self {
        MadeTokens { seed: mix(seed), vocabulary: vocabulary.into(), len }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn read(&self, start: u64, to: &mut [u32]) {
        for (place, token) in (start..).zip(to) {
            let phrase = mix(self.seed ^ (place / PHRASE)) % PHRASES;
            // The phrases are the same in training and validation, although the seeds differ.
            *token = (mix(phrase * PHRASE + place % PHRASE) % self.vocabulary) as u32;
        }
    }
}
