//! Rules that the compiler cannot enforce: pure crates use no clock, randomness or I/O, and writes
//! to the API server are only in `apply` and the election. Crate boundaries enforce the
//! dependencies (see `crates`).

use crate::tidy::tokens::Mention;
use crate::tidy::{RustFile, caught, none, rust_files};
use std::collections::BTreeSet;

/// Folders whose code must not use a clock, random numbers or I/O.
const PURE: [&str; 6] = ["src/core", "src/topology", "src/fabric", "src/plan", "src/ledger", "src/tools"];

/// kube's parameters of writes, and the folders that may name them. A dry-run create stores
/// nothing.
const WRITES: [&str; 5] = ["DeleteParams", "Patch", "PatchParams", "PostParams", "Preconditions"];
const WRITERS: [&str; 4] =
    ["src/controller/apply", "src/controller/election", "node-agent/daemon", "service/src/trial"];

/// Parts of `std` that a pure crate must not use.
const IMPURE_STD: [&str; 7] = ["env", "fs", "io", "net", "os", "process", "thread"];
/// Their iteration order depends on a random seed.
const RANDOM: [&str; 6] = ["HashMap", "HashSet", "RandomState", "hash_map", "hash_set", "DefaultHasher"];
/// Output macros.
const PRINTING: [&str; 5] = ["print", "println", "eprint", "eprintln", "dbg"];

/// Whether a file or folder is below a folder, or is its only file: `src/plan.rs` belongs to
/// `src/plan`.
pub(super) fn is_below(file: &str, folder: &str) -> bool {
    file.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
}

fn impure(mention: &Mention) -> Option<&'static str> {
    let path = &mention.path;
    let last = path.last().map(String::as_str).unwrap_or_default();
    if mention.is_macro && PRINTING.contains(&last) {
        return Some("prints");
    }
    if path.len() == 1 && matches!(last, "async" | "await") {
        return Some("is asynchronous");
    }
    if matches!(last, "now" | "elapsed") {
        return Some("reads a clock");
    }
    if !matches!(path[0].as_str(), "std" | "core" | "alloc") {
        return None;
    }
    match path.get(1).map(String::as_str) {
        None | Some("*") => Some("hides which part of std it uses"),
        Some(part) if IMPURE_STD.contains(&part) => Some("does input or output, or starts threads or processes"),
        // A point in time can be an argument. `now` and `elapsed` find clock reads.
        Some("time") if path.get(2).is_none_or(|part| part != "Duration" && part != "Instant") => Some("reads a clock"),
        _ if path.iter().any(|part| RANDOM.contains(&part.as_str())) => Some("depends on a random seed"),
        _ => None,
    }
}

/// Whether it names kube's parameters of a write.
fn writes(mention: &Mention) -> bool {
    mention.path.iter().any(|part| part == "kube") && mention.path.iter().any(|part| WRITES.contains(&part.as_str()))
}

fn check(RustFile { path: file, mentions, .. }: &RustFile, is_test: bool) -> Vec<String> {
    let pure = PURE.iter().find(|folder| is_below(file, folder));
    let may_write = WRITERS.iter().any(|folder| is_below(file, folder));
    let product = file.starts_with("src/") || file.starts_with("node-agent/");
    let mut faults = Vec::new();
    for mention in mentions.all.iter().filter(|mention| !is_test && !mention.in_test) {
        let location = format!("{file}:{}: `{}`", mention.line, mention.path.join("::"));
        if let Some((folder, what)) = pure.zip(impure(mention)) {
            faults.push(format!("{location}: {what}; {folder} is pure"));
        }
        if product && !may_write && writes(mention) {
            faults.push(format!("{location}: writes to the API server; only {WRITERS:?} can"));
        }
    }
    faults
}

/// Files compiled for tests only: modules declared under `#[cfg(test)]`, and everything below them.
pub(super) fn test_files(files: &[RustFile]) -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    for RustFile { path, mentions, .. } in files {
        let folder = ["/mod.rs", "/lib.rs", "/main.rs", ".rs"].iter().find_map(|end| path.strip_suffix(end));
        for name in &mentions.test_modules {
            tests.insert(format!("{}/{name}", folder.unwrap_or_default()));
        }
    }
    tests
}

#[test]
fn pure_crates_are_pure_and_only_writers_write() {
    let tests = test_files(rust_files());
    let is_test = |file: &str| {
        tests.iter().any(|module| is_below(file, module)) || file.contains("/tests/") || file.contains("/benches/")
    };
    none(&rust_files().iter().flat_map(|file| check(file, is_test(&file.path))).collect::<Vec<_>>());
}

#[test]
fn impure_code_is_caught() {
    let sources = [
        ("src/plan/lib.rs", "async fn f() {}", "asynchronous"),
        ("src/plan/lib.rs", "fn f() { std::fs::read(\"x\"); }", "input or output"),
        ("src/plan/lib.rs", "use std::{collections::BTreeMap, env};", "`std::env`"),
        ("src/plan/lib.rs", "use std::time::SystemTime;", "reads a clock"),
        ("src/ledger/pending_writes.rs", "fn f(a: std::time::Instant) { a.elapsed(); }", "reads a clock"),
        ("src/plan/lib.rs", "use std as s;", "hides which part"),
        ("src/plan/lib.rs", "fn f() { jiff::Timestamp::now(); }", "reads a clock"),
        ("src/plan/lib.rs", "fn f() { Timestamp::now(); }", "reads a clock"),
        ("src/plan/lib.rs", "use std::collections::HashMap;", "random seed"),
        ("src/plan/lib.rs", "fn f() { println!(\"x\"); }", "prints"),
        ("src/core/placement/solve.rs", "use std::thread;", "src/core is pure"),
        ("src/controller/watch.rs", "use kube::api::PostParams;", "writes to the API server"),
        ("src/controller/main_loop.rs", "fn f() { kube::api::Patch::Apply(1); }", "writes to the API server"),
        ("src/cli/live/status.rs", "use kube::{Api, api::{DeleteParams, ListParams}};", "writes to the API server"),
    ];
    for (file, source, wanted) in sources {
        caught(&check(&RustFile::new(file, source.into()), false), &[wanted]);
    }
    let fine = [
        ("src/core/placement/solve.rs", "use super::model::X; use std::time::Duration;"),
        (
            "src/plan/lib.rs",
            "#[cfg(test)] mod tests { use super::*; use serde_json::json; fn f() { println!(\"\"); } }",
        ),
        ("src/controller/election/mod.rs", "use kube::api::PostParams;"),
        ("src/controller/apply/executor.rs", "use kube::api::{DeleteParams, Patch};"),
        ("src/controller/watch.rs", "use kube::api::ListParams; use std::fs;"),
    ];
    for (file, source) in fine {
        none(&check(&RustFile::new(file, source.into()), false));
    }
    let declared = [RustFile::new("src/plan/job/mod.rs", "#[cfg(test)]\nmod tests;\nmod other;".into())];
    let tests = test_files(&declared);
    assert_eq!(tests.into_iter().collect::<Vec<_>>(), ["src/plan/job/tests"]);
    assert!(is_below("src/plan/job/tests/cases.rs", "src/plan/job/tests") && !is_below("src/planted.rs", "src/plan"));
}
