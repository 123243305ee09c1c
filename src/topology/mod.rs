//! The machines as placement sees them: ordinals, cores and distances, without a Kubernetes name.
//!
//! [`model`] is the structure, [`build`] makes it from `GPUTopology` reports, [`path`] classifies PCIe paths.

pub mod build;
pub mod devices;
pub mod model;
pub mod path;
