//! Synthetic text: tokens generated from the seed.

use super::random::mix;

/// Tokens per phrase.
const PHRASE: u64 = 8;
/// Number of distinct phrases.
const PHRASES: u64 = 64;

/// A random sequence of phrases: after the first token or two of a phrase, the rest is predictable.
#[derive(Debug)]
pub(super) struct SyntheticTokens {
    seed: u64,
    vocabulary: u64,
    len: u64,
}

impl SyntheticTokens {
    pub(super) fn new(seed: u64, vocabulary: u32, len: u64) -> Self {
        SyntheticTokens { seed: mix(seed), vocabulary: vocabulary.into(), len }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn read(&self, start: u64, to: &mut [u32]) {
        for (place, token) in (start..).zip(to) {
            let phrase = mix(self.seed ^ (place / PHRASE)) % PHRASES;
            // Training and validation share the phrases, although their seeds differ.
            *token = (mix(phrase * PHRASE + place % PHRASE) % self.vocabulary) as u32;
        }
    }
}
