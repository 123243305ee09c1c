//! The steps behind `check`, `test`, `run` and `gen`.

use crate::data::{What, data};
use crate::images::Version;
use crate::programs::Family;
use crate::setup;
use crate::totals::Totals;
use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Instant;

/// Packages whose tests need nothing but the compiler: the pure rooms, and the node agent on machines that do not exist.
const PURE: [&str; 8] = [
    "switchyard-worker-contract",
    "switchyard-crds",
    "switchyard-service",
    "switchyard",
    "switchyard-node-agent",
    "switchyard-node-agent-daemon",
    "switchyard-scenes",
    "xtask",
];

/// Wall-clock seconds for which `cargo xtask test` tries each file format.
const FUZZ_SECONDS: &str = "60";

/// Folder of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// A cargo command in the workspace.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    // What cargo told this program about its package: build scripts that look at it (ring's) would make half the tree anew whenever
    // cargo is called from here after it was called by hand.
    let told = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(told)) {
        command.env_remove(name);
    }
    command
}

/// Says what is done, does it, and says how long it took.
pub(crate) fn step(name: &str, command: &mut Command) -> Result<()> {
    println!("==> {name}");
    let start = Instant::now();
    let status = command.status().with_context(|| format!("{name}: cannot start {:?}", command.get_program()))?;
    if !status.success() {
        bail!("{name}: {status}");
    }
    println!("    {name}: {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// Formatting, lints, unit and golden tests.
pub(crate) fn check() -> Result<()> {
    let mut totals = Totals::default();
    quick(&mut totals)?;
    totals.finish()
}

fn quick(totals: &mut Totals) -> Result<()> {
    setup::components()?;
    step("formatting", &mut cargo(&["fmt", "--all", "--check"]))?;
    step("clippy", &mut cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]))?;
    let mut args = vec!["test", "--lib", "--tests"];
    args.extend(PURE.iter().flat_map(|package| ["-p", package]));
    totals.run("tests of the pure rooms and of the node agent", &mut cargo(&args))?;
    totals.run("what is generated is that of the code", &mut cargo(&["test", "-p", "xtask"]))?;
    totals.run(
        "placement against brute force; tidy: dependency table, file sizes, paths",
        &mut cargo(&["test", "-p", "switchyard-tests", "--test", "placement", "--test", "tidy"]),
    )
}

/// Everything, cheapest first.
pub(crate) fn test() -> Result<()> {
    let start = Instant::now();
    let mut totals = Totals::default();
    quick(&mut totals)?;
    if let Some(mut deny) = setup::cargo_deny()? {
        step(
            "licences and advisories of dependencies",
            deny.args(["--offline", "check", "bans", "licenses", "sources"]).current_dir(root()),
        )?;
    }
    let engine = [
        "switchyard-worker",
        "switchyard-checkpoint",
        "switchyard-example-custom-model",
        "switchyard-cuda",
        "switchyard-gpu-probe",
    ];
    let packages: Vec<&str> = engine.iter().flat_map(|package| ["-p", package]).collect();
    data(What::Digits)?;
    totals.run(
        "engine, collectives, readers, checkpoints, accuracy, probe of the GPU",
        cargo(&[&["test"][..], &packages].concat()).env("SWITCHYARD_TEST_DIGITS", "1"),
    )?;
    // The same packages as before, or cargo would build them with other features: only the files of tests differ.
    let mut fuzzers = ["data", "hostile"].map(|file| {
        let mut fuzzer = cargo(&[&["test"][..], &packages, &["--test", file, "fuzz"]].concat());
        // All at the same time, on however few cores: each goes on for this long.
        fuzzer.args(["--", "--test-threads", "16"]).env("FUZZ_SECONDS", FUZZ_SECONDS);
        fuzzer
    });
    totals.beside("fuzzers of every file format, a minute each, side by side", &mut fuzzers)?;
    step("both programs in release mode", &mut build())?;
    let processes = [
        "test",
        "-p",
        "switchyard-tests",
        "--lib",
        "--test",
        "bad_input",
        "--test",
        "run",
        "--test",
        "example",
        "--test",
        "fabric",
        "--test",
        "preflight",
    ];
    totals.run("real processes", &mut cargo(&processes))?;
    let mut report = cargo(&["test", "-p", "switchyard-tests", "--test", "report"]);
    if setup::chromium()? {
        report.env("SWITCHYARD_TEST_BROWSER", "1");
    }
    totals.run("reports of runs, and their page in a browser", &mut report)?;
    let others = ["etcd", "kubernetes", "helm", "prometheus-operator", "promtool", "kubeflow-trainer"];
    step(
        "control plane: etcd and Kubernetes; helm; promtool; CRDs of others",
        &mut cargo(&[&["run", "--quiet", "-p", "xtask", "--", "programs"][..], &others].concat()),
    )?;
    let files =
        ["lifecycle", "admission", "controller", "verdicts", "malformed", "fights", "rights", "agent", "documents"];
    let cluster: Vec<&str> = files.iter().flat_map(|file| ["--test", file]).collect();
    totals.run(
        "controller and node agent on a real API server; commands of the documents",
        &mut cargo(&[&["test", "-p", "switchyard-tests"][..], &cluster, &["--", "--test-threads", "6"]].concat()),
    )?;
    let chart = ["test", "-p", "switchyard-tests", "--test", "chart", "--", "--test-threads", "4"];
    totals.run("the Helm chart", &mut cargo(&chart))?;
    step("images", &mut cargo(&["run", "--quiet", "-p", "xtask", "--", "images", "--profile", "release"]))?;
    totals.run("what is in the images", &mut cargo(&["test", "-p", "switchyard-tests", "--test", "images"]))?;
    let devices = ["test", "-p", "switchyard-tests", "--test", "devices", "--", "--test-threads", "4"];
    totals.run("exact GPUs, with claims and without", &mut cargo(&devices))?;
    nodes(&mut totals)?;
    let faults = ["test", "-p", "switchyard-tests", "--test", "faults", "--", "--test-threads", "2"];
    totals.run("controller under faults", &mut cargo(&faults))?;
    let churn = ["test", "-p", "switchyard-tests", "--test", "churn", "--", "--test-threads", "1"];
    totals.run("churn, judged offline", &mut cargo(&churn))?;
    totals.run("documentation", &mut cargo(&["test", "--workspace", "--doc"]))?;
    step("rustdoc", cargo(&["doc", "--workspace", "--no-deps", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings"))?;
    println!("==> {:.0} s in all", start.elapsed().as_secs_f64());
    totals.finish()
}

/// Real nodes, where this machine can run them. In CI it must.
fn nodes(totals: &mut Totals) -> Result<()> {
    let check = ["run", "--quiet", "-p", "switchyard-tests", "--bin", "switchyard-bench-cluster", "--", "check"];
    let able = match setup::node_tools() {
        Ok(()) => cargo(&check).status().context("cannot start cargo")?.success(),
        Err(error) => {
            println!("{error:#}");
            false
        }
    };
    if !able {
        if std::env::var_os("CI").is_some() {
            bail!("real nodes cannot run here, and in CI they must");
        }
        println!("==> real nodes are left out: this machine cannot run them");
        return Ok(());
    }
    real_nodes()?;
    let tests = ["test", "-p", "switchyard-tests", "--test", "nodes", "--", "--test-threads", "1"];
    totals.run("real nodes: pods, links, GPUs, what is left", &mut cargo(&tests))?;
    // Two clusters at a time: their tests wait more than they compute.
    let users = ["test", "-p", "switchyard-tests", "--test", "e2e", "--", "--test-threads", "2"];
    totals.run(
        "the product on real nodes: from helm install to a trained model, and what fails on the way",
        &mut cargo(&users),
    )
}

/// The programs of a training on one machine.
const PROGRAMS: [&str; 2] = ["switchyard", "switchyard-worker"];

/// Builds `switchyard` and `switchyard-worker`, which ends up beside it.
pub(crate) fn build() -> Command {
    programs_in("release", &PROGRAMS)
}

/// Builds programs in a profile; they know of which commit they are.
///
/// The whole workspace is selected and only these programs are built: cargo unifies features over what is selected, so that each
/// crate is compiled once in a profile, whatever is built of it.
pub(crate) fn programs_in(profile: &str, programs: &[&str]) -> Command {
    let mut all = cargo(&["build", "--profile", profile, "--locked", "--workspace"]);
    all.args(programs.iter().flat_map(|program| ["--bin", program]));
    all.env("SWITCHYARD_VERSION", Version::of_this_tree().words());
    all
}

/// Builds both programs and runs a manifest; returns the program's own exit code. `worker`: the package of another worker.
pub(crate) fn run(file: &Path, worker: Option<&str>, rest: &[String]) -> ExitCode {
    let programs: Vec<&str> = PROGRAMS.into_iter().chain(worker).collect();
    if let Err(error) =
        step("building switchyard and switchyard-worker (release)", &mut programs_in("release", &programs))
    {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let program = target().join("release/switchyard");
    let mut command = Command::new(&program);
    command.arg("run").arg(file);
    if let Some(package) = worker {
        command.arg("--worker").arg(target().join("release").join(package));
    }
    // Replaces this process, so that signals sent to it reach the program, and its exit code is the program's.
    let error = command.args(rest).exec();
    eprintln!("error: cannot start {}: {error}", program.display());
    ExitCode::FAILURE
}

/// The fault layer in full.
pub(crate) fn chaos() -> Result<()> {
    control_plane()?;
    let results = root().join("docs/results");
    let full = ["test", "-p", "switchyard-tests", "--test", "faults", "--test", "churn"];
    let args = [&full[..], &["--", "--test-threads", "1", "--nocapture"]].concat();
    step("faults and churn, in full", cargo(&args).env("SWITCHYARD_CHAOS", &results))?;
    let workers = ["test", "-p", "switchyard-worker", "--test", "faults", "--", "--nocapture"];
    step("faults of workers, in full", cargo(&workers).env("SWITCHYARD_CHAOS", results))
}

/// A module of the tests on real nodes, in full; its result goes to `folder`.
pub(crate) fn bench_cluster(folder: &Path, module: &str) -> Result<()> {
    crate::images::images(None, "dist")?;
    control_plane()?;
    real_nodes()?;
    let test = ["test", "-p", "switchyard-tests", "--test", "e2e", "--", module, "--nocapture"];
    step("on real nodes", cargo(&test).env("SWITCHYARD_CHAOS", folder))
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

/// Where cargo builds.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The committed CRDs: name of the file and its text.
///
/// They are those of the code: `crds/tests/drift.rs` compares, so that this program need not be built with the API's types.
pub(crate) fn crds() -> Result<Vec<(String, String)>> {
    let folder = root().join("crds/generated");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .with_context(|| folder.display().to_string())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    names.sort();
    names.into_iter().map(|name| Ok((name.clone(), std::fs::read_to_string(folder.join(name))?))).collect()
}

/// Writes the generated CRDs, and what is generated of the chart and of the documents.
pub(crate) fn generate() -> Result<()> {
    step("CRDs", &mut cargo(&["run", "--quiet", "-p", "switchyard-crds", "--example", "generate"]))?;
    let pages = crate::figures::generated()?.into_iter().chain([crate::reference::generated()?]);
    for (path, text) in crate::chart::generated()?.into_iter().chain(pages) {
        let full = root().join(&path);
        std::fs::create_dir_all(full.parent().context("invariant: a file lies in a folder")?)?;
        std::fs::write(&full, text).with_context(|| full.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}
