//! Descriptions of machines, read into core's model and back.
//!
//! ```text
//! GPUTopology ─> cluster (nodes, cores), report (GPUs, NICs, paths) ─> nccl (NCCL's classes), cells (the matrix people know)
//! `nvidia-smi topo -m` ─> matrix ─> tree (PCIe paths with these distances) ─> import ─> GPUTopology
//! NCCL's topology file <─> xml (parse, check, generate, diff)
//! ```
//!
//! Pure: texts and objects in, values out. What a text does not contain stays absent, and what is reconstructed is named in `status.sources`.
#![forbid(unsafe_code)]

pub mod cells;
pub mod cluster;
pub mod fold;
pub mod import;
pub mod matrix;
pub mod nccl;
pub mod report;
pub mod tree;
pub mod xml;
