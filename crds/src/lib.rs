//! The API of Switchyard, group `training.switchyard.dev/v1alpha1`.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod gpu_topology;
