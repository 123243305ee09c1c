//! Developer commands: `cargo xtask <command>`.
//!
//! `test` is the one test command: CI runs it and nothing else. Every step says what it does before it does it.
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
    /// The inner loop: formatting, clippy, unit and golden tests. Under 3 minutes when warm.
    Check,
    /// Everything: `check`, dependency audit, and the tests with real processes. Ends with the totals.
    Test {
        /// Only these stages.
        #[arg(value_name = "STAGE")]
        stages: Vec<String>,
        /// Print the stages with their budgets, and run nothing.
        #[arg(long)]
        list: bool,
        /// Play one stage so often beside a load of all cores; write the counts to docs/results/repeat.json.
        #[arg(long, value_name = "N", requires = "stages", value_parser = clap::value_parser!(u32).range(1..))]
        repeat: Option<u32>,
        /// Also write stages, compile time and the forty slowest tests to docs/results/test-time.json, under these conditions.
        #[arg(long, value_enum, conflicts_with_all = ["repeat", "frameworks", "gpu_libraries"])]
        record: Option<record::Record>,
        /// Instead: the real PyTorch, PaddlePaddle, JAX and Open MPI from PyPI (gigabytes), started with the environment of our pods, and
        /// exported checkpoints in PyTorch; writes docs/results/frameworks.json.
        #[arg(long, conflicts_with = "stages")]
        frameworks: bool,
        /// Instead: NVIDIA's cuBLASLt, cuDNN and NCCL from PyPI (990 MB), opened without a GPU, our bindings against their headers, and what cuDNN accepts.
        #[arg(long, conflicts_with_all = ["stages", "frameworks"])]
        gpu_libraries: bool,
    },
    /// Build both programs and run a TrainJob on this machine.
    Run {
        /// Manifest of a TrainJob.
        file: PathBuf,
        /// Package whose program is the worker, built besides: one with networks of its own.
        #[arg(long, value_name = "PACKAGE")]
        worker: Option<String>,
        /// More arguments for `switchyard run`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// The fault layer and the churn in full, about an hour, with seeds; writes the result files to docs/results.
    Chaos,
    /// Build programs of others that tests and benchmarks run, where they are missing; print `NAME=FOLDER` lines.
    Programs {
        /// Which: etcd, kubernetes, kubernetes-node, containerd, coredns, training-operator, helm; or only files: prometheus-operator,
        /// kubeflow-trainer.
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Build `switchyard` and `switchyard-worker` of this tree and put them on the PATH.
    Install {
        /// The folder. Default: where cargo installs programs, ~/.cargo/bin.
        #[arg(long, value_name = "FOLDER")]
        to: Option<PathBuf>,
        /// Profile: `dev` is what `run` has built, `release` plans large clusters faster, `dist` is what is shipped.
        #[arg(long, default_value = workspace::LOCAL)]
        profile: String,
    },
    /// A cluster on this machine: a real control plane, with real nodes or with nodes of our test kubelet.
    Cluster {
        #[command(subcommand)]
        action: cluster::Action,
    },
    /// Fetch or make training data for examples and tests; print where they are.
    Data {
        /// Which.
        #[arg(value_enum)]
        what: data::What,
    },
    /// Build the images of the three programs, with nothing but this repository, a compiler and buildah; write them to target/images.
    Images {
        /// Instead: write the files of the images to this folder, one folder for each. The Dockerfile does this.
        #[arg(long, value_name = "FOLDER")]
        layout: Option<PathBuf>,
        /// Profile of the programs: `dist` is small and takes minutes to link; `release` is what `run` has built.
        #[arg(long, default_value = images::SHIPPED)]
        profile: String,
    },
    /// What is done on another machine, with a GPU.
    Gpu {
        #[command(subcommand)]
        what: gpu::What,
    },
    /// Write what is generated: CRDs, parts of the chart, docs/api.md, docs/performance.md and docs/dev/experiments.md.
    Gen,
    /// Measure, and write the result file to docs/results.
    Bench {
        /// What to measure.
        #[arg(value_enum)]
        what: bench::What,
    },
    /// Measure another commit and this tree in turn, and write docs/results/compare.json.
    Compare {
        /// What to measure.
        #[arg(value_enum)]
        what: bench::What,
        /// Checkout of the other commit (`git worktree add FOLDER COMMIT`); it is built in its own target folder.
        folder: PathBuf,
        /// Rounds; in each, both are measured.
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
