//! `cargo xtask bench build`: developer wait times in a fresh clone of the committed tree with an
//! empty target folder.

use crate::workspace::{cpu, root, stripped};
use anyhow::{Context, Result, ensure};
use serde_json::{Value as Json, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

/// The package and file of each one-line change.
const LINES: [(&str, &str); 3] = [
    ("switchyard-core", "src/core/lib.rs"),
    ("switchyard-plan", "src/plan/lib.rs"),
    ("switchyard-worker", "worker/src/lib.rs"),
];

/// Measures, prints and writes the result file.
pub(crate) fn bench(file: &Path) -> Result<()> {
    let begin_load = load()?;
    let folder = std::env::temp_dir().join(format!("switchyard-bench-build-{}", std::process::id()));
    let result = measure(&folder);
    let _ = fs::remove_dir_all(&folder);
    let (seconds, lines) = result?;
    let report = json!({
        "command": "cargo xtask bench build", "machine": cpu(), "cores": std::thread::available_parallelism()?.get(),
        "loadBefore": begin_load, "seconds": seconds, "changedLine": lines,
    });
    fs::write(file, serde_json::to_string_pretty(&report)? + "\n").with_context(|| file.display().to_string())?;
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}

fn measure(clone: &Path) -> Result<(Json, Json)> {
    let mut git = Command::new("git");
    timed("clone", git.args(["clone", "--quiet"]).arg(root()).arg(clone))?;
    // Downloads are not part of the figures.
    timed("third-party crates", cargo(clone, &["fetch", "--quiet"]))?;
    let first_step = first_step(clone)?;
    let test = ["build", "--quiet", "--workspace", "--bins", "--tests"];
    let seconds = json!({
        "firstStep": first_step,
        "testBuildCold": timed("all tests, nothing built", cargo(clone, &test))?,
        "testBuildWarm": timed("all tests, nothing changed", cargo(clone, &test))?,
        "checkCold": timed("cargo xtask check, lints for the first time", cargo(clone, &["xtask", "check"]))?,
        "checkWarm": timed("cargo xtask check, nothing changed", cargo(clone, &["xtask", "check"]))?,
    });
    let mut lines = Vec::new();
    for (package, file) in LINES {
        let test = ["test", "--quiet", "-p", package, "--lib"];
        timed(&format!("{package}: its tests"), cargo(clone, &test))?;
        let path = clone.join(file);
        let text = fs::read_to_string(&path).with_context(|| file.to_owned())?;
        // Moves every line of the file, as an edit does.
        fs::write(&path, format!("// One more line.\n{text}"))?;
        let all = timed(&format!("{package}: a line more, then its tests"), cargo(clone, &test))?;
        fs::write(&path, format!("// Another line.\n// One more line.\n{text}"))?;
        let compile = [&test[..], &["--no-run"]].concat();
        let compilation = timed(&format!("{package}: a line more, compiled"), cargo(clone, &compile))?;
        fs::write(&path, text)?;
        lines.push(json!({"package": package, "seconds": all, "compilationSeconds": compilation}));
    }
    Ok((seconds, lines.into()))
}

/// A cargo command in the clone.
fn cargo(clone: &Path, arguments: &[&str]) -> Command {
    let mut command = stripped(Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())));
    command.args(arguments).current_dir(clone).env("CARGO_TARGET_DIR", clone.join("target"));
    command
}

/// Seconds taken by a successful command. On failure, the error has the end of its output.
fn timed(what: &str, mut command: impl std::borrow::BorrowMut<Command>) -> Result<f64> {
    let start = Instant::now();
    let ended = command.borrow_mut().stderr(Stdio::inherit()).output().with_context(|| what.to_owned())?;
    let output = String::from_utf8_lossy(&ended.stdout);
    let last: Vec<&str> = output.lines().rev().take(30).collect();
    ensure!(
        ended.status.success(),
        "{what}: {}\n{}",
        ended.status,
        last.into_iter().rev().collect::<Vec<_>>().join("\n")
    );
    let seconds = rounded(start);
    println!("{what}: {seconds} s");
    Ok(seconds)
}

/// Seconds from the first command of the README to the first training step.
fn first_step(clone: &Path) -> Result<f64> {
    let start = Instant::now();
    let mut command = cargo(clone, &["xtask", "run", "examples/gpt-source.yaml"]);
    // Use a separate process group, so that the ranks can be killed with it.
    let mut run = command.stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0).spawn()?;
    let output = run.stderr.take().context("no standard error")?;
    let mut step = None;
    let mut seen = String::new();
    for line in BufReader::new(output).lines() {
        let line = line?;
        if line.contains(" step=") {
            step = Some(rounded(start));
            break;
        }
        seen.push_str(&line);
        seen.push('\n');
    }
    let _ = Command::new("kill").args(["-INT", "--"]).arg(format!("-{}", run.id())).status();
    run.wait()?;
    let step = step.with_context(|| format!("no training step in the output:\n{seen}"))?;
    println!("first training step: {step} s");
    Ok(step)
}

fn rounded(start: Instant) -> f64 {
    (start.elapsed().as_secs_f64() * 10.0).round() / 10.0
}

/// Load average of the last minute, which shows whether other programs were running.
fn load() -> Result<f64> {
    let text = fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().context("/proc/loadavg is empty")?.parse()?)
}
