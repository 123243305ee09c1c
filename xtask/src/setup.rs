//! Installs test prerequisites on a fresh machine.

use crate::data::{DataSet, data};
use anyhow::{Context, Result, anyhow, bail};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// A prerequisite of a test stage besides the compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prerequisite {
    /// The data set of the accuracy tests.
    Digits,
    /// NVIDIA's kernel compiler, its disassembler, and the driver and NVTX headers.
    Cuda,
    /// Chromium.
    Browser,
    /// Third-party programs and files, by family.
    Programs(&'static [&'static str]),
    /// The programs of real nodes, and a machine that can run them.
    Nodes,
    /// The image archives, built from the release programs.
    Images,
}

impl Prerequisite {
    /// Whether it can be provided in parallel with the compilation of the tests.
    fn is_early(self) -> bool {
        self != Prerequisite::Images
    }

    /// Installs or builds it; false if this machine cannot have it and the tests run without.
    fn provide(self) -> Result<bool> {
        match self {
            Prerequisite::Digits => data(DataSet::Digits).map(|_| true),
            Prerequisite::Cuda => crate::wheels::cuda().map(|()| true),
            Prerequisite::Browser => chromium(),
            Prerequisite::Programs(names) => programs(names).map(|()| true),
            Prerequisite::Nodes => {
                // Mandatory in CI; elsewhere the stage is skipped.
                let result = node_tools().and_then(|()| programs(&["kubernetes-node", "containerd", "coredns"]));
                if let Err(error) = &result
                    && std::env::var_os("CI").is_none()
                {
                    println!("setup | {error:#}");
                    return Ok(false);
                }
                result.map(|()| true)
            }
            Prerequisite::Images => run_self(&["images", "--profile", crate::workspace::LOCAL]).map(|()| true),
        }
    }
}

/// Prerequisites of a run, each provided once: by the setup lane, or by the first stage that needs
/// it.
#[derive(Debug, Default)]
pub(crate) struct Prerequisites(Mutex<Vec<(Prerequisite, Cell)>>);

/// Whether it is available, or why not.
type Outcome = std::result::Result<bool, String>;
/// `None` until it was tried. Locked meanwhile, so that others who need it wait.
type Cell = Arc<Mutex<Option<Outcome>>>;

impl Prerequisites {
    /// Provides everything that is independent of the compilation.
    pub(crate) fn provide_early(&self, prerequisites: &[Prerequisite]) {
        for need in prerequisites.iter().filter(|need| need.is_early()) {
            // The stage that needs it reports the failure.
            let _ = self.provide(*need);
        }
    }

    /// Waits until it is available; false if the tests run without.
    pub(crate) fn provide(&self, need: Prerequisite) -> Result<bool> {
        let slot = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match all.iter().find(|(other, _)| *other == need) {
                Some((_, slot)) => Arc::clone(slot),
                None => {
                    all.push((need, Arc::default()));
                    Arc::clone(&all[all.len() - 1].1)
                }
            }
        };
        let mut outcome = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let outcome = outcome.get_or_insert_with(|| need.provide().map_err(|error| format!("{error:#}")));
        outcome.clone().map_err(|error| anyhow!(error))
    }
}

/// Builds third-party programs; their output is shown at the end.
fn programs(names: &[&str]) -> Result<()> {
    run_self(&[&["programs"], names].concat())
}

/// Runs a command of this program and shows its output at the end.
fn run_self(arguments: &[&str]) -> Result<()> {
    // Not `current_exe()`: the test stages rebuild the workspace, xtask included, and replace the
    // running file.
    let mut command = Command::new("/proc/self/exe");
    let output = command.args(arguments).stdin(Stdio::null()).output().context("cannot start this program again")?;
    for line in [output.stderr, output.stdout].iter().flat_map(|text| text.split(|byte| *byte == b'\n')) {
        if !line.is_empty() {
            println!("setup | {}", String::from_utf8_lossy(line));
        }
    }
    if !output.status.success() {
        bail!("cargo xtask {}: {}", arguments.join(" "), output.status);
    }
    Ok(())
}

/// rustfmt and clippy. rustup installs them from the toolchain file; a toolchain without rustup
/// must include them.
pub(crate) fn components() -> Result<()> {
    for (tool, package) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        let present =
            crate::workspace::cargo(&[tool, "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !present.is_ok_and(|status| status.success()) {
            println!("==> installing {package} for the toolchain of rust-toolchain.toml");
            let added = Command::new("rustup").args(["component", "add", package]).status();
            if !added.is_ok_and(|status| status.success()) {
                anyhow::bail!(
                    "cargo {tool} is missing: install it with `rustup component add {package}` or your distribution's package"
                );
            }
        }
    }
    Ok(())
}

/// Whether Chromium is available, which renders reports in tests. Installs it with apt if possible.
///
/// # Errors
/// apt is available but failed to install it.
fn chromium() -> Result<bool> {
    if runs("chromium", &["--version"]) {
        return Ok(true);
    }
    // Without it, only the tests of the page fail.
    if !may_install() {
        println!("==> chromium is not installed, and cannot be installed here");
        return Ok(false);
    }
    install(&["chromium"], "in which the tests look at a report")?;
    Ok(true)
}

/// buildah, which builds images without a daemon.
///
/// # Errors
/// It is missing and cannot be installed.
pub(crate) fn buildah() -> Result<()> {
    tools(&[("buildah", "buildah")], "to build images")
}

/// Tools that real nodes need from the distribution: a program, and the Debian package that
/// contains it.
const NODE_TOOLS: [(&str, &str); 7] = [
    ("runc", "runc"),
    ("/usr/lib/cni/ptp", "containernetworking-plugins"),
    ("iptables", "iptables"),
    ("ip", "iproute2"),
    ("busybox", "busybox"),
    ("buildah", "buildah"),
    ("unshare", "util-linux"),
];

/// The first requirement of real nodes that this machine lacks and cannot install, as a sentence.
/// The program that runs the cluster detects the rest, such as cgroups that cannot be created.
pub(crate) fn missing_for_nodes() -> Option<String> {
    if !is_root() {
        return Some("they need root to create namespaces, mounts and cgroups".to_owned());
    }
    let packages = missing_tools(&NODE_TOOLS);
    if !packages.is_empty() && !may_install() {
        return Some(format!("missing packages (Debian names): {}", packages.join(", ")));
    }
    let namespaces = ["--mount", "--net", "--uts", "--pid", "--fork", "true"];
    if runs("unshare", &["--help"]) && !runs("unshare", &namespaces) {
        return Some("this process cannot create namespaces (unshare fails)".to_owned());
    }
    None
}

/// Tools of real nodes, installed with apt if possible.
///
/// # Errors
/// A tool is missing and cannot be installed.
pub(crate) fn node_tools() -> Result<()> {
    tools(&NODE_TOOLS, "for real nodes")
}

/// Programs with the packages that contain them, installed with apt if possible.
fn tools(wanted: &[(&str, &'static str)], purpose: &str) -> Result<()> {
    let missing = missing_tools(wanted);
    if missing.is_empty() {
        return Ok(());
    }
    if !may_install() {
        anyhow::bail!("missing {purpose}: the Debian packages {}", missing.join(", "));
    }
    install(&missing, purpose)
}

/// Packages whose program is missing.
fn missing_tools(wanted: &[(&str, &'static str)]) -> Vec<&'static str> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let is_installed = |program: &str| std::env::split_paths(&folders).any(|folder| folder.join(program).is_file());
    wanted.iter().filter(|(program, _)| !is_installed(program)).map(|(_, package)| *package).collect()
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Only root can install, and only with apt.
fn may_install() -> bool {
    is_root() && runs("apt-get", &["--version"])
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

fn install(packages: &[&str], purpose: &str) -> Result<()> {
    let names = packages.join(" ");
    println!("==> installing {names}, {purpose}");
    // An old package list can still be good enough.
    let _ = runs("apt-get", &["update"]);
    if runs("apt-get", &[&["install", "--yes", "--no-install-recommends"], packages].concat()) {
        return Ok(());
    }
    anyhow::bail!(
        "apt-get cannot install {names}: install it manually, or remove apt-get from PATH to continue without it"
    )
}

/// cargo-deny, if it is installed. It does not test the product and takes minutes to build, so it
/// is not installed here.
pub(crate) fn cargo_deny() -> Result<Option<Command>> {
    let mut probe = Command::new("cargo-deny");
    let present = probe
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !present {
        println!("==> cargo-deny is not installed: licences of dependencies are checked by tests/tests/tidy.rs only");
        return Ok(None);
    }
    Ok(Some(Command::new("cargo-deny")))
}
