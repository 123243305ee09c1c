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
