//! Describes a machine as a [`GPUTopology`]: processors, caches, NUMA nodes, memory, network
//! devices, GPUs.
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
//! Every parser is a pure function of the text of one file; the readers around them only open
//! files. A fact that cannot be read is omitted and named in `status.sources`, and does not affect
//! other facts. The library starts and writes nothing, needs no root privileges, and describes a
//! machine within milliseconds.
//!
//! In addition, [`events`] waits for GPU events, and [`counters`] reads values that change all the
//! time.
//!
//! The program that writes to a cluster is in `node-agent/daemon`.
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
pub use switchyard_crds::gpu_topology::GPUTopology;
