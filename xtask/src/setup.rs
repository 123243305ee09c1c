//! What a fresh machine lacks, and how it is had.

use crate::data::{What, data};
use anyhow::{Context, Result, anyhow, bail};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

/// What a stage of the tests needs beside the compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// The data set of the accuracy tests.
    Digits,
    /// NVIDIA's compiler of kernels, its disassembler, and the headers of its driver and of NVTX.
    Cuda,
    /// Chromium.
    Browser,
    /// Programs and files of others, by family.
    Programs(&'static [&'static str]),
    /// What real nodes run, and a machine that can run them.
    Nodes,
    /// The archives of the images, made of the release programs.
    Images,
}

impl Need {
    /// Whether it can be had before the tests are compiled, and beside that.
    fn is_early(self) -> bool {
        self != Need::Images
    }

    /// Installs or builds it; false where this machine cannot have it and the tests go without.
    fn provide(self) -> Result<bool> {
        match self {
            Need::Digits => data(What::Digits).map(|_| true),
            Need::Cuda => crate::wheels::cuda().map(|()| true),
            Need::Browser => chromium(),
            Need::Programs(names) => programs(names).map(|()| true),
            Need::Nodes => {
                // In CI they must be had; elsewhere the stage is left out.
                let had = node_tools().and_then(|()| programs(&["kubernetes-node", "containerd", "coredns"]));
                if let Err(error) = &had
                    && std::env::var_os("CI").is_none()
                {
                    println!("setup | {error:#}");
                    return Ok(false);
                }
                had.map(|()| true)
            }
            Need::Images => own(&["images", "--profile", crate::workspace::LOCAL]).map(|()| true),
        }
    }
}

/// Needs of a run, each provided once: by the lane of the setup, or by the first stage that asks.
#[derive(Debug, Default)]
pub(crate) struct Needs(Mutex<Vec<(Need, Slot)>>);

/// Whether it is there, or why it cannot be had.
type Outcome = std::result::Result<bool, String>;
/// `None` until it was tried. Locked meanwhile: a second who needs it waits.
type Slot = Arc<Mutex<Option<Outcome>>>;

impl Needs {
    /// Everything that can be had beside the compilation.
    pub(crate) fn provide_early(&self, needs: &[Need]) {
        for need in needs.iter().filter(|need| need.is_early()) {
            // A failure is reported by the stage that needs it.
            let _ = self.provide(*need);
        }
    }

    /// Waits until it is there; false where the tests go without.
    pub(crate) fn provide(&self, need: Need) -> Result<bool> {
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

/// Builds programs of others, whose messages are kept and shown at the end.
fn programs(names: &[&str]) -> Result<()> {
    own(&[&["programs"], names].concat())
}

/// Runs a command of this program; its output is shown when it is done.
fn own(arguments: &[&str]) -> Result<()> {
    // Not `current_exe()`: the test stages build the workspace, xtask included, and so replace the file that runs now.
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

/// rustfmt and clippy: part of the toolchain file, so rustup brings them; a toolchain without rustup must have them.
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

/// Chromium, in which the tests look at a report; whether it is there. Installed by apt where apt is and may.
///
/// # Errors
/// apt is there and did not bring it: the tests could have had it.
fn chromium() -> Result<bool> {
    if runs("chromium", &["--version"]) {
        return Ok(true);
    }
    // Without it the tests of the page fail, and no others.
    if !may_install() {
        println!("==> chromium is not installed, and cannot be installed here");
        return Ok(false);
    }
    install(&["chromium"], "in which the tests look at a report")?;
    Ok(true)
}

/// buildah, which makes images without a daemon.
///
/// # Errors
/// It is not there and cannot be installed.
pub(crate) fn buildah() -> Result<()> {
    tools(&[("buildah", "buildah")], "to make images")
}

/// What real nodes need of the distribution: a program, and the package of Debian that brings it.
const NODE_TOOLS: [(&str, &str); 7] = [
    ("runc", "runc"),
    ("/usr/lib/cni/ptp", "containernetworking-plugins"),
    ("iptables", "iptables"),
    ("ip", "iproute2"),
    ("busybox", "busybox"),
    ("buildah", "buildah"),
    ("unshare", "util-linux"),
];

/// What this machine lacks for real nodes and cannot install, as a sentence. What only shows at work, such as cgroups that may not be made,
/// the program that keeps the cluster finds.
pub(crate) fn missing_for_nodes() -> Option<String> {
    if !is_root() {
        return Some("they need root: namespaces, mounts and cgroups are made".to_owned());
    }
    let packages = missing_tools(&NODE_TOOLS);
    if !packages.is_empty() && !may_install() {
        return Some(format!("missing packages (Debian names): {}", packages.join(", ")));
    }
    let namespaces = ["--mount", "--net", "--uts", "--pid", "--fork", "true"];
    if runs("unshare", &["--help"]) && !runs("unshare", &namespaces) {
        return Some("this process may not make namespaces (unshare refuses)".to_owned());
    }
    None
}

/// The tools of real nodes. Installed by apt where apt is and may.
///
/// # Errors
/// One is missing and cannot be installed.
pub(crate) fn node_tools() -> Result<()> {
    tools(&NODE_TOOLS, "for real nodes")
}

/// Programs with the packages that bring them; installed by apt where apt is and may.
fn tools(wanted: &[(&str, &'static str)], what_for: &str) -> Result<()> {
    let missing = missing_tools(wanted);
    if missing.is_empty() {
        return Ok(());
    }
    if !may_install() {
        anyhow::bail!("missing {what_for}: the packages {} (names of Debian)", missing.join(", "));
    }
    install(&missing, what_for)
}

/// Packages whose program is not there.
fn missing_tools(wanted: &[(&str, &'static str)]) -> Vec<&'static str> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |program: &str| std::env::split_paths(&folders).any(|folder| folder.join(program).is_file());
    wanted.iter().filter(|(program, _)| !is_there(program)).map(|(_, package)| *package).collect()
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Only root may install, and only where apt is.
fn may_install() -> bool {
    is_root() && runs("apt-get", &["--version"])
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

fn install(packages: &[&str], what_for: &str) -> Result<()> {
    let names = packages.join(" ");
    println!("==> installing {names}, {what_for}");
    // A list that is old, or that cannot be fetched, may do.
    let _ = runs("apt-get", &["update"]);
    if runs("apt-get", &[&["install", "--yes", "--no-install-recommends"], packages].concat()) {
        return Ok(());
    }
    anyhow::bail!("apt-get cannot install {names}: install it by hand, or take apt-get from the PATH to go without")
}

/// cargo-deny, where it is installed. It is no test of the product and takes minutes to build, so it is not installed here.
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
