//! Where a part of a network begins and ends that runs on several ranks.

use crate::cpu::Cpu;
use crate::nn::{Backward, Forward, Layer, Needs};

/// [`Layer::kind`] of [`Received`].
pub(in crate::nn) const RECEIVED: &str = "Received";
/// [`Layer::kind`] of [`Sent`].
pub(in crate::nn) const SENT: &str = "Sent";

/// Holds a tensor that another rank computes. Its memory is written before forward, and its
/// gradient read after backward.
pub(in crate::nn) struct Received;

impl Layer for Received {
    fn kind(&self) -> &'static str {
        RECEIVED
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs::default()
    }

    fn forward(&mut self, _: &mut Forward<'_>) {}

    fn backward(&mut self, _: &mut Backward<'_>) {}
}

/// Keeps a tensor for another rank. It is read after forward, and its gradient written before
/// backward.
pub(in crate::nn) struct Sent;

impl Layer for Sent {
    fn kind(&self) -> &'static str {
        SENT
    }

    fn needs(&self, _: &Cpu) -> Needs {
        Needs::default()
    }

    fn forward(&mut self, _: &mut Forward<'_>) {}

    fn backward(&mut self, _: &mut Backward<'_>) {}
}
