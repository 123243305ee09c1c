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
use switchyard_controller::daemon::ControllerArgs;
use switchyard_worker_contract::exit::Exit;

/// Schedule and run distributed training jobs on the GPUs and NICs with the fastest path between
/// them, on this machine or on Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "switchyard", version, about, after_long_help = exit_codes(), max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(super) command: Command,

    /// Output format, for humans or for programs.
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    pub(super) output: Output,

    /// When to use colour. `NO_COLOR` and `CLICOLOR_FORCE` are honoured.
    #[arg(long, global = true, value_enum, default_value_t = ColorChoice::Auto)]
    pub(super) color: ColorChoice,

    /// Use only ASCII characters.
    #[arg(long, global = true)]
    pub(super) ascii: bool,

    /// Print only results and errors.
    #[arg(short, long, global = true)]
    pub(super) quiet: bool,

    /// Also print the reason for each decision.
    #[arg(short, long, global = true)]
    pub(super) verbose: bool,

    /// Version and commit of this program.
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
    /// For humans.
    Table,
    /// For humans and programs.
    Yaml,
    /// For programs; `run` prints one object per line.
    Json,
    /// For Graphviz; only for `topo`.
    Dot,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Run a TrainJob on this machine, without a cluster.
    #[command(after_long_help = exit_codes())]
    Run(RunArgs),
    /// Show the result of a run, where its time went and what would make it faster. Writes
    /// RUN_DIR/report.html and report.json.
    Report(ReportArgs),
    /// Show how a TrainJob would run on this machine, or where it would be placed in a cluster, and
    /// why. Starts nothing.
    #[command(after_long_help = exit_codes())]
    Plan(PlanArgs),
    /// Run a TrainJob on this machine for about a minute, with other numbers of threads and
    /// communicators and other bucket sizes, and show which make its steps shorter. None of them
    /// changes the loss.
    #[command(after_long_help = exit_codes())]
    Tune(TuneArgs),
    /// Show how placements would change if a node were drained, a job added, a domain level
    /// required, or a link lost. Changes nothing.
    Whatif(WhatifArgs),
    /// Replay a trace of jobs on a cluster: wait times and training speed with the controller's
    /// queue and with other schedulers' rules, with more racks or a different network. Changes
    /// nothing.
    Simulate(SimulateArgs),
    /// Print the cluster objects that determine placements, as input for --snapshot.
    Snapshot(SnapshotArgs),
    /// Show the topology of a machine (GPUs, NICs, NUMA nodes, cores, link bandwidths), or who uses
    /// which GPUs in a cluster.
    Topo(TopoArgs),
    /// Find settings in manifests of training jobs (TrainJobs, Kubeflow jobs, plain pods) that
    /// break the job, slow it down or have no effect.
    #[command(after_long_help = diagnose::LINT_CODES)]
    Lint(LintArgs),
    /// Convert a Kubeflow PyTorchJob, TFJob, PaddleJob, MPIJob or TrainJob to a Switchyard
    /// TrainJob, and list settings without an equivalent.
    #[command(after_long_help = diagnose::CONVERT_CODES)]
    Convert(ConvertArgs),
    /// Check the nodes that a TrainJob would get, before it uses any GPU time. Each finding comes
    /// with its fix. Starts nothing.
    #[command(after_long_help = exit_codes())]
    Preflight(PreflightArgs),
    /// Explain errors in the logs of ranks (NCCL, Gloo, MPI, CUDA, RDMA, our own worker): the root
    /// cause and its consequences.
    Doctor(DoctorArgs),
    /// Show the jobs of a cluster: stage, nodes, progress, and what they are waiting for. --watch
    /// keeps the display up to date.
    #[command(after_long_help = exit_codes())]
    Status(StatusArgs),
    /// Print the logs of a job's ranks in a cluster.
    Logs(LogsArgs),
    /// Collect objects, events and logs for diagnosing a fault in a cluster, in one archive.
    /// Secrets are not read, and values of environment variables are left out.
    SupportBundle(BundleArgs),
    /// List, verify and export the checkpoints of a job.
    #[command(subcommand, after_long_help = exit_codes())]
    Checkpoint(CheckpointCommand),
    /// Run the controller, which reconciles the TrainJobs of a cluster.
    Controller(ControllerArgs),
    /// Print Switchyard's CRDs, for `kubectl apply --server-side -f -`.
    Crd,
    /// Explain why a job is placed where it is, or why it is waiting. Also explains error codes,
    /// such as SY0003.
    Explain(ExplainArgs),
    /// Print the completion script of a shell. `kubectl` prints the program that kubectl calls to
    /// complete the plugin.
    Completions(CompletionsArgs),
    /// Write manual pages, one per command, to a folder.
    Man(ManArgs),
    /// Called by kubectl through `completions kubectl`.
    #[command(name = "__complete", hide = true, disable_help_flag = true)]
    Complete(CompleteArgs),
    /// Called by `run` for each pod of another framework.
    #[command(name = "__exec", hide = true, disable_help_flag = true)]
    Exec(ExecArgs),
    /// Print the version.
    Version,
}

/// Arguments of `completions`.
#[derive(Debug, Args)]
pub(super) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: CompletionShell,
}

/// A shell, or kubectl.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum CompletionShell {
    /// For bash.
    Bash,
    /// For zsh.
    Zsh,
    /// For fish.
    Fish,
    /// An executable for the PATH, named `kubectl_complete-switchyard`.
    Kubectl,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// The folder. Created if it does not exist.
    pub folder: PathBuf,
}

/// Arguments of the hidden `__complete`.
#[derive(Debug, Args)]
pub(super) struct CompleteArgs {
    /// The words of the command line so far; the last one is completed.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub words: Vec<String>,
}

/// Arguments of the hidden `__exec`.
#[derive(Debug, Args)]
pub(super) struct ExecArgs {
    /// A program and its arguments.
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

    /// GPUs of the ranks by their nvidia-smi index, one per rank, in rank order. Default: the set
    /// with the fastest ring among the GPUs that CUDA_VISIBLE_DEVICES shows.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub devices: Vec<u32>,

    /// Program that each rank runs, for example with custom models. Default: switchyard-worker next
    /// to this program or on the PATH.
    #[arg(long, value_name = "FILE", env = "SWITCHYARD_WORKER")]
    pub worker: Option<PathBuf>,

    #[command(flatten)]
    pub machines: MachinesArgs,
}

/// Arguments of `tune`.
#[derive(Debug, Args)]
pub(super) struct TuneArgs {
    /// Manifest of a TrainJob; `-` reads standard input.
    pub file: PathBuf,

    /// Write the manifest with the best settings to this file, with the reasons as comments. Other
    /// comments are lost.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Approximate time of all trials.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,

    /// Steps that count in each trial, after ten that do not. Default: as many as fit into
    /// `--seconds`.
    #[arg(long, value_name = "N", conflicts_with = "seconds", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub steps: Option<u64>,

    /// Directory for the run directories of the trials; new or empty. Default: runs/JOB-tune-xxxx.
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// Program that each rank runs. Default: switchyard-worker next to this program or on the PATH.
    #[arg(long, value_name = "FILE", env = "SWITCHYARD_WORKER")]
    pub worker: Option<PathBuf>,
}

/// Arguments of a `run` on several machines.
#[derive(Debug, Args)]
pub(super) struct MachinesArgs {
    /// Run on several machines: one address for each node of `trainer.numNodes`, the same list on
    /// all. Run the command on each of them. Rank 0 listens on the first, on port 29400 or the one
    /// given as HOST:PORT. `checkpoint.path` must be on storage that all of them share.
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires_all = ["node_rank", "key_file"])]
    pub hosts: Vec<String>,

    /// Position of this machine in `--hosts`, from 0.
    #[arg(long, value_name = "I", requires = "hosts")]
    pub node_rank: Option<u32>,

    /// Secret that all machines share: a file of 32 random bytes that only its owner can read. Make
    /// one with `head -c 32 /dev/urandom`, and copy it to every machine.
    #[arg(long, value_name = "FILE", requires = "hosts")]
    pub key_file: Option<PathBuf>,
}

/// Arguments of `report`.
#[derive(Debug, Clone, Args)]
pub(super) struct ReportArgs {
    /// Directory of a run written by `switchyard run`, or the name of a TrainJob in a cluster.
    #[arg(value_name = "RUN_DIR|JOB")]
    pub subject: PathBuf,

    /// Write the HTML report to this file, and leave RUN_DIR unchanged. Default:
    /// RUN_DIR/report.html.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// A run of the same job with synthetic data, to measure whether input is the bottleneck.
    #[arg(long, value_name = "RUN_DIR")]
    pub synthetic: Option<PathBuf>,

    /// Device file (docs/gpu.md). Compares the kernels of a profiled GPU run with its rates.
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

    /// Plan for the machine that this GPUTopology (YAML) describes instead of this machine. Can be
    /// repeated, once per node.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cluster", "snapshot"])]
    pub topology: Vec<PathBuf>,

    /// Show the minimum duration of each operation of a training step on the GPU that this device
    /// file describes (JSON; see docs/gpu.md). This machine does not need the GPU. Reads the job's
    /// data.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["topology", "cluster", "snapshot", "fabric"])]
    pub device: Option<PathBuf>,

    /// With `--device`, also predict the all-reduce and the part of it that the backward pass
    /// cannot hide, for this bus bandwidth between the ranks: 0.12 for 1 Gbit/s, or what
    /// `plan --cluster` predicts.
    #[arg(long, value_name = "GB/S", requires = "device", value_parser = positive)]
    pub bus_bandwidth: Option<f64>,

    /// Show where the job would be placed in the cluster of the kubeconfig.
    #[arg(long, conflicts_with = "snapshot")]
    pub cluster: bool,

    /// Show all fabric settings with their reasons instead of the placement.
    #[arg(long)]
    pub fabric: bool,

    /// Print a drawing of the placement in the cluster (SVG). If the job cannot be placed, the
    /// reason is printed as text.
    #[arg(long, requires = "of a cluster", conflicts_with = "fabric")]
    pub svg: bool,

    /// Namespace of the job. Default: the manifest's, otherwise the
    /// context's.
    #[arg(short, long, requires = "of a cluster")]
    pub namespace: Option<String>,

    /// The cluster.
    #[command(flatten)]
    pub source: ClusterArgs,
}

/// Subcommands of `checkpoint`.
#[derive(Debug, Subcommand)]
pub(super) enum CheckpointCommand {
    /// List the checkpoints in a directory, newest first. Compares file lengths, but not contents.
    List(SelectorArgs),
    /// Read checkpoints completely and compare all digests. Names damaged files, chunks and
    /// tensors.
    Verify(SelectorArgs),
    /// Export the model of a checkpoint, without the optimizer, to a single safetensors file for
    /// PyTorch and other frameworks.
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

    /// The file to write. Replaced if it exists.
    #[arg(long, value_name = "FILE")]
    pub to: PathBuf,
}

/// A number above 0.
fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "expected a number above 0".to_owned())
}

/// The table of exit codes for `--help`.
fn exit_codes() -> String {
    let rows = Exit::ALL.iter().map(|(exit, text)| format!("  {:>3}  {text}", exit.code()));
    format!("Exit codes:\n{}", rows.collect::<Vec<_>>().join("\n"))
}
