//! Enforces the repository rules: crate dependencies, file sizes, licences, documented paths,
//! unsafe code.
//!
//! Every rule is a pure function from text to faults, with a test that feeds it a violation. A
//! failure prints all faults at once, each with its location and remedy.

mod crates;
mod cycles;
mod docs;
mod files;
mod licences;
mod purity;
mod tokens;
mod unsafe_code;
mod words;

use serde_json::Value;
use std::process::Command;
use std::sync::OnceLock;
use switchyard_tests::root;
use tokens::Mentions;

/// Fails with all faults of a rule.
fn none(faults: &[String]) {
    assert!(faults.is_empty(), "{} fault(s):\n  {}", faults.len(), faults.join("\n  "));
}

/// Each of the words must be in some fault.
fn caught(faults: &[String], fragments: &[&str]) {
    for fragment in fragments {
        assert!(faults.iter().any(|fault| fault.contains(fragment)), "no fault contains `{fragment}`: {faults:#?}");
    }
}

/// Standard output of a command run in the repository.
fn output_of(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).current_dir(root()).output();
    let output = output.unwrap_or_else(|error| panic!("cannot run {program}: {error}"));
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

/// `cargo metadata` of the workspace and its dependencies on this platform.
fn metadata() -> &'static Value {
    static METADATA: OnceLock<Value> = OnceLock::new();
    METADATA.get_or_init(|| {
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let text =
            output_of(&cargo(), &["metadata", "--format-version", "1", "--locked", "--filter-platform", &platform]);
        serde_json::from_str(&text).expect("JSON")
    })
}

/// Packages of this workspace.
fn members(metadata: &Value) -> Vec<&Value> {
    let ids: Vec<&Value> = metadata["workspace_members"].as_array().expect("a list").iter().collect();
    metadata["packages"].as_array().expect("a list").iter().filter(|package| ids.contains(&&package["id"])).collect()
}

/// Every file that git does not ignore: tracked or new.
fn repository_files() -> &'static [String] {
    static FILES: OnceLock<Vec<String>> = OnceLock::new();
    FILES.get_or_init(|| {
        let text = output_of("git", &["ls-files", "--cached", "--others", "--exclude-standard"]);
        let files: Vec<String> = text.lines().filter(|file| root().join(file).is_file()).map(str::to_string).collect();
        assert!(files.iter().any(|file| file == "Cargo.toml"), "git lists no Cargo.toml: {files:?}");
        files
    })
}

/// Text of a repository file; `None` for binary files.
fn read(file: &str) -> Option<String> {
    let bytes = std::fs::read(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    String::from_utf8(bytes).ok()
}

/// A Rust file of the repository.
struct RustFile {
    path: String,
    text: String,
    mentions: Mentions,
}

impl RustFile {
    /// Parses a file.
    ///
    /// # Panics
    /// It is not Rust.
    fn new(path: &str, text: String) -> RustFile {
        let mentions = tokens::mentions(&text).unwrap_or_else(|error| panic!("{path}: not Rust: {error}"));
        RustFile { path: path.into(), text, mentions }
    }
}

/// Every Rust file of the repository, parsed once for all rules.
fn rust_files() -> &'static [RustFile] {
    static FILES: OnceLock<Vec<RustFile>> = OnceLock::new();
    FILES.get_or_init(|| {
        let paths = repository_files().iter().filter(|file| file.ends_with(".rs"));
        paths.map(|path| RustFile::new(path, read(path).unwrap_or_else(|| panic!("{path} is not UTF-8")))).collect()
    })
}
