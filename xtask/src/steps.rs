//! The steps behind `run`, `cluster`, `chaos` and `gen`.

use crate::images::programs_in;
use crate::programs::Family;
use crate::setup;
use crate::workspace::{cargo, machine, root, step, target};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;

/// Builds both programs and runs a manifest; returns the program's own exit code. `worker`: the package of another worker.
///
/// Only what computes is built in release mode: `switchyard` starts the ranks and shows what they report, and its dev build takes half as
/// long and is the one that tests use.
pub(crate) fn run(file: &Path, worker: Option<&str>, rest: &[String]) -> ExitCode {
    let worker = worker.unwrap_or("switchyard-worker");
    let build = || {
        thread::scope(|scope| {
            // Quiet, since cargo draws one bar at a time.
            let computes = scope.spawn(|| {
                let mut release = programs_in("release", &[worker]);
                step(&format!("building {worker} (release)"), release.arg("--quiet"))
            });
            let shows = step("building switchyard (dev)", &mut programs_in("dev", &["switchyard"]));
            computes.join().unwrap_or_else(|_| bail!("the build of the worker panicked")).and(shows)
        })
    };
    if let Err(error) = build() {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let program = target().join("debug/switchyard");
    let mut command = Command::new(&program);
    command.arg("run").arg(file).arg("--worker").arg(target().join("release").join(worker));
    // Replaces this process, so that signals sent to it reach the program, and its exit code is the program's.
    let error = command.args(rest).exec();
    eprintln!("error: cannot start {}: {error}", program.display());
    ExitCode::FAILURE
}

/// The fault layer in full.
pub(crate) fn chaos() -> Result<()> {
    control_plane()?;
    let results = root().join("docs/results");
    let full = ["test", "--workspace", "--test", "plane", "--", "faults::", "churn::"];
    let args = [&full[..], &["--test-threads", "1", "--nocapture"]].concat();
    step("faults and churn, in full", cargo(&args).env("SWITCHYARD_CHAOS", &results))?;
    let workers =
        ["test", "--workspace", "--test", "faults", "--test", "hangs", "--test", "gpu_seeds", "--", "--nocapture"];
    crate::wheels::cuda()?;
    let mut workers = cargo(&workers);
    workers.env("SWITCHYARD_CHAOS", results);
    step("faults of workers and orders of streams, in full", &mut workers)
}

/// A module of the tests on real nodes, in full; its result goes to `folder`.
pub(crate) fn bench_cluster(folder: &Path, module: &str) -> Result<()> {
    crate::images::images(None, crate::images::SHIPPED)?;
    control_plane()?;
    real_nodes()?;
    let module = format!("e2e::{module}::");
    let test = ["test", "--workspace", "--test", "cluster", "--", &module, "--nocapture"];
    step("on real nodes", cargo(&test).env("SWITCHYARD_CHAOS", folder))
}

/// The tests of what others do to pods and nodes, one after another, and how long each verdict took.
pub(crate) fn bench_scenes(file: &Path) -> Result<()> {
    control_plane()?;
    let lines = target().join("scenes.jsonl");
    if lines.exists() {
        std::fs::remove_file(&lines)?;
    }
    let modules =
        ["admitted", "scenes", "hindrances", "hostile", "failures"].map(|name| format!("lifecycle::{name}::"));
    let mut test = cargo(&["test", "--workspace", "--test", "plane", "--", "--test-threads", "1"]);
    step("scenes", test.args(modules).env("SWITCHYARD_SCENES", &lines))?;
    let text = std::fs::read_to_string(&lines).with_context(|| lines.display().to_string())?;
    let scenes: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let result =
        json!({"command": "cargo xtask bench scenes", "machine": machine(), "goalSeconds": 15, "scenes": scenes});
    std::fs::write(file, format!("{}\n", serde_json::to_string_pretty(&result)?))?;
    for scene in &scenes {
        println!("{:>6} s  {}: {}", scene["seconds"], scene["scene"], scene["verdict"]);
    }
    Ok(())
}

/// Builds programs of others and prints where they are.
pub(crate) fn programs(names: &[String]) -> Result<()> {
    for name in names {
        println!("{name}={}", Family::named(name)?.build()?.display());
    }
    Ok(())
}

/// Runs the command of the tests' library that keeps a cluster; returns its exit code.
pub(crate) fn cluster(arguments: &[String]) -> ExitCode {
    let has_real_nodes = arguments.iter().any(|argument| argument.starts_with("--nodes"));
    let starts = arguments.first().is_some_and(|argument| argument == "up");
    // Nodes whose kubelet is ours start the worker from beside the bench. To end a cluster needs the bench alone, and must not take minutes.
    let programs = match starts && !has_real_nodes {
        true => vec![BENCH, "switchyard", "switchyard-worker"],
        false => vec![BENCH],
    };
    let build = || -> Result<()> {
        let mut compile = programs_in("release", &programs);
        if !starts {
            return step("building the bench", compile.arg("--quiet"));
        }
        // Programs in Go beside those in Rust.
        thread::scope(|scope| {
            let others = scope.spawn(|| {
                control_plane()?;
                if has_real_nodes { real_nodes() } else { Ok(()) }
            });
            let own = step(&format!("building {} (release)", programs.join(", ")), &mut compile);
            others.join().unwrap_or_else(|_| bail!("the build of the programs of others panicked")).and(own)
        })
    };
    if let Err(error) = build() {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let program = target().join("release").join(BENCH);
    let error = Command::new(&program).args(arguments).exec();
    eprintln!("error: cannot start {}: {error}", program.display());
    ExitCode::FAILURE
}

/// The program that keeps a cluster.
const BENCH: &str = "switchyard-bench-cluster";

/// Builds the control plane, where it is missing.
pub(crate) fn control_plane() -> Result<()> {
    for name in ["etcd", "kubernetes"] {
        Family::named(name)?.build()?;
    }
    Ok(())
}

/// Builds and installs what real nodes run, where it is missing.
fn real_nodes() -> Result<()> {
    setup::node_tools()?;
    for name in ["kubernetes-node", "containerd", "coredns"] {
        Family::named(name)?.build()?;
    }
    Ok(())
}

/// Writes the generated CRDs, and what is generated of the chart and of the documents.
pub(crate) fn generate() -> Result<()> {
    step("compiling the API", &mut cargo(&["build", "--quiet", "--workspace", "--example", "generate"]))?;
    step("CRDs", &mut Command::new(target().join("debug/examples/generate")))?;
    let pages = crate::figures::generated()?.into_iter().chain([crate::reference::generated()?]);
    for (path, text) in crate::chart::generated()?.into_iter().chain(pages) {
        let full = root().join(&path);
        std::fs::create_dir_all(full.parent().context("invariant: a file lies in a folder")?)?;
        std::fs::write(&full, text).with_context(|| full.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}
