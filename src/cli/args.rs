//! Arguments.

mod cluster;
mod diagnose;
mod live;
mod simulate;
mod topo;
mod values;

pub(super) use cluster::{ClusterArgs, ExplainArgs, PreflightArgs, SnapshotArgs, WhatifArgs};
pub(super) use diagnose::{ConvertArgs, DoctorArgs, DoctorClusterArgs, DoctorCommand, DoctorGpuArgs, LintArgs};
pub(super) use live::{BundleArgs, ConnectionArgs, LogsArgs, StatusArgs};
pub(super) use simulate::{Limits, SimulateArgs};
pub(super) use topo::{ImportArgs, TopoArgs, TopoCommand, XmlArgs};

use clap::{ArgGroup, Args, ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use switchyard_controller_daemon::ControllerArgs;
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
    /// Parses the arguments of this process. Usage, help and errors show the name by which the
    /// program was called, such as `kubectl switchyard` for a plugin. `version` is the version to
    /// print. Exits on invalid arguments and on requests for help.
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

    /// Applies `--color` to all output.
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
    /// Show how a run went, where its time went, and what would make it faster; writes
    /// RUN_DIR/report.html and report.json.
    Report(ReportArgs),
    /// Show how a TrainJob would run on this machine, or where it would be placed in a cluster, and
    /// why; starts nothing.
    #[command(after_long_help = exit_codes())]
    Plan(PlanArgs),
    /// Show how placements would change: a node drained, a job added, a level required, a link
    /// lost; changes nothing.
    Whatif(WhatifArgs),
    /// Play a trace of jobs against a cluster: how long jobs would wait and how fast they would
    /// run, by the controller's own rules and by those of others, with more racks or another
    /// network; changes nothing.
    Simulate(SimulateArgs),
    /// Print the objects of a cluster that decide placements, for --snapshot of other commands.
    Snapshot(SnapshotArgs),
    /// Show how a machine is built: GPUs, NICs, NUMA nodes, cores, the bandwidth of its links; or
    /// who uses which GPUs of a cluster.
    Topo(TopoArgs),
    /// Find settings in manifests of training jobs (ours, Kubeflow's, plain pods) that break the
    /// job, cost speed or do nothing.
    #[command(after_long_help = diagnose::LINT_CODES)]
    Lint(LintArgs),
    /// Convert a PyTorchJob, PaddleJob, MPIJob or TrainJob of Kubeflow to a TrainJob, and list what
    /// has no counterpart.
    #[command(after_long_help = diagnose::CONVERT_CODES)]
    Convert(ConvertArgs),
    /// Check the nodes that a TrainJob would get, before it uses any GPU time: 27 checks, each with
    /// the fix; starts nothing.
    #[command(after_long_help = exit_codes())]
    Preflight(PreflightArgs),
    /// Explain the errors in logs of ranks (NCCL, Gloo, MPI, CUDA, RDMA, our own worker): the first
    /// cause, and what followed from it.
    Doctor(DoctorArgs),
    /// Show the jobs of a cluster: stage, nodes, progress, what they are waiting for; with --watch
    /// for as long as they run.
    #[command(after_long_help = exit_codes())]
    Status(StatusArgs),
    /// Print the logs of a job's ranks in a cluster.
    Logs(LogsArgs),
    /// Collect in one archive what is needed to understand a fault in a cluster: objects, events,
    /// logs. No Secret is read, and no value of an environment variable is kept.
    SupportBundle(BundleArgs),
    /// Work with the checkpoints of a job: list them, verify them, export the model.
    #[command(subcommand, after_long_help = exit_codes())]
    Checkpoint(CheckpointCommand),
    /// Run the controller: reconciles the TrainJobs of a cluster.
    Controller(ControllerArgs),
    /// Print the CRDs of Switchyard, for `kubectl apply --server-side -f -`.
    Crd,
    /// Explain why a job is placed where it is or why it waits; or explain an error code, such as
    /// SY0003.
    Explain(ExplainArgs),
    /// Print the completion script of a shell; `kubectl`: the program that kubectl runs for
    /// completion.
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

    /// GPUs of the ranks, by the numbers that nvidia-smi shows: one for each rank, in the order of
    /// the ranks. Default: each process takes the GPU of its number.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub devices: Vec<u32>,

    /// Program of the ranks, such as one with custom models. Default: switchyard-worker beside this
    /// program or on the PATH.
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

    /// A device file (docs/gpu.md): the kernels of a profiled run on GPUs are held against its
    /// rates.
    #[arg(long, value_name = "FILE")]
    pub device: Option<PathBuf>,

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

    /// Plan for the machine described by this GPUTopology (YAML) instead of this machine. May be
    /// repeated, one per node.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cluster", "snapshot"])]
    pub topology: Vec<PathBuf>,

    /// Show how long each operation of a training step takes at least on the GPU of this device
    /// file (JSON; see docs/gpu.md), which need not be there. Reads the job's data.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["topology", "cluster", "snapshot", "fabric"])]
    pub device: Option<PathBuf>,

    /// Show where the job would be placed in the cluster of the kubeconfig.
    #[arg(long, conflicts_with = "snapshot")]
    pub cluster: bool,

    /// Show every setting of the fabric, with its reason, instead of the placement.
    #[arg(long)]
    pub fabric: bool,

    /// Print a drawing of the placement in the cluster (SVG). If there is none, the reason is
    /// printed as text.
    #[arg(long, requires = "of a cluster", conflicts_with = "fabric")]
    pub svg: bool,

    /// Namespace in which the job will be created. Default: that of the manifest, else that of the
    /// context.
    #[arg(short, long, requires = "of a cluster")]
    pub namespace: Option<String>,

    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}

/// Subcommands of `checkpoint`.
#[derive(Debug, Subcommand)]
pub(super) enum CheckpointCommand {
    /// List the checkpoints in a directory, newest first. Lengths are compared, contents are not.
    List(SelectorArgs),
    /// Read checkpoints completely and compare all digests; names the file, chunk and tensors that
    /// are damaged.
    Verify(SelectorArgs),
    /// Write the model of a checkpoint, without the optimizer, to one safetensors file, for PyTorch
    /// and others.
    Export(ExportArgs),
}

/// Which checkpoints.
#[derive(Debug, Args)]
pub(super) struct SelectorArgs {
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
    pub selector: SelectorArgs,

    /// The file to write; it is replaced if it exists.
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
}

/// The table of exit codes for `--help`.
fn exit_codes() -> String {
    let rows = Exit::ALL.iter().map(|(exit, text)| format!("  {:>3}  {text}", exit.code()));
    format!("Exit codes:\n{}", rows.collect::<Vec<_>>().join("\n"))
}
