//! Runs stages: what must be there is installed beside the compilation, then both lanes work; at the end stand the times.

use crate::images::Version;
use crate::setup::{self, Need, Needs};
use crate::stages::{Lane, STAGES, Stage, Work};
use crate::test_programs::{self, Program, Selection};
use crate::totals::Totals;
use crate::workspace::{cargo, root, step, target};
use anyhow::{Context, Result, bail};
use serde_json::{Value as Json, json};
use std::fs;
use std::hint::black_box;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// How many of the slowest tests are named.
const SLOWEST: usize = 20;

/// Prints the stages.
pub(crate) fn list() {
    for stage in &STAGES {
        let Stage { name, what, budget, lane, .. } = stage;
        println!("{name:<14} {budget:>5} s  {:<8} {what}", format!("{lane:?}").to_lowercase());
    }
}

/// Runs the stages of these names, or all, and prints the totals.
pub(crate) fn run(names: &[String]) -> Result<()> {
    let stages = chosen(names)?;
    let start = Instant::now();
    let needs: Vec<Need> = stages.iter().flat_map(|stage| stage.needs).copied().collect();
    let provided = Needs::default();
    let (mut totals, mut times) = thread::scope(|scope| {
        scope.spawn(|| provided.provide_early(&needs));
        let mut totals = Totals::default();
        let mut times = Vec::new();
        let (lint, rest): (Vec<_>, Vec<_>) = stages.iter().copied().partition(|stage| matches!(stage.work, Work::Lint));
        // Before the tests are compiled, which takes longer: it finds most.
        lane(&lint, &[], &provided, false, &mut totals, &mut times)?;
        let begin = Instant::now();
        let programs = match rest.iter().any(|stage| matches!(stage.work, Work::Tests { .. })) {
            false => Vec::new(),
            true => {
                println!("==> compiling the tests");
                let programs = test_programs::build(selection(&rest))?;
                times.push(("compilation", begin.elapsed().as_secs_f64(), None));
                programs
            }
        };
        let lanes = [Lane::Compute, Lane::Wait]
            .map(|lane| rest.iter().copied().filter(|stage| stage.lane == lane).collect::<Vec<_>>());
        let yields = lanes.iter().all(|lane| !lane.is_empty());
        let done = Mutex::new((&mut totals, &mut times));
        let ended: Vec<Result<()>> = thread::scope(|scope| {
            let started = lanes.each_ref().map(|stages| {
                let (programs, provided, done) = (&programs, &provided, &done);
                scope.spawn(move || {
                    let (mut totals, mut times) = (Totals::default(), Vec::new());
                    let ended = lane(stages, programs, provided, yields, &mut totals, &mut times);
                    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                    done.0.add(totals);
                    done.1.extend(times);
                    ended
                })
            });
            started.into_iter().map(|lane| lane.join().unwrap_or_else(|_| bail!("a lane panicked"))).collect()
        });
        ended.into_iter().collect::<Result<Vec<()>>>()?;
        Ok::<_, anyhow::Error>((totals, times))
    })?;
    println!("==> {:.0} s in all", start.elapsed().as_secs_f64());
    summary(&mut totals, &mut times);
    totals.finish()
}

/// Plays a stage this often beside a load of all cores, and writes what came of it to `docs/results/repeat.json`.
pub(crate) fn repeat(names: &[String], times: u32) -> Result<()> {
    let [name] = names else { bail!("--repeat plays one stage: name it (`--list` lists them)") };
    let stages = chosen(names)?;
    let [stage] = stages[..] else { bail!("--repeat plays one stage") };
    if !matches!(stage.work, Work::Tests { .. }) {
        bail!("{name} has no tests of its own to repeat");
    }
    let provided = Needs::default();
    let programs = test_programs::build(Selection::All)?;
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let (mut all, mut runs) = (Totals::default(), Vec::new());
    let ended = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                let mut number = 0u64;
                while !ended.load(Ordering::Relaxed) {
                    number = black_box(number.wrapping_add(1));
                }
            });
        }
        let result: Result<()> = (1..=times).try_for_each(|run| {
            println!("==> {name}: run {run} of {times}, beside {cores} busy cores");
            let (mut totals, mut seconds) = (Totals::default(), Vec::new());
            lane(&[stage], &programs, &provided, false, &mut totals, &mut seconds)?;
            runs.push(json!({
                "passed": totals.passed, "failed": totals.failed, "skipped": totals.skipped, "failures": totals.failures,
                "seconds": seconds.first().map(|(_, seconds, _)| seconds.round()),
            }));
            all.add(totals);
            Ok(())
        });
        ended.store(true, Ordering::Relaxed);
        result
    });
    result?;
    let path = root().join("docs/results/repeat.json");
    let mut file: Json = match fs::read_to_string(&path) {
        Ok(text) => serde_json::from_str(&text).with_context(|| path.display().to_string())?,
        Err(_) => json!({"command": "cargo xtask test --repeat N STAGE", "stages": {}}),
    };
    let commit = Version::of_this_tree().commit;
    file["stages"][name] = json!({"commit": commit, "cores": cores, "busy": cores, "runs": runs});
    fs::write(&path, serde_json::to_string_pretty(&file)? + "\n").with_context(|| path.display().to_string())?;
    println!("docs/results/repeat.json");
    all.finish()
}

/// The stages of these names in the order of the table; all without a name.
fn chosen(names: &[String]) -> Result<Vec<&'static Stage>> {
    if let Some(name) = names.iter().find(|name| STAGES.iter().all(|stage| stage.name != **name)) {
        bail!("got the stage `{name}`; expected one of {}", STAGES.map(|stage| stage.name).join(", "));
    }
    Ok(STAGES.iter().filter(|stage| names.is_empty() || names.iter().any(|name| stage.name == name)).collect())
}

/// What these stages need compiled.
fn selection(stages: &[&Stage]) -> Selection {
    if stages.iter().all(|stage| stage.name == "pure") { Selection::Pure } else { Selection::All }
}

/// Name of a stage, seconds, and its budget.
type Time = (&'static str, f64, Option<u64>);

/// Runs stages one after another. `yields`: its programs let those of the other lane go first.
fn lane(
    stages: &[&'static Stage],
    programs: &[Program],
    provided: &Needs,
    yields: bool,
    totals: &mut Totals,
    times: &mut Vec<Time>,
) -> Result<()> {
    for stage in stages {
        let mut is_able = true;
        for need in stage.needs {
            let had = provided.provide(*need).with_context(|| stage.name)?;
            if *need == Need::Nodes {
                is_able = had && can_run_nodes()?;
            }
        }
        if !is_able {
            println!("==> {}: left out, this machine cannot run real nodes", stage.name);
            continue;
        }
        println!("==> {}: {}", stage.name, stage.what);
        let (begin, before) = (Instant::now(), totals.passed + totals.failed);
        match &stage.work {
            Work::Lint => lint()?,
            Work::Documentation => documentation(stage.name, totals)?,
            Work::Tests { of, threads, environment } => {
                for mut group in test_programs::commands(programs, of)? {
                    for command in &mut group {
                        timed(command, *threads, environment, yields && stage.lane == Lane::Compute);
                    }
                    totals.run(stage.name, &mut group)?;
                }
            }
        }
        let seconds = begin.elapsed().as_secs_f64();
        println!("    {}: {} tests, {seconds:.1} s", stage.name, totals.passed + totals.failed - before);
        times.push((stage.name, seconds, Some(stage.budget)));
    }
    Ok(())
}

/// Completes the start of a program of tests.
fn timed(command: &mut Command, threads: Option<u32>, environment: &[(&str, &str)], yields: bool) {
    if yields {
        let mut nice = Command::new("nice");
        nice.args(["-n", "5"]).arg(command.get_program()).args(command.get_args());
        nice.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        nice.current_dir(command.get_current_dir().unwrap_or(&root()));
        *command = nice;
    }
    command.envs(environment.iter().copied());
    command.args(threads.map(|threads| format!("--test-threads={threads}")));
    // The runner of a stable toolchain reports times only so. `switchyard_tests::cargo` keeps the variable from the compiler.
    command.env("RUSTC_BOOTSTRAP", "1").args(["-Z", "unstable-options", "--report-time"]);
}

/// Formatting, clippy, licences.
fn lint() -> Result<()> {
    setup::components()?;
    step("formatting", &mut cargo(&["fmt", "--all", "--check"]))?;
    step("clippy", &mut cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]))?;
    if let Some(mut deny) = setup::cargo_deny()? {
        let deny = deny.args(["--offline", "check", "bans", "licenses", "sources"]).current_dir(root());
        step("licences and advisories of dependencies", deny)?;
    }
    Ok(())
}

/// Tests in the documentation, and its links.
fn documentation(name: &str, totals: &mut Totals) -> Result<()> {
    totals.run(name, &mut [cargo(&["test", "--workspace", "--doc"])])?;
    step("rustdoc", cargo(&["doc", "--workspace", "--no-deps", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings"))
}

/// Whether this machine can run real nodes. In CI it must.
fn can_run_nodes() -> Result<bool> {
    let bench = target().join("debug/switchyard-bench-cluster");
    let able = Command::new(&bench).arg("check").status().with_context(|| bench.display().to_string())?.success();
    if !able && std::env::var_os("CI").is_some() {
        bail!("real nodes cannot run here, and in CI they must");
    }
    Ok(able)
}

/// Prints the times of the stages and of the slowest tests. A stage far over its budget fails the run.
fn summary(totals: &mut Totals, times: &mut [Time]) {
    println!("\nstage           seconds  budget");
    for (name, seconds, budget) in times.iter() {
        let words = budget.map_or_else(|| "-".to_owned(), |budget| budget.to_string());
        println!("{name:<14} {seconds:>8.0} {words:>7}");
        if budget.is_some_and(|budget| *seconds > 2.0 * budget as f64) {
            totals.broken.push(format!("{name}: took {seconds:.0} s, over twice its budget of {words} s"));
        }
    }
    totals.times.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("\nslowest tests");
    for (seconds, name) in totals.times.iter().take(SLOWEST) {
        println!("{seconds:>7.1} s  {name}");
    }
    println!();
}
