//! Samples of a token sequence: windows for next-token prediction, and sequences with masked
//! tokens.

use super::batch::Row;
use super::entropy::{self, Entropies};
use super::error::DataError;
use super::part::{Draw, EpochSize, Part, SampleError, Scratch};
use super::permutation::Permutation;
use super::random::Random;
use super::task::{Masking, WindowKind};
use super::tokens::Tokens;

/// Windows of a token sequence.
#[derive(Debug)]
pub(super) struct Windows {
    pub tokens: Tokens,
    pub shape: WindowKind,
}

impl Part for Windows {
    fn epoch_size(&self) -> EpochSize {
        let usable = self.tokens.len().saturating_sub(self.shape.needed(0));
        EpochSize { samples: usable / self.shape.stride(), slack: usable % self.shape.stride() }
    }

    fn write(&self, draw: &Draw, row: &mut Row<'_>, scratch: &mut Scratch) -> Result<(), SampleError> {
        let start = draw.offset + draw.sample * self.shape.stride();
        match &self.shape {
            WindowKind::NextToken { context, .. } => {
                let context = *context as usize;
                scratch.tokens.resize(context + 1, 0);
                self.tokens.read(start, &mut scratch.tokens, &mut scratch.bytes)?;
                row.tokens.copy_from_slice(&scratch.tokens[..context]);
                row.targets.copy_from_slice(&scratch.tokens[1..]);
            }
            WindowKind::Masked(masking) => {
                let mut random = Random::new(draw.key);
                self.segments(masking, start, &mut random, row, scratch)?;
                mask_tokens(masking, &mut random, row);
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), DataError> {
        self.tokens.check()
    }

    fn windows(&self) -> Option<WindowKind> {
        Some(self.shape)
    }

    fn entropies(&self) -> Result<Option<Entropies>, DataError> {
        match self.shape {
            WindowKind::NextToken { vocabulary, .. } if self.tokens.is_real() => entropy::of(&self.tokens, vocabulary),
            _ => Ok(None),
        }
    }

    fn memory_bytes(&self) -> u64 {
        self.tokens.memory_bytes()
    }
}

impl Windows {
    /// Fills a row with `CLS text SEP`, or `CLS a SEP b SEP`, where b follows a half of the time
    /// and otherwise comes from elsewhere.
    fn segments(
        &self,
        masking: &Masking,
        start: u64,
        random: &mut Random,
        row: &mut Row<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), DataError> {
        let first = masking.first_segment() as usize;
        let (tokens, bytes) = (&mut *row.tokens, &mut scratch.bytes);
        tokens[0] = masking.cls;
        self.tokens.read(start, &mut tokens[1..=first], bytes)?;
        tokens[first + 1] = masking.sep;
        row.segments.fill(0);
        if masking.next_sentence {
            row.segments[first + 2..].fill(1);
            let end = tokens.len() - 1;
            let second = &mut tokens[first + 2..end];
            let follows = random.below(2);
            let mut from = start + first as u64;
            if follows == 0 {
                // Any position except the true one.
                let positions = self.tokens.len() - second.len() as u64;
                let other = random.below(positions);
                from = other + u64::from(other >= from);
            }
            self.tokens.read(from, second, bytes)?;
            tokens[end] = masking.sep;
            row.next_sentence[0] = follows as u32;
        }
        Ok(())
    }
}

/// Chooses the tokens to predict among the non-special ones and masks them: of ten, eight become
/// MASK, one becomes a random token, and one is unchanged (Devlin et al. 2019, appendix A.1).
fn mask_tokens(masking: &Masking, random: &mut Random, row: &mut Row<'_>) {
    let order = Permutation::new(masking.window().into(), random.bits());
    for (choice, position) in row.positions.iter_mut().enumerate() {
        *position = order.at(choice as u64) as u32;
    }
    row.positions.sort_unstable();
    for (position, target) in row.positions.iter_mut().zip(&mut *row.targets) {
        // Skip CLS and, in the second segment, the SEP between the segments.
        *position += 1 + u32::from(*position >= masking.first_segment());
        let token = &mut row.tokens[*position as usize];
        *target = *token;
        match random.below(10) {
            0..8 => *token = masking.mask,
            8 => *token = random.below(masking.vocabulary.into()) as u32,
            _ => {}
        }
        *position += row.first;
    }
}
