//! Reasons why a job cannot use a node.

use crate::eligible;
use jiff::Timestamp;
use switchyard_core::quantity::Resources;
use switchyard_crds as api;

/// Why a node is excluded.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Excluded {
    /// The scheduler would reject the node.
    #[error("{0}")]
    Unfit(eligible::Unfit),
    /// Not enough of a resource.
    #[error("{name}: {} free, {} requested", Resources::amount(name, *free), Resources::amount(name, *requested))]
    Short {
        name: String,
        /// Free amount, in thousandths.
        free: i64,
        /// Requested amount, in thousandths.
        requested: i64,
    },
    #[error("{free} of {all} GPUs free")]
    Gpus { free: u32, all: u32 },
    /// It has enough free GPUs, but their links are slower than the job requires.
    #[error("its free GPUs are not joined by {0:?} or better (topologyPolicy.nodeTopology.minLink)")]
    Links(api::MinLink),
    /// The report is invalid.
    #[error("its GPUTopology cannot be used: {0}")]
    Report(String),
    /// The report is stale.
    #[error("its GPUTopology is from {0} and has not been renewed since")]
    Stale(Timestamp),
    #[error("no GPUTopology: the node agent does not run there")]
    NoReport,
    /// The job avoids this node.
    #[error("{0}")]
    Avoided(String),
    /// No DRA driver offers its GPUs.
    #[error("no ResourceSlice offers its GPUs")]
    NoSlice,
}
