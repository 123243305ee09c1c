//! Checks file sizes and forbidden words.

use crate::tidy::{RustFile, caught, none, read, repository_files, rust_files};

/// Maximum lines of a Rust file; files above [`LONG`] are listed.
const LIMIT: usize = 500;
const LONG: usize = 400;

/// Macros of unfinished code.
const UNFINISHED: [&str; 3] = ["todo", "unimplemented", "dbg"];

/// Package registry hosts. The choice of registry is up to the machine.
const REGISTRIES: [&str; 8] = [
    "crates.io",
    "pypi.org",
    "pythonhosted.org",
    "proxy.golang.org",
    "registry.npmjs.org",
    "://registry.",
    "artifactory",
    "sonatype",
];

fn check_size(file: &str, lines: usize) -> Option<String> {
    if lines > LIMIT {
        return Some(format!("{file}: {lines} lines; expected at most {LIMIT}: split it by topic"));
    }
    if lines > LONG {
        println!("{file}: {lines} lines; {LONG} is a good size");
    }
    None
}

/// Finds home and work folders of the author's machine. The needles are assembled here, so that
/// this file does not contain them.
fn machine_path(line: &str) -> Option<String> {
    ["root", "home", "work"].iter().map(|folder| format!("/{folder}/")).find(|needle| {
        line.match_indices(needle.as_str()).any(|(at, _)| {
            // `docs/home/page` is a relative path.
            let before = line[..at].chars().next_back();
            !before.is_some_and(|c| c.is_alphanumeric() || "._-}>*)".contains(c))
        })
    })
}

fn registry(line: &str) -> Option<&'static str> {
    // cargo's name for its default registry in Cargo.lock and for cargo-deny.
    let line = line.replace("https://github.com/rust-lang/crates.io-index", "");
    REGISTRIES.into_iter().find(|host| line.contains(host))
}

fn check_words(file: &str, text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let location = format!("{file}:{}", index + 1);
        faults.extend(machine_path(line).map(|path| format!("{location}: a machine-specific path, {path}")));
        faults.extend(registry(line).map(|host| format!("{location}: a registry host, {host}")));
    }
    faults
}

fn check_finished(RustFile { path: file, mentions, .. }: &RustFile) -> Vec<String> {
    let unfinished = mentions.all.iter().filter(|mention| {
        mention.is_macro
            && !mention.in_test
            && mention.path.last().is_some_and(|word| UNFINISHED.contains(&word.as_str()))
    });
    unfinished
        .map(|mention| format!("{file}:{}: `{}!` in code that runs", mention.line, mention.path.join("::")))
        .collect()
}

#[test]
fn no_rust_file_is_too_long() {
    let sizes = rust_files().iter().map(|file| (&file.path, file.text.lines().count()));
    none(&sizes.filter_map(|(file, lines)| check_size(file, lines)).collect::<Vec<_>>());
}

#[test]
fn no_file_contains_a_machine_or_registry_name() {
    // This file contains the words that it looks for.
    let files = repository_files().iter().filter(|file| *file != "tests/tests/tidy/files.rs");
    none(&files.filter_map(|file| Some(check_words(file, &read(file)?))).flatten().collect::<Vec<_>>());
}

#[test]
fn code_is_finished() {
    none(&rust_files().iter().flat_map(check_finished).collect::<Vec<_>>());
}

/// Commands of a shell script.
fn commands(script: &str) -> Vec<&str> {
    script.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

#[test]
fn continuous_integration_runs_the_one_test_command() {
    use std::os::unix::fs::PermissionsExt;
    let script = read(".ci/run").unwrap();
    assert_eq!(commands(&script), ["set -eu", "cd \"$(dirname \"$0\")/..\"", "cargo xtask test"]);
    let mode = std::fs::metadata(switchyard_tests::root().join(".ci/run")).unwrap().permissions().mode();
    assert_eq!(mode & 0o111, 0o111, "not executable: {mode:o}");
}

#[test]
fn violations_in_files_are_caught() {
    caught(check_size("src/plan/mod.rs", LIMIT + 1).as_slice(), &["expected at most 500"]);
    assert_eq!(check_size("src/plan/mod.rs", LIMIT), None);

    let home = format!("see /{}/me/x", "home");
    caught(&check_words("docs/x.md", &format!("first\n{home}")), &["docs/x.md:2: a machine-specific path"]);
    caught(&check_words("x.toml", "index = \"https://static.crates.io/x\""), &["a registry host"]);
    none(&check_words("x.md", "the folder docs/home/page and a $dir/work.rs"));
    none(&check_words("Cargo.lock", "source = \"registry+https://github.com/rust-lang/crates.io-index\""));

    let unfinished = "fn f() { todo!() }\n#[cfg(test)] mod tests { fn g() { dbg!(1); } }\nfn h() { let t = \"todo!()\"; std::dbg!(t); }";
    assert_eq!(
        check_finished(&RustFile::new("x.rs", unfinished.into())),
        ["x.rs:1: `todo!` in code that runs", "x.rs:3: `std::dbg!` in code that runs",]
    );
}
