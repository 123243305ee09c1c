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
    let there = debian("chromium", "in which the tests look at a report")?;
    if !there {
        println!("==> chromium is not installed: the page of the report is checked as text only");
    }
    Ok(there)
}

/// buildah, which makes images without a daemon.
///
/// # Errors
/// It is not there and cannot be installed.
pub(crate) fn buildah() -> Result<()> {
    anyhow::ensure!(debian("buildah", "which makes images")?, "buildah is not installed: install it by hand");
    Ok(())
}

/// Whether a program is there; installed by apt from the package of its name, where apt is and may.
fn debian(program: &str, purpose: &str) -> Result<bool> {
    let runs = |program: &str, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if runs(program, &["--version"]) {
        return Ok(true);
    }
    // Only root may install; others are told.
    let root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0");
    if !root || !runs("apt-get", &["--version"]) {
        return Ok(false);
    }
    println!("==> installing {program}, {purpose}");
    runs("apt-get", &["update"]);
    if runs("apt-get", &["install", "--yes", "--no-install-recommends", program]) && runs(program, &["--version"]) {
        return Ok(true);
    }
    anyhow::bail!("apt-get cannot install {program}: install it by hand, or take apt-get from the PATH to go without")
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
