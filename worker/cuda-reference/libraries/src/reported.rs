//! What the driver has reported of its GPUs so far: kept where launches run, told by NVML.

use crate::fault::Faults;
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What has happened so far.
pub(crate) struct Happened {
    /// GPU and number of each error, in order.
    pub(crate) xids: Vec<(usize, u64)>,
    /// GPUs whose memory has an error.
    pub(crate) broken: BTreeSet<usize>,
    /// Who waits for errors of which GPUs, and how many of them it has seen.
    pub(crate) sets: Vec<Option<(BTreeSet<usize>, usize)>>,
}

static HAPPENED: Mutex<Happened> = Mutex::new(Happened { xids: Vec::new(), broken: BTreeSet::new(), sets: Vec::new() });
pub(crate) static CHANGED: Condvar = Condvar::new();

pub(crate) fn happened() -> MutexGuard<'static, Happened> {
    HAPPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A launch of a GPU runs: what was asked for happens.
pub(crate) fn launched(gpu: usize, launch: u64, faults: &Faults) {
    if let Some((_, _, xid)) = faults.xid.filter(|(one, at, _)| (*one, *at) == (gpu as u64, launch)) {
        happened().xids.push((gpu, xid));
        CHANGED.notify_all();
    }
    if faults.ecc == Some(launch) {
        happened().broken.insert(gpu);
    }
}

impl Happened {
    /// The next error for a set; `None`: no such set.
    pub(crate) fn next(&mut self, set: usize) -> Option<Option<(usize, u64)>> {
        let (gpus, seen) = self.sets.get_mut(set.checked_sub(1)?)?.as_mut()?;
        let found = self.xids.iter().enumerate().skip(*seen).find(|(_, (gpu, _))| gpus.contains(gpu));
        *seen = found.map_or(self.xids.len(), |(index, _)| index + 1);
        Some(found.map(|(_, xid)| *xid))
    }
}

/// Errors that a set has seen; of one that is not there, none is to come.
pub(crate) fn seen(happened: &Happened, set: usize) -> usize {
    let found = set.checked_sub(1).and_then(|index| happened.sets.get(index)?.as_ref());
    found.map_or(usize::MAX, |(_, seen)| *seen)
}
