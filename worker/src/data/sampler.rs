//! Which samples a rank trains on at a step: a pure function.
//!
//! An epoch divides the text into `N` windows of `T` tokens and puts them in an order of its own:
//!
//! ```text
//! windows in order   w0 w1 w2 w3 w4 w5 w6 w7 | w8 ...          G = world x batch x merge = 8
//! step               `--------- 0 ---------' `-- 1
//! rank               `---- 0 --' `---- 1 --'                   batch x merge = 4 each
//! micro-batch        `-0-' `-1-' `-0-' `-1-'                   batch = 2 each
//! ```
//!
//! So the windows of a step depend on `G` only, not on how it is divided: two ranks with batch 2 and merge 2, one rank
//! with batch 8, and eight ranks with batch 1 see the same. What is left at the end of an epoch, less than a step, is
//! left out; which windows these are changes from epoch to epoch.

use super::error::DataError;
use super::permutation::{Permutation, mix};

/// How a step is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Tokens per window, `T`.
    pub context_length: u32,
    /// Windows per micro-batch of one rank.
    pub batch_size: u32,
    /// Micro-batches per step of one rank.
    pub merge: u32,
    /// Ranks.
    pub world: u32,
}

/// Where the windows of every step start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampler {
    shape: Shape,
    seed: u64,
    /// Windows of an epoch.
    windows: u64,
    /// Tokens that no window needs: an epoch's first window starts at any of 0 to `slack`.
    slack: u64,
}

impl Sampler {
    /// A sampler over `train_tokens` tokens. A window needs the token after its last one, as the last target.
    ///
    /// # Errors
    /// A size is 0, or the text is too short for one step.
    pub fn new(train_tokens: u64, shape: Shape, seed: u64) -> Result<Self, DataError> {
        for (size, field) in [
            (shape.context_length, "spec.engine.model.gpt.contextLength"),
            (shape.batch_size, "spec.engine.batchSizePerProcess"),
            (shape.merge, "spec.engine.batchMerge"),
            (shape.world, "number of processes"),
        ] {
            if size == 0 {
                return Err(DataError::Zero { field });
            }
        }
        let context_length = u64::from(shape.context_length);
        let usable = train_tokens.saturating_sub(1);
        let sampler = Self { shape, seed, windows: usable / context_length, slack: usable % context_length };
        let windows = sampler.windows_per_step();
        if sampler.windows < windows {
            let needed = windows.saturating_mul(context_length).saturating_add(1);
            return Err(DataError::TooShort { got: train_tokens, needed, windows, context_length });
        }
        Ok(sampler)
    }

    /// How a step is divided.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Windows of an epoch, `N`.
    pub fn windows(&self) -> u64 {
        self.windows
    }

    /// Windows of a step over all ranks, `G`.
    pub fn windows_per_step(&self) -> u64 {
        let Shape { batch_size, merge, world, .. } = self.shape;
        u64::from(batch_size).saturating_mul(merge.into()).saturating_mul(world.into())
    }

    /// Steps of an epoch, at least 1.
    pub fn steps_per_epoch(&self) -> u64 {
        self.windows / self.windows_per_step()
    }

    /// The epoch a step belongs to, from 0.
    pub fn epoch(&self, step: u64) -> u64 {
        step / self.steps_per_epoch()
    }

    /// First tokens of the windows of one micro-batch, `batch_size` of them.
    ///
    /// # Panics
    /// `rank` or `micro_batch` is not below the world or merge of the shape.
    pub fn micro_batch(&self, step: u64, rank: u32, micro_batch: u32) -> impl ExactSizeIterator<Item = usize> + use<> {
        let Shape { context_length, batch_size, merge, world } = self.shape;
        assert!(rank < world, "rank {rank} of {world}");
        assert!(micro_batch < merge, "micro-batch {micro_batch} of {merge}");
        let epoch = self.epoch(step);
        let share = u64::from(batch_size) * u64::from(merge);
        let first = (step % self.steps_per_epoch()) * self.windows_per_step()
            + u64::from(rank) * share
            + u64::from(micro_batch) * u64::from(batch_size);
        let key = mix(self.seed ^ mix(epoch));
        let order = Permutation::new(self.windows, key);
        let offset = mix(key) % (self.slack + 1);
        (0..batch_size).map(move |index| {
            let window = order.at(first + u64::from(index));
            (offset + window * u64::from(context_length)) as usize
        })
    }
}

/// Writes the windows that start at `starts`: row by row the tokens, and the tokens that follow each of them.
///
/// # Panics
/// A window and the token after it is not inside of `text`, or the slices are no whole number of rows.
pub(super) fn fill(text: &[u8], starts: impl ExactSizeIterator<Item = usize>, inputs: &mut [u16], targets: &mut [u16]) {
    let context_length = inputs.len() / starts.len().max(1);
    assert!(inputs.len() == targets.len() && inputs.len() == context_length * starts.len(), "rows of equal length");
    let rows = inputs.chunks_exact_mut(context_length).zip(targets.chunks_exact_mut(context_length));
    for (start, (inputs, targets)) in starts.zip(rows) {
        let window = &text[start..start + context_length + 1];
        for (token, byte) in inputs.iter_mut().zip(window) {
            *token = u16::from(*byte);
        }
        for (token, byte) in targets.iter_mut().zip(&window[1..]) {
            *token = u16::from(*byte);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn shape(context_length: u32, batch_size: u32, merge: u32, world: u32) -> Shape {
        Shape { context_length, batch_size, merge, world }
    }

    /// The windows of one step in order: rank by rank, micro-batch by micro-batch.
    fn step(sampler: &Sampler, step: u64) -> Vec<usize> {
        let Shape { merge, world, .. } = sampler.shape();
        (0..world)
            .flat_map(|rank| (0..merge).map(move |micro| (rank, micro)))
            .flat_map(|(rank, micro)| sampler.micro_batch(step, rank, micro))
            .collect()
    }

    #[test]
    fn counts() {
        let sampler = Sampler::new(1001, shape(10, 4, 2, 3), 1).expect("enough");
        assert_eq!((sampler.windows(), sampler.windows_per_step(), sampler.steps_per_epoch()), (100, 24, 4));
        assert_eq!((sampler.epoch(3), sampler.epoch(4)), (0, 1));
    }

    #[test]
    fn too_short() {
        assert!(Sampler::new(241, shape(10, 4, 2, 3), 1).is_ok());
        let error = Sampler::new(240, shape(10, 4, 2, 3), 1).expect_err("one token less");
        assert!(matches!(error, DataError::TooShort { got: 240, needed: 241, windows: 24, context_length: 10 }));
        assert!(error.to_string().contains("240 tokens for training: one step needs 241"), "{error}");
        assert!(Sampler::new(0, shape(10, 1, 1, 1), 1).is_err());
        let error = Sampler::new(1000, shape(10, 1, 0, 1), 1).expect_err("merge of 0");
        assert_eq!(error.to_string(), "spec.engine.batchMerge: got 0: expected at least 1");
        let huge = shape(u32::MAX, u32::MAX, u32::MAX, u32::MAX);
        assert!(matches!(Sampler::new(u64::MAX, huge, 1), Err(DataError::TooShort { needed: u64::MAX, .. })));
    }

    #[test]
    fn seeds_and_epochs_differ() {
        let sampler = |seed| Sampler::new(10_005, shape(10, 4, 1, 2), seed).expect("enough");
        let epoch = sampler(1).steps_per_epoch();
        assert_ne!(step(&sampler(1), 0), step(&sampler(2), 0));
        assert_ne!(step(&sampler(1), 0), step(&sampler(1), epoch));
        let offsets: BTreeSet<usize> = (0..50).map(|number| step(&sampler(1), number * epoch)[0] % 10).collect();
        assert!(offsets.len() > 3, "the windows of an epoch start at {offsets:?}");
    }

    #[test]
    fn tokens_and_targets() {
        let text: Vec<u8> = (0..20).collect();
        let (mut inputs, mut targets) = ([0; 6], [0; 6]);
        fill(&text, [16, 2].into_iter(), &mut inputs, &mut targets);
        assert_eq!(inputs, [16, 17, 18, 2, 3, 4]);
        assert_eq!(targets, [17, 18, 19, 3, 4, 5]);
    }

    proptest! {
        #[test]
        fn a_step_does_not_depend_on_its_division(
            tokens in 2_000u64..6_000, context in 1u32..40, seed in any::<u64>(), number in 0u64..300,
        ) {
            // 12 windows per step, divided in every way.
            let mut all = BTreeSet::new();
            for world in [1, 2, 3, 4, 6, 12] {
                for merge in (1..=12).filter(|merge| 12 / world % merge == 0) {
                    let shape = shape(context, 12 / world / merge, merge, world);
                    all.insert(step(&Sampler::new(tokens, shape, seed).expect("enough"), number));
                }
            }
            prop_assert_eq!(all.len(), 1);
        }

        #[test]
        fn every_window_at_most_once_per_epoch(
            tokens in 100u64..4_000, context in 1u32..20, batch in 1u32..4, merge in 1u32..3, world in 1u32..4,
            seed in any::<u64>(), epoch in 0u64..5,
        ) {
            let Ok(sampler) = Sampler::new(tokens, shape(context, batch, merge, world), seed) else { return Ok(()) };
            let mut seen = BTreeSet::new();
            for number in 0..sampler.steps_per_epoch() {
                for start in step(&sampler, epoch * sampler.steps_per_epoch() + number) {
                    prop_assert!(seen.insert(start), "window {} twice", start);
                    prop_assert!(start as u64 + u64::from(context) < tokens);
                }
            }
            prop_assert_eq!(seen.len() as u64, sampler.steps_per_epoch() * sampler.windows_per_step());
            prop_assert!(sampler.windows() - (seen.len() as u64) < sampler.windows_per_step());
            // No two windows overlap.
            let starts: Vec<usize> = seen.into_iter().collect();
            prop_assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= context as usize));
        }
    }
}
