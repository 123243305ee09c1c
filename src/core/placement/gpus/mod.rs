//! Exact GPU placement for a gang: nodes, the GPUs and NICs on each, and rank order.

mod choose;
mod fleet;
mod groups;
mod repair;
mod request;
pub mod ring;
mod shape;
mod solve;

pub use fleet::{Fleet, FleetError, MAX_LEVELS, Site};
pub use request::{Group, MAX_GROUPS, Placement, Pod, Refusal, Request, Slices};
pub use ring::{MinLink, UNLIMITED};
pub use shape::{Level, MAX_GPUS, Shape};
