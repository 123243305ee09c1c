//! The workspace: its folders, cargo in it, and commands that are shown while they run.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value as Json;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Folder of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// A cargo command in the workspace.
pub(crate) fn cargo(args: &[&str]) -> Command {
    let mut command = stripped(Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())));
    command.args(args).current_dir(root());
    command
}

/// Without what cargo tells this program about its package: build scripts that read it (ring's) would build half the tree again whenever
/// cargo is called from here after it was called by hand.
pub(crate) fn stripped(mut command: Command) -> Command {
    let of_this_program = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_this_program)) {
        command.env_remove(name);
    }
    // CI builds once: what an incremental build keeps is written for nobody.
    if std::env::var_os("CI").is_some() {
        command.env("CARGO_INCREMENTAL", "0");
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

/// Profile of programs and images for this machine and for tests: the engine is optimised, nothing is optimised across crates.
pub(crate) const LOCAL: &str = "dev";

/// Where cargo puts the programs of a profile.
pub(crate) fn built_in(profile: &str) -> PathBuf {
    target().join(if profile == "dev" { "debug" } else { profile })
}

/// What cargo says of the packages of the workspace.
pub(crate) fn metadata() -> Result<Json> {
    let output = cargo(&["metadata", "--no-deps", "--format-version", "1"]).output().context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo metadata: {}", output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Names of the packages of the workspace.
pub(crate) fn members() -> Result<BTreeSet<String>> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    Ok(packages.filter_map(|package| package["name"].as_str().map(str::to_owned)).collect())
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

/// CPU seconds of all children of this process that have ended, and of theirs.
pub(crate) fn children_cpu() -> f64 {
    process_stat("self").map_or(0.0, |stat| stat.children)
}

/// What the kernel says of a process.
pub(crate) struct ProcessStat {
    /// It has ended, and nobody has waited for it.
    pub is_zombie: bool,
    /// CPU seconds of its own.
    pub own: f64,
    /// CPU seconds of its children that have ended and were waited for, and of theirs.
    pub children: f64,
}

/// Reads `/proc/PID/stat`; `None` without such a process.
pub(crate) fn process_stat(pid: &str) -> Option<ProcessStat> {
    const TICKS_PER_SECOND: f64 = 100.0;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Behind the name, which may have spaces: the state, and as 12th to 15th field utime, stime, cutime and cstime (proc_pid_stat(5)).
    let fields: Vec<&str> = text.rsplit(')').next()?.split_whitespace().collect();
    let seconds = |from: usize| {
        let ticks = fields.get(from..from + 2)?.iter().map(|field| field.parse::<f64>());
        Some(ticks.sum::<std::result::Result<f64, _>>().ok()? / TICKS_PER_SECOND)
    };
    Some(ProcessStat { is_zombie: *fields.first()? == "Z", own: seconds(11)?, children: seconds(13)? })
}

/// Name of the CPU.
pub(crate) fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(String::new, |(_, name)| name.trim().to_string())
}

/// Name of the CPU, and cores.
pub(crate) fn machine() -> String {
    format!("{}, {} cores", cpu(), std::thread::available_parallelism().map_or(0, usize::from))
}
