//! The samples of evaluations: the same at every evaluation, in every run and for every world size.

use super::bad::{BadSamples, Side};
use super::batch::Batch;
use super::dataset::Dataset;
use super::error::DataError;
use super::part::Scratch;
use std::sync::Arc;

/// Evenly spaced samples of the validation split, divided over ranks and batches.
///
/// The samples depend only on `batches x batch_size x world`, not on how that number is divided. If
/// it exceeds the number of samples available, samples repeat as evenly as possible. Every batch is
/// full, so the mean over all batches and ranks is the mean over the set.
#[derive(Debug)]
pub struct ValidationSet {
    dataset: Arc<Dataset>,
    selection: EvenlySpaced,
    batch: Batch,
    scratch: Scratch,
    bad: BadSamples,
}

impl ValidationSet {
    /// `batches` batches of `batch_size` samples for each of `world` ranks. `bad` counts unreadable
    /// samples. `None` if there is no validation sample or a size is 0.
    pub fn new(dataset: &Arc<Dataset>, batch_size: u32, batches: u32, world: u32, bad: BadSamples) -> Option<Self> {
        let selection = EvenlySpaced::new(dataset.validation_samples(), batch_size, batches, world)?;
        let (batch, scratch) = (dataset.batch(batch_size), Scratch::default());
        Some(ValidationSet { dataset: Arc::clone(dataset), selection, batch, scratch, bad })
    }

    /// Batches per rank.
    pub fn batches(&self) -> u32 {
        self.selection.batches
    }

    /// One batch of a rank. Images are centre-cropped without augmentation, and the masked tokens
    /// are always the same.
    ///
    /// # Errors
    /// The data can no longer be read, or more samples are unreadable than allowed.
    ///
    /// # Panics
    /// `rank` or `index` is not below the number of ranks or batches.
    pub fn batch(&mut self, rank: u32, index: u32) -> Result<&Batch, DataError> {
        let samples = self.selection.samples(rank, index);
        self.dataset.fill_validation(&mut self.batch, samples, &mut self.scratch)?;
        for bad in self.batch.bad.drain(..) {
            self.bad.record(Side::Validation, bad)?;
        }
        Ok(&self.batch)
    }
}

/// Selects evenly spaced samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EvenlySpaced {
    /// Samples available.
    samples: u64,
    batch_size: u32,
    batches: u32,
    world: u32,
}

impl EvenlySpaced {
    fn new(samples: u64, batch_size: u32, batches: u32, world: u32) -> Option<Self> {
        let sizes = [samples, batch_size.into(), batches.into(), world.into()];
        (!sizes.contains(&0)).then_some(Self { samples, batch_size, batches, world })
    }

    /// The samples of one batch of a rank.
    fn samples(&self, rank: u32, index: u32) -> impl Iterator<Item = u64> + use<> {
        assert!(rank < self.world, "rank {rank} of {}", self.world);
        assert!(index < self.batches, "batch {index} of {}", self.batches);
        let set = *self;
        let per_round = u128::from(set.world) * u128::from(set.batch_size);
        let total = per_round * u128::from(set.batches);
        let first = u128::from(index) * per_round + u128::from(rank) * u128::from(set.batch_size);
        (0..set.batch_size).map(move |row| {
            let position = first + u128::from(row);
            // Below the number of samples, because `position` is below `total`.
            (position * u128::from(set.samples) / total) as u64
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(samples: u64, batch: u32, batches: u32, world: u32) -> Vec<u64> {
        let set = EvenlySpaced::new(samples, batch, batches, world).expect("samples");
        let mut all: Vec<u64> = (0..batches)
            .flat_map(|index| (0..world).map(move |rank| (rank, index)))
            .flat_map(|(rank, index)| set.samples(rank, index))
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn evenly_spaced() {
        assert_eq!(all(10, 1, 5, 1), [0, 2, 4, 6, 8]);
        assert_eq!(all(3, 2, 3, 1), [0, 0, 1, 1, 2, 2], "three samples for six slots");
        assert_eq!(EvenlySpaced::new(0, 1, 1, 1), None);
        assert_eq!(EvenlySpaced::new(100, 1, 0, 1), None);
    }

    proptest! {
        #[test]
        fn the_set_does_not_depend_on_its_division(samples in 1u64..5_000) {
            let one = all(samples, 24, 1, 1);
            for (batch, batches, world) in [(1, 24, 1), (2, 6, 2), (4, 2, 3), (3, 2, 4), (1, 1, 24)] {
                prop_assert_eq!(&one, &all(samples, batch, batches, world));
            }
            prop_assert!(one.into_iter().all(|sample| sample < samples));
        }
    }
}
