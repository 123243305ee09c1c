//! Runs test commands and adds up what their runners say.

use anyhow::{Context, Result, bail};
use std::io::{BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::Instant;

/// Tests so far.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    passed: u64,
    failed: u64,
    skipped: u64,
    broken: Vec<String>,
}

impl Totals {
    /// Runs one test command, shows its output and counts. A failing command is remembered; the next ones still run.
    pub(crate) fn run(&mut self, name: &str, command: &mut Command) -> Result<()> {
        self.beside(name, std::slice::from_mut(command))
    }

    /// Runs test commands at the same time, as one step.
    pub(crate) fn beside(&mut self, name: &str, commands: &mut [Command]) -> Result<()> {
        println!("==> {name}");
        let start = Instant::now();
        let before = self.passed + self.failed;
        let ended: Vec<Result<Ended>> = thread::scope(|scope| {
            let started: Vec<_> = commands.iter_mut().map(|command| scope.spawn(|| one(command))).collect();
            let end = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|_| bail!("the thread that listens to cargo panicked"))
            };
            started.into_iter().map(end).collect()
        });
        for ended in ended {
            let ended = ended.with_context(|| name.to_owned())?;
            self.passed += ended.passed;
            self.failed += ended.failed;
            self.skipped += ended.skipped;
            if !ended.status.success() {
                self.broken.push(format!("{name}: {}", ended.status));
            }
        }
        let ran = self.passed + self.failed - before;
        println!("    {name}: {ran} tests, {:.1} s", start.elapsed().as_secs_f64());
        Ok(())
    }

    /// Prints the totals. A test that was skipped counts as a failure of the run: CI can have every part that a test needs.
    pub(crate) fn finish(self) -> Result<()> {
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

/// What a test command said.
struct Ended {
    passed: u64,
    failed: u64,
    skipped: u64,
    status: ExitStatus,
}

/// Runs a test command, shows its output and counts.
fn one(command: &mut Command) -> Result<Ended> {
    let mut child = command.stdout(Stdio::piped()).spawn().context("cannot start cargo")?;
    let stdout = child.stdout.take().context("no standard output")?;
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        if let Some(more) = counts(&line) {
            passed += more.0;
            failed += more.1;
            skipped += more.2;
        }
        // One line per passed test says nothing that the count does not.
        let is_passed = line.starts_with("test ") && line.ends_with("... ok");
        if !(is_passed || line.is_empty() || line == "running 0 tests") {
            println!("{line}");
        }
    }
    Ok(Ended { passed, failed, skipped, status: child.wait()? })
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
    use super::counts;

    #[test]
    fn reads_the_runner() {
        let line = "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.1s";
        assert_eq!(counts(line), Some((12, 1, 2)));
        assert_eq!(counts("test result"), None);
    }
}
