//! Runs stages: installs prerequisites during compilation, then runs the lanes in parallel and
//! prints the times.

use crate::crates;
use crate::failed;
use crate::images::Version;
use crate::record::{self, Load, Record};
use crate::setup::{self, Prerequisite, Prerequisites};
use crate::stages::{Lane, STAGES, Stage, Work};
use crate::test_programs::{self, Program, Selection};
use crate::totals::{Launch, Name, Outcome, Time, Totals, log};
use crate::workspace::{cargo, children_cpu, root, step, target};
use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value as Json, json};
use std::fs;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

/// Number of slowest tests to print.
const SLOWEST: usize = 20;

/// Prints the stages.
pub(crate) fn list() {
    for stage in &STAGES {
        let Stage { name, what, budget, lane, .. } = stage;
        println!("{name:<14} {budget:>5} s  {:<8} {what}", format!("{lane:?}").to_lowercase());
    }
}

/// Runs the named stages, or all, and prints the totals. Tests that failed last time run first.
pub(crate) fn run(names: &[String], record: Option<Record>) -> Result<()> {
    let stages = selected(names)?;
    let start = Instant::now();
    let clock = record::Cores::now();
    let prerequisites: Vec<Prerequisite> = stages.iter().flat_map(|stage| stage.prerequisites).copied().collect();
    let provided = Prerequisites::default();
    let (lint, rest): (Vec<_>, Vec<_>) = stages.iter().copied().partition(|stage| matches!(stage.work, Work::Lint));
    fs::create_dir_all(log("").parent().context("invariant: a log has a parent folder")?)?;
    crates::restore()?;
    let _load = record.filter(|record| *record == Record::Busy).map(|_| Load::start());
    let mut outcome = thread::scope(|scope| {
        scope.spawn(|| provided.provide_early(&prerequisites));
        let mut outcome = Outcome::default();
        // Lint before the longer compilation, because it finds most errors.
        run_stages(lint.iter().copied(), &[], &provided, false, &mut outcome);
        if rest.iter().any(|stage| matches!(stage.work, Work::Tests { .. })) {
            println!("==> compiling the tests");
            let (begin, before) = (Instant::now(), children_cpu());
            let programs = test_programs::build(selection(&rest))?;
            let seconds = begin.elapsed().as_secs_f64();
            println!("    compilation: {seconds:.1} s");
            let cpu = children_cpu() - before;
            outcome.times.push(Time { name: "compilation", seconds, cpu, tests: 0, budget: None });
            if selection(&rest) == Selection::All && !lint.is_empty() {
                crates::store()?;
            }
            rerun_failures(&failed::last(), &rest, &programs, &provided)?;
            lanes(&rest, &programs, &provided, &mut outcome)?;
        } else {
            run_stages(rest.iter().copied(), &[], &provided, false, &mut outcome);
        }
        Ok::<_, anyhow::Error>(outcome)
    })?;
    let seconds = start.elapsed().as_secs_f64();
    println!("==> {seconds:.0} s in all, {:.0} % of the cores idle", clock.idle_percent());
    failed::write(&stages, &outcome.totals);
    summary(&mut outcome);
    if let Some(record) = record {
        record.write(seconds, &clock, &outcome)?;
    }
    outcome.totals.finish()
}

/// Runs the lanes in parallel. An idle lane takes stages from another.
fn lanes(
    stages: &[&'static Stage],
    programs: &[Program],
    provided: &Prerequisites,
    outcome: &mut Outcome,
) -> Result<()> {
    let remaining = &Mutex::new(stages.to_vec());
    let yields = stages.iter().any(|stage| stage.lane != Lane::Compute);
    let ended: Vec<Result<Outcome>> = thread::scope(|scope| {
        let started = Lane::ALL.map(|lane| {
            scope.spawn(move || {
                let mut own = Outcome::default();
                let next = || next(lane, &mut remaining.lock().unwrap_or_else(PoisonError::into_inner));
                run_stages(std::iter::from_fn(next), programs, provided, yields, &mut own);
                own
            })
        });
        started.into_iter().map(|lane| lane.join().map_err(|_| anyhow!("a lane panicked"))).collect()
    });
    for own in ended {
        let own = own?;
        outcome.totals.add(own.totals);
        outcome.times.extend(own.times);
    }
    Ok(())
}

/// Takes the next stage of a lane, or one of another lane that can run in any.
fn next(lane: Lane, remaining: &mut Vec<&'static Stage>) -> Option<&'static Stage> {
    let own = remaining.iter().position(|stage| stage.lane == lane);
    let position = own.or_else(|| remaining.iter().position(|stage| stage.lane != Lane::Nodes))?;
    Some(remaining.remove(position))
}

/// Runs last time's failures first, for an early verdict. Their stages run and count them again.
fn rerun_failures(
    names: &[Name],
    stages: &[&'static Stage],
    programs: &[Program],
    provided: &Prerequisites,
) -> Result<()> {
    for stage in stages {
        let Work::Tests { threads, environment, .. } = &stage.work else { continue };
        let names: Vec<Name> = names.iter().filter(|name| name.stage == stage.name).cloned().collect();
        let mut launches = test_programs::only(programs, &names);
        if launches.is_empty() {
            continue;
        }
        println!("==> {}: the {} tests that failed last time run first", stage.name, names.len());
        let mut totals = Totals::default();
        // If the stage cannot run here, it reports that itself.
        if can_run(stage, provided).unwrap_or(false) {
            launches.iter_mut().for_each(|launch| configure(&mut launch.command, *threads, environment, false));
            totals.run(stage.name, launches, 1)?;
            totals.print_failures();
            println!("    {}: {} of them pass, {} fail again", stage.name, totals.passed, totals.failed);
        }
    }
    Ok(())
}

/// Runs a stage `times` times under load on all cores, and writes the results to
/// `docs/results/repeat.json`.
pub(crate) fn repeat(names: &[String], times: u32) -> Result<()> {
    let [name] = names else { bail!("--repeat runs one stage: name it (`--list` lists them)") };
    let stages = selected(names)?;
    let [stage] = stages[..] else { bail!("--repeat runs one stage") };
    if !matches!(stage.work, Work::Tests { .. }) {
        bail!("{name} has no tests of its own to repeat");
    }
    let provided = Prerequisites::default();
    let programs = test_programs::build(Selection::All)?;
    let (mut all, mut runs) = (Totals::default(), Vec::new());
    let load = Load::start();
    let cores = load.cores();
    for run in 1..=times {
        println!("==> {name}: run {run} of {times}, with {cores} busy cores");
        let mut outcome = Outcome::default();
        run_stages([stage].into_iter(), &programs, &provided, false, &mut outcome);
        let Outcome { totals, times } = outcome;
        let failures: Vec<String> = totals.failures.iter().map(|failure| failure.name.to_string()).collect();
        runs.push(json!({
            "passed": totals.passed, "failed": totals.failed, "skipped": totals.skipped, "failures": failures,
            "seconds": times.first().map(|time| time.seconds.round()),
        }));
        all.add(totals);
    }
    drop(load);
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

/// The named stages in table order; all if no name is given.
fn selected(names: &[String]) -> Result<Vec<&'static Stage>> {
    if let Some(name) = names.iter().find(|name| STAGES.iter().all(|stage| stage.name != **name)) {
        bail!("got the stage `{name}`; expected one of {}", STAGES.map(|stage| stage.name).join(", "));
    }
    Ok(STAGES.iter().filter(|stage| names.is_empty() || names.iter().any(|name| stage.name == name)).collect())
}

/// What must be compiled for these stages.
fn selection(stages: &[&Stage]) -> Selection {
    if stages.iter().all(|stage| stage.name == "pure") { Selection::Pure } else { Selection::All }
}

/// Runs stages one after another. If `yields`, their programs give way to those of other lanes. A
/// failed stage is reported immediately, with its log; the remaining stages still run.
fn run_stages(
    stages: impl Iterator<Item = &'static Stage>,
    programs: &[Program],
    provided: &Prerequisites,
    yields: bool,
    outcome: &mut Outcome,
) {
    for stage in stages {
        let begin = Instant::now();
        // From an earlier run.
        let _ = fs::remove_file(log(stage.name));
        let mut own = Totals::default();
        match stage_of(stage, programs, provided, yields, &mut own) {
            Ok(true) => {}
            Ok(false) => continue,
            Err(error) => own.broken.push(format!("{}: {error:#}", stage.name)),
        }
        let (seconds, tests) = (begin.elapsed().as_secs_f64(), own.passed + own.failed);
        println!("    {}: {tests} tests, {seconds:.1} s, {:.0} s of CPU time", stage.name, own.cpu);
        if !own.failures.is_empty() || !own.broken.is_empty() {
            // Lint and documentation print to this screen alone.
            let log = Some(log(stage.name)).filter(|log| log.is_file());
            let log = log.map(|log| format!("; everything it printed: {}", log.display())).unwrap_or_default();
            println!("==> {} FAILED{log}", stage.name);
            own.print_failures();
        }
        outcome.times.push(Time { name: stage.name, seconds, cpu: own.cpu, tests, budget: Some(stage.budget) });
        outcome.totals.add(own);
    }
}

/// Runs one stage; false if this machine cannot.
fn stage_of(
    stage: &Stage,
    programs: &[Program],
    provided: &Prerequisites,
    yields: bool,
    totals: &mut Totals,
) -> Result<bool> {
    if !can_run(stage, provided)? {
        println!("==> {}: skipped, this machine cannot run real nodes", stage.name);
        return Ok(false);
    }
    println!("==> {}: {}", stage.name, stage.what);
    match &stage.work {
        Work::Lint => {
            let before = children_cpu();
            lint(totals);
            totals.cpu += children_cpu() - before;
        }
        Work::Documentation => documentation(stage.name, totals)?,
        Work::Tests { of, threads, environment } => {
            let (mut launches, width) = test_programs::launches(programs, of)?;
            for launch in &mut launches {
                configure(&mut launch.command, *threads, environment, yields && stage.lane == Lane::Compute);
            }
            totals.run(stage.name, launches, width)?;
        }
    }
    Ok(true)
}

/// Provides the prerequisites of a stage; false if this machine cannot run it.
fn can_run(stage: &Stage, provided: &Prerequisites) -> Result<bool> {
    for need in stage.prerequisites {
        let had = provided.provide(*need)?;
        if *need == Prerequisite::Nodes && !(had && can_run_nodes()?) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Completes the command line of a test program.
fn configure(command: &mut Command, threads: Option<u32>, environment: &[(&str, &str)], yields: bool) {
    if yields {
        let mut nice = Command::new("nice");
        nice.args(["-n", "5"]).arg(command.get_program()).args(command.get_args());
        nice.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        nice.current_dir(command.get_current_dir().unwrap_or(&root()));
        *command = nice;
    }
    command.envs(environment.iter().copied()).env("SWITCHYARD_TEST_BUILT", "1");
    command.args(threads.map(|threads| format!("--test-threads={threads}")));
    // The stable test runner has no other way to report times. `switchyard_tests::cargo` hides the
    // variable from the compiler.
    command.env("RUSTC_BOOTSTRAP", "1").args(["-Z", "unstable-options", "--report-time"]);
}

/// Formatting, clippy, licences. Runs all of them even if one fails.
fn lint(totals: &mut Totals) {
    let mut check = |done: Result<()>| {
        if let Err(error) = done {
            totals.broken.push(format!("lint: {error:#}"));
        }
    };
    check(setup::components());
    check(step("formatting", &mut cargo(&["fmt", "--all", "--check"])));
    check(step("clippy", &mut cargo(&["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"])));
    match setup::cargo_deny() {
        Ok(Some(mut deny)) => {
            let deny = deny.args(["--offline", "check", "bans", "licenses", "sources"]).current_dir(root());
            check(step("licences and advisories of dependencies", deny));
        }
        Ok(None) => {}
        Err(error) => check(Err(error)),
    }
}

/// Documentation tests and links.
fn documentation(name: &str, totals: &mut Totals) -> Result<()> {
    let tests = Launch { program: "doc".to_owned(), command: cargo(&["test", "--workspace", "--doc"]) };
    totals.run(name, vec![tests], 1)?;
    step("rustdoc", cargo(&["doc", "--workspace", "--no-deps", "--quiet"]).env("RUSTDOCFLAGS", "-D warnings"))
}

/// Whether this machine can run real nodes, which is mandatory in CI.
fn can_run_nodes() -> Result<bool> {
    let bench = target().join("debug/switchyard-bench-cluster");
    let able = Command::new(&bench).arg("check").status().with_context(|| bench.display().to_string())?.success();
    if !able && std::env::var_os("CI").is_some() {
        bail!("real nodes cannot run here, but CI requires them");
    }
    Ok(able)
}

/// Prints the times of the stages and the slowest tests. A stage far over its budget fails the run.
fn summary(outcome: &mut Outcome) {
    println!("\nstage           seconds      CPU  budget");
    for Time { name, seconds, cpu, budget, .. } in &outcome.times {
        let words = budget.map_or_else(|| "-".to_owned(), |budget| budget.to_string());
        println!("{name:<14} {seconds:>8.0} {cpu:>8.0} {words:>7}");
        if budget.is_some_and(|budget| *seconds > 2.0 * budget as f64) {
            outcome.totals.broken.push(format!("{name}: took {seconds:.0} s, over twice its budget of {words} s"));
        }
    }
    outcome.totals.times.sort_by(|a, b| b.0.total_cmp(&a.0));
    println!("\nslowest tests");
    for (seconds, name) in outcome.totals.times.iter().take(SLOWEST) {
        println!("{seconds:>7.1} s  {name}");
    }
    println!();
}
