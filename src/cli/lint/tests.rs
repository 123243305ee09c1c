//! Findings as shown to people and programs, the examples (which have none), and the table in the
//! documentation.

use super::*;
use serde_json::json;
use std::path::PathBuf;
use switchyard_fabric::lint::RULES;

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn linted(path: &str) -> File {
    let text = std::fs::read_to_string(at(path)).unwrap();
    file(path.to_string(), text, Options::default()).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn plain(file: File) -> String {
    anstream::adapter::strip_str(&screen(&[file])).to_string()
}

const MISTAKES: &str = "examples/other/pytorchjob-with-mistakes.yaml";

/// After an intended change: `INSTA_UPDATE=always cargo test -p switchyard --lib`, then review the
/// diff.
#[test]
fn mistakes_are_shown_in_the_file() {
    insta::assert_snapshot!("lint_mistakes", plain(linted(MISTAKES)));
}

#[test]
fn programs_get_the_same_with_lines() {
    let files = [linted(MISTAKES)];
    let report = json!(report(&files));
    let rows = report["findings"].as_array().unwrap();
    assert_eq!(
        rows.len() as u64,
        ["errors", "warnings", "notes"].map(|key| report[key].as_u64().unwrap()).iter().sum::<u64>()
    );
    let row = rows.iter().find(|row| row["rule"] == "prefix-match").unwrap();
    assert_eq!((row["severity"].as_str(), row["objectKind"].as_str()), (Some("warning"), Some("PyTorchJob")));
    let line = row["line"].as_u64().unwrap() as usize;
    assert!(files[0].text.lines().nth(line - 1).unwrap().contains("NCCL_IB_HCA"), "{line}");
    let script = rows.iter().find(|row| row["got"] == "--nproc_per_node=4").unwrap()["line"].as_u64().unwrap() as usize;
    assert!(files[0].text.lines().nth(script - 1).unwrap().contains("torchrun"), "{script}");
}

#[test]
fn examples_have_no_findings() {
    let folders = ["examples", "examples/clusters"];
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(at(folder)).unwrap());
    let names =
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|end| end == "yaml"));
    let mut count = 0;
    for path in names {
        let text = std::fs::read_to_string(&path).unwrap();
        let text = plain(file(path.display().to_string(), text, Options::default()).unwrap());
        assert!(text.starts_with("nothing found in 1 object of 1 file"), "{}: {text}", path.display());
        count += 1;
    }
    assert!(count >= 10, "{count} examples");
}

#[test]
fn files_without_a_job_and_broken_yaml_are_refused_by_name() {
    let refused = |text: &str| file("a.yaml".into(), text.into(), Options::default()).err().unwrap().message;
    assert!(refused("kind: Service\nspec: {}").contains("error[SY0002]: a.yaml: got nothing that starts pods"));
    assert!(refused("").contains("a.yaml: got nothing that starts pods"));
    assert!(refused("a: [1,\nb: {").contains("error[SY0001]: a.yaml is not valid YAML"));
}

#[test]
fn all_documents_are_checked_and_named() {
    let pod = |name: &str, value: &str| {
        format!(
            "kind: Pod\nmetadata: {{name: {name}}}\nspec: {{containers: [{{env: [{{name: NCCL_DEBUG, value: {value}}}]}}]}}\n"
        )
    };
    let text = format!("{}---\nkind: Service\n---\n{}", pod("a", "TRACE"), pod("b", "TRACE"));
    let shown = plain(file("x.yaml".into(), text, Options::default()).unwrap());
    assert!(shown.contains("= of: Pod b") && shown.ends_with("2 warnings in 2 objects of 1 file"), "{shown}");
    assert!(shown.contains("x.yaml:9:"), "the line is that of the file, not of the document: {shown}");
}

/// Manifests of users: rule, words of the finding or of its fix, and what must not be found.
#[test]
fn manifests_from_the_field_have_their_findings() {
    for (name, rule, words, without) in [
        ("lint-duplicate-key", "duplicate-key", "`resources` appears twice (lines 9 and 11)", "DuplicateKeyPolicy"),
        ("lint-duplicate-key", "debug-setting", "NCCL_IB_DISABLE", ""),
        ("lint-gloo-caret", "interface-form", "delete GLOO_SOCKET_IFNAME", "write GLOO_SOCKET_IFNAME"),
        ("lint-graph-file", "debug-setting", "NCCL_GRAPH_FILE", ""),
        ("lint-hca-is-interface", "interface", "eth0 is an interface", ""),
        ("lint-host-access-kubeflow", "host-access", "hostNetwork: true", ""),
        ("lint-host-access-kubeflow", "host-access", "privileged: true", ""),
        ("lint-net-socket", "debug-setting", "NCCL_NET", ""),
        ("lint-tcpxo", "vendor-profile", "NCCL_FASTRAK_CTRL_DEV", "delete"),
        ("lint-volcano-job", "debug-setting", "NCCL_IB_DISABLE", ""),
        ("lint-volcano-job", "interface", "NCCL_SOCKET_IFNAME", ""),
        ("pass-lint-oci-mpi", "host-access", "hostNetwork: true", "NCCL_IB_TC"),
        ("pass-lint-rayjob", "interface", "NCCL_SOCKET_IFNAME", ""),
        ("pass-lint-rayjob", "debug-setting", "NCCL_P2P_DISABLE", ""),
        ("pass-lint-script-exports", "value", "NCCL_DEBUG=debug", ""),
        ("pass-lint-script-exports", "renamed-key", "NCCL_IB_CUDA_SUPPORT", ""),
    ] {
        let text = std::fs::read_to_string(at(&format!("tests/fixtures/field/{name}.txt"))).unwrap();
        let files = [file(name.into(), text, Options::default()).unwrap()];
        let found = findings(&files).any(|finding| {
            finding.rule == rule
                && (finding.got.contains(words) || finding.why.contains(words) || finding.fix.contains(words))
        });
        let shown = screen(&files);
        assert!(found, "{name}: no {rule} with {words}: {shown}");
        assert!(without.is_empty() || !shown.contains(without), "{name}: {shown}");
    }
    for (name, without) in [
        ("lint-ibext-disable", "unknown-key"),
        ("pass-lint-azure-topo-file", "NCCL_TOPO_FILE"),
        ("pass-lint-azure-topo-file", "UCX_"),
        ("pass-lint-efa", "FI_"),
        ("pass-lint-efa", "NCCL_SOCKET_IFNAME"),
        ("pass-lint-oci-mpi", "prefix-match"),
        ("pass-lint-oci-mpi", "unknown-key"),
    ] {
        let text = std::fs::read_to_string(at(&format!("tests/fixtures/field/{name}.txt"))).unwrap();
        let findings = screen(&[file(name.into(), text, Options::default()).unwrap()]);
        assert!(!findings.contains(without), "{name}: {findings}");
    }
}

/// The rows of docs/tools.md, from the table of rules.
#[test]
fn the_document_has_every_rule() {
    let rows: Vec<String> =
        RULES.iter().map(|rule| format!("| `{}` | {} | {} |", rule.id, rule.severity.word(), rule.finds)).collect();
    let text = std::fs::read_to_string(at("docs/tools.md")).unwrap_or_default();
    let (_, section) = text.split_once("## Lint\n").unwrap_or_default();
    let (section, _) = section.split_once("## Topology files\n").unwrap_or_default();
    let shown: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
    assert_eq!(shown, rows, "docs/tools.md should have:\n{}", rows.join("\n"));
}

proptest::proptest! {
    #[test]
    fn no_text_panics(text in "\\PC*|(kind: Pod|spec:|  containers:|  - env:|[ a-z:{}\\[\\]\"'\n-]){0,40}") {
        if let Ok(read) = file("a.yaml".into(), text, Options::default()) {
            let _ = screen(&[read]);
        }
    }
}
