//! Reads machine descriptions into the core model, and writes them back.
//!
//! ```text
//! GPUTopology ─> cluster (nodes, cores)
//! GPUTopology ─> report (GPUs, NICs, paths) ─> nccl (NCCL's path classes)
//! GPUTopology ─> cells (the matrix of nvidia-smi)
//! `nvidia-smi topo -m` ─> matrix ─> tree (PCIe paths with these classes) ─> import ─> GPUTopology
//! NCCL's topology file <─> xml (parse, check, generate, diff)
//! ```
//!
//! Pure: texts and objects in, values out. Facts missing from a text stay absent, and reconstructed
//! facts are named in `status.sources`.
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
