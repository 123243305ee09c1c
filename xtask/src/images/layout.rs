//! Lays out the files of an image.

use super::{Image, Version, sbom};
use crate::workspace::root;
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

/// Text files. Nobody can log in; the user is the one of job pods (`src/plan/objects/pod.rs`) and
/// of the chart.
const TEXTS: [(&str, &str); 3] = [
    ("etc/passwd", "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/tmp:/sbin/nologin\n"),
    ("etc/group", "root:x:0:\nnonroot:x:65532:\n"),
    // Without this file, the C library queries no DNS server.
    ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
];

/// Legacy folder names that programs and NVIDIA's runtime still use.
const LINKS: [(&str, &str); 2] = [("lib", "usr/lib"), ("lib64", "usr/lib64")];

/// Writes all files of an image, with fixed permissions and one modification time.
pub(super) fn write(image: &Image, built: &Path, folder: &Path, version: &Version) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let put = |path: &str, bytes: &[u8], mode: u32| -> Result<()> {
        let to = folder.join(path);
        fs::create_dir_all(to.parent().context("invariant: a file has a parent folder")?)?;
        fs::write(&to, bytes).with_context(|| to.display().to_string())?;
        Ok(fs::set_permissions(&to, Permissions::from_mode(mode))?)
    };
    let stripped = folder.with_extension("stripped");
    fs::create_dir_all(folder)?;
    strip(built, &stripped)?;
    put(&format!("usr/bin/{}", image.name), &fs::read(&stripped)?, 0o755)?;
    fs::remove_file(&stripped)?;

    let mut packages = BTreeMap::new();
    for library in libraries(built, image.loads)? {
        let bytes = fs::read(&library).with_context(|| library.display().to_string())?;
        // All libraries are below /usr in the image, regardless of this machine; `LINKS` covers the
        // old names.
        let path = library.strip_prefix("/").context("invariant: the linker prints absolute paths")?;
        let path = path.strip_prefix("usr").unwrap_or(path);
        put(&format!("usr/{}", path.display()), &bytes, 0o755)?;
        if let Some((package, version)) = sbom::package_of(&library) {
            packages.insert(package, version);
        }
    }
    for (name, to) in LINKS {
        fs::create_dir_all(folder.join(to))?;
        symlink(to, folder.join(name))?;
    }
    for (path, text) in TEXTS {
        put(path, text.as_bytes(), 0o644)?;
    }
    put("usr/share/doc/switchyard/LICENSE", &fs::read(root().join("LICENSE"))?, 0o644)?;
    for package in packages.keys() {
        if let Ok(text) = fs::read(format!("/usr/share/doc/{package}/copyright")) {
            put(&format!("usr/share/doc/{package}/copyright"), &text, 0o644)?;
        }
    }
    put("usr/share/doc/switchyard/sbom.cdx.json", sbom::sbom(image, version, &packages)?.as_bytes(), 0o644)?;
    fs::create_dir_all(folder.join("tmp"))?;
    normalize(folder, SystemTime::UNIX_EPOCH + Duration::from_secs(version.time))?;
    Ok(fs::set_permissions(folder.join("tmp"), Permissions::from_mode(0o1777))?)
}

/// Strips a program of its symbols, which are a quarter of it. Panics still report their location.
pub(crate) fn strip(program: &Path, to: &Path) -> Result<()> {
    let status = Command::new("strip").arg("--strip-all").arg("-o").arg(to).arg(program).status();
    ensure!(
        status.context("cannot start strip, which comes with a C compiler")?.success(),
        "strip {}",
        program.display()
    );
    Ok(())
}

/// The dynamic linker and the libraries that a program needs, plus `loads` with their dependencies.
fn libraries(program: &Path, loads: &[&str]) -> Result<Vec<PathBuf>> {
    let mut found = linked(program)?;
    let beside = found.iter().find(|path| path.file_name().is_some_and(|name| name == "libc.so.6"));
    let beside = beside.and_then(|path| path.parent()).context("a program without the C library")?.to_path_buf();
    for name in loads {
        let library = beside.join(name);
        found.extend(linked(&library)?);
        found.push(library);
    }
    found.sort();
    found.dedup();
    Ok(found)
}

/// Parses the output of `ldd`: `name => /path (0x…)`, or the linker's own `/path (0x…)`.
fn linked(file: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(file).output().context("cannot start ldd, which comes with the C library")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && !text.contains("not found"), "ldd {}: {text}", file.display());
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from);
    Ok(text.lines().filter_map(path).collect())
}

/// Sets folder permissions and all modification times, independent of the umask and the clock.
fn normalize(folder: &Path, time: SystemTime) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let kind = fs::symlink_metadata(&path)?;
        if kind.is_dir() {
            normalize(&path, time)?;
        } else if kind.is_file() {
            File::open(&path)?.set_modified(time)?;
        }
    }
    fs::set_permissions(folder, Permissions::from_mode(0o755))?;
    Ok(File::open(folder)?.set_modified(time)?)
}
