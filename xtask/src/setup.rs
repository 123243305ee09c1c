//! What a fresh machine lacks, and how it is had.

use anyhow::Result;
use std::process::{Command, Stdio};

/// rustfmt and clippy: part of the toolchain file, so rustup brings them; a toolchain without rustup must have them.
pub(crate) fn components() -> Result<()> {
    for (tool, package) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        let present = crate::steps::cargo(&[tool, "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
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
pub(crate) fn chromium() -> Result<bool> {
    if runs("chromium", &["--version"]) {
        return Ok(true);
    }
    // Others are told, and the test says that it looked at nothing.
    if !may_install() {
        println!("==> chromium is not installed: the page of the report is checked as text only");
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

/// The tools of real nodes. Installed by apt where apt is and may.
///
/// # Errors
/// One is missing and cannot be installed.
pub(crate) fn node_tools() -> Result<()> {
    tools(&NODE_TOOLS, "for real nodes")
}

/// Programs with the packages that bring them; installed by apt where apt is and may.
fn tools(wanted: &[(&str, &'static str)], what_for: &str) -> Result<()> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let is_there = |program: &str| std::env::split_paths(&folders).any(|folder| folder.join(program).is_file());
    let missing: Vec<&str> =
        wanted.iter().filter(|(program, _)| !is_there(program)).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !may_install() {
        anyhow::bail!("missing {what_for}: the packages {} (names of Debian)", missing.join(", "));
    }
    install(&missing, what_for)
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Only root may install, and only where apt is.
fn may_install() -> bool {
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0");
    root && runs("apt-get", &["--version"])
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
