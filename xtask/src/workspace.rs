//! The workspace: its folders, cargo commands, and commands whose output is shown.

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

/// Removes the variables that cargo sets for this program's package. Otherwise build scripts that
/// read them (ring's) would rebuild half the tree when cargo runs from here and by hand
/// alternately.
pub(crate) fn stripped(mut command: Command) -> Command {
    let is_own_variable = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_own_variable)) {
        command.env_remove(name);
    }
    // CI builds once, so incremental build data would never be used. Nobody debugs there, a panic
    // names its line without line tables, and they take a tenth of the compile time.
    if std::env::var_os("CI").is_some() {
        command.envs([("CARGO_INCREMENTAL", "0"), ("CARGO_PROFILE_DEV_DEBUG", "0")]);
    }
    command
}

/// Announces a step, runs it, and prints how long it took.
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

/// Profile of local programs, images and tests: the engine is optimised, but not across crates.
pub(crate) const LOCAL: &str = "dev";

/// Output folder of a profile.
pub(crate) fn built_in(profile: &str) -> PathBuf {
    target().join(if profile == "dev" { "debug" } else { profile })
}

/// Package metadata of the workspace.
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

/// Target folder of cargo.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// The committed CRDs: file name and text.
///
/// `crds/tests/drift.rs` ensures that they match the code, so this program need not be built with
/// the API types.
pub(crate) fn crds() -> Result<Vec<(String, String)>> {
    let folder = root().join("crds/generated");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .with_context(|| folder.display().to_string())?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    names.sort();
    names.into_iter().map(|name| Ok((name.clone(), std::fs::read_to_string(folder.join(name))?))).collect()
}

/// CPU seconds of all reaped children of this process and their descendants.
pub(crate) fn children_cpu() -> f64 {
    process_stat("self").map_or(0.0, |stat| stat.children)
}

/// Kernel statistics of a process.
pub(crate) struct ProcessStat {
    /// Whether it has ended but was not reaped.
    pub is_zombie: bool,
    /// CPU seconds of the process itself.
    pub own: f64,
    /// CPU seconds of its reaped children and their descendants.
    pub children: f64,
}

/// Reads `/proc/PID/stat`; `None` if there is no such process. xtask uses no package of the
/// workspace, so not the parser of `switchyard-worker-contract` either.
pub(crate) fn process_stat(pid: &str) -> Option<ProcessStat> {
    const TICKS_PER_SECOND: f64 = 100.0;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Fields after the name, which can contain spaces: the state, and as 12th to 15th field utime,
    // stime, cutime and cstime (proc_pid_stat(5)).
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

/// Name of the CPU, and number of cores.
pub(crate) fn machine() -> String {
    format!("{}, {} cores", cpu(), std::thread::available_parallelism().map_or(0, usize::from))
}
