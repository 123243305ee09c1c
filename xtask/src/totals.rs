//! Runs test programs and adds up their results.

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::workspace::{process_stat, target};

/// Test results so far.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
    /// Failed steps with their stages.
    pub broken: Vec<String>,
    pub failures: Vec<Failure>,
    /// Every test with its duration, if the runner reports it.
    pub times: Vec<(f64, Name)>,
    /// CPU seconds of all commands and their reaped children.
    pub cpu: f64,
}

/// A test: its stage, its program, and its name in the program.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Name {
    pub stage: String,
    pub program: String,
    pub test: String,
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.stage, self.test)
    }
}

/// Command that starts a test program.
#[derive(Debug)]
pub(crate) struct Launch {
    /// `package/target`.
    pub program: String,
    pub command: Command,
}

/// A failed test with its output.
#[derive(Debug)]
pub(crate) struct Failure {
    pub name: Name,
    pub lines: Vec<String>,
}

/// Results and times of the stages.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub totals: Totals,
    pub times: Vec<Time>,
}

/// Resources that a stage used.
#[derive(Debug)]
pub(crate) struct Time {
    pub name: &'static str,
    pub seconds: f64,
    /// CPU seconds.
    pub cpu: f64,
    pub tests: u64,
    /// Seconds.
    pub budget: Option<u64>,
}

/// How much of a failed test's output is repeated at the end, so that a truncated log still names
/// the cause.
const REPEATED_LINES: usize = 12;
const REPEATED_CHARACTERS: usize = 300;

impl Totals {
    /// Runs test commands, `width` at a time. Prints their output prefixed by the stage's name,
    /// appends it to the stage's log, and counts. A failed command is recorded; the remaining ones
    /// still run.
    pub(crate) fn run(&mut self, stage: &str, launches: Vec<Launch>, width: usize) -> Result<()> {
        let queue = Mutex::new(VecDeque::from(launches));
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        let work = || {
            let mut ended = Vec::new();
            while let Some(launch) = next() {
                ended.push(one(stage, launch));
            }
            ended
        };
        let ended: Vec<Vec<Result<(Totals, ExitStatus)>>> = thread::scope(|scope| {
            let started: Vec<_> = (0..width).map(|_| scope.spawn(work)).collect();
            let end = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|_| vec![Err(anyhow!("the thread that reads the tests' output panicked"))])
            };
            started.into_iter().map(end).collect()
        });
        for ended in ended.into_iter().flatten() {
            let (totals, status) = ended.with_context(|| stage.to_owned())?;
            // A runner exits non-zero if tests failed, and those are already named.
            if !status.success() && totals.failures.is_empty() {
                self.broken.push(format!("{stage}: {status}"));
            }
            self.add(totals);
        }
        Ok(())
    }

    /// Adds the totals of another part.
    pub(crate) fn add(&mut self, other: Totals) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.broken.extend(other.broken);
        self.failures.extend(other.failures);
        self.times.extend(other.times);
        self.cpu += other.cpu;
    }

    /// Prints the failures, with the beginning of their output.
    pub(crate) fn print_failures(&self) {
        for Failure { name, lines } in &self.failures {
            println!("---- {name}");
            for line in lines.iter().skip(cause(lines)).take(REPEATED_LINES) {
                println!("{}", line.chars().take(REPEATED_CHARACTERS).collect::<String>());
            }
        }
        for Failure { name, .. } in &self.failures {
            println!("FAILED {name}");
        }
        for broken in &self.broken {
            println!("FAILED {broken}");
        }
    }

    /// Prints the totals. A skipped test fails the run in CI, where every prerequisite can be met.
    pub(crate) fn finish(self) -> Result<()> {
        self.print_failures();
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        let failed = self.failures.len() + self.broken.len();
        if failed > 0 {
            bail!("{failed} test{} or steps failed", if failed == 1 { "" } else { "s" });
        }
        if self.skipped > 0 {
            bail!("{} tests were skipped", self.skipped);
        }
        if self.passed == 0 {
            bail!("no test ran");
        }
        Ok(())
    }
}

/// The log of a stage: all output, including that of passed tests.
pub(crate) fn log(stage: &str) -> std::path::PathBuf {
    target().join("tests").join(format!("{stage}.log"))
}

/// Runs one test command.
fn one(stage: &str, mut launch: Launch) -> Result<(Totals, ExitStatus)> {
    let what = format!("cannot start {:?}", launch.command.get_program());
    let path = log(stage);
    let mut log = File::options().append(true).create(true).open(&path).with_context(|| path.display().to_string())?;
    let mut child = launch.command.stdout(Stdio::piped()).spawn().context(what)?;
    let stdout = child.stdout.take().context("no standard output")?;
    let mut totals = Totals::default();
    let name = |test: &str| Name { stage: stage.to_owned(), program: launch.program.clone(), test: test.to_owned() };
    // Whether the current lines are the output of a failed test.
    let mut output = false;
    // Tests that another command runs; their ignore reason names it.
    let mut excluded = 0;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        // A full disk must not fail the tests.
        let _ = writeln!(log, "{line}");
        if let Some((passed, failed, skipped)) = counts(&line) {
            totals.passed += passed;
            totals.failed += failed;
            totals.skipped += skipped - excluded;
            excluded = 0;
            // Print nothing for a program with no selected tests.
            if passed + failed + skipped == 0 {
                continue;
            }
        }
        let test = test(&line);
        if let Some((test, verdict, seconds)) = test {
            totals.times.extend(seconds.map(|seconds| (seconds, name(test))));
            if verdict == "FAILED" {
                totals.failures.push(Failure { name: name(test), lines: Vec::new() });
            }
            excluded += u64::from(verdict.starts_with("ignored, ") && verdict.contains(": cargo xtask test --"));
        }
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            output = true;
            // The output of failed tests follows the verdicts, in the order of the failures.
            if let Some(at) = totals.failures.iter().position(|failure| failure.name.test == test) {
                let failure = totals.failures.remove(at);
                totals.failures.push(failure);
            }
        } else if line == "failures:" {
            output = false;
        } else if let (true, Some(last)) = (output, totals.failures.last_mut()) {
            last.lines.push(line.clone());
        }
        // Omit lines of passed tests, which the count covers.
        let is_passed = test.is_some_and(|(_, verdict, _)| verdict == "ok");
        if !(is_passed || line.is_empty() || line.starts_with("running ")) {
            println!("{stage} | {line}");
        }
    }
    totals.cpu = cpu_seconds(&child);
    Ok((totals, child.wait()?))
}

/// CPU seconds of a process that is ending and of its reaped children; 0 if the kernel does not
/// report them.
fn cpu_seconds(child: &Child) -> f64 {
    let end = Instant::now() + Duration::from_secs(10);
    while let Some(stat) = process_stat(&child.id().to_string()) {
        if stat.is_zombie || Instant::now() > end {
            return stat.own + stat.children;
        }
        thread::sleep(Duration::from_millis(1));
    }
    0.0
}

/// Index of the first line that explains a failure: a panic or a returned error. Without either,
/// the first line.
fn cause(lines: &[String]) -> usize {
    let is_cause =
        |line: &String| line.starts_with("Error: ") || line.starts_with("thread '") && line.contains(" panicked at ");
    lines.iter().position(is_cause).unwrap_or(0)
}

/// Name, verdict and seconds of a line `test a::b ... ok <1.234s>`.
fn test(line: &str) -> Option<(&str, &str, Option<f64>)> {
    let (name, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let (verdict, time) = rest.split_once(" <").unwrap_or((rest, ""));
    Some((name, verdict, time.strip_suffix("s>").and_then(|seconds| seconds.parse().ok())))
}

/// Passed, failed and ignored of a line `test result: ok. 3 passed; 0 failed; 0 ignored; …`.
fn counts(line: &str) -> Option<(u64, u64, u64)> {
    let rest = line.strip_prefix("test result: ")?;
    let number =
        |word: &str| rest.split([';', '.']).find_map(|part| part.trim().strip_suffix(word)?.trim().parse::<u64>().ok());
    Some((number("passed")?, number("failed")?, number("ignored")?))
}

#[cfg(test)]
mod tests {
    use super::{cause, counts, test};

    #[test]
    fn the_cause_of_a_failure_is_found_in_its_output() {
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(cause(&lines("0.1 s  a\n0.2 s  b\nError: not so after 300 s\nStack backtrace:")), 2);
        assert_eq!(cause(&lines("\nthread 'a::b' (12) panicked at a.rs:1:2:\nwhy")), 1);
        assert_eq!(cause(&lines("killed")), 0);
    }

    #[test]
    fn reads_the_runner() {
        let line = "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.1s";
        assert_eq!(counts(line), Some((12, 1, 2)));
        assert_eq!(counts("test result"), None);
        assert_eq!(test("test a::b ... ok <1.250s>"), Some(("a::b", "ok", Some(1.25))));
        assert_eq!(test("test a::b ... FAILED <0.001s>"), Some(("a::b", "FAILED", Some(0.001))));
        assert_eq!(test("test a - should panic ... ignored, slow"), Some(("a - should panic", "ignored, slow", None)));
        assert_eq!(test("test result: ok."), None);
    }
}
