//! Roles of a `TrainJob`: pods of one job that run different programs.

use crate::trainer::{EnvVar, MAX_NODES, MAX_PROC_PER_NODE, ResourcesPerNode, one};
use k8s_openapi::api::core::v1::Toleration;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Maximum number of roles of a job. Kueue admits at most eight kinds of pods in a group.
pub const MAX_ROLES: usize = 8;

/// Pods that run the same program. All roles share `spec.template`. Pods of different roles can
/// share a node.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Role {
    /// Name of the role, in the pods' label `training.switchyard.dev/role`. With framework
    /// TensorFlow, the names `chief`, `worker`, `ps` and `evaluator` are the task types of
    /// `TF_CONFIG`. With Paddle, a role `ps` starts parameter servers. With MPI and Horovod, a role
    /// `launcher` of one pod runs `mpirun` and computes nothing.
    #[schemars(length(min = 1, max = 20), regex(pattern = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,

    /// Number of pods. Default 1.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = MAX_NODES))]
    pub replicas: i32,

    /// Processes in each pod. Default: one for each GPU of the pod; 1 without GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = MAX_PROC_PER_NODE))]
    pub num_proc_per_node: Option<i32>,

    /// Image of the trainer container. Default: `trainer.image`, else the image of the template's
    /// container `trainer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub image: Option<String>,

    /// Command of the trainer container. Default: the image's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 4096)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub command: Vec<String>,

    /// Arguments of the trainer container. Default: the image's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), inner(length(max = 32768)))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub args: Vec<String>,

    /// Environment of the role's processes, added to `trainer.env`. Of two values for one name, the
    /// role's wins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub env: Vec<EnvVar>,

    /// Resources of each pod. Its limits replace those of the template's container `trainer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources_per_node: Option<ResourcesPerNode>,

    /// Labels that a node must have, added to those of the template.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub node_selector: BTreeMap<String, String>,

    /// Tolerations, added to those of the template.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Atomic)]
    pub tolerations: Vec<Toleration>,

    /// Role that this one exchanges data with. Its pods are placed on the nodes of that role if
    /// there is room, else in the smallest domain around them that has room.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20))]
    pub near: Option<String>,

    /// Whether the pods join the framework's rendezvous.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rendezvous: Option<Rendezvous>,

    /// Reaction to a failed pod of the role. Default `RestartJob`.
    #[serde(default)]
    pub on_failure: OnRoleFailure,
}

/// Whether the pods join the framework's rendezvous, whose ranks train together. Roles that join
/// have the lowest ranks. Default: `Join` for the first role, and with MPI and Horovod for all
/// roles, otherwise `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Rendezvous {
    /// They are ranks of the group that trains.
    Join,
    /// They get no variables of the framework's launcher.
    None,
}

/// Reaction to a failed pod of a role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum OnRoleFailure {
    /// The attempt fails, and `failurePolicy` decides about the next one.
    #[default]
    RestartJob,
    /// The job continues without the pod, for example without an evaluator.
    Ignore,
}

/// When a job with roles is complete.
#[derive(KubeSchema, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SuccessPolicy {
    /// Role whose completion completes the job: once all its pods have succeeded, the pods of the
    /// other roles are deleted.
    #[schemars(length(min = 1, max = 20))]
    pub role: String,
}
