//! How one network is divided over several ranks.

use super::one;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// How one network is divided over several ranks.
#[derive(KubeSchema, Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Parallelism {
    /// Stages of a pipeline: consecutive layers of the network on different ranks. Each rank has
    /// the weights and the optimizer's state of one stage. Divides numNodes * numProcPerNode; the
    /// quotient is the number of pipelines, which train on different samples. Set `batchMerge` to
    /// several times this number, so that stages rarely wait for each other. Default 1: every rank
    /// has the whole network. CPUs only.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 256))]
    pub pipeline_stages: i32,
}

impl Default for Parallelism {
    fn default() -> Parallelism {
        Parallelism { pipeline_stages: one() }
    }
}
