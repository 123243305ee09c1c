//! The samples a model is judged by: the same at every evaluation, in every run and for every number of ranks.

use super::corpus::Corpus;
use super::sampler::fill;

/// Tokens of one batch, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenBatch {
    /// Tokens, `batch_size` rows of `context_length`.
    pub inputs: Vec<u16>,
    /// The token that follows each of them.
    pub targets: Vec<u16>,
}

impl TokenBatch {
    /// Room for a batch.
    pub fn new(batch_size: u32, context_length: u32) -> Self {
        let tokens = batch_size as usize * context_length as usize;
        Self { inputs: vec![0; tokens], targets: vec![0; tokens] }
    }
}

/// Windows evenly spaced over the validation split, divided over ranks and batches.
///
/// The windows depend on `batches x batch_size x world` only: the same number divided in another way is the same set.
/// When that number is larger than the number of windows in the split, windows occur repeatedly, and as nearly equally
/// often as it can be; every batch is full, and the mean over all batches and ranks is the mean over the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValidationSet {
    /// Windows in the split.
    windows: u64,
    context_length: u32,
    batch_size: u32,
    batches: u32,
    world: u32,
}

impl ValidationSet {
    /// `batches` batches of `batch_size` windows for each of `world` ranks. `None`: the split has no window, or a size
    /// is 0.
    pub fn new(validation_tokens: u64, context_length: u32, batch_size: u32, batches: u32, world: u32) -> Option<Self> {
        let windows = validation_tokens.saturating_sub(1).checked_div(context_length.into())?;
        let sizes = [windows, batch_size.into(), batches.into(), world.into()];
        (!sizes.contains(&0)).then_some(Self { windows, context_length, batch_size, batches, world })
    }

    /// Batches of each rank.
    pub fn batches(&self) -> u32 {
        self.batches
    }

    /// First tokens of the windows of one rank's batch.
    ///
    /// # Panics
    /// `rank` or `index` is not below the number of ranks or batches.
    pub fn starts(&self, rank: u32, index: u32) -> impl ExactSizeIterator<Item = usize> + use<> {
        assert!(rank < self.world, "rank {rank} of {}", self.world);
        assert!(index < self.batches, "batch {index} of {}", self.batches);
        let set = *self;
        let per_round = u128::from(set.world) * u128::from(set.batch_size);
        let total = per_round * u128::from(set.batches);
        let first = u128::from(index) * per_round + u128::from(rank) * u128::from(set.batch_size);
        (0..set.batch_size).map(move |row| {
            let position = first + u128::from(row);
            // Below the number of windows, since `position` is below `total`.
            let window = (position * u128::from(set.windows) / total) as usize;
            window * set.context_length as usize
        })
    }

    /// Fills `batch` with one rank's batch.
    ///
    /// # Panics
    /// As [`Self::starts`]; or `batch` is of another shape, or `corpus` another one than the set was made for.
    pub fn fill(&self, corpus: &Corpus, rank: u32, index: u32, batch: &mut TokenBatch) {
        fill(corpus.validation(), self.starts(rank, index), &mut batch.inputs, &mut batch.targets);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(tokens: u64, context: u32, batch: u32, batches: u32, world: u32) -> Vec<usize> {
        let set = ValidationSet::new(tokens, context, batch, batches, world).expect("windows");
        let mut starts: Vec<usize> = (0..batches)
            .flat_map(|index| (0..world).map(move |rank| (rank, index)))
            .flat_map(|(rank, index)| set.starts(rank, index))
            .collect();
        starts.sort_unstable();
        starts
    }

    #[test]
    fn evenly_spaced() {
        assert_eq!(all(101, 10, 1, 5, 1), [0, 20, 40, 60, 80]);
        assert_eq!(all(31, 10, 2, 3, 1), [0, 0, 10, 10, 20, 20], "three windows for six places");
        assert_eq!(ValidationSet::new(10, 10, 1, 1, 1), None, "the last target is missing");
        assert_eq!(ValidationSet::new(0, 10, 1, 1, 1), None);
        assert_eq!(ValidationSet::new(100, 10, 1, 0, 1), None);
        assert_eq!(ValidationSet::new(100, 0, 1, 1, 1), None);
    }

    proptest! {
        #[test]
        fn the_set_does_not_depend_on_its_division(tokens in 50u64..5_000, context in 1u32..20) {
            let one = all(tokens, context, 24, 1, 1);
            for (batch, batches, world) in [(1, 24, 1), (2, 6, 2), (4, 2, 3), (3, 2, 4), (1, 1, 24)] {
                prop_assert_eq!(&one, &all(tokens, context, batch, batches, world));
            }
            for start in one {
                prop_assert!(start as u64 + u64::from(context) < tokens);
            }
        }
    }
}
