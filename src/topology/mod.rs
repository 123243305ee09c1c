//! The machines as placement sees them: ordinals, cores and distances, without a Kubernetes name.
//!
//! [`model`] is the structure, [`build`] makes it from `GPUTopology` reports, [`path`] classifies PCIe paths.
//! The other way round: [`matrix`] reads the text of `nvidia-smi topo -m`, [`tree`] finds PCIe paths for its classes, and
//! [`import`] makes a `GPUTopology` of both and of what [`gpu_model`] knows about NVLink.

pub mod build;
pub mod gpu_model;
pub mod import;
pub mod matrix;
pub mod model;
pub mod path;
pub mod tree;
