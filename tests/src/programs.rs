//! Builds the programs that tests start.

use crate::{mutants, root};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Returns the folder that contains `switchyard` and `switchyard-worker`, built in the test's
/// profile.
///
/// Cargo builds them if they are outdated, once per test process, in the running test's target
/// folder.
///
/// # Panics
/// The build failed.
pub fn programs() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let programs = ["--workspace", "--bin", "switchyard", "--bin", "switchyard-worker"];
        build(&programs, &["switchyard", "switchyard-worker"])
    })
}

/// Returns the path of the node agent.
///
/// # Panics
/// The build failed.
pub(crate) fn agent() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let name = "switchyard-node-agent";
        build(&["--workspace", "--bin", name], &[name]).join(name)
    })
}

/// Returns the path of xtask.
///
/// # Panics
/// The build failed.
pub fn xtask() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| build(&["--workspace", "--bin", "xtask"], &["xtask"]).join("xtask"))
}

/// Returns the path of the GPU probe.
///
/// # Panics
/// The build failed.
pub fn gpu_probe() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| build(&["--workspace", "--bin", "gpu-probe"], &["gpu-probe"]).join("gpu-probe"))
}

/// Returns the path of a `switchyard-controller` with mutants that the fault tests must catch.
/// `SWITCHYARD_MUTANT` selects one (see `tests/src/mutants.rs`).
///
/// # Panics
/// The build failed.
pub fn mutants_program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let name = "switchyard-mutants";
        // Select the whole workspace, as in every other build, so that third-party crates get the
        // same features.
        build_in(&mutants::copy(), &["--workspace", "--bin", name], &[name]).join(name)
    })
}

/// Returns environment variables that shift a program's wall clock by the whole seconds in this
/// file, as soon as they are written to it.
///
/// # Panics
/// The clock library does not build.
pub fn shifted_clock(file: &Path) -> Vec<(&'static str, String)> {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let library = "libswitchyard_test_clock.so";
    let folder = FOLDER.get_or_init(|| build(&["--package", "switchyard-test-clock"], &[library]));
    let text = |path: &Path| path.display().to_string();
    vec![("LD_PRELOAD", text(&folder.join(library))), ("SYTEST_CLOCK_OFFSET", text(file))]
}

/// Returns the running test's target folder.
///
/// # Panics
/// The test binary was moved out of it.
pub fn target() -> PathBuf {
    profile_folder().parent().expect("invariant: the profile's folder is in the target folder").to_path_buf()
}

/// Returns the profile folder that contains the running program.
fn profile_folder() -> PathBuf {
    profile_of(&std::env::current_exe().expect("the path of the running test"))
}

/// Tests are TARGET/PROFILE/deps/test-0123, for any CARGO_TARGET_DIR or configuration; the cluster
/// benchmark is TARGET/PROFILE/switchyard-bench-cluster.
fn profile_of(program: &Path) -> PathBuf {
    let folder = program.parent().expect("invariant: a program has a parent folder");
    let is_test = folder.file_name().is_some_and(|name| name == "deps");
    let profile = if is_test { folder.parent() } else { Some(folder) };
    profile.expect("invariant: tests are in the profile's folder").to_path_buf()
}

/// Returns a cargo command in the repository, with the running test's target folder.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments).current_dir(root()).env("CARGO_TARGET_DIR", target());
    // Remove cargo's variables about the test's package, and the one that makes the test runner
    // report times. Build scripts read them, and would rebuild half of the tree each time.
    let is_test_variable =
        |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") || name == "RUSTC_BOOTSTRAP";
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_test_variable)) {
        cargo.env_remove(name);
    }
    cargo
}

/// Builds files in the running test's profile and target folder. Returns their folder.
///
/// Programs are selected from the whole workspace, like the tests themselves, so their crates are
/// already built.
///
/// `cargo xtask test` builds all programs first and sets an environment variable, so that cargo
/// need not check the whole tree again in each test process.
fn build(what: &[&str], files: &[&str]) -> PathBuf {
    let folder = profile_folder();
    let are_programs = what.contains(&"--bin") && files.iter().all(|file| folder.join(file).is_file());
    if are_programs && std::env::var_os("SWITCHYARD_TEST_BUILT").is_some() {
        return folder;
    }
    build_in(root(), what, files)
}

/// Like [`build`], for the workspace in this folder.
fn build_in(workspace: &Path, what: &[&str], files: &[&str]) -> PathBuf {
    let folder = profile_folder();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let names = files.join(" and ");
    // The test harness captures `eprintln!`, but a first build takes minutes, and silence looks
    // like a hang.
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

    /// Regression: the benchmark used the repository as its target folder, and rebuilt `xtask`
    /// there.
    #[test]
    fn tests_and_programs_have_the_same_profile() {
        for program in ["/t/release/deps/test-0123", "/t/release/switchyard-bench-cluster"] {
            assert_eq!(profile_of(Path::new(program)), Path::new("/t/release"), "{program}");
        }
    }
}
