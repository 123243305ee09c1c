//! Describes a machine as a `GPUTopology`.
#![forbid(unsafe_code)]
#![deny(missing_docs)]
