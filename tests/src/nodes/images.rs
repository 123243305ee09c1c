//! Builds images without a builder: a single layer of files in a Docker archive, which containerd
//! imports.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An image with busybox as all of its commands, for sandboxes and tests. Without arguments it
/// waits until it is killed.
pub const TOOLS: &str = "switchyard.test/tools:1";

/// An image to build.
#[derive(Debug, Clone, Default)]
pub struct Image<'a> {
    /// Name and tag.
    pub name: &'a str,
    /// Files on this machine and their paths in the image. Modes are preserved.
    pub files: Vec<(PathBuf, String)>,
    /// Symbolic links: path, target.
    pub links: Vec<(String, String)>,
    /// Entry point, used by containers without a `command`; `args` are appended.
    pub command: Vec<String>,
}

impl Image<'_> {
    /// Adds a program from this machine, with the shared libraries it needs.
    ///
    /// # Errors
    /// ldd cannot be started.
    pub fn add_program(&mut self, program: &Path, to: &str) -> Result<()> {
        self.files.push((program.to_path_buf(), to.to_string()));
        let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
        // Lines are `libc.so.6 => /lib/libc.so.6 (0x…)`, without the arrow for the linker itself. A
        // static program has none.
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let path = line.rsplit_once("=> ").map_or(line, |(_, path)| path).trim();
            let path = path.split(' ').next().filter(|path| path.starts_with('/'));
            let is_new = |path: &&str| self.files.iter().all(|(_, to)| to != path);
            if let Some(path) = path.filter(is_new).map(str::to_string) {
                self.files.push((path.clone().into(), path));
            }
        }
        Ok(())
    }

    /// Writes the archive and returns its path.
    ///
    /// # Errors
    /// A file cannot be read, or `folder` is not writable.
    pub fn archive(&self, folder: &Path) -> Result<PathBuf> {
        let work = tempfile::Builder::new().prefix("image-").tempdir_in(folder)?;
        let (root, parts) = (work.path().join("root"), work.path().join("parts"));
        fs::create_dir_all(root.join("tmp"))?;
        fs::create_dir(&parts)?;
        for (from, to) in &self.files {
            let to = prepare_path(&root, to)?;
            fs::copy(from, to).with_context(|| from.display().to_string())?;
        }
        for (at, to) in &self.links {
            symlink(to, prepare_path(&root, at)?)?;
        }
        tar(&root, &parts.join("layer.tar"))?;
        let digest = Sha256::digest(fs::read(parts.join("layer.tar"))?);
        let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let config = json!({
            "architecture": architecture, "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Entrypoint": self.command},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
        });
        let manifest = json!([{"Config": "config.json", "RepoTags": [self.name], "Layers": ["layer.tar"]}]);
        fs::write(parts.join("config.json"), config.to_string())?;
        fs::write(parts.join("manifest.json"), manifest.to_string())?;
        let archive = folder.join(format!("{}.tar", self.name.replace(['/', ':'], "-")));
        tar(&parts, &archive)?;
        Ok(archive)
    }
}

/// Builds the [`TOOLS`] image.
///
/// # Errors
/// busybox is not installed.
pub(super) fn tools(folder: &Path) -> Result<PathBuf> {
    let search = std::env::var_os("PATH").unwrap_or_default();
    let busybox = std::env::split_paths(&search).map(|folder| folder.join("busybox")).find(|path| path.is_file());
    let busybox = busybox.context("no busybox (package busybox)")?;
    let list = Command::new(&busybox).arg("--list").output().context("cannot start busybox")?;
    let names = String::from_utf8(list.stdout)?;
    let links = names.lines().filter(|name| *name != "busybox").map(|name| (format!("/bin/{name}"), "busybox".into()));
    let command = ["tail", "-f", "/dev/null"].map(String::from).to_vec();
    let mut image = Image { name: TOOLS, links: links.collect(), command, ..Image::default() };
    image.add_program(&busybox, "/bin/busybox")?;
    image.archive(folder)
}

/// Returns a path below `root`, and creates its parent folder.
fn prepare_path(root: &Path, path: &str) -> Result<PathBuf> {
    let target = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(target.parent().context("the file has no parent folder")?)?;
    Ok(target)
}

/// Archives a folder reproducibly: the same files give the same archive.
fn tar(folder: &Path, archive: &Path) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-C"]).arg(folder);
    let output = command.arg("-cf").arg(archive).arg(".").output().context("cannot start tar")?;
    ensure!(output.status.success(), "{}: {}", archive.display(), String::from_utf8_lossy(&output.stderr));
    Ok(())
}
