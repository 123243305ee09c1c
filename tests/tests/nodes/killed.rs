//! An owner that is killed leaves nothing for long, and who cleans up leaves the living alone.

use crate::{cluster, kubectl, until};
use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use switchyard_tests::nodes::{clean_all, left};

fn bench(folder: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_switchyard-bench-cluster"));
    let output = command.args(arguments).arg("--folder").arg(folder).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{}: {text}{}", arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    Ok(text)
}

#[test]
fn what_a_killed_owner_left_is_removed_and_nothing_of_a_living_one() -> Result<()> {
    let living = cluster(1)?;
    let folder = tempfile::tempdir()?;
    let said = bench(folder.path(), &["up", "--nodes", "1"])?;
    assert!(said.contains("nodes ready: ") && said.contains("export KUBECONFIG="), "{said}");
    let state: Value = serde_json::from_slice(&std::fs::read(folder.path().join("state.json"))?)?;
    let pid = state["pid"].as_i64().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)).context("no pid")?;
    let kubeconfig = state["kubeconfig"].as_str().context("no kubeconfig")?;
    let number = Path::new(kubeconfig).ancestors().nth(2).and_then(|path| path.file_name()?.to_str()?.parse().ok());
    let number: u8 = number.with_context(|| format!("no number in {kubeconfig}"))?;
    assert_ne!(number, living.number());

    kill_process(pid, Signal::KILL)?;
    // The kernel takes back what is in namespaces, by itself.
    until("without processes and interfaces", || {
        let kinds = ["process ", "interface ", "route ", "mount "];
        Ok(!left(number)?.iter().any(|entry| kinds.iter().any(|kind| entry.starts_with(kind))))
    })?;
    let rest = left(number)?;
    assert!(rest.iter().any(|entry| entry.starts_with("cgroup ")), "{rest:#?}");
    let said = bench(folder.path(), &["down"])?;
    assert!(said.contains(&format!("cleaned up switchyard-nodes-{number}")), "{said}");
    assert_eq!(left(number)?, Vec::<String>::new());

    assert!(!left(living.number())?.is_empty());
    assert_eq!(clean_all()?, Vec::<String>::new(), "the other one has an owner");
    let ready = r#"jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}"#;
    assert_eq!(kubectl(&living, &["get", "nodes", "-o", ready])?, "True");
    Ok(())
}
