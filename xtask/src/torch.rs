//! PyTorch for the benchmarks that take it as their peer.

use crate::programs::{cache, quietly};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// An interpreter of the user's that has what is needed.
const OWN: &str = "SWITCHYARD_TORCH_PYTHON";
/// What is taken from PyPI. The digits are part of the result files' meaning.
const PACKAGES: [&str; 3] = ["torch==2.15.0", "numpy==2.4.6", "safetensors==0.8.0"];

/// A Python that can import PyTorch: the one that the environment names, or one of our own in the cache.
pub(crate) fn python() -> Result<PathBuf> {
    if let Some(own) = std::env::var_os(OWN) {
        let own = PathBuf::from(own);
        ensure!(imports(&own), "{OWN}: {} cannot import torch, numpy and safetensors", own.display());
        return Ok(own);
    }
    let parent = cache("python")?;
    fs::create_dir_all(&parent).with_context(|| format!("cannot make {}", parent.display()))?;
    let folder = parent.join(PACKAGES[0].replace("==", "-"));
    let python = folder.join("bin/python");
    // Two at once: the second waits, and finds it done.
    let lock = File::create(parent.join("torch.lock"))?;
    lock.lock().context("cannot lock the cache")?;
    if imports(&python) {
        return Ok(python);
    }
    eprintln!("==> installing {} from PyPI into {} (gigabytes)", PACKAGES.join(", "), folder.display());
    let help = format!("python3 with venv and pip is needed, or {OWN}=PYTHON with torch, numpy and safetensors");
    // A try that was cut short leaves half of it.
    let _ = fs::remove_dir_all(&folder);
    quietly("python environment", Command::new("python3").args(["-m", "venv"]).arg(&folder)).context(help.clone())?;
    let mut pip = Command::new(folder.join("bin/pip"));
    quietly("packages", pip.args(["install", "--quiet"]).args(PACKAGES)).context(help)?;
    ensure!(imports(&python), "{} cannot import what was installed", python.display());
    Ok(python)
}

fn imports(python: &Path) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", "import torch, numpy, safetensors"]).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
