//! The Switchyard API, group `training.switchyard.dev/v1alpha1`, and the validation that an API
//! server would do.
//!
//! - [`TrainJob`]: a user's request, and its state.
//! - [`PlacementSlice`]: a part of the placement of a job with too many nodes for its status.
//! - [`ProvisioningRequest`]: the only third-party kind, through which a gang requests nodes.
//! - [`validate`]: the checks that the API server derives from the CRD (structure, then CEL rules),
//!   without an API server.
//! - `crds/generated/*.yaml`: the CRDs, written by `cargo xtask gen`, never by hand.
//!
//! Deliberately absent: clients, I/O, decisions.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod checkpoint;
pub mod conditions;
pub mod device_use;
mod engine;
mod fabric;
mod failure_policy;
pub mod generate;
pub mod gpu_topology;
pub mod labels;
pub mod names;
mod placement_slice;
mod provisioning_request;
mod role;
mod topology_policy;
mod train_job;
mod train_job_status;
mod trainer;
pub mod validate;

pub use checkpoint::*;
pub use engine::*;
pub use fabric::*;
pub use failure_policy::*;
pub use placement_slice::*;
pub use provisioning_request::*;
pub use role::*;
pub use topology_policy::*;
pub use train_job::*;
pub use train_job_status::*;
pub use trainer::*;
