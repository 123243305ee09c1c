//! Caches compiled third-party crates across a user's clones. They are a quarter of what a clone's
//! first test run compiles.
//!
//! Cargo identifies them by fingerprints that depend neither on the clone nor on its target folder,
//! and still verifies them: a crate with different source, features or flags is recompiled.
//! Modification times are preserved, since cargo rebuilds anything older than its dependencies.

use crate::programs::cache;
use crate::workspace::{built_in, members, root};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs::{self, File, FileTimes};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Subfolders of a profile folder that hold crates.
const FOLDERS: [&str; 3] = [".fingerprint", "build", "deps"];
/// Compiler outputs, which cargo replaces but never rewrites in place. All other files are copied,
/// since cargo and build scripts rewrite them.
const LINKED: [&str; 3] = ["rlib", "rmeta", "so"];
/// A marker in the target folder, which records what was restored from the cache.
const RESTORED: &str = ".shared-crates";

/// Copies cached crates into this clone's target folder, once per clone.
pub(crate) fn restore() -> Result<()> {
    let (shared, target) = (shared()?, built_in("dev"));
    let marker = target.join(RESTORED);
    let name = shared.file_name().unwrap_or_default().as_encoded_bytes();
    if !shared.is_dir() || fs::read(&marker).is_ok_and(|taken| taken == name) {
        return Ok(());
    }
    let start = Instant::now();
    let lock = lock()?;
    lock.lock_shared()?;
    let entries = transfer(&shared, &target, &BTreeSet::new())?;
    fs::write(&marker, name)?;
    println!(
        "==> {entries} files of compiled crates reused from {}: {:.1} s",
        shared.display(),
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Caches the crates of this freshly compiled clone, unless the cache already has them.
pub(crate) fn store() -> Result<()> {
    let (shared, target) = (shared()?, built_in("dev"));
    if shared.is_dir() {
        return Ok(());
    }
    let parent = shared.parent().context("invariant: the cache has a folder")?;
    let lock = lock()?;
    lock.lock()?;
    // Crates of other compiler or dependency versions are obsolete.
    for other in fs::read_dir(parent)? {
        let path = other?.path();
        if path.is_dir() {
            fs::remove_dir_all(&path).with_context(|| path.display().to_string())?;
        }
    }
    let partial = parent.join("partial");
    transfer(&target, &partial, &members()?)?;
    fs::rename(&partial, &shared)?;
    fs::write(target.join(RESTORED), shared.file_name().unwrap_or_default().as_encoded_bytes())?;
    Ok(())
}

fn lock() -> Result<File> {
    Ok(File::create(cache("crates")?.join("lock"))?)
}

/// The cache folder for these crate versions, this compiler and these flags.
fn shared() -> Result<PathBuf> {
    let compiler = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("-vV").output()?;
    ensure!(compiler.status.success(), "rustc -vV: {}", compiler.status);
    let mut hasher = DefaultHasher::new();
    compiler.stdout.hash(&mut hasher);
    for file in ["Cargo.lock", "Cargo.toml", ".cargo/config.toml"] {
        let path = root().join(file);
        fs::read(&path).with_context(|| path.display().to_string())?.hash(&mut hasher);
    }
    std::env::var_os("RUSTFLAGS").hash(&mut hasher);
    let folder = cache("crates")?;
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder.join(format!("{:016x}", hasher.finish())))
}

/// Copies or links all crates except those of `without`, overwriting existing files. Returns the
/// number of files and folders.
fn transfer(from: &Path, to: &Path, without: &BTreeSet<String>) -> Result<usize> {
    let mut count = 0;
    for folder in FOLDERS {
        let (from, to) = (from.join(folder), to.join(folder));
        fs::create_dir_all(&to)?;
        for entry in fs::read_dir(&from).with_context(|| from.display().to_string())? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if package_of(name).is_none_or(|package| without.contains(&package)) || !is_of_crate(folder, &path) {
                continue;
            }
            let target = to.join(name);
            copy_or_link(&path, &target).with_context(|| format!("{} to {}", path.display(), target.display()))?;
            count += 1;
        }
    }
    Ok(count)
}

/// False for test programs and incremental build objects, which are in the same folders.
fn is_of_crate(folder: &str, path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    folder != "deps" || extension == "d" || LINKED.contains(&extension)
}

/// The package name, with hyphens, from `anyhow-048b8907eea8f476` or
/// `libserde_json-0ff2cdde3c525be2.rmeta`.
fn package_of(name: &str) -> Option<String> {
    let (package, _) = name.split_once('.').map_or(name, |(stem, _)| stem).rsplit_once('-')?;
    let is_file = name.contains('.') && !name.ends_with(".d");
    let package = if is_file { package.strip_prefix("lib").unwrap_or(package) } else { package };
    Some(package.replace('_', "-"))
}

fn copy_or_link(from: &Path, to: &Path) -> io::Result<()> {
    let of = fs::metadata(from)?;
    if of.is_dir() {
        match fs::remove_dir_all(to) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir_all(to)?,
        }
        return fs::read_dir(from)?.try_for_each(|entry| {
            let entry = entry?;
            copy_or_link(&entry.path(), &to.join(entry.file_name()))
        });
    }
    match fs::remove_file(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let is_linked = from.extension().is_some_and(|extension| LINKED.iter().any(|linked| extension == *linked));
    // The cache can be on another file system.
    if is_linked && fs::hard_link(from, to).is_ok() {
        return Ok(());
    }
    fs::copy(from, to)?;
    let times = FileTimes::new().set_modified(of.modified()?);
    File::options().append(true).open(to)?.set_times(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn third_party_crates_are_distinguished_from_ours() {
        assert_eq!(package_of("anyhow-048b8907eea8f476").as_deref(), Some("anyhow"));
        assert_eq!(package_of("libserde_json-0ff2.rmeta").as_deref(), Some("serde-json"));
        assert_eq!(package_of("libloading-0ff2").as_deref(), Some("libloading"));
        assert_eq!(package_of("liblibloading-0ff2.rlib").as_deref(), Some("libloading"));
        assert_eq!(package_of("libloading-0ff2.d").as_deref(), Some("libloading"));
        assert_eq!(package_of("unnumbered"), None);
        assert!(members().unwrap().contains("switchyard-plan") && members().unwrap().contains("xtask"));
    }

    #[test]
    fn times_are_preserved_and_rewritten_files_are_copied() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        for name in [
            ".fingerprint/a-1/lib-a",
            "build/a-2/out/x.rs",
            "deps/liba-1.rlib",
            "deps/a-1.d",
            "deps/program-1",
            "deps/libours-1.rlib",
        ] {
            let path = from.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, name).unwrap();
        }
        let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let file = from.join(".fingerprint/a-1/lib-a");
        File::options().append(true).open(&file).unwrap().set_times(FileTimes::new().set_modified(old)).unwrap();
        for _ in 0..2 {
            assert_eq!(transfer(&from, &to, &BTreeSet::from(["ours".to_string()])).unwrap(), 4);
        }
        assert_eq!(fs::metadata(to.join(".fingerprint/a-1/lib-a")).unwrap().modified().unwrap(), old);
        fs::write(to.join("build/a-2/out/x.rs"), "changed").unwrap();
        assert_eq!(fs::read_to_string(from.join("build/a-2/out/x.rs")).unwrap(), "build/a-2/out/x.rs");
        assert!(
            to.join("deps/liba-1.rlib").exists()
                && !to.join("deps/program-1").exists()
                && !to.join("deps/libours-1.rlib").exists()
        );
    }
}
