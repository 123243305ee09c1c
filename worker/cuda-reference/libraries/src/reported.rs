//! Driver events of GPUs so far: recorded when launches run, reported through NVML.

use crate::fault::Faults;
use std::collections::BTreeSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Driver events so far.
pub(crate) struct DriverEvents {
    /// GPU and XID of each error, in order.
    pub(crate) xids: Vec<(usize, u64)>,
    /// GPUs with a memory error.
    pub(crate) broken: BTreeSet<usize>,
    /// NVML event sets: their GPUs, and how many XIDs each has consumed.
    pub(crate) sets: Vec<Option<(BTreeSet<usize>, usize)>>,
}

static EVENTS: Mutex<DriverEvents> =
    Mutex::new(DriverEvents { xids: Vec::new(), broken: BTreeSet::new(), sets: Vec::new() });
pub(crate) static CHANGED: Condvar = Condvar::new();

pub(crate) fn driver_events() -> MutexGuard<'static, DriverEvents> {
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Injects the faults of a launch that runs.
pub(crate) fn launched(gpu: usize, launch: u64, faults: &Faults) {
    if let Some((_, _, xid)) = faults.xid.filter(|(one, at, _)| (*one, *at) == (gpu as u64, launch)) {
        driver_events().xids.push((gpu, xid));
        CHANGED.notify_all();
    }
    if faults.ecc == Some(launch) {
        driver_events().broken.insert(gpu);
    }
}

impl DriverEvents {
    /// The next error for a set; `None` if the set does not exist.
    pub(crate) fn next(&mut self, set: usize) -> Option<Option<(usize, u64)>> {
        let (gpus, seen) = self.sets.get_mut(set.checked_sub(1)?)?.as_mut()?;
        let found = self.xids.iter().enumerate().skip(*seen).find(|(_, (gpu, _))| gpus.contains(gpu));
        *seen = found.map_or(self.xids.len(), |(index, _)| index + 1);
        Some(found.map(|(_, xid)| *xid))
    }
}

/// Number of errors that a set has consumed; `usize::MAX` if it does not exist.
pub(crate) fn seen(events: &DriverEvents, set: usize) -> usize {
    let found = set.checked_sub(1).and_then(|index| events.sets.get(index)?.as_ref());
    found.map_or(usize::MAX, |(_, seen)| *seen)
}
