//! A folder with everything that an agent reads of a machine.

use crate::failures::Failures;
use crate::files;
use crate::machine::Machine;
use crate::scene::{Scene, SceneError};
use crate::tree::Tree;
use std::fs;
use std::path::PathBuf;

/// The scene, beside the library.
pub const SCENE_FILE: &str = "scene.json";
/// What is wrong just now, beside the library.
pub const FAILURES_FILE: &str = "failures.json";
/// What cargo calls the mock of NVML.
const LIBRARY: &str = "libswitchyard_nvml_mock.so";

/// A machine with its files and its NVML. The folder goes when it is dropped.
///
/// Every method but [`Stage::new`] panics when a file cannot be written, as those of [`Tree`] do.
#[derive(Debug)]
pub struct Stage {
    /// `sys`, `proc`, `dev` and the library.
    pub tree: Tree,
    /// What stands here.
    pub machine: Machine,
}

impl Stage {
    /// Sets a machine up.
    ///
    /// # Errors
    /// The scene contradicts itself.
    pub fn new(scene: Scene) -> Result<Stage, SceneError> {
        let machine = Machine::new(scene)?;
        let stage = Stage { tree: Tree::new(), machine };
        files::write(&stage.machine, &stage.tree);
        stage.tree.file(SCENE_FILE, &serde_json::to_string(&stage.machine.scene)?);
        stage.set(&stage.machine.scene.failures);
        stage.set_missing(&[]);
        Ok(stage)
    }

    /// From now on the library lacks these functions beside those that the scene says. On a machine without a driver there is no
    /// library that could.
    pub fn set_missing(&self, functions: &[&str]) {
        if self.machine.scene.driver.is_none() {
            return;
        }
        // A copy, since the dynamic linker loads one file only once, and the mock plays what lies beside it.
        let mut library = fs::read(library_beside_test()).expect("the mock of NVML");
        for function in functions.iter().copied().chain(self.machine.scene.without.iter().map(String::as_str)) {
            spoil(&mut library, function);
        }
        fs::write(self.tree.path("library.new"), library).expect("a copy of the library");
        // Another file: somebody may have the old one open.
        fs::rename(self.tree.path("library.new"), self.library()).expect("a new file");
    }

    /// NVML. There is none on a machine without a driver.
    pub fn library(&self) -> PathBuf {
        self.tree.path("libnvidia-ml.so.1")
    }

    /// From now on this is wrong, and nothing else.
    pub fn set(&self, failures: &Failures) {
        files::write_changing(&self.machine, failures, &self.tree);
        // At once, so that a library that reads it meanwhile sees the one or the other.
        let text = serde_json::to_string(failures).expect("failures are JSON");
        self.tree.file("failures.new", &text);
        fs::rename(self.tree.path("failures.new"), self.tree.path(FAILURES_FILE)).expect("a new file");
    }
}

/// Cargo puts it beside the test, which depends on it.
fn library_beside_test() -> PathBuf {
    let program = std::env::current_exe().expect("a test knows its own file");
    let folders = program.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join(LIBRARY)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("{LIBRARY} is not beside {}: is it a dev-dependency?", program.display()))
}

/// Spoils the name of a function in the library's table of strings, so that nobody finds it.
fn spoil(library: &mut [u8], name: &str) {
    let needle: Vec<u8> = [0].into_iter().chain(name.bytes()).chain([0]).collect();
    let places: Vec<usize> =
        library.windows(needle.len()).enumerate().filter(|(_, text)| *text == needle).map(|(at, _)| at).collect();
    assert!(!places.is_empty(), "the mock of NVML has no {name}");
    for at in places {
        library[at + 1] = b'x';
    }
}
