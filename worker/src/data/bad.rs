//! Samples that cannot be read: skipped, named once, counted up to a limit.

use super::error::DataError;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// A sample that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bad {
    /// Its index in its part of the data.
    pub sample: u64,
    /// Which sample it is, and what is wrong with it.
    pub what: String,
}

/// The part of the data that a sample belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Training,
    Validation,
}

/// The count of one rank over its run, for training and validation together. Clones share it.
///
/// Only the thread that takes the batches counts, in the order of the batches. So the batch that reports one sample too
/// many does not depend on the timing of the reader's threads.
#[derive(Debug, Clone)]
pub struct BadSamples {
    limit: u64,
    seen: Arc<Mutex<BTreeSet<(Side, u64)>>>,
    /// Bad samples found while the data were opened; they have no index.
    before: u64,
}

impl BadSamples {
    /// Starts with the `before` bad samples found while the data were opened. At most `limit` are allowed.
    pub(super) fn new(limit: u64, before: u64) -> Self {
        BadSamples { limit, seen: Arc::default(), before }
    }

    /// Bad samples so far.
    pub fn count(&self) -> u64 {
        self.before + self.seen.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    /// Counts a sample that has not been counted yet, and names it in the log.
    pub(super) fn note(&self, side: Side, bad: Bad) -> Result<(), DataError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if !seen.insert((side, bad.sample)) {
            return Ok(());
        }
        let count = self.before + seen.len() as u64;
        if count > self.limit {
            return Err(DataError::BadSamples { count, limit: self.limit, last: bad.what });
        }
        eprintln!("bad sample {count} of at most {}: {}", self.limit, bad.what);
        Ok(())
    }
}
