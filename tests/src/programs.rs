//! Builds the programs that the tests start.

use crate::{mutants, root};
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
    FOLDER.get_or_init(|| {
        let programs = ["--workspace", "--bin", "switchyard", "--bin", "switchyard-worker"];
        build(&programs, &["switchyard", "switchyard-worker"])
    })
}

/// The node agent.
///
/// # Panics
/// It does not build.
pub(crate) fn agent() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let name = "switchyard-node-agent";
        build(&["--workspace", "--bin", name], &[name]).join(name)
    })
}

/// The developer commands.
///
/// # Panics
/// They do not build.
pub fn xtask() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| build(&["--workspace", "--bin", "xtask"], &["xtask"]).join("xtask"))
}

/// The probe of GPUs.
///
/// # Panics
/// It does not build.
pub fn gpu_probe() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| build(&["--workspace", "--bin", "gpu-probe"], &["gpu-probe"]).join("gpu-probe"))
}

/// `switchyard-controller` with bugs that the fault tests must catch; `SWITCHYARD_PLANTED` chooses one (see `tests/src/mutants.rs`).
///
/// # Panics
/// It does not build.
pub fn planted() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let name = "switchyard-planted";
        // The whole workspace is selected, as for every other build: the crates of others are built with the same features.
        build_in(&mutants::copy(), &["--workspace", "--bin", name], &[name]).join(name)
    })
}

/// Environment by which a program's wall clock is off by the whole seconds that are written in this file, from when they are written.
///
/// # Panics
/// The library that does it does not build.
pub fn clock_by(file: &Path) -> Vec<(&'static str, String)> {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let library = "libswitchyard_test_clock.so";
    let folder = FOLDER.get_or_init(|| build(&["--package", "switchyard-test-clock"], &[library]));
    let text = |path: &Path| path.display().to_string();
    vec![("LD_PRELOAD", text(&folder.join(library))), ("SYTEST_CLOCK_OFFSET", text(file))]
}

/// The target folder of the running test.
///
/// # Panics
/// The test was moved elsewhere.
pub fn target() -> PathBuf {
    profile_folder().parent().expect("invariant: the profile's folder lies in the target folder").to_path_buf()
}

/// The folder of the profile that the running program was built with.
fn profile_folder() -> PathBuf {
    profile_of(&std::env::current_exe().expect("the path of the running test"))
}

/// Tests are TARGET/PROFILE/deps/test-0123, wherever CARGO_TARGET_DIR or a configuration put it; the bench of clusters is
/// TARGET/PROFILE/switchyard-bench-cluster.
fn profile_of(program: &Path) -> PathBuf {
    let folder = program.parent().expect("invariant: a program lies in a folder");
    let is_test = folder.file_name().is_some_and(|name| name == "deps");
    let profile = if is_test { folder.parent() } else { Some(folder) };
    profile.expect("invariant: tests lie in a folder of the profile").to_path_buf()
}

/// A cargo command in the repository, with the target folder of the running test.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).current_dir(root()).env("CARGO_TARGET_DIR", target());
    // What cargo says to a test about its package, and what makes the test's runner report times: build scripts that read it would
    // build half the tree again each time.
    let is_of_the_test =
        |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") || name == "RUSTC_BOOTSTRAP";
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_of_the_test)) {
        cargo.env_remove(name);
    }
    cargo
}

/// Builds files in the profile and target folder of the running test. Returns their folder.
///
/// Programs are chosen from the whole workspace, as the tests themselves are: their crates are built already.
///
/// `cargo xtask test` has built all programs, and says so by a variable: cargo need not check the whole tree again in each test process.
fn build(what: &[&str], files: &[&str]) -> PathBuf {
    let folder = profile_folder();
    let are_programs = what.contains(&"--bin") && files.iter().all(|file| folder.join(file).is_file());
    if are_programs && std::env::var_os("SWITCHYARD_TEST_BUILT").is_some() {
        return folder;
    }
    build_in(root(), what, files)
}

/// The same for the workspace in a folder.
fn build_in(workspace: &Path, what: &[&str], files: &[&str]) -> PathBuf {
    let folder = profile_folder();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let names = files.join(" and ");
    // Not by `eprintln!`, which the test harness keeps to itself: a first build takes minutes, and silence looks like a hang.
    let note = format!("building {names} for the tests (profile {profile})\n");
    let _ = std::io::stderr().write_all(note.as_bytes());
    let status = cargo(&["build", "--quiet", "--profile", profile]).args(what).current_dir(workspace).status();
    let status = status.unwrap_or_else(|error| panic!("cannot start cargo: {error}"));
    assert!(status.success(), "{names} do not build: {status}");
    for file in files {
        assert!(folder.join(file).is_file(), "{file} is not in {}", folder.display());
    }
    folder
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bench took the repository for its target folder, and built `xtask` once more there.
    #[test]
    fn tests_and_programs_have_the_same_profile() {
        for program in ["/t/release/deps/test-0123", "/t/release/switchyard-bench-cluster"] {
            assert_eq!(profile_of(Path::new(program)), Path::new("/t/release"), "{program}");
        }
    }
}
