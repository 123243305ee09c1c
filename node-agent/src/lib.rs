//! Describes a machine as a [`GPUTopology`]: processors, caches, NUMA nodes, memory, network devices, GPUs.
//!
//! ```text
//!            files of sysfs, procfs, dev          NVML
//!  read ──────────────┬─────────────────────┬──────┴────────┐
//!  parse    cpu, cgroup, numa     net, rdma, pci, acs,   gpu, nvlink, fabric
//!                    │             host, measured         (nvml, nvml_raw)
//!                     └─────────────────────┴───────┬───────┘
//!                                    describe ── GPUTopology
//! ```
//!
//! Every parser is a pure function of the text of one file; the readers around them only open files. A fact that cannot
//! be read is left out and named in `status.sources`, and does not affect other facts. Nothing is started, written or
//! changed, no root rights are needed, and one description takes milliseconds.
//!
//! Besides the description, [`events`] waits for reports from GPUs, and [`counters`] reads values that change all the
//! time.
//!
//! Not here: the program that writes to a cluster (`node-agent/daemon`).
#![deny(unsafe_code)]

pub mod acs;
pub mod cgroup;
pub mod counters;
pub mod cpu;
mod describe;
pub mod events;
pub mod fabric;
pub mod gpu;
pub mod host;
pub mod measured;
pub mod net;
pub mod numa;
mod nvlink;
mod nvml;
#[allow(unsafe_code)]
mod nvml_raw;
pub mod pci;
pub mod rdma;
mod read;

pub use describe::{DescribeError, Roots, describe};
pub use read::Notes;
/// The type of the description.
pub use switchyard_crds::gpu_topology::GPUTopology;
