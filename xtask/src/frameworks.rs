//! `cargo xtask test --frameworks`: tests with real third-party frameworks, and their result file.

use crate::cluster::control_plane;
use crate::stages::FRAMEWORKS as FRAMEWORKS_MODULE;
use crate::totals::{Launch, Totals};
use crate::wheels::{FRAMEWORKS, TORCH};
use crate::workspace::{cargo, root, step};
use anyhow::{Context, Result};
use serde_json::{Map, Value, json};
use std::fs;

/// Installs missing frameworks, runs their tests, and writes the results.
pub(crate) fn test() -> Result<()> {
    let (torch, others) = (TORCH.python()?, FRAMEWORKS.python()?);
    control_plane()?;
    let parts = crate::workspace::target().join("frameworks");
    let _ = fs::remove_dir_all(&parts);
    fs::create_dir_all(&parts).with_context(|| parts.display().to_string())?;
    let module = format!("{FRAMEWORKS_MODULE}::");
    let file = ["test", "--workspace", "--test", "processes", "--", &module, "--include-ignored"];
    step("building the framework tests", &mut cargo(&[&file[..4], &["--no-run"]].concat()))?;
    let mut totals = Totals::default();
    let mut command = cargo(&file);
    command.env(TORCH.variable, torch).env(FRAMEWORKS.variable, others).env("SWITCHYARD_FRAMEWORKS_RESULTS", &parts);
    println!("==> third-party frameworks, started with our pods' environment");
    totals.run("frameworks", vec![Launch { program: "processes".to_owned(), command }], 1)?;
    totals.finish()?;
    let mut results = Map::new();
    for entry in fs::read_dir(&parts)? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        results.insert(name, serde_json::from_slice(&fs::read(&path)?).with_context(|| path.display().to_string())?);
    }
    let versions = results.remove("versions").unwrap_or(Value::Null);
    let report = json!({"command": "cargo xtask test --frameworks", "versions": versions, "results": results});
    let path = root().join("docs/results/frameworks.json");
    fs::write(&path, serde_json::to_string_pretty(&report)? + "\n").with_context(|| path.display().to_string())?;
    println!("docs/results/frameworks.json");
    Ok(())
}
