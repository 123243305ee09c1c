//! Arguments of the commands that diagnose manifests and logs.

use super::ConnectionArgs;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use switchyard_fabric::variables::nccl;

/// Arguments of `lint`.
#[derive(Debug, Args)]
pub(crate) struct LintArgs {
    /// Manifests with one or more YAML documents; `-` reads standard input.
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,

    /// NCCL version in the image, such as 2.21.5. Reports variables that this version ignores.
    #[arg(long, value_name = "VERSION")]
    pub nccl: Option<nccl::Version>,
}

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub(crate) struct ConvertArgs {
    /// Manifest with one or more YAML documents; `-` reads standard input.
    pub file: PathBuf,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct DoctorArgs {
    /// A command other than reading logs.
    #[command(subcommand)]
    pub command: Option<DoctorCommand>,

    /// Logs of ranks, or folders of logs such as a run directory; `-` reads standard input. Or the
    /// name of a TrainJob in the cluster of the kubeconfig, to read the logs of its pods.
    #[arg(value_name = "LOG|JOB", required = true)]
    pub logs: Vec<PathBuf>,

    /// Where a TrainJob is.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// What else the doctor looks at.
#[derive(Debug, Subcommand)]
pub(crate) enum DoctorCommand {
    /// Show what this machine provides for GPU training (driver, libraries, GPUs), what is missing,
    /// and how to fix it.
    Gpu(DoctorGpuArgs),
    /// Check a cluster's Switchyard installation: policies, leader, agents, versions, CRDs,
    /// webhooks. Each finding comes with its fix.
    Cluster(DoctorClusterArgs),
}

/// Arguments of `doctor cluster`.
#[derive(Debug, Args)]
pub(crate) struct DoctorClusterArgs {
    /// Kubeconfig. Default: KUBECONFIG or ~/.kube/config.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig. Default: the current one.
    #[arg(long)]
    pub context: Option<String>,
}

/// Arguments of `doctor gpu`.
#[derive(Debug, Args)]
pub(crate) struct DoctorGpuArgs {
    /// Program that inspects the GPUs. Default: switchyard-worker next to this program or on the
    /// PATH.
    #[arg(long, value_name = "FILE", env = "SWITCHYARD_WORKER")]
    pub worker: Option<PathBuf>,
}

/// Exit codes of `lint`, for `--help`.
pub(super) const LINT_CODES: &str =
    "Exit codes:\n    0  no error found\n    1  an error found\n    2  wrong command line or unreadable file";

/// Exit codes of `convert`, for `--help`.
pub(super) const CONVERT_CODES: &str = "Exit codes:\n    0  converted; settings without an equivalent are listed on standard error\n    2  wrong command line, unreadable file, nothing to convert, or an invalid result";
