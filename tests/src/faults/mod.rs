//! A proxy between a controller and its API server that does what networks, servers and schedulers do to it.
//!
//! The controller under test is the real program, unchanged: it is killed, left without an answer, shown old events. What happens
//! to a call is decided by a [`Plan`] from what the call is and how many there were before, never by chance alone.

mod lane;
mod plan;
mod proxy;
mod stream;

pub use lane::{Lane, Point, Scenario};
pub use plan::{Call, Fault, Plan, Weather};
pub use proxy::Proxy;
