//! The samples of evaluations: the same at every evaluation, in every run and for every world size.

use super::bad::{BadSamples, Side};
use super::batch::Batch;
use super::dataset::Dataset;
use super::error::DataError;
use super::part::Scratch;
use std::sync::Arc;

/// Samples of the validation split, divided over ranks and batches: a fixed number of evenly spaced
/// ones, or each of them once.
///
/// Evenly spaced samples depend only on `batches x batch_size x world`, not on how that number is
/// divided. If it exceeds the number of samples available, samples repeat as evenly as possible.
#[derive(Debug)]
pub struct ValidationSet {
    dataset: Arc<Dataset>,
    selection: Selection,
    batch: Batch,
    scratch: Scratch,
    bad: BadSamples,
}

impl ValidationSet {
    /// `batches` batches of `batch_size` samples for each of `world` ranks; `None`: as many as it
    /// takes for every sample once. `bad` counts unreadable samples. Returns `None` if there is no
    /// validation sample or a size is 0.
    pub fn new(
        dataset: &Arc<Dataset>,
        batch_size: u32,
        batches: Option<u32>,
        world: u32,
        bad: BadSamples,
    ) -> Option<Self> {
        let selection = Selection::new(dataset.validation_samples(), batch_size, batches, world)?;
        let (batch, scratch) = (dataset.batch(batch_size), Scratch::default());
        Some(ValidationSet { dataset: Arc::clone(dataset), selection, batch, scratch, bad })
    }

    /// Batches per rank.
    pub fn batches(&self) -> u32 {
        self.selection.batches
    }

    /// One batch of a rank, and the number of its samples; the other rows count for nothing. Images
    /// are centre-cropped without augmentation, and the masked tokens are always the same.
    ///
    /// # Errors
    /// The data can no longer be read, or more samples are unreadable than allowed.
    ///
    /// # Panics
    /// `rank` or `index` is not below the number of ranks or batches.
    pub fn batch(&mut self, rank: u32, index: u32) -> Result<(&Batch, u64), DataError> {
        let ValidationSet { dataset, selection, batch, scratch, bad } = self;
        let samples = selection.samples(rank, index);
        let count = if selection.each_once {
            dataset.fill_validation_once(batch, samples, scratch)?
        } else {
            dataset.fill_validation(batch, samples.flatten(), scratch)?;
            selection.batch_size.into()
        };
        for sample in batch.bad.drain(..) {
            bad.record(Side::Validation, sample)?;
        }
        Ok((&*batch, count))
    }
}

/// Chooses the samples of each batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Selection {
    /// Samples available.
    samples: u64,
    batch_size: u32,
    batches: u32,
    world: u32,
    /// All samples instead of evenly spaced ones.
    each_once: bool,
}

impl Selection {
    fn new(samples: u64, batch_size: u32, batches: Option<u32>, world: u32) -> Option<Self> {
        let each_once = batches.is_none();
        let per_round = u64::from(batch_size) * u64::from(world);
        let needed = || u32::try_from(samples.div_ceil(per_round.max(1))).unwrap_or(u32::MAX);
        let batches = batches.unwrap_or_else(needed);
        let sizes = [samples, batch_size.into(), batches.into(), world.into()];
        (!sizes.contains(&0)).then_some(Self { samples, batch_size, batches, world, each_once })
    }

    /// The samples of one batch of a rank; `None` for rows without one.
    fn samples(&self, rank: u32, index: u32) -> impl Iterator<Item = Option<u64>> + use<> {
        assert!(rank < self.world, "rank {rank} of {}", self.world);
        assert!(index < self.batches, "batch {index} of {}", self.batches);
        let set = *self;
        let per_round = u128::from(set.world) * u128::from(set.batch_size);
        let total = per_round * u128::from(set.batches);
        let first = u128::from(index) * per_round + u128::from(rank) * u128::from(set.batch_size);
        (0..set.batch_size).map(move |row| {
            let position = first + u128::from(row);
            let sample = if set.each_once { position } else { position * u128::from(set.samples) / total };
            u64::try_from(sample).ok().filter(|sample| *sample < set.samples)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(samples: u64, batch: u32, batches: Option<u32>, world: u32) -> Vec<u64> {
        let set = Selection::new(samples, batch, batches, world).expect("samples");
        let mut all: Vec<u64> = (0..set.batches)
            .flat_map(|index| (0..world).map(move |rank| (rank, index)))
            .flat_map(|(rank, index)| set.samples(rank, index))
            .flatten()
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn evenly_spaced() {
        assert_eq!(all(10, 1, Some(5), 1), [0, 2, 4, 6, 8]);
        assert_eq!(all(3, 2, Some(3), 1), [0, 0, 1, 1, 2, 2], "three samples for six slots");
        assert_eq!(Selection::new(0, 1, Some(1), 1), None);
        assert_eq!(Selection::new(100, 1, Some(0), 1), None);
        assert_eq!(Selection::new(100, 0, None, 1), None);
    }

    proptest! {
        #[test]
        fn the_set_does_not_depend_on_its_division(samples in 1u64..5_000) {
            let one = all(samples, 24, Some(1), 1);
            for (batch, batches, world) in [(1, 24, 1), (2, 6, 2), (4, 2, 3), (3, 2, 4), (1, 1, 24)] {
                prop_assert_eq!(&one, &all(samples, batch, Some(batches), world));
            }
            prop_assert!(one.into_iter().all(|sample| sample < samples));
        }

        #[test]
        fn each_sample_once_for_any_division(samples in 1u64..5_000, batch in 1u32..40, world in 1u32..9) {
            prop_assert_eq!(all(samples, batch, None, world), (0..samples).collect::<Vec<_>>());
        }
    }
}
