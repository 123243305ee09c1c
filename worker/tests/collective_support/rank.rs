//! A rank with its group membership and its reducer.

use switchyard_worker::comm::{CommError, Group, GroupConfig, Options, Reducer};

pub struct Rank {
    // Dropped first, because reductions end with the group.
    pub reducer: Reducer,
    pub group: Group,
}

impl Rank {
    pub fn connect(config: &GroupConfig, lens: &[usize], options: &Options) -> Result<Rank, CommError> {
        let mut group = Group::join(config)?;
        Ok(Rank { reducer: Reducer::connect(&mut group, lens, options)?, group })
    }

    /// Waits for reductions in flight, then for all ranks to leave.
    pub fn leave(self) -> Result<(), CommError> {
        let Rank { mut reducer, group } = self;
        (0..reducer.buckets()).try_for_each(|bucket| reducer.wait(bucket))?;
        group.leave()
    }
}
