//! All-reduce options of a job; must be equal on all ranks.

use super::{error::CommError, plan::Algorithm, wire::Wire};

/// Options of a group; must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Concurrent all-reduces, 1 to [`Options::MAX_LANES`]. Each lane has its own queue, thread,
    /// shared-memory flags and connections. Operations of one lane run in the order in which they
    /// were started. Results do not depend on the number of lanes.
    pub lanes: u32,
    /// Gradient format between hosts. In shared memory gradients are always f32.
    pub wire: Wire,
    /// Buckets from this index on always travel as f32, because their values must not be rounded.
    pub exact_from: u32,
    /// Measure each connection between neighbours before it is used.
    pub probe: bool,
    /// Algorithm between hosts; `None`: chosen for each bucket by a cost model.
    pub algorithm: Option<Algorithm>,
}

impl Default for Options {
    fn default() -> Options {
        Options { lanes: 1, wire: Wire::F32, exact_from: u32::MAX, probe: false, algorithm: None }
    }
}

impl Options {
    /// More lanes would only compete for CPUs.
    pub const MAX_LANES: u32 = 8;

    /// Wire format of a bucket.
    pub(super) fn wire_of(&self, bucket: u32) -> Wire {
        if bucket >= self.exact_from { Wire::F32 } else { self.wire }
    }

    pub(super) fn check(&self) -> Result<(), CommError> {
        if (1..=Options::MAX_LANES).contains(&self.lanes) {
            return Ok(());
        }
        Err(CommError::Group {
            got: format!("{} lanes of communication", self.lanes),
            expected: format!("1 to {} lanes", Options::MAX_LANES),
        })
    }
}
