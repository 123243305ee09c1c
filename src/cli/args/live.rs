//! Arguments of the commands about jobs in a running cluster.

use clap::Args;
use std::path::PathBuf;

/// Which cluster, and which namespace of it.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct ConnectionArgs {
    /// Kubeconfig. Default: KUBECONFIG or ~/.kube/config.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig. Default: the current one.
    #[arg(long)]
    pub context: Option<String>,

    /// Namespace. Default: the context's.
    #[arg(short, long)]
    pub namespace: Option<String>,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Name of a TrainJob. Default: all jobs in the namespace.
    pub job: Option<String>,

    /// Show the jobs of all namespaces.
    #[arg(short = 'A', long, conflicts_with_all = ["job", "namespace"])]
    pub all_namespaces: bool,

    /// Keep running and show changes: in place on a terminal, otherwise one line each. Exits when
    /// the named job ends.
    #[arg(short, long)]
    pub watch: bool,

    /// The cluster.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Arguments of `logs`.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    /// Name of a TrainJob.
    pub job: String,

    /// Print only the log of this global rank. With images other than Switchyard's, print the log
    /// of the rank's node.
    #[arg(long, value_name = "N")]
    pub rank: Option<u32>,

    /// Print the log of one node of the job.
    #[arg(long, value_name = "N", conflicts_with = "rank")]
    pub node_rank: Option<u32>,

    /// Print the log of this container, such as an init container or a sidecar. Default: the
    /// trainer container; before it starts, the init container that is running or failed.
    #[arg(short, long, value_name = "NAME")]
    pub container: Option<String>,

    /// Print logs of this attempt, if its pods still exist. Default: the latest attempt with pods.
    #[arg(long, value_name = "N")]
    pub attempt: Option<u32>,

    /// Follow the logs as long as the pods run.
    #[arg(short, long)]
    pub follow: bool,

    /// Number of lines per node, from the end. Default: all that the kubelet keeps.
    #[arg(long, value_name = "LINES", value_parser = clap::value_parser!(i64).range(0..))]
    pub tail: Option<i64>,

    /// The cluster.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Arguments of `support-bundle`.
#[derive(Debug, Args)]
pub(crate) struct BundleArgs {
    /// Include logs and events of these TrainJobs. Default: the active jobs in the namespace, and
    /// the most recent one that failed.
    #[arg(value_name = "JOB")]
    pub jobs: Vec<String>,

    /// The archive to write. Default: switchyard-bundle-TIME.tar.gz in the current directory.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Leave out job logs, which can contain sensitive data.
    #[arg(long)]
    pub no_job_logs: bool,

    /// Namespace of the controller and the agents.
    #[arg(long, value_name = "NAMESPACE", default_value = "switchyard-system")]
    pub system_namespace: String,

    /// The cluster.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}
