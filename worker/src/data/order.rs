//! The samples of a rank at a step, as a pure function.
//!
//! An epoch permutes the `N` samples:
//!
//! ```text
//! samples in order   s0 s1 s2 s3 s4 s5 s6 s7 | s8 ...          G = world x batch x merge = 8
//! step               `--------- 0 ---------' `-- 1
//! rank               `---- 0 --' `---- 1 --'                   batch x merge = 4 each
//! micro-batch        `-0-' `-1-' `-0-' `-1-'                   batch = 2 each
//! ```
//!
//! The samples of a step depend only on `G`, not on how it is divided: two ranks with batch 2 and
//! merge 2, one rank with batch 8, and eight ranks with batch 1 see the same samples. The remainder
//! of an epoch, less than a step, is skipped; it consists of different samples in every epoch. Text
//! samples are windows; each epoch shifts all of them by a few tokens.

use super::dataset::Dataset;
use super::error::DataError;
use super::part::{Draw, EpochSize};
use super::permutation::Permutation;
use super::random::mix;
use std::ops::Range;

/// How the samples of a step are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepShape {
    /// Samples per micro-batch and rank.
    pub batch_size: u32,
    /// Micro-batches per step and rank.
    pub merge: u32,
    pub world: u32,
}

/// The sample order of all steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    shape: StepShape,
    seed: u64,
    epoch_size: EpochSize,
    origin: Origin,
}

/// A step with a known sample position; later steps take the following samples. A run that resumes
/// with a different world size has an origin that is not a multiple of its steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Origin {
    step: u64,
    epoch: u64,
    /// Samples of the epoch already consumed.
    position: u64,
}

impl Order {
    /// The order of the training samples.
    ///
    /// # Errors
    /// A size is 0, or there are too few samples for one step.
    pub fn new(dataset: &Dataset, shape: StepShape, seed: u64) -> Result<Self, DataError> {
        let order = Order::over(dataset.epoch_size(), shape, seed)?;
        match order.samples_per_step() {
            needed if order.epoch_size.samples < needed => Err(dataset.too_few(needed)),
            _ => Ok(order),
        }
    }

    fn over(epoch_size: EpochSize, shape: StepShape, seed: u64) -> Result<Self, DataError> {
        for (size, field) in [
            (shape.batch_size, "spec.engine.batchSizePerProcess"),
            (shape.merge, "spec.engine.batchMerge"),
            (shape.world, "number of processes"),
        ] {
            if size == 0 {
                return Err(DataError::Zero { field });
            }
        }
        Ok(Order { shape, seed, epoch_size, origin: Origin::default() })
    }

    pub fn shape(&self) -> StepShape {
        self.shape
    }

    /// Samples per epoch, `N`.
    pub fn samples(&self) -> u64 {
        self.epoch_size.samples
    }

    /// Samples per step over all ranks, `G`.
    pub fn samples_per_step(&self) -> u64 {
        let StepShape { batch_size, merge, world } = self.shape;
        u64::from(batch_size).saturating_mul(merge.into()).saturating_mul(world.into())
    }

    /// Steps per epoch, at least 1.
    pub fn steps_per_epoch(&self) -> u64 {
        self.epoch_size.samples / self.samples_per_step()
    }

    /// Resumes the order: step `step` starts at this position of this epoch, as returned by
    /// [`Order::position`] for another [`StepShape`].
    pub fn from_position(self, step: u64, epoch: u64, position: u64) -> Order {
        Order { origin: Origin { step, epoch, position }, ..self }
    }

    /// The start of a step: its epoch, counted from 0, and the samples of that epoch already
    /// consumed. The step must not precede the origin.
    pub fn position(&self, step: u64) -> (u64, u64) {
        let Origin { step: first, epoch, position } = self.origin;
        let steps = step.saturating_sub(first);
        let left = self.epoch_size.samples.saturating_sub(position) / self.samples_per_step();
        match steps.checked_sub(left) {
            None => (epoch, position + steps * self.samples_per_step()),
            Some(later) => {
                let each = self.steps_per_epoch();
                (epoch + 1 + later / each, later % each * self.samples_per_step())
            }
        }
    }

    /// The epoch of a step, counted from 0.
    pub fn epoch(&self, step: u64) -> u64 {
        self.position(step).0
    }

    /// The first step of the epoch after the epoch of `step`.
    pub(super) fn end_of_epoch(&self, step: u64) -> u64 {
        let (_, position) = self.position(step);
        step + (self.epoch_size.samples - position.min(self.epoch_size.samples)) / self.samples_per_step()
    }

    /// Steps until `epochs` epochs are done, including those before the origin.
    pub fn steps_of(&self, epochs: u64) -> u64 {
        let Origin { step, epoch, position } = self.origin;
        let left = self.epoch_size.samples.saturating_sub(position) / self.samples_per_step();
        match epochs.checked_sub(epoch + 1) {
            None => step,
            Some(later) => step.saturating_add(left).saturating_add(later.saturating_mul(self.steps_per_epoch())),
        }
    }

    /// The positions of one micro-batch in its epoch: `batch_size` of them.
    ///
    /// # Panics
    /// `rank` or `micro_batch` is not below the world or merge of the shape.
    pub fn positions(&self, step: u64, rank: u32, micro_batch: u32) -> Range<u64> {
        let StepShape { batch_size, merge, world } = self.shape;
        assert!(rank < world, "rank {rank} of {world}");
        assert!(micro_batch < merge, "micro-batch {micro_batch} of {merge}");
        let share = u64::from(batch_size) * u64::from(merge);
        let first = self.position(step).1 + u64::from(rank) * share + u64::from(micro_batch) * u64::from(batch_size);
        first..first + u64::from(batch_size)
    }

    /// The sample at each position of an epoch.
    pub(super) fn epoch_order(&self, epoch: u64) -> Epoch {
        let key = mix(self.seed ^ mix(epoch));
        let order = Permutation::new(self.epoch_size.samples, key);
        Epoch { order, key, offset: mix(key) % (self.epoch_size.slack + 1) }
    }
}

/// The order of one epoch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Epoch {
    order: Permutation,
    key: u64,
    offset: u64,
}

impl Epoch {
    /// The sample at a position, which is below the number of samples. Its random numbers depend on
    /// seed, epoch and sample.
    pub(super) fn draw(&self, position: u64) -> Draw {
        let sample = self.order.at(position);
        Draw { sample, offset: self.offset, key: mix(self.key ^ mix(!sample)), augment: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// The order of windows of `context` tokens, each followed by a target token; `None` if there
    /// are too few for a step.
    fn order(tokens: u64, context: u32, (batch_size, merge, world): (u32, u32, u32), seed: u64) -> Option<Order> {
        let (samples, slack) = ((tokens - 1) / u64::from(context), (tokens - 1) % u64::from(context));
        let order =
            Order::over(EpochSize { samples, slack }, StepShape { batch_size, merge, world }, seed).expect("sizes");
        (order.samples_per_step() <= samples).then_some(order)
    }

    /// The window starts of one step, in order: rank by rank, micro-batch by micro-batch.
    fn step(order: &Order, context: u32, step: u64) -> Vec<u64> {
        let epoch = order.epoch_order(order.epoch(step));
        let StepShape { merge, world, .. } = order.shape();
        (0..world)
            .flat_map(|rank| (0..merge).map(move |micro| (rank, micro)))
            .flat_map(|(rank, micro)| order.positions(step, rank, micro))
            .map(|position| epoch.draw(position))
            .map(|draw| draw.offset + draw.sample * u64::from(context))
            .collect()
    }

    #[test]
    fn counts() {
        let order = order(1001, 10, (4, 2, 3), 1).expect("enough");
        assert_eq!((order.samples(), order.samples_per_step(), order.steps_per_epoch()), (100, 24, 4));
        assert_eq!((order.epoch(3), order.epoch(4)), (0, 1));
    }

    #[test]
    fn sizes_of_zero() {
        let shape = StepShape { batch_size: 1, merge: 0, world: 1 };
        let error = Order::over(EpochSize { samples: 10, slack: 0 }, shape, 1).expect_err("merge of 0");
        assert_eq!(error.to_string(), "spec.engine.batchMerge: got 0: expected at least 1");
        let huge = StepShape { batch_size: u32::MAX, merge: u32::MAX, world: u32::MAX };
        let order = Order::over(EpochSize { samples: 10, slack: 0 }, huge, 1).expect("sizes");
        assert_eq!(order.samples_per_step(), u64::MAX);
    }

    #[test]
    fn seeds_and_epochs_differ() {
        let order = |seed| order(10_005, 10, (4, 1, 2), seed).expect("enough");
        let epoch = order(1).steps_per_epoch();
        assert_ne!(step(&order(1), 10, 0), step(&order(2), 10, 0));
        assert_ne!(step(&order(1), 10, 0), step(&order(1), 10, epoch));
        let offsets: BTreeSet<u64> = (0..50).map(|number| step(&order(1), 10, number * epoch)[0] % 10).collect();
        assert!(offsets.len() > 3, "the windows of an epoch start at {offsets:?}");
        let keys = |epoch| -> BTreeSet<u64> {
            (0..1000).map(|position| order(1).epoch_order(epoch).draw(position).key).collect()
        };
        assert_eq!(keys(0).len(), 1000, "chance is another one for each sample");
        assert!(keys(0).is_disjoint(&keys(1)), "and in each epoch");
    }

    proptest! {
        #[test]
        fn a_step_does_not_depend_on_its_division(
            tokens in 2_000u64..6_000, context in 1u32..40, seed in any::<u64>(), number in 0u64..300,
        ) {
            // 12 windows per step, divided in every possible way.
            let mut all = BTreeSet::new();
            for world in [1, 2, 3, 4, 6, 12] {
                for merge in (1..=12).filter(|merge| 12 / world % merge == 0) {
                    let order = order(tokens, context, (12 / world / merge, merge, world), seed).expect("enough");
                    all.insert(step(&order, context, number));
                }
            }
            prop_assert_eq!(all.len(), 1);
        }

        #[test]
        fn every_window_at_most_once_per_epoch(
            tokens in 100u64..4_000, context in 1u32..20, batch in 1u32..4, merge in 1u32..3, world in 1u32..4,
            seed in any::<u64>(), epoch in 0u64..5,
        ) {
            let Some(order) = order(tokens, context, (batch, merge, world), seed) else { return Ok(()) };
            let mut seen = BTreeSet::new();
            for number in 0..order.steps_per_epoch() {
                for start in step(&order, context, epoch * order.steps_per_epoch() + number) {
                    prop_assert!(seen.insert(start), "window {} twice", start);
                    prop_assert!(start + u64::from(context) < tokens);
                }
            }
            prop_assert_eq!(seen.len() as u64, order.steps_per_epoch() * order.samples_per_step());
            prop_assert!(order.samples() - (seen.len() as u64) < order.samples_per_step());
            // No two windows overlap.
            let starts: Vec<u64> = seen.into_iter().collect();
            prop_assert!(starts.windows(2).all(|pair| pair[1] - pair[0] >= u64::from(context)));
        }
    }
}
