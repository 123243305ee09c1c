//! The dependency table by module of the root package, and what its pure rooms must not touch.

use crate::tidy::tokens::{Mention, mentions};
use crate::tidy::{caught, metadata, none, rust_files};
use std::collections::BTreeSet;

/// What one room may name beside itself.
struct Row {
    /// Path of the module; the longest that fits counts.
    module: &'static str,
    /// Beginnings of paths: `crate::plan`, `serde`. `std` is always allowed.
    may: &'static [&'static str],
    /// The same, for its tests.
    tests_may: &'static [&'static str],
    /// No clock, no randomness, no input or output, no threads.
    pure: bool,
}

const CRDS: &str = "switchyard_crds";
const CONTRACT: &str = "switchyard_worker_contract";
const SERVICE: &str = "switchyard_service";
const CHECKPOINT: &str = "switchyard_checkpoint";

/// What the controller names. Of kube it has what reads: the parameters of writes (`kube::api::PostParams` and its like) are for
/// `apply` and the election only.
const CONTROLLER_MAY: [&str; 26] = [
    "crate::plan",
    "crate::planted",
    "crate::apply",
    "crate::topology",
    CRDS,
    CONTRACT,
    "kube::Api",
    "kube::Client",
    "kube::Config",
    "kube::Error",
    "kube::Resource",
    "kube::ResourceExt",
    "kube::api::LogParams",
    "kube::core",
    "kube::runtime",
    SERVICE,
    "axum",
    "futures",
    "jiff",
    "k8s_openapi",
    "prometheus_client",
    "serde",
    "serde_json",
    "thiserror",
    "tokio",
    "tracing",
];

const TABLE: [Row; 28] = [
    // One function that is `false` in every program that is shipped.
    Row { module: "planted", may: &[], tests_may: &[], pure: false },
    Row { module: "topology", may: &[], tests_may: &["proptest"], pure: true },
    Row { module: "topology::build", may: &[CRDS, CONTRACT, "thiserror"], tests_may: &["proptest"], pure: true },
    Row { module: "topology::cells", may: &[CRDS], tests_may: &[], pure: true },
    Row { module: "topology::fold", may: &[CONTRACT], tests_may: &[], pure: true },
    Row {
        module: "topology::import",
        may: &[CRDS, CONTRACT, "thiserror"],
        tests_may: &["insta", "proptest", "serde_json"],
        pure: true,
    },
    Row { module: "topology::matrix", may: &[CONTRACT], tests_may: &["proptest"], pure: true },
    Row { module: "topology::nccl", may: &[CRDS], tests_may: &[], pure: true },
    Row { module: "topology::report", may: &[CRDS, "thiserror"], tests_may: &[], pure: true },
    Row { module: "topology::xml", may: &[CRDS, CONTRACT, "thiserror"], tests_may: &["insta", "proptest"], pure: true },
    Row { module: "topology::tree", may: &["thiserror"], tests_may: &["proptest"], pure: true },
    Row { module: "placement", may: &["crate::topology::model", "thiserror"], tests_may: &["proptest"], pure: true },
    Row {
        module: "placement::gpus",
        may: &["crate::topology::devices", "crate::topology::model", "crate::topology::path", "thiserror"],
        tests_may: &[],
        pure: true,
    },
    Row {
        module: "plan",
        may: &[
            "crate::fabric",
            "crate::planted",
            "crate::topology",
            "crate::placement",
            "crate::units",
            CRDS,
            CONTRACT,
            "k8s_openapi",
            "jiff",
            "serde",
            "serde_json",
            "thiserror",
        ],
        // The linter's table of rendezvous variables must be that of the planner.
        tests_may: &["crate::variables", "insta", "proptest"],
        pure: true,
    },
    // The one that writes to an API server; the Lease of the election is the exception.
    Row {
        module: "apply",
        may: &[
            "crate::plan",
            "crate::planted",
            CRDS,
            "futures",
            "getrandom",
            "k8s_openapi",
            "kube",
            "serde",
            "serde_json",
            "thiserror",
            "tokio",
        ],
        tests_may: &[],
        pure: false,
    },
    Row { module: "controller", may: &CONTROLLER_MAY, tests_may: &["proptest"], pure: false },
    Row {
        module: "controller::election",
        may: &["getrandom", "jiff", "k8s_openapi", "kube", "rustix::time", "tokio", "tracing"],
        tests_may: &["http", "serde_json", "tower"],
        pure: false,
    },
    Row {
        module: "local",
        may: &[
            "crate::topology",
            "crate::plan",
            CRDS,
            CONTRACT,
            "switchyard_node_agent",
            "tokio",
            "rustix",
            "jiff",
            "serde",
            "serde_json",
            "serde_saphyr",
            "thiserror",
            "getrandom",
        ],
        tests_may: &["insta", "proptest"],
        pure: false,
    },
    // Settings that follow from the nodes of a gang, and what NCCL will do there, foretold from their reports.
    Row {
        module: "fabric",
        may: &[
            // Check 22 of the preflight is what the linter says.
            "crate::lint",
            "crate::placement::gpus",
            "crate::plan",
            "crate::topology",
            "crate::units",
            "crate::variables",
            CRDS,
            CONTRACT,
            "jiff",
            "k8s_openapi",
            "serde",
            "serde_json",
            "serde_saphyr",
            "thiserror",
        ],
        tests_may: &["insta"],
        pure: true,
    },
    // What every room that speaks to people may use.
    Row { module: "units", may: &[], tests_may: &[], pure: true },
    Row {
        module: "report",
        may: &[
            "crate::plan::resources",
            "crate::units",
            CONTRACT,
            "jiff",
            "k8s_openapi",
            "serde",
            "serde_json",
            "serde_saphyr",
        ],
        tests_may: &[],
        pure: true,
    },
    // Known variables are tables: they know no manifest.
    Row { module: "variables", may: &[], tests_may: &[], pure: true },
    Row {
        module: "lint",
        may: &["crate::units", "crate::variables", CRDS, "serde_json"],
        tests_may: &["proptest"],
        pure: true,
    },
    Row {
        module: "convert",
        // Manifests of others are read as the linter reads them.
        may: &["crate::lint", CRDS, "serde_json", "thiserror"],
        // What is converted must be valid.
        tests_may: &["crate::plan", "insta", "proptest"],
        pure: true,
    },
    Row {
        module: "doctor",
        // What the status of a job knows about an error is read from it.
        may: &["crate::units", CRDS, "aho_corasick", "jiff", "serde", "serde_json"],
        // What the table of errors says of rules must be true.
        tests_may: &["crate::lint", "proptest"],
        pure: true,
    },
    Row {
        module: "cli",
        may: &[
            "crate::convert",
            "crate::doctor",
            "crate::fabric",
            "crate::lint",
            "crate::variables",
            "crate::topology",
            "crate::placement",
            "crate::plan",
            "crate::local",
            "crate::report",
            "crate::units",
            "crate::controller",
            CHECKPOINT,
            CRDS,
            CONTRACT,
            SERVICE,
            "switchyard_node_agent",
            "getrandom",
            "annotate_snippets",
            "anstream",
            "anstyle",
            "clap",
            "indicatif",
            "jiff",
            "rustix",
            "serde",
            "serde_json",
            "serde_saphyr",
            "strsim",
            "terminal_size",
            "thiserror",
            "tokio",
            "unicode_width",
            // `status`, `logs` and the like look at a running cluster by themselves: nothing is decided from it.
            "clap_complete",
            "clap_mangen",
            "flate2",
            "futures",
            "k8s_openapi",
            "kube",
            "tar",
        ],
        tests_may: &["insta", "proptest", "tempfile"],
        pure: false,
    },
    Row { module: "main", may: &["switchyard::cli", "clap"], tests_may: &[], pure: false },
    // The root of the library declares the rooms and names nothing of them.
    Row { module: "lib", may: &[], tests_may: &[], pure: true },
];

/// Parts of `std` that a pure room has no use for.
const IMPURE_STD: [&str; 7] = ["env", "fs", "io", "net", "os", "process", "thread"];
/// Iteration over these depends on a random seed.
const RANDOM: [&str; 6] = ["HashMap", "HashSet", "RandomState", "hash_map", "hash_set", "DefaultHasher"];
/// Output.
const PRINTING: [&str; 5] = ["print", "println", "eprint", "eprintln", "dbg"];

/// Module path of a file below `src`: `src/plan/mod.rs` is `plan`, `src/cli/topo/text.rs` is `cli::topo::text`.
fn module_of(file: &str) -> Vec<String> {
    let inner = file.strip_prefix("src/").unwrap_or(file).trim_end_matches(".rs");
    let mut module: Vec<String> = inner.split('/').map(str::to_string).collect();
    if module.last().is_some_and(|last| last == "mod") {
        module.pop();
    }
    module
}

/// The path from the root of the crate (`crate`, …) or beginning with the name of another crate; `None` for a local name.
fn absolute(mention: &Mention, module: &[String], crates: &BTreeSet<String>) -> Option<Vec<String>> {
    let first = mention.path.first()?.as_str();
    let mut here: Vec<String> = module.to_vec();
    here.extend(mention.inline.iter().cloned());
    match first {
        "crate" => return Some(mention.path.clone()),
        "self" | "super" => {}
        _ => return crates.contains(first).then(|| mention.path.clone()),
    }
    let mut rest = mention.path.as_slice();
    while let Some(word) = rest.first().filter(|word| *word == "self" || *word == "super") {
        if word == "super" {
            here.pop();
        }
        rest = &rest[1..];
    }
    Some(["crate".to_string()].into_iter().chain(here).chain(rest.iter().cloned()).collect())
}

fn begins_with(path: &[String], prefix: &str) -> bool {
    let prefix: Vec<&str> = prefix.split("::").collect();
    path.len() >= prefix.len() && path.iter().zip(prefix).all(|(a, b)| a == b)
}

fn impure(mention: &Mention, path: Option<&Vec<String>>) -> Option<&'static str> {
    let last = mention.path.last().map(String::as_str).unwrap_or_default();
    if mention.is_macro && PRINTING.contains(&last) {
        return Some("prints");
    }
    if mention.path.len() == 1 && matches!(last, "async" | "await") {
        return Some("is asynchronous");
    }
    if last == "now" {
        return Some("reads a clock");
    }
    let path = path?;
    if !matches!(path[0].as_str(), "std" | "core" | "alloc") {
        return None;
    }
    match path.get(1).map(String::as_str) {
        None | Some("*") => Some("hides which part of std it uses"),
        Some(part) if IMPURE_STD.contains(&part) => Some("does input or output, or starts threads or processes"),
        Some("time") if path.get(2).is_none_or(|part| part != "Duration") => Some("reads a clock"),
        _ if path.iter().any(|part| RANDOM.contains(&part.as_str())) => Some("depends on a random seed"),
        _ => None,
    }
}

/// Checks one file of the root package.
fn check(file: &str, source: &str, is_test: bool, crates: &BTreeSet<String>) -> Vec<String> {
    let module = module_of(file);
    let rows = TABLE.iter().filter(|row| begins_with(&module, row.module));
    let Some(row) = rows.max_by_key(|row| row.module.len()) else {
        return vec![format!(
            "{file}: `{}` has no row in the table of tests/tests/tidy/modules.rs: write one",
            module[0]
        )];
    };
    let found = match mentions(source) {
        Ok(found) => found,
        Err(error) => return vec![format!("{file}: not Rust: {error}")],
    };
    let mut faults = Vec::new();
    for mention in &found.all {
        let test = is_test || mention.in_test;
        let path = absolute(mention, &module, crates);
        let text = mention.path.join("::");
        let place = format!("{file}:{}: `{text}`", mention.line);
        if let Some(path) = &path {
            let own = path[0] == "crate" && path.get(1) == module.first();
            let standard = matches!(path[0].as_str(), "std" | "core" | "alloc");
            let allowed = row.may.iter().chain(row.tests_may.iter().filter(|_| test));
            if !own && !standard && !allowed.clone().any(|prefix| begins_with(path, prefix)) {
                let allowed: Vec<&str> = allowed.copied().collect();
                faults.push(format!("{place}: {} may use std, itself and {allowed:?}", row.module));
            }
        }
        if let Some(what) = impure(mention, path.as_ref()).filter(|_| row.pure && !test) {
            faults.push(format!("{place}: {what}; {} is pure", row.module));
        }
    }
    faults
}

/// Files that are compiled for tests only.
fn test_files(files: &[(&str, String)]) -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    for (file, source) in files {
        let folder = format!("src/{}", module_of(file).join("/"));
        for name in mentions(source).map(|found| found.test_modules).unwrap_or_default() {
            tests.insert(format!("{folder}/{name}.rs"));
            tests.insert(format!("{folder}/{name}/mod.rs"));
        }
    }
    tests
}

/// The crates that the root package can name.
fn known_crates() -> BTreeSet<String> {
    let root = metadata()["packages"].as_array().into_iter().flatten().find(|package| package["name"] == "switchyard");
    let names = root.expect("the root package")["dependencies"].as_array().into_iter().flatten();
    let names = names.filter_map(|dependency| dependency["rename"].as_str().or(dependency["name"].as_str()));
    let standard = ["std", "core", "alloc", "switchyard"];
    names.chain(standard).map(|name| name.replace('-', "_")).collect()
}

#[test]
fn every_room_names_only_what_the_table_allows() {
    let crates = known_crates();
    let files: Vec<(&str, String)> = rust_files().filter(|(file, _)| file.starts_with("src/")).collect();
    assert!(files.len() > 20, "only {} files found below src/", files.len());
    let tests = test_files(&files);
    let faults: Vec<String> =
        files.iter().flat_map(|(file, source)| check(file, source, tests.contains(*file), &crates)).collect();
    none(&faults);
}

#[test]
fn only_main_uses_cli() {
    for row in TABLE.iter().filter(|row| row.module != "main") {
        assert!(!row.may.iter().any(|prefix| prefix.ends_with("cli")), "{}", row.module);
    }
    let main = TABLE.iter().find(|row| row.module == "main").unwrap();
    assert!(main.may.contains(&"switchyard::cli"));
}

#[test]
fn planted_violations_are_caught() {
    let crates: BTreeSet<String> =
        ["std", "core", "tokio", "kube", "switchyard", "switchyard_crds", "jiff", "proptest", "serde_json"]
            .map(String::from)
            .into();
    let planted = [
        ("src/placement/solve.rs", "use switchyard_crds::TrainJob;", "placement may use"),
        ("src/placement/solve.rs", "use crate::topology::build::NamedCluster;", "placement may use"),
        ("src/placement/solve.rs", "use crate::topology;", "placement may use"),
        ("src/placement/mod.rs", "use super::cli;", "`super::cli`"),
        ("src/placement/mod.rs", "use crate::*;", "`crate::*`"),
        ("src/topology/model.rs", "fn f(x: switchyard_crds::TrainJob) {}", "topology may use"),
        ("src/plan/mod.rs", "fn f() { kube::Client::try_default(); }", "plan may use"),
        ("src/plan/mod.rs", "fn f() { vec![crate::local::Worker::find()]; }", "crate::local::Worker::find"),
        ("src/plan/mod.rs", "mod inner { use super::super::local::Worker; }", "super::super::local"),
        ("src/plan/mod.rs", "async fn f() {}", "asynchronous"),
        ("src/plan/mod.rs", "fn f() { std::fs::read(\"x\"); }", "input or output"),
        ("src/plan/mod.rs", "use std::{collections::BTreeMap, env};", "`std::env`"),
        ("src/plan/mod.rs", "use std::time::Instant;", "reads a clock"),
        ("src/plan/mod.rs", "use std as s;", "hides which part"),
        ("src/plan/mod.rs", "fn f() { jiff::Timestamp::now(); }", "reads a clock"),
        ("src/plan/mod.rs", "fn f() { Timestamp::now(); }", "reads a clock"),
        ("src/plan/mod.rs", "use std::collections::HashMap;", "random seed"),
        ("src/plan/mod.rs", "fn f() { println!(\"x\"); }", "prints"),
        ("src/plan/mod.rs", "use proptest::prelude::*;", "plan may use"),
        ("src/plan/mod.rs", "use crate::apply::Executor;", "plan may use"),
        ("src/controller/watch.rs", "use kube::api::PostParams;", "controller may use"),
        ("src/controller/work.rs", "fn f() { kube::api::Patch::Apply(1); }", "controller may use"),
        ("src/local/run.rs", "use kube::Api;", "local may use"),
        ("src/local/run.rs", "use crate::cli::Cli;", "local may use"),
        ("src/main.rs", "use switchyard::plan::plan;", "main may use"),
        ("src/novel/mod.rs", "", "`novel` has no row"),
    ];
    for (file, source, wanted) in planted {
        caught(&check(file, source, false, &crates), &[wanted]);
    }
    let fine = [
        (
            "src/placement/solve.rs",
            "use crate::topology::model::Cluster; use super::model::X; use std::time::Duration;",
        ),
        (
            "src/plan/mod.rs",
            "#[cfg(test)] mod tests { use super::*; use serde_json::json; fn f() { println!(\"\"); } }",
        ),
        ("src/plan/mod.rs", "use crate::placement::{self, solve}; fn f() { placement::solve(); env::ALL; }"),
        ("src/main.rs", "use switchyard::cli::Cli;"),
        ("src/controller/election.rs", "use kube::api::PostParams;"),
        ("src/apply/executor.rs", "use kube::api::{DeleteParams, Patch};"),
    ];
    for (file, source) in fine {
        none(&check(file, source, false, &crates));
    }
    let declared = [("src/plan/mod.rs", "#[cfg(test)]\nmod tests;\nmod other;".to_string())];
    assert!(
        test_files(&declared).contains("src/plan/tests.rs") && !test_files(&declared).contains("src/plan/other.rs")
    );
}
