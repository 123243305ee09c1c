//! Exact GPUs for a gang: which nodes, which GPUs and NICs on them, in which order of ranks.

mod choose;
mod fleet;
mod groups;
mod repair;
mod request;
pub mod ring;
mod shape;
mod solve;

pub use fleet::{Fleet, FleetError, MOST_LEVELS, Site};
pub use request::{Group, MOST_GROUPS, Placement, Pod, Refusal, Request, Slices};
pub use ring::{MinLink, UNLIMITED};
pub use shape::{Level, MOST_GPUS, Shape};
