//! Unreadable samples: skipped, logged once, and counted up to a limit.

use super::error::DataError;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// An unreadable sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BadSample {
    /// Its index in its split.
    pub sample: u64,
    /// The sample and the problem, for messages.
    pub what: String,
}

/// Training or validation split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Side {
    Training,
    Validation,
}

/// Bad-sample counter of one rank for the whole run, shared by training and validation. Clones
/// share the count.
///
/// Only the thread that takes the batches counts, in batch order, so the batch that exceeds the
/// limit does not depend on reader-thread timing.
#[derive(Debug, Clone)]
pub struct BadSamples {
    limit: u64,
    seen: Arc<Mutex<BTreeSet<(Side, u64)>>>,
    /// Bad samples found while opening the data; they have no index.
    at_open: u64,
}

impl BadSamples {
    /// Creates a counter with `at_open` bad samples found while opening the data and at most
    /// `limit` allowed.
    pub(super) fn new(limit: u64, at_open: u64) -> Self {
        BadSamples { limit, seen: Arc::default(), at_open }
    }

    /// Bad samples so far.
    pub fn count(&self) -> u64 {
        self.at_open + self.seen.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    /// Counts and logs a sample, unless it was counted before.
    pub(super) fn record(&self, side: Side, bad: BadSample) -> Result<(), DataError> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if !seen.insert((side, bad.sample)) {
            return Ok(());
        }
        let count = self.at_open + seen.len() as u64;
        if count > self.limit {
            return Err(DataError::BadSamples { count, limit: self.limit, last: bad.what });
        }
        eprintln!("bad sample {count} of at most {}: {}", self.limit, bad.what);
        Ok(())
    }
}
