//! A temporary folder for one test.

use crate::leftovers::{Leftover, leftovers};
use crate::program::Program;
use crate::{Manifest, programs};
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A folder with one test's data, in which its programs run. It is removed on drop.
///
/// Every process started in it has its path in the environment, which identifies leftovers.
#[derive(Debug)]
pub struct Scene {
    folder: TempDir,
}

impl Scene {
    /// Creates the folder.
    ///
    /// # Panics
    /// The folder cannot be created.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        let folder = tempfile::Builder::new().prefix("switchyard-test-").tempdir().expect("a temporary folder");
        Scene { folder }
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns a path in the folder.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Writes a file, and creates its parent folders.
    ///
    /// # Panics
    /// The file cannot be written.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.join(name);
        let folder = path.parent().expect("invariant: it is in the scene's folder");
        fs::create_dir_all(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        fs::write(&path, content).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        path
    }

    /// Writes about `kibibytes` KiB of text from which a small model can learn.
    pub fn write_text(&self, name: &str, kibibytes: usize) -> PathBuf {
        let mut text = String::new();
        let mut line = 0_u64;
        while text.len() < kibibytes << 10 {
            let words = ["signal", "track", "switch", "yard", "wagon", "shunt", "brake", "buffer"];
            let word = |step: u64| words[((line * step + line / 3) % 8) as usize];
            let _ = writeln!(text, "line {line}: the {} passes the {} and stops at the {}.", word(3), word(5), word(7));
            line += 1;
        }
        self.write(name, text)
    }

    /// Writes a manifest to a file.
    pub fn manifest(&self, name: &str, manifest: &Manifest) -> PathBuf {
        self.write(name, manifest.yaml())
    }

    /// Returns a command that runs `switchyard` with these arguments in the folder.
    pub fn switchyard<A: AsRef<str>>(&self, arguments: impl IntoIterator<Item = A>) -> Program {
        Program::new(&programs().join("switchyard"), self.path(), arguments)
    }

    /// Returns the status that a run wrote to its directory.
    ///
    /// # Panics
    /// The status is missing or cannot be read.
    pub fn status(&self, run_dir: &str) -> Value {
        let path = self.join(run_dir).join("status.yaml");
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let document: Value =
            serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        document["status"].clone()
    }

    /// Returns everything in the folder, as sorted relative paths.
    pub fn entries(&self) -> Vec<String> {
        fn collect(folder: &Path, root: &Path, found: &mut Vec<String>) {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                found.extend(path.strip_prefix(root).ok().map(|path| path.display().to_string()));
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    collect(&path, root, found);
                }
            }
        }
        let mut found = Vec::new();
        collect(self.path(), self.path(), &mut found);
        found.sort();
        found
    }

    /// Returns processes that were started in the folder and still exist after `timeout`.
    pub fn leftovers(&self, timeout: Duration) -> Vec<Leftover> {
        let start = Instant::now();
        loop {
            let found = leftovers(self.path());
            if found.is_empty() || start.elapsed() > timeout {
                return found;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Fails if processes, sockets or shared memory of the folder are left. Kills them first, so
    /// that they do not outlive the test.
    ///
    /// # Panics
    /// Something is left.
    pub fn assert_nothing_left(&self) {
        let found = self.leftovers(Duration::from_secs(1));
        found.iter().for_each(Leftover::kill);
        assert!(found.is_empty(), "left behind: {found:#?}");
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Also clean up after a test that fails midway.
        leftovers(self.path()).iter().for_each(Leftover::kill);
    }
}
