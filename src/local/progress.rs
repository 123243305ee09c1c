//! The reports of all ranks as the interval that a screen and the status show.

use jiff::Timestamp;
use switchyard_worker_contract::event::Summary;
use switchyard_worker_contract::fold::Breakdown;

/// Figures over one interval of steps, folded over the ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Interval {
    /// What the status shows.
    pub figures: Summary,
    /// When it was reported.
    pub at: Timestamp,
    /// Where the time goes.
    pub breakdown: Breakdown,
}

impl Interval {
    /// What was folded, and when.
    pub(super) fn new((figures, breakdown): (Summary, Breakdown), at: Timestamp) -> Interval {
        Interval { figures, at, breakdown }
    }
}
