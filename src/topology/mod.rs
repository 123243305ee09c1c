//! The machines as placement sees them: ordinals, cores, devices and distances, without a Kubernetes name.
//!
//! [`model`] and [`devices`] are the structure: CPUs, and GPUs with NICs. [`build`] and [`report`] make them from `GPUTopology` reports,
//! [`path`] classifies PCIe paths, [`nccl`] all ways as NCCL does, [`rates`] says what a link is good for.
//! The other way round: [`matrix`] reads the text of `nvidia-smi topo -m`, [`tree`] finds PCIe paths for its classes, and
//! [`import`] makes a `GPUTopology` of both and of what [`gpu_model`] knows about NVLink. [`cells`] is that matrix of a report, [`fold`] finds equal
//! blocks in one. [`xml`]
//! reads, checks, makes and compares NCCL's topology files.

pub mod build;
pub mod cells;
pub mod fold;
pub mod import;
pub mod matrix;
pub mod nccl;
pub mod report;
pub mod tree;
pub mod xml;
