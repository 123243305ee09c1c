//! Builds all test programs at once, and selects the tests of each stage.

use crate::stages::{STAGES, Tests, Work};
use crate::totals::{Launch, Name};
use crate::workspace::{cargo, metadata, stripped};
use anyhow::{Context, Result, ensure};
use serde_json::Value as Json;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Package with the tests of the whole product.
const PACKAGE: &str = "switchyard-tests";

/// A test program.
#[derive(Debug)]
pub(crate) struct Program {
    package: String,
    /// Name of the target.
    name: String,
    /// Whether it is a file in `tests/` rather than a library or program.
    is_integration: bool,
    file: PathBuf,
    /// Folder of the package, which is the working directory of its tests.
    folder: PathBuf,
}

/// What to build.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Selection {
    /// Libraries, programs and the rules, as run by `check`.
    Pure,
    /// All test programs, and the programs that they start.
    All,
}

/// Builds test programs.
///
/// Always selects the whole workspace, so that each crate is compiled once.
pub(crate) fn build(selection: Selection) -> Result<Vec<Program>> {
    let integration = match selection {
        Selection::All => Vec::new(),
        Selection::Pure => integration_tests()?,
    };
    let mut command = match selection {
        Selection::All => cargo(&["build", "--workspace", "--bins", "--example", "worker", "--tests"]),
        Selection::Pure => cargo(&["test", "--no-run", "--workspace", "--lib", "--bins"]),
    };
    command.args(integration.iter().flat_map(|name| ["--test", name]));
    command.args(["--message-format", "json-render-diagnostics"]).stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    ensure!(output.status.success(), "the tests do not build: {}", output.status);
    let mut programs = Vec::new();
    for line in String::from_utf8(output.stdout)?.lines() {
        let message: Json = serde_json::from_str(line).with_context(|| format!("cargo reports {line}"))?;
        if message["profile"]["test"] != true || !message["executable"].is_string() {
            continue;
        }
        let text = |value: &Json| value.as_str().map(str::to_owned).with_context(|| format!("cargo reports {line}"));
        let manifest = PathBuf::from(text(&message["manifest_path"])?);
        programs.push(Program {
            package: package_of(&text(&message["package_id"])?).to_owned(),
            name: text(&message["target"]["name"])?,
            is_integration: message["target"]["kind"][0] == "test",
            file: text(&message["executable"])?.into(),
            folder: manifest.parent().context("invariant: a manifest has a parent folder")?.into(),
        });
    }
    // Sort by name, since the compiler finishes them in any order.
    programs.sort_by(|a, b| (&a.package, a.is_integration, &a.name).cmp(&(&b.package, b.is_integration, &b.name)));
    Ok(programs)
}

/// Names of the integration tests that `check` runs.
fn integration_tests() -> Result<Vec<String>> {
    let metadata = metadata()?;
    let list = |value: &Json| value.as_array().cloned().unwrap_or_default();
    let mut names = vec!["rules".to_owned()];
    for package in list(&metadata["packages"]) {
        if package["name"] != PACKAGE && !engine().iter().any(|name| package["name"] == *name) {
            let tests = list(&package["targets"]).into_iter().filter(|target| target["kind"][0] == "test");
            names.extend(tests.filter_map(|target| target["name"].as_str().map(str::to_owned)));
        }
    }
    Ok(names)
}

/// The packages of the stage `engine`.
fn engine() -> &'static [&'static str] {
    STAGES
        .iter()
        .find_map(|stage| match stage.work {
            Work::Tests { of: Tests::Packages(packages), .. } => Some(packages),
            _ => None,
        })
        .unwrap_or_default()
}

/// The package name from its id: `path+file:///a/xtask#0.1.0`, or
/// `path+file:///a/tests#switchyard-tests@0.1.0`.
fn package_of(id: &str) -> &str {
    let (path, version) = id.rsplit_once('#').unwrap_or((id, ""));
    match version.split_once('@') {
        Some((name, _)) => name,
        None => path.rsplit('/').next().unwrap_or(path),
    }
}

/// Number of independent test programs to run at a time: a waiting program, or one on its last
/// test, leaves cores idle.
const SIDE_BY_SIDE: usize = 2;

/// The commands of a stage, and how many of them to run at a time.
pub(crate) fn launches(programs: &[Program], tests: &Tests) -> Result<(Vec<Launch>, usize)> {
    let of = |wanted: &dyn Fn(&Program) -> bool| programs.iter().filter(|program| wanted(program)).collect::<Vec<_>>();
    let (launches, width) = match tests {
        Tests::AllExcept(packages) => {
            let own = |program: &Program| match program.package.as_str() {
                PACKAGE => program.name == "rules",
                package => !packages.contains(&package),
            };
            (of(&own).into_iter().map(Program::launch).collect(), SIDE_BY_SIDE)
        }
        Tests::Packages(packages) => {
            let own = of(&|program| packages.contains(&program.package.as_str()));
            (own.into_iter().map(Program::launch).collect(), SIDE_BY_SIDE)
        }
        Tests::Concurrent(names, word) => {
            let found = of(&|program| program.is_integration && names.contains(&program.name.as_str()));
            let start = |program: &Program| {
                let mut launch = program.launch();
                launch.command.arg(word);
                launch
            };
            (found.into_iter().map(start).collect(), names.len())
        }
        Tests::Modules(name, modules) => {
            let found = of(&|program| program.package == PACKAGE && program.is_integration && program.name == *name);
            let program = found.first().with_context(|| format!("no program of tests `{name}`"))?;
            let all = program.list()?;
            let module = |module: &&str| {
                let own: Vec<&String> = all.iter().filter(|test| test.split("::").next() == Some(*module)).collect();
                // Without a name the program would run all tests.
                ensure!(!own.is_empty(), "{name} has no module `{module}`");
                let mut launch = program.launch();
                launch.command.arg("--exact").args(own);
                Ok(launch)
            };
            let mut launches: Vec<Launch> = modules.iter().map(module).collect::<Result<_>>()?;
            // The library of the tests and the command of the cluster are checked with the first
            // that use them.
            if *name == "processes" && modules.len() > 1 {
                let own = of(&|program| program.package == PACKAGE && !program.is_integration);
                launches.splice(0..0, own.into_iter().map(Program::launch));
            }
            (launches, 1)
        }
    };
    ensure!(!launches.is_empty(), "{tests:?} names no program");
    Ok((launches, width))
}

/// Commands for exactly these tests, one per program that still exists.
pub(crate) fn only(programs: &[Program], names: &[Name]) -> Vec<Launch> {
    let mut launches = Vec::new();
    for program in programs {
        let id = program.id();
        let tests: Vec<&str> = names.iter().filter(|name| name.program == id).map(|name| name.test.as_str()).collect();
        if !tests.is_empty() {
            let mut launch = program.launch();
            launch.command.arg("--exact").args(tests);
            launches.push(launch);
        }
    }
    launches
}

impl Program {
    /// `package/target`.
    fn id(&self) -> String {
        format!("{}/{}", self.package, self.name)
    }

    fn launch(&self) -> Launch {
        Launch { program: self.id(), command: self.command() }
    }

    /// The command line that `cargo test` uses.
    fn command(&self) -> Command {
        let mut command = stripped(Command::new(&self.file));
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// Names of its tests.
    fn list(&self) -> Result<Vec<String>> {
        let output = self.command().args(["--list", "--format", "terse"]).output();
        let output = output.with_context(|| format!("cannot start {}", self.file.display()))?;
        let text = String::from_utf8(output.stdout)?;
        Ok(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::package_of;

    #[test]
    fn packages_are_derived_from_ids() {
        assert_eq!(package_of("path+file:///a/xtask#0.1.0"), "xtask");
        assert_eq!(package_of("path+file:///a/tests#switchyard-tests@0.1.0"), "switchyard-tests");
    }
}
