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

    /// Namespace. Default: that of the context.
    #[arg(short, long)]
    pub namespace: Option<String>,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Name of a TrainJob. Default: all of the namespace.
    pub job: Option<String>,

    /// The jobs of all namespaces.
    #[arg(short = 'A', long, conflicts_with_all = ["job", "namespace"])]
    pub all_namespaces: bool,

    /// Keep running and show every change: in place on a terminal, else one line each. Ends with
    /// the job if one is named.
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

    /// Only the log of this global rank. For other images than Switchyard's: the log of its node.
    #[arg(long, value_name = "N")]
    pub rank: Option<u32>,

    /// The log of one node of the job.
    #[arg(long, value_name = "N", conflicts_with = "rank")]
    pub node_rank: Option<u32>,

    /// The log of this container of the pods, such as an init container or a sidecar. Default: the
    /// trainer's, or before it starts that of the init container that runs or failed.
    #[arg(short, long, value_name = "NAME")]
    pub container: Option<String>,

    /// Pods of this attempt, if they still exist. Default: the newest attempt with pods.
    #[arg(long, value_name = "N")]
    pub attempt: Option<u32>,

    /// Follow the logs while the pods run.
    #[arg(short, long)]
    pub follow: bool,

    /// Number of lines per node, from the end. Default: everything that the kubelet keeps.
    #[arg(long, value_name = "LINES", value_parser = clap::value_parser!(i64).range(0..))]
    pub tail: Option<i64>,

    /// The cluster.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Arguments of `support-bundle`.
#[derive(Debug, Args)]
pub(crate) struct BundleArgs {
    /// Include logs and events of these TrainJobs. Default: those of the namespace that are not
    /// over, and the newest that failed.
    #[arg(value_name = "JOB")]
    pub jobs: Vec<String>,

    /// The archive to write. Default: switchyard-bundle-TIME.tar.gz here.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Leave out the logs of jobs, because programs may print what others should not see.
    #[arg(long)]
    pub no_job_logs: bool,

    /// Namespace of the controller and the agents.
    #[arg(long, value_name = "NAMESPACE", default_value = "switchyard-system")]
    pub system_namespace: String,

    /// The cluster.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}
