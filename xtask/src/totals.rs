//! Runs test programs and adds up what they report.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;

/// Tests so far.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
    /// Commands that failed, by the name of their stage.
    pub broken: Vec<String>,
    /// Names of the tests that failed, as `stage: test`.
    pub failures: Vec<String>,
    /// What each failed test printed, as its runner repeats it at the end.
    pub outputs: Vec<Output>,
    /// Seconds and name of each test whose runner reports times.
    pub times: Vec<(f64, String)>,
}

/// What a failed test printed.
#[derive(Debug)]
pub(crate) struct Output {
    /// `stage: test`.
    pub test: String,
    pub lines: Vec<String>,
}

/// How much of the output of a failed test is repeated at the end: a log that keeps only its end still names the cause.
const REPEATED_LINES: usize = 12;
const REPEATED_CHARACTERS: usize = 300;

impl Totals {
    /// Runs test commands at the same time, shows their output behind the name, and counts. A failing command is remembered; the next
    /// ones still run.
    pub(crate) fn run(&mut self, name: &str, commands: &mut [Command]) -> Result<()> {
        let ended: Vec<Result<(Totals, ExitStatus)>> = thread::scope(|scope| {
            let started: Vec<_> = commands.iter_mut().map(|command| scope.spawn(|| one(name, command))).collect();
            let end = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|_| bail!("the thread that reads the test's output panicked"))
            };
            started.into_iter().map(end).collect()
        });
        for ended in ended {
            let (totals, status) = ended.with_context(|| name.to_owned())?;
            self.add(totals);
            if !status.success() {
                self.broken.push(format!("{name}: {status}"));
            }
        }
        Ok(())
    }

    /// Adds those of another part.
    pub(crate) fn add(&mut self, other: Totals) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.broken.extend(other.broken);
        self.failures.extend(other.failures);
        self.outputs.extend(other.outputs);
        self.times.extend(other.times);
    }

    /// Prints the totals. A test that was skipped counts as a failure of the run: CI can have every part that a test needs.
    pub(crate) fn finish(self) -> Result<()> {
        for Output { test, lines } in &self.outputs {
            println!("---- {test}");
            for line in lines.iter().skip(cause(lines)).take(REPEATED_LINES) {
                println!("{}", line.chars().take(REPEATED_CHARACTERS).collect::<String>());
            }
        }
        for failure in &self.failures {
            println!("FAILED {failure}");
        }
        for broken in &self.broken {
            println!("FAILED {broken}");
        }
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        if !self.broken.is_empty() {
            bail!("{} step{} failed", self.broken.len(), if self.broken.len() == 1 { "" } else { "s" });
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

/// Runs a test command.
fn one(name: &str, command: &mut Command) -> Result<(Totals, ExitStatus)> {
    let what = format!("cannot start {:?}", command.get_program());
    let mut child = command.stdout(Stdio::piped()).spawn().context(what)?;
    let stdout = child.stdout.take().context("no standard output")?;
    let mut totals = Totals::default();
    // Whether the lines are the output of a failed test.
    let mut output = false;
    // Tests of another command: their reason names it.
    let mut of_others = 0;
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        if let Some((passed, failed, skipped)) = counts(&line) {
            totals.passed += passed;
            totals.failed += failed;
            totals.skipped += skipped - of_others;
            of_others = 0;
            // A program none of whose tests are due says nothing.
            if passed + failed + skipped == 0 {
                continue;
            }
        }
        let test = test(&line);
        if let Some((test, verdict, seconds)) = test {
            totals.times.extend(seconds.map(|seconds| (seconds, format!("{name}: {test}"))));
            if verdict == "FAILED" {
                totals.failures.push(format!("{name}: {test}"));
            }
            of_others += u64::from(verdict.starts_with("ignored, ") && verdict.contains(": cargo xtask test --"));
        }
        if let Some(test) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            totals.outputs.push(Output { test: format!("{name}: {test}"), lines: Vec::new() });
            output = true;
        } else if line == "failures:" {
            output = false;
        } else if let (true, Some(last)) = (output, totals.outputs.last_mut()) {
            last.lines.push(line.clone());
        }
        // One line per passed test says nothing that the count does not.
        let is_passed = test.is_some_and(|(_, verdict, _)| verdict == "ok");
        if !(is_passed || line.is_empty() || line.starts_with("running ")) {
            println!("{name} | {line}");
        }
    }
    Ok((totals, child.wait()?))
}

/// The first line that says why a test failed: a panic, or the error that it returned. Without either the first.
fn cause(lines: &[String]) -> usize {
    let says =
        |line: &String| line.starts_with("Error: ") || line.starts_with("thread '") && line.contains(" panicked at ");
    lines.iter().position(says).unwrap_or(0)
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
    fn the_cause_of_a_failure_is_found_behind_what_was_printed() {
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
