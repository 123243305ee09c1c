//! The command behind `cargo xtask cluster`: a killed owner's leftovers disappear soon, cleanup
//! spares live clusters, and an unsuitable machine is reported with the reason.

use crate::nodes::{cluster, kubectl, until};
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use switchyard_tests::nodes::{clean_all, leftovers_of};

const PROGRAM: &str = env!("CARGO_BIN_EXE_switchyard-bench-cluster");

fn bench(folder: &Path, arguments: &[&str]) -> Result<String> {
    let output = Command::new(PROGRAM).args(arguments).arg("--folder").arg(folder).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{}: {text}{}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

#[test]
fn only_leftovers_of_dead_owners_are_removed() -> Result<()> {
    let living = cluster(1)?;
    let folder = tempfile::tempdir()?;
    let output = bench(folder.path(), &["up", "--nodes", "1"])?;
    assert!(output.contains("nodes ready: ") && output.contains("export KUBECONFIG="), "{output}");
    let state: Value = serde_json::from_slice(&std::fs::read(folder.path().join("state.json"))?)?;
    let pid = state["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)).context("no pid")?;
    let kubeconfig = state["kubeconfig"].as_str().context("no kubeconfig")?;
    let number = Path::new(kubeconfig).ancestors().nth(2).and_then(|path| path.file_name()?.to_str()?.parse().ok());
    let number: u8 = number.with_context(|| format!("no number in {kubeconfig}"))?;
    assert_ne!(number, living.number());

    kill_process(pid, Signal::KILL)?;
    // The kernel itself frees everything inside the namespaces.
    until("without processes and interfaces", || {
        let kinds = ["process ", "interface ", "route ", "mount "];
        Ok(!leftovers_of(number)?.iter().any(|entry| kinds.iter().any(|kind| entry.starts_with(kind))))
    })?;
    let rest = leftovers_of(number)?;
    assert!(rest.iter().any(|entry| entry.starts_with("cgroup ")), "{rest:#?}");
    let output = bench(folder.path(), &["down"])?;
    assert!(output.contains(&format!("cleaned up switchyard-nodes-{number}")), "{output}");
    assert_eq!(leftovers_of(number)?, Vec::<String>::new());

    assert!(!leftovers_of(living.number())?.is_empty());
    assert_eq!(clean_all()?, Vec::<String>::new(), "a cluster with a living owner is kept");
    let ready = r#"jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}"#;
    assert_eq!(kubectl(&living, &["get", "nodes", "-o", ready])?, "True");
    Ok(())
}

#[test]
fn a_machine_that_cannot_run_nodes_reports_why() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for command in [&["check"][..], &["up", "--nodes", "1"]] {
        // In a user namespace without an ID map, no user is root.
        let output = Command::new("unshare")
            .args(["--user", PROGRAM])
            .args(command)
            .arg("--folder")
            .arg(folder.path())
            .output()?;
        let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert_eq!((output.status.code(), text.contains("real nodes need root")), (Some(77), true), "{text}");
    }
    assert!(bench(folder.path(), &["check"])?.contains("can run real nodes"));
    Ok(())
}
