//! The machines as placement sees them: ordinals, cores and distances, without a Kubernetes name.
//!
//! [`model`] is the structure, [`build`] makes it from `GPUTopology` reports, [`path`] classifies PCIe paths.
//! [`tree`] finds PCIe paths for classes, and [`gpu_model`] knows the NVLinks of products.

pub mod build;
pub mod gpu_model;
pub mod model;
pub mod path;
pub mod tree;
