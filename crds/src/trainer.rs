//! What a job's pods run: processes, their resources and environment.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum number of nodes of a job.
pub const MAX_NODES: i32 = 4096;
/// Maximum number of processes on a node.
pub const MAX_PROC_PER_NODE: i32 = 64;

/// Framework that runs in the trainer container.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Framework {
    /// Switchyard's own engine, configured by `engine`.
    #[default]
    Switchyard,
    /// PyTorch, started by `torchrun`, or directly if each node has one process.
    Torch,
    /// PaddlePaddle, started by `python -m paddle.distributed.launch`.
    Paddle,
    /// Horovod, started by `mpirun` as with `MPI`.
    Horovod,
    /// Open MPI 5: the command, which calls `mpirun`, runs on node 0; the other nodes run its
    /// daemon. No ssh.
    MPI,
    /// JAX, with one process per node.
    JAX,
    /// TensorFlow, with one worker per node.
    TensorFlow,
    /// Any program. Its environment contains only the rank, the number of nodes and the address of
    /// node 0.
    Plain,
}

/// Processes, their resources and environment.
#[derive(KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.framework) && self.framework != 'Switchyard') || !has(self.resourcesPerNode) \
    || !has(self.resourcesPerNode.limits) || self.resourcesPerNode.limits.all(name, name in ['cpu', 'memory', 'nvidia.com/gpu'])")
    .message("only cpu, memory and nvidia.com/gpu are supported with framework Switchyard")
    .field_path(".resourcesPerNode.limits"))]
#[x_kube(validation = Rule::new("!has(self.framework) || !(self.framework in ['JAX', 'TensorFlow']) || !has(self.numProcPerNode) || self.numProcPerNode == 1")
    .message("frameworks JAX and TensorFlow have one process per node, which drives all its GPUs: leave numProcPerNode out")
    .field_path(".numProcPerNode"))]
pub struct Trainer {
    /// Number of nodes (one pod each). Default 1. `switchyard run` has one machine unless `--hosts`
    /// names more: with `topologyPolicy.mode: Preferred` it starts the processes of all nodes there
    /// and prints a warning, with `Required` it rejects the job.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = MAX_NODES))]
    pub num_nodes: i32,

    /// Processes on each node; with `engine.executionMode: SingleProcess`, devices of the single
    /// process. Default: one for each GPU of the pod; 1 without GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_PROC_PER_NODE))]
    pub num_proc_per_node: Option<i32>,

    /// Framework of the trainer container, which determines its rendezvous environment; values from
    /// `env` and the template win. Default `Switchyard`.
    #[serde(default)]
    pub framework: Framework,

    /// Image of the trainer container. Default: the image of the template's container `trainer`, or
    /// with framework Switchyard the worker image of the installed version.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub image: Option<String>,

    /// Command of the trainer container, for frameworks other than Switchyard. Default: the
    /// image's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 4096)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub command: Vec<String>,

    /// Arguments of the trainer container, for frameworks other than Switchyard. Default: the
    /// image's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), inner(length(max = 32768)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub args: Vec<String>,

    /// Compute threads of each process; with `engine.executionMode: SingleProcess`, of each of its
    /// devices. Default: the physical cores that placement assigns to it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub cpu_threads: Option<i32>,

    /// Resources of each node's pod. Default: the whole node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources_per_node: Option<ResourcesPerNode>,

    /// Environment of every process, added to what Switchyard sets. Names that begin with
    /// `SWITCHYARD_` are reserved, except the settings documented for users
    /// (`SWITCHYARD_TRANSPORT`, `SWITCHYARD_KERNEL`, …).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub env: Vec<EnvVar>,
}

impl Default for Trainer {
    fn default() -> Self {
        Trainer {
            num_nodes: 1,
            num_proc_per_node: None,
            framework: Framework::Switchyard,
            image: None,
            command: Vec::new(),
            args: Vec::new(),
            cpu_threads: None,
            resources_per_node: None,
            env: Vec::new(),
        }
    }
}

/// Resources of each node's pod.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourcesPerNode {
    /// Limits by resource name: `cpu` (cores) bounds the cores that processes of a node are placed
    /// on, `memory` (bytes) is compared before the start with what the engine will allocate,
    /// `nvidia.com/gpu` is the number of GPUs. Framework Switchyard accepts no others, and GPUs
    /// only if `engine.device` is not `Cpu`.
    #[serde(default)]
    #[schemars(extend("maxProperties" = 16))]
    pub limits: BTreeMap<String, Quantity>,
}

/// One environment variable.
#[derive(KubeSchema, Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnvVar {
    /// Name of the variable.
    #[schemars(length(min = 1, max = 256), regex(pattern = r"^[A-Za-z_][A-Za-z0-9_]*$"))]
    #[x_kube(validation = Rule::new("!self.startsWith('SWITCHYARD_') || self in ['SWITCHYARD_TRANSPORT', 'SWITCHYARD_HOST_ID', 'SWITCHYARD_KERNEL', 'SWITCHYARD_GPU_CACHE', 'SWITCHYARD_PEER_TIMEOUT_SECONDS', 'SWITCHYARD_CONNECT_TIMEOUT_SECONDS', 'SWITCHYARD_FAULT']")
        .message("names that begin with SWITCHYARD_ are set by Switchyard: choose another name"))]
    pub name: String,

    /// Value of the variable. Default: empty.
    #[serde(default)]
    #[schemars(length(max = 32768))]
    pub value: String,
}

pub(crate) fn one() -> i32 {
    1
}
