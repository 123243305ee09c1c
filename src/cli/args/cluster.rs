//! Arguments of the commands about placements in a running or saved cluster.

use clap::Args;
use std::path::PathBuf;
use switchyard_plan::cluster::levels::DomainLevel;

/// Arguments of `preflight`.
#[derive(Debug, Args)]
pub(crate) struct PreflightArgs {
    /// Manifest of a TrainJob; `-` reads standard input.
    pub file: PathBuf,

    /// Check the cluster of the kubeconfig. The default without --snapshot.
    #[arg(long, conflicts_with = "snapshot")]
    pub cluster: bool,

    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}

/// Which cluster, and how to read it.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClusterArgs {
    /// Read the cluster from a file written by `switchyard snapshot`, or from a kubectl List; `-`
    /// reads standard input.
    #[arg(long, value_name = "FILE")]
    pub snapshot: Option<PathBuf>,

    /// Kubeconfig. Default: KUBECONFIG or ~/.kube/config.
    #[arg(long, value_name = "FILE", conflicts_with = "snapshot")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig. Default: the current one.
    #[arg(long, conflicts_with = "snapshot")]
    pub context: Option<String>,

    /// Fabric profile of the cluster, as for the controller.
    #[arg(long, value_name = "FILE")]
    pub fabric_profile: Option<PathBuf>,

    /// A level of node domains, as for the controller. Can be repeated. Default: the levels in the
    /// snapshot or in the arguments of the controller's pod, otherwise the built-in ones.
    #[arg(long = "domain", value_name = "KEY[:FACTOR|:NVLink]")]
    pub domains: Vec<DomainLevel>,

    /// A queue setting: a flag of the controller without dashes, such as
    /// queue-policy=Opportunistic. Can be repeated. Default: as in the arguments of the
    /// controller's pod, if the cluster has one, otherwise the controller's defaults.
    #[arg(long = "queue", value_name = "NAME=VALUE")]
    pub queue: Vec<String>,
}

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// Name of a TrainJob, or an error code.
    #[arg(value_name = "JOB|CODE")]
    pub subject: String,

    /// Namespace of the TrainJob. Default: the context's; `default` in a snapshot.
    #[arg(short, long)]
    pub namespace: Option<String>,

    /// Show all fabric settings with their reasons instead of the placement.
    #[arg(long)]
    pub fabric: bool,

    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}

/// Arguments of `snapshot`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}

/// Arguments of `whatif`.
#[derive(Debug, Args)]
pub(crate) struct WhatifArgs {
    /// Manifests of TrainJobs that are not in the cluster: shows where they would be placed before
    /// and after the change. Default: the queued jobs, and those that the change moves.
    pub files: Vec<PathBuf>,

    /// Drain this node. Can be repeated.
    #[arg(long, value_name = "NODE")]
    pub drain: Vec<String>,

    /// Add this job. Can be repeated.
    #[arg(long, value_name = "FILE")]
    pub add: Vec<PathBuf>,

    /// Require each job to fit in a single domain of this level.
    #[arg(long, value_name = "KEY")]
    pub require: Option<String>,

    /// Take down the NVLinks of a GPU (NODE/GPU), those between two GPUs (NODE/GPU-GPU), or a NIC
    /// (NODE/NIC). GPUs are given by index. Can be repeated.
    #[arg(long, value_name = "NODE/DEVICE")]
    pub lose_link: Vec<String>,

    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}
