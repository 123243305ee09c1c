//! Output about topology files for people and programs.

use super::*;
use std::path::PathBuf;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/fixtures/topo-xml/{name}.xml"))
}

fn checked(name: &str) -> Checked {
    let (_, parsed) = read(&fixture(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    Checked { name: format!("{name}.xml"), findings: findings(&parsed, None) }
}

/// After an intended change: `INSTA_UPDATE=always cargo test -p switchyard --lib xml`, then review
/// the diff.
#[test]
fn findings_are_shown_with_lines_reason_and_change() {
    insta::assert_snapshot!(checked("dump").screen());
}

#[test]
fn errors_decide_the_exit_code() {
    assert_eq!((checked("passthrough").exit(), checked("dump").exit()), (Exit::Done, Exit::Done));
    assert_eq!(checked("web").exit(), FOUND);
}

#[test]
fn programs_get_the_same() {
    let report = checked("domain").report();
    assert_eq!(report["errors"], 2);
    assert_eq!(report["findings"].as_array().map(Vec::len), Some(checked("domain").findings.len()));
    let several = report["findings"].as_array().unwrap().iter().find(|row| row["rule"] == "several-nodes").unwrap();
    assert_eq!(several["severity"], "error");
}

#[test]
fn the_same_change_of_several_pairs_is_said_once() {
    let machines = ["flat", "passthrough"].map(|name| machine_of(&fixture(name)).unwrap());
    insta::assert_snapshot!(differences(&diff(&machines[0], &machines[1]).unwrap()));
    assert_eq!(differences(&[]), "nothing that matters to NCCL differs");
}
