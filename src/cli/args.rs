//! Arguments.

mod cluster;
mod diagnose;
mod live;
mod topo;
mod values;

pub(super) use cluster::{ClusterArgs, ExplainArgs, PreflightArgs, SnapshotArgs, WhatifArgs};
pub(super) use diagnose::{ConvertArgs, DoctorArgs, LintArgs};
pub(super) use live::{BundleArgs, ConnectionArgs, LogsArgs, StatusArgs};
pub(super) use topo::{ImportArgs, TopoArgs, TopoCommand, XmlArgs};

use clap::{ArgGroup, Args, ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;
use switchyard_plan::cluster::levels::{DomainLevel, LevelError, Levels};
use switchyard_service::telemetry;
use switchyard_worker_contract::exit::Exit;

/// Topology-aware training jobs.
#[derive(Debug, Parser)]
#[command(name = "switchyard", version, about, after_long_help = exit_codes(), max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(super) command: Command,

    /// Format of the result: for people, or for programs.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    pub(super) output: Output,

    /// When to use colour. Also honours `NO_COLOR` and `CLICOLOR_FORCE`.
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto)]
    pub(super) color: ColorChoice,

    /// Use only ASCII characters.
    #[arg(long, global = true)]
    pub(super) ascii: bool,

    /// Print the result and errors only.
    #[arg(short, long, global = true)]
    pub(super) quiet: bool,

    /// Also print the reason for each decision.
    #[arg(short, long, global = true)]
    pub(super) verbose: bool,

    /// Version of this program, and of which commit it is.
    #[arg(skip = env!("CARGO_PKG_VERSION"))]
    pub(super) version: &'static str,
}

impl Cli {
    /// The arguments of this process. `version` is the version of the program. Usage, help and errors use the name by which the program was
    /// called: as a plugin, `kubectl switchyard`. Exits on invalid arguments and on requests for help.
    pub fn parse_as(version: &'static str) -> Cli {
        let called = std::env::args_os().next().map(PathBuf::from);
        let plugin = called.as_deref().and_then(|path| path.file_name()?.to_str()?.strip_prefix("kubectl-"));
        let command = Cli::command().version(version);
        let command = match plugin {
            Some(plugin) => command.bin_name(format!("kubectl {plugin}")),
            None => command,
        };
        Cli { version, ..Cli::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit()) }
    }

    /// Applies `--color` to everything that is printed.
    pub fn apply_color(&self) {
        let choice = match self.color {
            ColorChoice::Always => anstream::ColorChoice::Always,
            ColorChoice::Never => anstream::ColorChoice::Never,
            ColorChoice::Auto => anstream::ColorChoice::Auto,
        };
        choice.write_global();
    }
}

/// Form of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// For people and programs.
    Yaml,
    /// For programs; `run` prints one object per line.
    Json,
    /// For Graphviz; only `topo` takes it.
    Dot,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run a TrainJob on this machine, without a cluster.
    #[command(after_long_help = exit_codes())]
    Run(RunArgs),
    /// Show how a run went, where its time went, and what would make it faster; writes RUN_DIR/report.html and report.json.
    Report(ReportArgs),
    /// Show how a TrainJob would run on this machine, or where it would be placed in a cluster, and why; starts nothing.
    #[command(after_long_help = exit_codes())]
    Plan(PlanArgs),
    /// Show how placements would change: a node drained, a job added, a level required, a link lost; changes nothing.
    Whatif(WhatifArgs),
    /// Print the objects of a cluster that decide placements, for --snapshot of other commands.
    Snapshot(SnapshotArgs),
    /// Show how a machine is built: GPUs, NICs, NUMA nodes, cores, the bandwidth of its links; or who uses which GPUs of a cluster.
    Topo(TopoArgs),
    /// Find settings in manifests of training jobs (ours, Kubeflow's, plain pods) that break the job, cost speed or do nothing.
    #[command(after_long_help = diagnose::LINT_CODES)]
    Lint(LintArgs),
    /// Convert a PyTorchJob, PaddleJob, MPIJob or TrainJob of Kubeflow to a TrainJob, and list what has no counterpart.
    #[command(after_long_help = diagnose::CONVERT_CODES)]
    Convert(ConvertArgs),
    /// Check the nodes that a TrainJob would get, before it uses any GPU time: 27 checks, each with the fix; starts nothing.
    #[command(after_long_help = exit_codes())]
    Preflight(PreflightArgs),
    /// Explain the errors in logs of ranks (NCCL, Gloo, MPI, CUDA, RDMA, our own worker): the first cause, and what followed from it.
    Doctor(DoctorArgs),
    /// Show the jobs of a cluster: stage, nodes, progress, what they are waiting for; with --watch for as long as they run.
    #[command(after_long_help = exit_codes())]
    Status(StatusArgs),
    /// Print the logs of a job's ranks in a cluster.
    Logs(LogsArgs),
    /// Collect in one archive what is needed to understand a fault in a cluster: objects, events, logs. No Secret is read, and no value of
    /// an environment variable is kept.
    SupportBundle(BundleArgs),
    /// Work with the checkpoints of a job: list them, verify them, export the model.
    #[command(subcommand, after_long_help = exit_codes())]
    Checkpoint(CheckpointCommand),
    /// Run the controller: reconciles the TrainJobs of a cluster.
    Controller(ControllerArgs),
    /// Print the CRDs of Switchyard, for `kubectl apply --server-side -f -`.
    Crd,
    /// Explain why a job is placed where it is or why it waits; or explain an error code, such as SY0003.
    Explain(ExplainArgs),
    /// Print the completion script of a shell; `kubectl`: the program that kubectl runs for completion.
    Completions(CompletionsArgs),
    /// Write manual pages, one per command, into a folder.
    Man(ManArgs),
    /// Called by kubectl through `completions kubectl`.
    #[command(name = "__complete", hide = true, disable_help_flag = true)]
    Complete(CompleteArgs),
    /// Print the version.
    Version,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    /// Which shell.
    #[arg(value_enum)]
    pub shell: CompletionShell,
}

/// A shell, or kubectl.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CompletionShell {
    /// For bash to evaluate.
    Bash,
    /// For zsh to evaluate.
    Zsh,
    /// For fish to evaluate.
    Fish,
    /// A program to put on the PATH as `kubectl_complete-switchyard`.
    Kubectl,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// The folder; it is created if it does not exist.
    pub folder: PathBuf,
}

/// Arguments of the hidden `__complete`.
#[derive(Debug, Args)]
pub(super) struct CompleteArgs {
    /// The words of the command line so far; the last one is completed.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<String>,
}

/// Arguments of `run`.
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// Manifest of a TrainJob; `-` reads standard input.
    pub file: PathBuf,

    /// Directory for logs, status and the trained model; new or empty. Default: runs/JOB-xxxx.
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// Program of the ranks, such as one with custom models. Default: switchyard-worker beside this program or on the PATH.
    #[arg(long, value_name = "FILE", env = "SWITCHYARD_WORKER")]
    pub worker: Option<PathBuf>,
}

/// Arguments of `report`.
#[derive(Debug, Clone, Args)]
pub(super) struct ReportArgs {
    /// Directory of a run, as `switchyard run` leaves it, or the name of a TrainJob in a cluster.
    #[arg(value_name = "RUN_DIR|JOB")]
    pub subject: PathBuf,

    /// Write the page to this file instead of RUN_DIR/report.html; RUN_DIR is then left unchanged.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// A run of the same job with synthetic data, to measure whether input is the bottleneck.
    #[arg(long, value_name = "RUN_DIR")]
    pub synthetic: Option<PathBuf>,

    /// Where the job is.
    #[command(flatten)]
    pub connection: ConnectionArgs,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("of a cluster").args(["cluster", "snapshot"]).multiple(true)))]
pub(super) struct PlanArgs {
    /// Manifest of a TrainJob; `-` reads standard input.
    pub file: PathBuf,

    /// Plan for the machine described by this GPUTopology (YAML) instead of this machine. May be repeated, one per node.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cluster", "snapshot"])]
    pub topology: Vec<PathBuf>,

    /// Show where the job would be placed in the cluster of the kubeconfig.
    #[arg(long, conflicts_with = "snapshot")]
    pub cluster: bool,

    /// Show every setting of the fabric, with its reason, instead of the placement.
    #[arg(long)]
    pub fabric: bool,

    /// Print a drawing of the placement in the cluster (SVG). If there is none, the reason is printed as text.
    #[arg(long, requires = "of a cluster", conflicts_with = "fabric")]
    pub svg: bool,

    /// Namespace in which the job will be created. Default: that of the manifest, else that of the context.
    #[arg(short, long, requires = "of a cluster")]
    pub namespace: Option<String>,

    /// The cluster.
    #[command(flatten)]
    pub place: ClusterArgs,
}

/// Subcommands of `checkpoint`.
#[derive(Debug, Subcommand)]
pub(super) enum CheckpointCommand {
    /// List the checkpoints in a directory, newest first. Lengths are compared, contents are not.
    List(WhichArgs),
    /// Read checkpoints completely and compare all digests; names the file, chunk and tensors that are damaged.
    Verify(WhichArgs),
    /// Write the model of a checkpoint, without the optimizer, to one safetensors file, for PyTorch and others.
    Export(ExportArgs),
}

/// Which checkpoints.
#[derive(Debug, Args)]
pub(super) struct WhichArgs {
    /// The directory of a job's checkpoints.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,

    /// Only checkpoints of this step.
    #[arg(long, value_name = "N")]
    pub step: Option<u64>,

    /// Only checkpoints of this attempt.
    #[arg(long, value_name = "N")]
    pub attempt: Option<u32>,
}

/// Arguments of `checkpoint export`.
#[derive(Debug, Args)]
pub(super) struct ExportArgs {
    /// Which checkpoints: the newest complete one is exported.
    #[command(flatten)]
    pub which: WhichArgs,

    /// The file to write; it is replaced if it exists.
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
}

/// A switch, with the values of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(super) enum Toggle {
    /// On.
    Enabled,
    /// Off.
    Disabled,
}

/// Arguments of `controller`.
#[derive(Debug, Args)]
pub(super) struct ControllerArgs {
    /// Kubeconfig. Default: KUBECONFIG or ~/.kube/config, else the pod's service account.
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// Context of the kubeconfig. Default: the current one.
    #[arg(long)]
    pub context: Option<String>,

    /// Namespace of the Lease. Default: switchyard-system.
    #[arg(long, env = "POD_NAMESPACE")]
    pub namespace: Option<String>,

    /// Name of this controller in the Lease, plus a random part. Default: the host name.
    #[arg(long, env = "POD_NAME")]
    pub identity: Option<String>,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080")]
    pub listen: SocketAddr,

    /// Whether several controllers choose a leader by a Lease.
    #[arg(long, value_enum, default_value_t = Toggle::Enabled)]
    pub leader_elect: Toggle,

    /// Seconds after which a Lease that is not renewed is free.
    #[arg(long, value_name = "SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub lease_duration_seconds: u16,

    /// Seconds after which a leader that cannot renew its Lease stops.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub renew_deadline_seconds: u16,

    /// Seconds between two attempts to take or renew the Lease.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub retry_period_seconds: u16,

    /// Reconcile only the TrainJobs of this namespace. Default: of all namespaces.
    #[arg(long, value_name = "NAMESPACE")]
    pub watch_namespace: Option<String>,

    /// Image of the worker, for jobs that name none.
    #[arg(long, value_name = "IMAGE", default_value = concat!("switchyard-worker:", env!("CARGO_PKG_VERSION")))]
    pub worker_image: String,

    /// Device class that ResourceClaims for GPUs name.
    #[arg(long, value_name = "CLASS", default_value = "gpu.nvidia.com")]
    pub gpu_device_class: String,

    /// Driver that offers GPUs in ResourceSlices, with their UUIDs as attributes.
    #[arg(long, value_name = "DRIVER", default_value = "gpu.nvidia.com")]
    pub gpu_driver: String,

    /// File with the administrator's profile of the fabric (docs/fabric.md), which wins over the built-in packs.
    #[arg(long, value_name = "FILE")]
    pub fabric_profile: Option<PathBuf>,

    /// A level of domains of nodes, small to large, repeatable: KEY (a label of the nodes), KEY:FACTOR with its oversubscription,
    /// KEY:NVLink for an NVLink domain; `cluster` is all nodes. Default: NVLink cliques and the labels of Topograph and of clouds.
    #[arg(long = "domain", value_name = "KEY[:FACTOR|:NVLink]")]
    pub domains: Vec<DomainLevel>,

    /// A ValidatingAdmissionPolicy that must be in force, with a binding of the same name; repeatable. The log and the metric
    /// switchyard_policy_missing report one that is not.
    #[arg(long = "admission-policy", value_name = "NAME")]
    pub admission_policies: Vec<String>,

    /// Seconds for which a node that does not report (condition Ready is Unknown) is waited for, since it stopped and since the ranks last
    /// made progress. A node that reports that it is not ready is never taken for lost.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub node_grace_seconds: u32,

    /// Where more than this share of the nodes, and at least 3, stop reporting within a minute, no job is started again for that until they
    /// report; 0: never.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub fleet_brake_percent: u8,

    /// Jobs that are reconciled at the same time.
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub concurrent_reconciles: u16,

    /// Format of the log on standard error.
    #[arg(long, value_enum, default_value_t = telemetry::Format::Text)]
    pub log_format: telemetry::Format,

    /// Log level: error, warn, info, debug, trace, or a filter of the tracing library.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: String,
}

/// The levels of the command line; if there are none, the known ones.
pub(super) fn levels(domains: &[DomainLevel]) -> Result<Levels, LevelError> {
    if domains.is_empty() { Ok(Levels::default()) } else { Levels::new(domains.to_vec()) }
}

/// The table of exit codes for `--help`.
fn exit_codes() -> String {
    let rows = Exit::ALL.iter().map(|(exit, text)| format!("  {:>3}  {text}", exit.code()));
    format!("Exit codes:\n{}", rows.collect::<Vec<_>>().join("\n"))
}
