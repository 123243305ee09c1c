//! Why a node is not for a job.

use crate::eligible;
use jiff::Timestamp;
use switchyard_core::quantity::Resources;
use switchyard_crds as api;

/// Why a node is left out.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Excluded {
    /// The scheduler would not take it.
    #[error("{0}")]
    Unfit(eligible::Unfit),
    /// Not enough of a resource.
    #[error("{name}: {} free, {} asked for", Resources::amount(name, *free), Resources::amount(name, *need))]
    Short {
        name: String,
        /// What is free, thousandths.
        free: i64,
        /// What is asked for, thousandths.
        need: i64,
    },
    #[error("{free} of {all} GPUs free")]
    Gpus { free: u32, all: u32 },
    /// Its free GPUs are enough, but not joined as the job asks.
    #[error("its free GPUs are not joined by {0:?} or better (topologyPolicy.nodeTopology.minLink)")]
    Links(api::MinLink),
    /// The report cannot be used.
    #[error("its GPUTopology cannot be used: {0}")]
    Report(String),
    /// The report is old.
    #[error("its GPUTopology is from {0} and has not been renewed since")]
    Stale(Timestamp),
    #[error("no GPUTopology: the node agent does not run there")]
    NoReport,
    /// It is not asked.
    #[error("{0}")]
    LeftOut(String),
    /// No driver offers its GPUs for claims.
    #[error("no ResourceSlice offers its GPUs")]
    NoSlice,
}
