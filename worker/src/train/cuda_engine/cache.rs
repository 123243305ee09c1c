//! On-disk cache of compiled kernels and selected algorithms.
//!
//! An entry is a file. Its name is a digest of everything that its contents depend on: device,
//! versions, sources, options. It begins with that digest and a digest of its contents, so that a
//! corrupt or misnamed file is detected. No entry is required.

use crate::process::variable;
use crate::train::digest::digest;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use switchyard_worker_contract::env;

/// Start of every file. The number is the format version.
const MAGIC: &str = "switchyard GPU cache 1";
/// Value of the variable that disables the cache.
const DISABLED: &str = "none";

/// The cache folder; `None` if disabled.
pub(super) struct Cache(Option<PathBuf>);

impl Cache {
    /// The folder named by the environment, or the user's cache folder.
    pub fn from_env() -> Cache {
        let home = || variable("HOME").map(|home| Path::new(&home).join(".cache"));
        let default =
            || variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(home).map(|base| base.join("switchyard/gpu"));
        match variable(env::GPU_CACHE) {
            Some(named) => Cache((named != DISABLED).then(|| named.into())),
            None => Cache(default()),
        }
    }

    pub fn folder(&self) -> Option<&Path> {
        self.0.as_deref()
    }

    /// The cached contents for `key`.
    pub fn get(&self, key: &str) -> Option<Vec<u8>> {
        let file = self.file(key)?;
        let bytes = std::fs::read(&file).inspect_err(|error| {
            if error.kind() != ErrorKind::NotFound {
                eprintln!("warning: cannot read {}: {error}; it will be recreated", file.display());
            }
        });
        let bytes = bytes.ok()?;
        let contents = contents(&bytes, key);
        if contents.is_none() {
            eprintln!("warning: {} is corrupt or misnamed; it will be recreated", file.display());
        }
        contents.map(<[u8]>::to_vec)
    }

    /// Caches contents. Errors are ignored: the next run recreates them.
    pub fn put(&self, key: &str, contents: &[u8]) {
        let Some(file) = self.file(key) else { return };
        // Other threads and processes may write the same entry: each writes its own file, and the
        // last rename wins.
        static WRITTEN: AtomicU32 = AtomicU32::new(0);
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let temporary = file.with_extension(format!("{}-{number}", std::process::id()));
        let bytes = [head(key, contents).as_bytes(), contents].concat();
        let created = file.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written = created.and_then(|()| std::fs::write(&temporary, bytes));
        if written.and_then(|()| std::fs::rename(&temporary, &file)).is_err() {
            let _ = std::fs::remove_file(&temporary);
        }
    }

    fn file(&self, key: &str) -> Option<PathBuf> {
        self.0.as_ref().map(|folder| folder.join(digest(key.as_bytes())))
    }
}

fn head(key: &str, contents: &[u8]) -> String {
    format!("{MAGIC}\n{}\n{}\n", digest(key.as_bytes()), digest(contents))
}

/// The contents after a valid head.
fn contents<'a>(bytes: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let (_, contents) = bytes.split_at_checked(head(key, &[]).len())?;
    bytes.starts_with(head(key, contents).as_bytes()).then_some(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "GPU 1, compiler 2\nsource";

    fn cache() -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache(Some(folder.path().join("deep/below")));
        cache.put(KEY, b"contents");
        (folder, cache)
    }

    #[test]
    fn entries_are_found_only_by_their_exact_key() {
        let (_folder, cache) = cache();
        assert_eq!(cache.get(KEY).as_deref(), Some(&b"contents"[..]));
        for other in ["GPU 2, compiler 2\nsource", "GPU 1, compiler 3\nsource", "GPU 1, compiler 2\nsource "] {
            assert_eq!(cache.get(other), None, "{other}");
        }
        cache.put(KEY, b"");
        assert_eq!(cache.get(KEY).as_deref(), Some(&b""[..]));
        assert_eq!(Cache(None).get(KEY), None);
    }

    #[test]
    fn every_changed_or_missing_byte_is_detected() {
        let (_folder, cache) = cache();
        let file = cache.file(KEY).unwrap();
        let whole = std::fs::read(&file).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert_eq!(contents(&changed, KEY), None, "byte {at}");
            assert_eq!(contents(&whole[..at], KEY), None, "{at} bytes");
        }
        std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
        assert_eq!(cache.get(KEY), None);
        // An entry that was copied to another entry's name.
        std::fs::write(cache.file("other").unwrap(), &whole).unwrap();
        assert_eq!(cache.get("other"), None);
    }

    #[test]
    fn a_folder_that_cannot_be_created_caches_nothing() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), "").unwrap();
        let cache = Cache(Some(folder.path().join("file/below")));
        cache.put(KEY, b"contents");
        assert_eq!(cache.get(KEY), None);
    }
}
