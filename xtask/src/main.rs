//! Developer commands: `cargo xtask <command>`.
//!
//! `test` is the only test command, and CI runs only that. Every step is announced before it runs.
#![forbid(unsafe_code)]

mod bench;
mod bench_build;
mod chart;
mod cluster;
mod compare;
mod crates;
mod data;
mod failed;
mod figures;
mod forgeries;
mod frameworks;
mod gpu;
mod images;
mod programs;
mod record;
mod reference;
mod run;
mod setup;
mod stages;
mod steps;
mod test_programs;
mod totals;
mod wheels;
mod workspace;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Developer commands of Switchyard.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the fast checks: formatting, clippy, unit and golden tests. Under 3 minutes when warm.
    Check,
    /// Run everything: `check`, dependency audit, and the tests with real processes. Ends with the
    /// totals.
    Test {
        /// Run only these stages.
        #[arg(value_name = "STAGE")]
        stages: Vec<String>,
        /// Print the stages with their budgets and run nothing.
        #[arg(long)]
        list: bool,
        /// Run one stage N times under load on all cores; write the counts to
        /// docs/results/repeat.json.
        #[arg(long, value_name = "N", requires = "stages", value_parser = clap::value_parser!(u32).range(1..))]
        repeat: Option<u32>,
        /// Also write stages, compile time and the forty slowest tests to
        /// docs/results/test-time.json, as measured under these conditions.
        #[arg(long, value_enum, conflicts_with_all = ["repeat", "frameworks", "gpu_libraries"])]
        record: Option<record::Record>,
        /// Instead, test the real PyTorch, PaddlePaddle, JAX and Open MPI from PyPI (gigabytes) in
        /// the environment of our pods, and exported checkpoints in PyTorch; writes
        /// docs/results/frameworks.json.
        #[arg(long, conflicts_with = "stages")]
        frameworks: bool,
        /// Instead, load NVIDIA's cuBLASLt, cuDNN and NCCL from PyPI (990 MB) without a GPU;
        /// compare our bindings with their headers and check what cuDNN accepts.
        #[arg(long, conflicts_with_all = ["stages", "frameworks"])]
        gpu_libraries: bool,
    },
    /// Build both programs and run a TrainJob on this machine.
    Run {
        /// Manifest of a TrainJob.
        file: PathBuf,
        /// Build this package's program and use it as the worker, for custom networks.
        #[arg(long, value_name = "PACKAGE")]
        worker: Option<String>,
        /// More arguments for `switchyard run`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Run the fault layer and the churn tests in full, about an hour, with seeds; write the result
    /// files to docs/results.
    Chaos,
    /// Build missing third-party programs that tests and benchmarks run; print `NAME=FOLDER` lines.
    Programs {
        /// Programs: etcd, kubernetes, kubernetes-node, containerd, coredns, training-operator,
        /// helm. Files without a program: prometheus-operator, kubeflow-trainer.
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Build `switchyard` and `switchyard-worker` from this tree and put them on the PATH.
    Install {
        /// Target folder. Default: where cargo installs programs, ~/.cargo/bin.
        #[arg(long, value_name = "FOLDER")]
        to: Option<PathBuf>,
        /// Profile: `dev` reuses what `run` has built, `release` plans large clusters faster,
        /// `dist` is shipped.
        #[arg(long, default_value = workspace::LOCAL)]
        profile: String,
    },
    /// Run a cluster on this machine: a real control plane, with real nodes or with nodes of our
    /// test kubelet.
    Cluster {
        #[command(subcommand)]
        action: cluster::Action,
    },
    /// Fetch or generate training data for examples and tests; print their path.
    Data {
        /// Data set.
        #[arg(value_enum)]
        what: data::DataSet,
    },
    /// Build the images of the three programs, with only this repository, a compiler and buildah;
    /// write them to target/images.
    Images {
        /// Only write the files of the images, one folder per image, to this folder. The Dockerfile
        /// does this.
        #[arg(long, value_name = "FOLDER")]
        layout: Option<PathBuf>,
        /// Profile of the programs: `dist` is small but takes minutes to link, `release` is faster
        /// to build.
        #[arg(long, default_value = images::SHIPPED)]
        profile: String,
    },
    /// Prepare files for a machine with a GPU.
    Gpu {
        #[command(subcommand)]
        what: gpu::GpuCommand,
    },
    /// Write generated files: CRDs, parts of the chart, docs/api.md, docs/performance.md and
    /// docs/dev/experiments.md.
    Gen,
    /// Run a benchmark and write its result file to docs/results.
    Bench {
        /// What to measure.
        #[arg(value_enum)]
        what: bench::Benchmark,
    },
    /// Benchmark another commit and this tree in alternating rounds, and write
    /// docs/results/compare.json.
    Compare {
        /// What to measure.
        #[arg(value_enum)]
        what: bench::Benchmark,
        /// Checkout of the other commit (`git worktree add FOLDER COMMIT`); it is built in its own
        /// target folder.
        folder: PathBuf,
        /// Rounds; each measures both.
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
        rounds: u32,
        /// More arguments for both.
        #[arg(last = true)]
        rest: Vec<String>,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Check => run::run(&["lint", "pure"].map(String::from), None),
        Command::Test { list: true, .. } => {
            run::list();
            Ok(())
        }
        Command::Test { frameworks: true, .. } => frameworks::test(),
        Command::Test { gpu_libraries: true, .. } => gpu::libraries(),
        Command::Test { stages, repeat: Some(times), .. } => run::repeat(&stages, times),
        Command::Test { stages, record, .. } => run::run(&stages, record),
        Command::Run { file, worker, rest } => return steps::run(&file, worker.as_deref(), &rest),
        Command::Chaos => steps::chaos(),
        Command::Programs { names } => steps::programs(&names),
        Command::Install { to, profile } => steps::install(to.as_deref(), &profile),
        Command::Cluster { action } => return cluster::cluster(&action),
        Command::Data { what } => data::data(what).map(|path| println!("{}", path.display())),
        Command::Images { layout, profile } => images::images(layout.as_deref(), &profile),
        Command::Gpu { what } => gpu::gpu(&what),
        Command::Gen => steps::generate(),
        Command::Bench { what } => bench::bench(what),
        Command::Compare { what, folder, rounds, rest } => compare::compare(what, &folder, rounds, &rest),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
