//! Dependency table of the crates.

use crate::tidy::{cargo, caught, members, metadata, none, output_of};
use serde_json::{Value, json};

/// Allowed dependencies of a workspace package, not counting its tests.
struct Row {
    package: &'static str,
    /// Allowed dependencies within this workspace.
    workspace: &'static [&'static str],
    /// All allowed dependencies, if the list is closed.
    only: Option<&'static [&'static str]>,
    /// Packages that its dependency tree must not contain.
    never: &'static [&'static str],
}

const CONTRACT: &str = "switchyard-worker-contract";
const CRDS: &str = "switchyard-crds";
const AGENT: &str = "switchyard-node-agent";
const SCENES: &str = "switchyard-scenes";
const WORKER: &str = "switchyard-worker";
const SERVICE: &str = "switchyard-service";
const CHECKPOINT: &str = "switchyard-checkpoint";
const CORE: &str = "switchyard-core";
const TOPOLOGY: &str = "switchyard-topology";
const FABRIC: &str = "switchyard-fabric";
const PLAN: &str = "switchyard-plan";
const LEDGER: &str = "switchyard-ledger";
const CONTROLLER: &str = "switchyard-controller";
const LOCAL: &str = "switchyard-local";
const TOOLS: &str = "switchyard-tools";
const CLI: &str = "switchyard-cli";
const SIMULATE: &str = "switchyard-simulate";
const CUDA: &str = "switchyard-cuda";
const DAEMON: &str = "switchyard-node-agent-daemon";

/// Crates that bring clients, sockets or threads, which pure computation must not use.
const IMPURE: &[&str] = &["kube-client", "kube-runtime", "tokio", "rustix", WORKER];

/// `switchyard-tests` and `xtask` are in no row, because no package may depend on them.
const TABLE: &[Row] = &[
    Row {
        package: CONTRACT,
        workspace: &[],
        only: Some(&["serde", "serde_json", "thiserror"]),
        never: &["tokio", "kube", "k8s-openapi"],
    },
    Row {
        package: CRDS,
        workspace: &[CONTRACT],
        only: None,
        never: &["switchyard", WORKER, AGENT, "kube-client", "kube-runtime", "tokio"],
    },
    // `switchyard` uses it to describe its own machine, so the agent's program code is in a
    // separate package.
    Row {
        package: AGENT,
        workspace: &[CRDS, CONTRACT],
        only: None,
        never: &["switchyard", WORKER, "kube-client", "kube-runtime", "tokio"],
    },
    Row {
        package: DAEMON,
        workspace: &[AGENT, CRDS, CONTRACT, SERVICE],
        only: None,
        never: &["switchyard", WORKER, "kube-runtime"],
    },
    Row { package: SERVICE, workspace: &[], only: None, never: &[CRDS, AGENT, "kube-runtime"] },
    // It judges the queue, so the queue's crates must not use it.
    Row { package: SIMULATE, workspace: &[PLAN, LEDGER, CRDS], only: None, never: IMPURE },
    // The worker writes checkpoints with it and `switchyard` reads them. It depends on neither.
    Row {
        package: CHECKPOINT,
        workspace: &[CONTRACT],
        only: Some(&["bytemuck", "rustix", "serde", "serde_json", "thiserror", "xxhash-rust"]),
        never: &["kube", "tokio", WORKER],
    },
    Row {
        package: WORKER,
        workspace: &[CHECKPOINT, CONTRACT, CUDA],
        only: None,
        never: &["kube", "kube-core", "kube-client", "k8s-openapi", "schemars", CRDS, AGENT, "switchyard", "tokio"],
    },
    Row {
        package: CUDA,
        workspace: &[],
        only: Some(&["bytemuck", "libloading", "serde", "serde_json", "thiserror"]),
        never: &["tokio", WORKER],
    },
    // For tests only: executes kernels. No program contains it.
    Row {
        package: "switchyard-cuda-reference",
        workspace: &[CUDA],
        only: Some(&["bytemuck", "half", "thiserror"]),
        never: &["tokio", WORKER],
    },
    // For tests only: stand-ins for NVIDIA's libraries.
    Row {
        package: "switchyard-cuda-libraries",
        workspace: &[CUDA, "switchyard-cuda-reference"],
        only: Some(&["bytemuck", "half"]),
        never: &["tokio", WORKER],
    },
    // Probes a machine and starts the worker as a program. No package depends on it.
    Row {
        package: "switchyard-gpu-probe",
        workspace: &[CUDA, CONTRACT],
        only: Some(&["clap", "csv", "half", "rustix", "safetensors", "serde", "serde_json"]),
        never: &["tokio", WORKER],
    },
    // A user's dependencies: the engine's crate alone.
    Row {
        package: "switchyard-example-custom-model",
        workspace: &[WORKER],
        only: Some(&[]),
        never: &["kube", "tokio"],
    },
    Row { package: CORE, workspace: &[], only: Some(&["thiserror"]), never: &[] },
    Row { package: TOPOLOGY, workspace: &[CORE, CRDS, CONTRACT], only: Some(&["thiserror"]), never: IMPURE },
    Row { package: FABRIC, workspace: &[CORE, TOPOLOGY, CRDS, CONTRACT], only: None, never: IMPURE },
    Row { package: PLAN, workspace: &[CORE, TOPOLOGY, FABRIC, CRDS, CONTRACT], only: None, never: IMPURE },
    Row { package: LEDGER, workspace: &[CORE, PLAN, FABRIC, CRDS, CONTRACT], only: None, never: IMPURE },
    Row { package: TOOLS, workspace: &[CORE, FABRIC, CRDS, CONTRACT], only: None, never: IMPURE },
    Row {
        // Its image contains no command-line code.
        package: CONTROLLER,
        workspace: &[LEDGER, PLAN, FABRIC, CRDS, CONTRACT, SERVICE],
        only: None,
        never: &[WORKER, AGENT, CLI, LOCAL, TOOLS],
    },
    Row {
        package: LOCAL,
        workspace: &[CORE, TOPOLOGY, PLAN, CRDS, CONTRACT, AGENT],
        only: None,
        never: &[WORKER, "kube-client", LEDGER, CLI],
    },
    Row {
        package: CLI,
        workspace: &[
            CORE, TOPOLOGY, FABRIC, PLAN, LEDGER, CONTROLLER, LOCAL, TOOLS, CHECKPOINT, CRDS, CONTRACT, AGENT, SERVICE,
            SIMULATE,
        ],
        only: None,
        never: &[WORKER, DAEMON, "switchyard-tests"],
    },
    Row {
        package: "switchyard-tests",
        workspace: &[
            CORE, TOPOLOGY, FABRIC, PLAN, LEDGER, CONTROLLER, LOCAL, TOOLS, CLI, CRDS, CONTRACT, AGENT, DAEMON, WORKER,
            SCENES,
        ],
        only: None,
        never: &[],
    },
    Row {
        package: SCENES,
        workspace: &[CONTRACT],
        only: Some(&["serde", "serde_json", "tempfile", "thiserror"]),
        never: &["kube", "tokio", AGENT],
    },
    Row {
        package: "switchyard-nvml-mock",
        workspace: &[SCENES],
        only: Some(&["nvml-wrapper-sys"]),
        never: &["kube", "tokio", AGENT],
    },
    Row { package: "switchyard-test-clock", workspace: &[], only: Some(&[]), never: &[] },
    // Compiled before everything else.
    Row { package: "xtask", workspace: &[], only: None, never: &["k8s-openapi", "schemars", "tokio"] },
];

/// Compares each package's direct dependencies with the table.
fn check_named(metadata: &Value) -> Vec<String> {
    let packages = members(metadata);
    let names: Vec<&str> = packages.iter().filter_map(|package| package["name"].as_str()).collect();
    let mut faults = Vec::new();
    for package in &packages {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(row) = TABLE.iter().find(|row| row.package == name) else {
            faults.push(format!("{name} has no row in the table of tests/tests/tidy/crates.rs: write one"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let other = dependency["name"].as_str().unwrap_or_default();
            // `kind` is null for normal dependencies, otherwise "dev" or "build".
            if dependency["kind"] == "dev" {
                continue;
            }
            let ours = names.contains(&other);
            if ours && !row.workspace.contains(&other) {
                faults.push(format!("{name} depends on {other}: expected only {:?} of this workspace", row.workspace));
            }
            if let Some(only) = row.only.filter(|only| !ours && !only.contains(&other)) {
                faults.push(format!("{name} depends on {other}: expected only {only:?}"));
            }
        }
    }
    faults
}

/// Searches the output of `cargo tree --prefix none` for forbidden packages.
fn check_tree(row: &Row, tree: &str) -> Vec<String> {
    let names = tree.lines().filter_map(|line| line.split(' ').next());
    let mut found: Vec<&str> = names.filter(|name| row.never.contains(name)).collect();
    found.dedup();
    found.iter().map(|name| format!("{} is in the tree of {}: forbidden", name, row.package)).collect()
}

#[test]
fn every_crate_depends_only_on_allowed_crates() {
    none(&check_named(metadata()));
}

#[test]
fn no_dependency_tree_contains_forbidden_crates() {
    let mut faults = Vec::new();
    for row in TABLE.iter().filter(|row| !row.never.is_empty()) {
        let tree = output_of(
            &cargo(),
            &["tree", "--locked", "--package", row.package, "--edges", "normal", "--prefix", "none", "--no-dedupe"],
        );
        assert!(tree.starts_with(row.package), "{tree}");
        faults.extend(check_tree(row, &tree));
    }
    none(&faults);
}

#[test]
fn forbidden_dependencies_are_caught() {
    let package = |name: &str, dependencies: Value| json!({"id": name, "name": name, "dependencies": dependencies});
    let faulty = json!({
        "workspace_members": [WORKER, CRDS, CONTRACT, CLI, "newcomer"],
        "packages": [
            package(WORKER, json!([{"name": CRDS, "kind": null}, {"name": "serde", "kind": null}])),
            package(CRDS, json!([{"name": CLI, "kind": "dev"}, {"name": WORKER, "kind": "build"}])),
            package(CONTRACT, json!([{"name": "serde", "kind": null}, {"name": "libc", "kind": null}])),
            package(CLI, json!([{"name": WORKER, "kind": null}])),
            package("newcomer", json!([])),
        ],
    });
    let faults = check_named(&faulty);
    caught(
        &faults,
        &[
            "switchyard-worker depends on switchyard-crds",
            "switchyard-crds depends on switchyard-worker",
            "switchyard-worker-contract depends on libc",
            "switchyard-cli depends on switchyard-worker",
            "newcomer has no row",
        ],
    );
    assert_eq!(faults.len(), 5, "{faults:#?}");

    let row = TABLE.iter().find(|row| row.package == WORKER).unwrap();
    let tree =
        "switchyard-worker v0.1.0 (/x)\nserde v1.0.228\ntokio v1.48.0\ntokio-util v0.7.0\nkube-core v5.0.0 (*)\n";
    let faults = check_tree(row, tree);
    caught(&faults, &["tokio is in the tree of switchyard-worker", "kube-core is in the tree"]);
    assert_eq!(faults.len(), 2, "{faults:#?}");
}
