//! A folder with everything that an agent reads from a machine.

use crate::failures::Failures;
use crate::files;
use crate::machine::Machine;
use crate::scene::{Scene, SceneError};
use crate::tree::Tree;
use std::fs;
use std::path::PathBuf;

/// The scene, next to the library.
pub const SCENE_FILE: &str = "scene.json";
/// The current failures, next to the library.
pub const FAILURES_FILE: &str = "failures.json";
/// File name of the NVML mock that cargo builds.
const LIBRARY: &str = "libswitchyard_nvml_mock.so";

/// A machine with its files and its NVML. The folder is deleted on drop.
///
/// Every method except [`Stage::new`] panics if a file cannot be written, like those of [`Tree`].
#[derive(Debug)]
pub struct Stage {
    /// `sys`, `proc`, `dev` and the library.
    pub tree: Tree,
    /// The machine on this stage.
    pub machine: Machine,
}

impl Stage {
    /// Sets up a machine.
    ///
    /// # Errors
    /// The scene is inconsistent.
    pub fn new(scene: Scene) -> Result<Stage, SceneError> {
        let machine = Machine::new(scene)?;
        let stage = Stage { tree: Tree::new(), machine };
        files::write(&stage.machine, &stage.tree);
        stage.tree.file(SCENE_FILE, &serde_json::to_string(&stage.machine.scene)?);
        stage.set(&stage.machine.scene.failures);
        stage.set_missing(&[]);
        Ok(stage)
    }

    /// Makes the library lack these functions in addition to those that the scene lists. On a
    /// machine without a driver there is no library.
    pub fn set_missing(&self, functions: &[&str]) {
        if self.machine.scene.driver.is_none() {
            return;
        }
        // Copy the library, because the dynamic linker loads a file only once, and the mock reads
        // the files next to it.
        let mut library = fs::read(library_next_to_test()).expect("the mock of NVML");
        for function in functions.iter().copied().chain(self.machine.scene.without.iter().map(String::as_str)) {
            corrupt_symbol(&mut library, function);
        }
        fs::write(self.tree.path("library.new"), library).expect("a copy of the library");
        // Replace the file, because a process can have the old one open.
        fs::rename(self.tree.path("library.new"), self.library()).expect("a new file");
    }

    /// Path of NVML. The file does not exist on a machine without a driver.
    pub fn library(&self) -> PathBuf {
        self.tree.path("libnvidia-ml.so.1")
    }

    /// Replaces the current failures.
    pub fn set(&self, failures: &Failures) {
        files::write_changing(&self.machine, failures, &self.tree);
        // Replace atomically, so that a library reading concurrently sees either version.
        let text = serde_json::to_string(failures).expect("failures are JSON");
        self.tree.file("failures.new", &text);
        fs::rename(self.tree.path("failures.new"), self.tree.path(FAILURES_FILE)).expect("a new file");
    }
}

/// Cargo places the library next to the test, which depends on it.
fn library_next_to_test() -> PathBuf {
    let program = std::env::current_exe().expect("a test knows its own file");
    let folders = program.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join(LIBRARY)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("{LIBRARY} is not beside {}: is it a dev-dependency?", program.display()))
}

/// Corrupts the name of a function in the library's string table, so that it cannot be found.
fn corrupt_symbol(library: &mut [u8], name: &str) {
    let needle: Vec<u8> = [0].into_iter().chain(name.bytes()).chain([0]).collect();
    let places: Vec<usize> =
        library.windows(needle.len()).enumerate().filter(|(_, text)| *text == needle).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the mock of NVML has no {name}");
    for at in places {
        library[at + 1] = b'x';
    }
}
