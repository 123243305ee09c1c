//! Benchmarks another commit against this tree in alternating rounds on this machine.
//!
//! ```text
//! git worktree add FOLDER COMMIT -> cargo xtask compare BENCH FOLDER -> docs/results/compare.json
//! ```
//!
//! Each side is built in the profile that its commit ships. Because background load slows both
//! sides down, the minimum over all rounds is compared, with the medians next to it.

use crate::bench::Benchmark;
use crate::images::SHIPPED;
use crate::workspace::{machine, root, step, stripped, target};
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One of the two commits.
struct Side {
    /// Folder of its checkout.
    checkout: PathBuf,
    target: PathBuf,
    /// The profile that its commit ships.
    profile: &'static str,
}

impl Side {
    fn of(checkout: &Path, target: PathBuf) -> Result<Side> {
        let manifest = checkout.join("Cargo.toml");
        let text = fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
        let profile = if text.contains(&format!("[profile.{SHIPPED}]")) { SHIPPED } else { "release" };
        Ok(Side { checkout: checkout.to_path_buf(), target, profile })
    }

    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = stripped(Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())));
        command.args(arguments).args(["--profile", self.profile, "--workspace"]);
        command.current_dir(&self.checkout).env("CARGO_TARGET_DIR", &self.target);
        command
    }

    /// The commit, and whether the tree has changes other than results.
    fn commit(&self) -> Result<String> {
        let git = |arguments: &[&str]| -> Result<String> {
            let output = Command::new("git").args(arguments).current_dir(&self.checkout).output()?;
            ensure!(
                output.status.success(),
                "{}: {}",
                self.checkout.display(),
                String::from_utf8_lossy(&output.stderr)
            );
            Ok(String::from_utf8(output.stdout)?.trim().to_string())
        };
        let changed =
            if git(&["status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/results"])?.is_empty() {
                ""
            } else {
                ", changed"
            };
        Ok(format!("{}{changed}", git(&["rev-parse", "--short=12", "HEAD"])?))
    }
}

/// Measures both sides, prints a table, and writes the rows.
pub(crate) fn compare(what: Benchmark, checkout: &Path, rounds: u32, arguments: &[String]) -> Result<()> {
    let (name, bench) = what.bench().context("only benchmarks that are one program can be compared")?;
    let sides = [Side::of(checkout, checkout.join("target"))?, Side::of(&root(), target())?];
    let commits = [sides[0].commit()?, sides[1].commit()?];
    for (side, commit) in sides.iter().zip(&commits) {
        step(&format!("building {bench} of {commit}"), side.cargo(&["bench", "--bench", bench]).arg("--no-run"))?;
    }
    let results = target().join("compare");
    fs::create_dir_all(&results).with_context(|| results.display().to_string())?;
    let mut measured = [Vec::new(), Vec::new()];
    for round in 1..=rounds {
        for (index, side) in sides.iter().enumerate() {
            let file = results.join(format!("{bench}-{index}.json"));
            let mut run = side.cargo(&["bench", "--bench", bench]);
            run.arg("--").arg("--json").arg(&file).args(arguments);
            step(&format!("round {round} of {rounds}: {}", commits[index]), &mut run)?;
            let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
            let mut found = BTreeMap::new();
            figures(&serde_json::from_str(&text)?, "", &mut found);
            found.retain(|path, _| what.is_compared(path));
            measured[index].push(found);
        }
    }
    let rows = rows(&measured);
    ensure!(!rows.is_empty(), "{name}: the results have no figure in common");
    println!("{:<100} {:>12} {:>12} {:>7} {:>7}", "least of the rounds", commits[0], commits[1], "ratio", "median");
    for row in &rows {
        let figure = |name: &str| row[name].as_f64().unwrap_or(f64::NAN);
        println!(
            "{:<100} {:>12.3} {:>12.3} {:>7.3} {:>7.3}",
            row["what"].as_str().unwrap_or_default(),
            figure("before"),
            figure("after"),
            figure("ratio"),
            figure("ratioOfMedians")
        );
    }
    let command = ["cargo xtask compare", name, "FOLDER", "--rounds", &rounds.to_string()].join(" ");
    let command = if arguments.is_empty() { command } else { format!("{command} -- {}", arguments.join(" ")) };
    let section = json!({
        "command": command, "before": commits[0], "after": commits[1], "profiles": [sides[0].profile, sides[1].profile],
        "machine": machine(), "rows": rows,
    });
    let path = root().join("docs/results/compare.json");
    let mut all: Map<String, Value> = match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).with_context(|| path.display().to_string())?,
        Err(_) => Map::new(),
    };
    all.insert(name.to_string(), section);
    fs::write(&path, format!("{}\n", serde_json::to_string_pretty(&all)?)).with_context(|| path.display().to_string())
}

/// Collects all numbers of a result by path. List elements are identified by their strings and
/// thread counts rather than by index.
fn figures(value: &Value, path: &str, found: &mut BTreeMap<String, Vec<f64>>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| figures(value, &format!("{path}/{name}"), found))
        }
        Value::Array(items) => {
            for item in items {
                let texts = item.as_object().into_iter().flatten().filter_map(|(name, value)| match value {
                    Value::String(text) => Some(text.clone()),
                    Value::Number(number) if name == "threads" => Some(format!("{number} threads")),
                    _ => None,
                });
                figures(item, &[path.to_string()].into_iter().chain(texts).collect::<Vec<_>>().join("/"), found);
            }
        }
        Value::Number(number) => found.entry(path.to_string()).or_default().extend(number.as_f64()),
        _ => {}
    }
}

/// Figures that both sides have in all rounds: minima and medians.
fn rows(measured: &[Vec<BTreeMap<String, Vec<f64>>>; 2]) -> Vec<Value> {
    let side = |index: usize, path: &str| -> Option<Vec<f64>> {
        let rounds = measured[index].iter().map(|round| round.get(path).cloned());
        let mut all = rounds.collect::<Option<Vec<_>>>()?.concat();
        all.sort_by(f64::total_cmp);
        Some(all)
    };
    let paths = measured[1].first().into_iter().flat_map(BTreeMap::keys);
    paths
        .filter_map(|path| {
            let (before, after) = (side(0, path)?, side(1, path)?);
            let (min, medians) = ((before[0], after[0]), (before[before.len() / 2], after[after.len() / 2]));
            // Zero counts have no ratio.
            (min.0 > 0.0 && medians.0 > 0.0).then(|| {
                json!({
                    "what": path.trim_start_matches('/'), "before": min.0, "after": min.1, "ratio": min.1 / min.0,
                    "ratioOfMedians": medians.1 / medians.0,
                })
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_compared_by_name_in_any_order() {
        let before = json!({"time": [{"what": "a", "p50": 4.0}, {"what": "b", "p50": 1}], "gone": 3});
        let after =
            json!({"time": [{"what": "b", "p50": 2}, {"what": "a", "p50": 3.0}, {"what": "new", "p50": 1}], "zero": 0});
        let of = |value: &Value| {
            let mut found = BTreeMap::new();
            figures(value, "", &mut found);
            found
        };
        let slower = json!({"time": [{"what": "a", "p50": 40.0}, {"what": "b", "p50": 10}]});
        let rows = rows(&[vec![of(&before), of(&slower), of(&slower)], vec![of(&after), of(&after), of(&after)]]);
        let seen: Vec<_> =
            rows.iter().map(|row| (row["what"].as_str().unwrap(), row["ratio"].as_f64().unwrap())).collect();
        assert_eq!(seen, [("time/a/p50", 0.75), ("time/b/p50", 2.0)]);
        assert_eq!(rows[0]["ratioOfMedians"], 0.075);
    }
}
