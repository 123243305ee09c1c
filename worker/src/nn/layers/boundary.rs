//! Where a part of a network begins and ends that runs on several ranks.

use crate::cpu::Cpu;
use crate::nn::{Backward, Forward, Layer, Needs};

/// [`Layer::kind`] of a tensor that another rank computes. Its memory is written before forward,
/// and its gradient read after backward.
pub(in crate::nn) const RECEIVED: &str = "Received";
/// [`Layer::kind`] of a tensor for another rank. It is read after forward, and its gradient written
/// before backward.
pub(in crate::nn) const SENT: &str = "Sent";

/// Holds a tensor at an end of a stage: [`RECEIVED`] or [`SENT`].
pub(in crate::nn) struct StageEnd(pub &'static str);

impl Layer for StageEnd {
    fn kind(&self) -> &'static str {
        self.0
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs::default()
    }

    fn forward(&mut self, _: &mut Forward<'_>) {}

    fn backward(&mut self, _: &mut Backward<'_>) {}
}
