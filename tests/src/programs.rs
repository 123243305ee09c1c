//! Builds the programs that the tests start.

use crate::root;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The folder in which `switchyard` and `switchyard-worker` lie side by side, built in the profile of the test.
///
/// Cargo builds them when they are not up to date, once per test process, in the target folder of the running test.
///
/// # Panics
/// They do not build.
pub fn programs() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| build(&["switchyard", "switchyard-worker"], &["switchyard", "switchyard-worker"]))
}

/// Environment by which a program's wall clock is off by the whole seconds that are written in this file, from when they are written.
///
/// # Panics
/// The library that does it does not build.
pub fn clock_by(file: &Path) -> Vec<(&'static str, String)> {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let library = "libswitchyard_test_clock.so";
    let folder = FOLDER.get_or_init(|| build(&["switchyard-test-clock"], &[library]));
    let text = |path: &Path| path.display().to_string();
    vec![("LD_PRELOAD", text(&folder.join(library))), ("SYTEST_CLOCK_OFFSET", text(file))]
}

/// Builds packages of this workspace. Answers where their files are.
fn build(packages: &[&str], files: &[&str]) -> PathBuf {
    // TARGET/PROFILE/deps/test-0123: wherever CARGO_TARGET_DIR or a configuration put it.
    let test = std::env::current_exe().expect("the path of the running test");
    let folder = test.ancestors().nth(2).expect("invariant: tests lie in a folder of the profile").to_path_buf();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let target = folder.parent().expect("invariant: the profile's folder lies in the target folder");
    // Not by `eprintln!`, which the test harness keeps to itself: a first build takes minutes, and silence looks like a hang.
    let note = format!("building {} for the tests (profile {profile})\n", packages.join(" and "));
    let _ = std::io::stderr().write_all(note.as_bytes());
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["build", "--quiet", "--profile", profile, "--target-dir"]).arg(target).current_dir(root());
    command.args(packages.iter().flat_map(|package| ["--package", package]));
    let status = command.status().unwrap_or_else(|error| panic!("cannot start cargo: {error}"));
    assert!(status.success(), "the programs do not build: {status}");
    for file in files {
        assert!(folder.join(file).is_file(), "{file} is not in {}", folder.display());
    }
    folder
}
