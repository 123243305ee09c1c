//! Images without a builder: files in one layer, as an archive of Docker's kind, which containerd imports.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// An image with busybox as all of its commands: that of sandboxes, and of tests. Without arguments it waits until it is killed.
pub const TOOLS: &str = "switchyard.test/tools:1";

/// An image to be made.
#[derive(Debug, Clone, Default)]
pub struct Image<'a> {
    /// Name and tag.
    pub name: &'a str,
    /// Files of this machine, and where they lie in the image; with their modes.
    pub files: Vec<(PathBuf, String)>,
    /// Symbolic links: where they lie, and what they say.
    pub links: Vec<(String, String)>,
    /// The program of a container whose `command` names none; `args` come after it.
    pub command: Vec<String>,
}

impl Image<'_> {
    /// Puts a program of this machine in, with the shared libraries that it needs.
    ///
    /// # Errors
    /// ldd cannot be started.
    pub fn add_program(&mut self, program: &Path, to: &str) -> Result<()> {
        self.files.push((program.to_path_buf(), to.to_string()));
        let output = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
        // `libc.so.6 => /lib/libc.so.6 (0x…)`, and for the linker itself without the arrow; of a static program nothing.
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

    /// Writes the archive. Answers its path.
    ///
    /// # Errors
    /// A file cannot be read, or nothing can be written to `folder`.
    pub fn archive(&self, folder: &Path) -> Result<PathBuf> {
        let work = tempfile::Builder::new().prefix("image-").tempdir_in(folder)?;
        let (root, parts) = (work.path().join("root"), work.path().join("parts"));
        fs::create_dir_all(root.join("tmp"))?;
        fs::create_dir(&parts)?;
        for (from, to) in &self.files {
            let to = place(&root, to)?;
            fs::copy(from, to).with_context(|| from.display().to_string())?;
        }
        for (at, to) in &self.links {
            symlink(to, place(&root, at)?)?;
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

/// [`TOOLS`].
///
/// # Errors
/// There is no busybox.
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

/// The place of a path below `root`, whose folder is made.
fn place(root: &Path, path: &str) -> Result<PathBuf> {
    let place = root.join(path.trim_start_matches('/'));
    fs::create_dir_all(place.parent().context("a file lies in a folder")?)?;
    Ok(place)
}

/// The content of a folder as an archive, the same for the same files.
fn tar(folder: &Path, archive: &Path) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-C"]).arg(folder);
    let output = command.arg("-cf").arg(archive).arg(".").output().context("cannot start tar")?;
    ensure!(output.status.success(), "{}: {}", archive.display(), String::from_utf8_lossy(&output.stderr));
    Ok(())
}
