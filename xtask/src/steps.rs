//! Implements `run`, `install`, `chaos` and `gen`.

use crate::cluster::{control_plane, real_nodes};
use crate::images::programs_in;
use crate::programs::build_all;
use crate::workspace::{LOCAL, built_in, cargo, machine, root, step, target};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Builds both programs and runs a manifest; returns the program's exit code. `worker` is the
/// package of another worker.
///
/// Uses the profile of the tests. The engine is optimised there as well, and a second profile would
/// compile every shared crate and procedural macro again, a third of the time until the first step.
pub(crate) fn run(file: &Path, worker: Option<&str>, rest: &[String]) -> ExitCode {
    let worker = worker.unwrap_or("switchyard-worker");
    let programs = ["switchyard", worker];
    if let Err(error) = step(&format!("building {} ({LOCAL})", programs.join(", ")), &mut programs_in(LOCAL, &programs))
    {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let folder = built_in(LOCAL);
    let mut command = Command::new(folder.join("switchyard"));
    command.arg("run").arg(file).arg("--worker").arg(folder.join(worker));
    // Replace this process, so that the program receives its signals and determines its exit code.
    let error = command.args(rest).exec();
    eprintln!("error: cannot start {}: {error}", folder.join("switchyard").display());
    ExitCode::FAILURE
}

/// Puts `switchyard` and `switchyard-worker` from this tree into a folder on the PATH.
pub(crate) fn install(folder: Option<&Path>, profile: &str) -> Result<()> {
    let folder = match folder {
        Some(folder) => folder.to_owned(),
        None => cargo_bin()?,
    };
    let programs = ["switchyard", "switchyard-worker"];
    step(&format!("building {} ({profile})", programs.join(", ")), &mut programs_in(profile, &programs))?;
    std::fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    for program in programs {
        let (built, to) = (built_in(profile).join(program), folder.join(program));
        // Replace the file rather than overwrite it, because the program can be running.
        let new = to.with_extension("new");
        crate::images::layout::strip(&built, &new)?;
        std::fs::rename(&new, &to).with_context(|| to.display().to_string())?;
        println!("{}", to.display());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !std::env::split_paths(&path).any(|entry| entry == folder) {
        println!("{} is not on the PATH: export PATH=\"{}:$PATH\"", folder.display(), folder.display());
    }
    Ok(())
}

fn cargo_bin() -> Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    Ok(home.context("neither CARGO_HOME nor HOME is set: name a folder with --to")?.join("bin"))
}

/// Runs the fault layer in full.
pub(crate) fn chaos() -> Result<()> {
    control_plane()?;
    let results = root().join("docs/results");
    let full = ["test", "--workspace", "--test", "plane", "--", "faults::", "churn::"];
    let args = [&full[..], &["--test-threads", "1", "--nocapture"]].concat();
    step("faults and churn, in full", cargo(&args).env("SWITCHYARD_CHAOS", &results))?;
    let workers =
        ["test", "--workspace", "--test", "hosts", "--test", "hangs", "--test", "trainings", "--", "--nocapture"];
    crate::wheels::cuda()?;
    let mut workers = cargo(&workers);
    workers.args(["faults::", "gpu_seeds::", "every_hang_is_reported_correctly"]);
    workers.env("SWITCHYARD_CHAOS", results);
    step("worker faults and stream orders, in full", &mut workers)
}

/// Runs a module of the tests on real nodes in full; its result goes to `folder`.
pub(crate) fn bench_cluster(folder: &Path, module: &str) -> Result<()> {
    crate::images::images(None, crate::images::SHIPPED)?;
    control_plane()?;
    real_nodes()?;
    let module = format!("e2e::{module}::");
    let test = ["test", "--workspace", "--test", "cluster", "--", &module, "--nocapture"];
    step("on real nodes", cargo(&test).env("SWITCHYARD_CHAOS", folder))
}

/// Runs the tests of interference by others one after another, and records how long each verdict
/// took.
pub(crate) fn bench_scenes(file: &Path) -> Result<()> {
    control_plane()?;
    let lines = target().join("scenes.jsonl");
    if lines.exists() {
        std::fs::remove_file(&lines)?;
    }
    let modules =
        ["admitted", "constraints", "blockers", "hostile", "failures"].map(|name| format!("lifecycle::{name}::"));
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

/// Builds third-party programs and prints their folders.
pub(crate) fn programs(names: &[String]) -> Result<()> {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    for (name, folder) in names.iter().zip(build_all(&names)?) {
        println!("{name}={}", folder.display());
    }
    Ok(())
}

/// Writes the generated CRDs, chart files and documents.
pub(crate) fn generate() -> Result<()> {
    step("compiling the API", &mut cargo(&["build", "--quiet", "--workspace", "--example", "generate"]))?;
    step("CRDs", &mut Command::new(target().join("debug/examples/generate")))?;
    let pages = [crate::reference::generated()?, crate::forgeries::generated()?];
    let pages = crate::figures::generated()?.into_iter().chain(pages);
    for (path, text) in crate::chart::generated()?.into_iter().chain(pages) {
        let full = root().join(&path);
        std::fs::create_dir_all(full.parent().context("invariant: a file has a parent folder")?)?;
        std::fs::write(&full, text).with_context(|| full.display().to_string())?;
        println!("{}", path.display());
    }
    Ok(())
}
