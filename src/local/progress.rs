//! Folds the reports of all ranks into the interval that the screen and the status show.

use jiff::Timestamp;
use switchyard_worker_contract::event::Summary;
use switchyard_worker_contract::fold::Breakdown;

/// Figures over one interval of steps, folded over the ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Interval {
    /// The figures that go into the status.
    pub figures: Summary,
    /// Time of the report.
    pub at: Timestamp,
    /// Where the time went.
    pub breakdown: Breakdown,
}

impl Interval {
    pub(super) fn new((figures, breakdown): (Summary, Breakdown), at: Timestamp) -> Interval {
        Interval { figures, at, breakdown }
    }
}
