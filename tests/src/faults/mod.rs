//! A proxy between a controller and its API server that injects network, server and scheduler
//! faults.
//!
//! The controller under test is the real, unmodified program. The proxy kills it, drops responses
//! or delays watch events. A [`Plan`] decides each fault from the call and the number of earlier
//! calls, or from a seed, so that runs are reproducible.

mod lane;
mod plan;
mod proxy;
mod stream;
mod view;

pub use lane::{FaultPoint, Lane, Scenario};
pub use plan::{Call, Fault, Plan, RandomFaults};
pub use proxy::Proxy;
