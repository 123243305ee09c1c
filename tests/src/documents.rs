//! Commands shown in the documentation, and where each one runs. The info string of a fenced block
//! holds its class after the language; rendered pages do not show it.
//!
//! | after `sh` or `console` | the commands run |
//! |---|---|
//! | `local` | in a folder with the repository's files; `local exit=1`: the last one exits with 1 |
//! | `plane` | on a real API server, on nodes with our own kubelet |
//! | `cluster` | on real nodes, page by page |
//! | `job` | on real nodes, while the job from docs/first-job-on-a-laptop.md exists |
//! | `build` | not at all, since they take minutes; only the arguments of cargo are checked |
//! | `other: REASON` | not at all, for this reason |
//!
//! cargo commands are checked but not run, in blocks of every class. Lines that set shell variables
//! (`export`) are left to the test. Each line is a command; in a `console` block, lines after `$ `
//! are commands and the lines that follow are their output.

use crate::root;
use anyhow::{Context, Result};
use std::fs;

/// Languages of blocks with commands.
pub const SHELLS: [&str; 5] = ["sh", "console", "bash", "shell", "zsh"];

/// Where the commands of a block run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Class {
    /// In a folder with the repository's files; the last command exits with this code.
    Local {
        /// Exit code.
        exit: i32,
    },
    /// On an API server without real nodes.
    Plane,
    /// On real nodes.
    Cluster,
    /// On real nodes, with the job from docs/first-job-on-a-laptop.md.
    Job,
    /// Not run; contains only cargo commands.
    Build,
    /// Not run, for this reason.
    Other(String),
}

/// A fenced block with commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// File and line of the opening fence.
    pub location: String,
    /// Info string: the language, and the text after it.
    pub info: String,
    /// Contents.
    pub text: String,
}

/// One command of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// Shell command line.
    pub line: String,
    /// Output that the page shows, if any.
    pub output: Option<String>,
}

impl Block {
    /// Parses the block's class.
    ///
    /// # Errors
    /// A message, if the class is missing or unknown.
    pub fn class(&self) -> Result<Class, String> {
        let (_, class) = self.info.split_once(' ').unwrap_or_default();
        let unknown = || {
            let expected = "local, local exit=CODE, plane, cluster, job, build, or other: REASON";
            format!("{}: block class: got `{class}`; expected {expected} (tests/src/documents.rs)", self.location)
        };
        match class.trim() {
            "local" => Ok(Class::Local { exit: 0 }),
            "plane" => Ok(Class::Plane),
            "cluster" => Ok(Class::Cluster),
            "job" => Ok(Class::Job),
            "build" => Ok(Class::Build),
            class => match (class.strip_prefix("local exit="), class.strip_prefix("other: ")) {
                (Some(code), _) => code.parse().map(|exit| Class::Local { exit }).map_err(|_| unknown()),
                (_, Some(reason)) if reason.split_whitespace().count() > 2 => Ok(Class::Other(reason.to_string())),
                _ => Err(unknown()),
            },
        }
    }

    /// Returns the commands, in order.
    pub fn commands(&self) -> Vec<Command> {
        if !self.info.starts_with("console") {
            let lines = self.text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
            return lines.map(|line| Command { line: line.to_string(), output: None }).collect();
        }
        let parts = self.text.strip_prefix("$ ").unwrap_or_default().split("\n$ ");
        let parts = parts.filter(|part| !part.is_empty()).map(|part| part.split_once('\n').unwrap_or((part, "")));
        let command = |(line, output): (&str, &str)| Command {
            line: line.to_string(),
            output: Some(output.trim_end().to_string()).filter(|output| !output.is_empty()),
        };
        parts.map(command).collect()
    }
}

impl Command {
    /// Returns the arguments of every cargo call in the line, including calls inside pipelines and
    /// lists.
    pub fn cargo_arguments(&self) -> Vec<Vec<&str>> {
        let code = self.line.split(" #").next().unwrap_or_default();
        let parts = code.split(['(', ')', '|', ';', '&']).map(str::split_whitespace);
        let commands = parts.filter_map(|words| {
            let mut words = words.skip_while(|word| word.contains('='));
            (words.next() == Some("cargo")).then(|| words.collect())
        });
        commands.collect()
    }

    /// Returns whether tests skip the line: it calls cargo, or exports a shell variable that the
    /// test sets itself.
    pub fn is_skipped(&self) -> bool {
        !self.cargo_arguments().is_empty() || self.line.starts_with("export ")
    }
}

/// Returns the blocks with commands in a text.
pub fn blocks_in(file: &str, text: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut open: Option<&str> = None;
    for (index, line) in text.lines().enumerate() {
        match (line.trim_start().strip_prefix("```"), open) {
            (Some(info), None) => {
                open = Some(info);
                let location = format!("{file}:{}", index + 1);
                blocks.push(Block { location, info: info.trim().to_string(), text: String::new() });
            }
            (Some(_), Some(_)) => open = None,
            (None, Some(_)) => {
                if let Some(block) = blocks.last_mut() {
                    block.text.push_str(line);
                    block.text.push('\n');
                }
            }
            (None, None) => {}
        }
    }
    blocks.retain(|block| SHELLS.contains(&block.info.split([' ', ',']).next().unwrap_or_default()));
    blocks
}

/// Returns the blocks with commands in a document.
///
/// # Errors
/// The document cannot be read.
pub fn blocks(file: &str) -> Result<Vec<Block>> {
    let text = fs::read_to_string(root().join(file)).with_context(|| file.to_string())?;
    Ok(blocks_in(file, &text))
}

/// Returns the user and developer documents, as paths in the repository.
///
/// # Errors
/// A folder cannot be read.
pub fn documents() -> Result<Vec<String>> {
    let mut found = vec!["README.md".to_string(), "charts/switchyard/README.md".to_string()];
    for folder in ["docs", "docs/dev"] {
        for entry in fs::read_dir(root().join(folder))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            found.extend(name.ends_with(".md").then(|| format!("{folder}/{name}")));
        }
    }
    for entry in fs::read_dir(root().join("examples"))? {
        let readme = format!("examples/{}/README.md", entry?.file_name().to_string_lossy());
        found.extend(root().join(&readme).is_file().then_some(readme));
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(info: &str, text: &str) -> Block {
        Block { location: "a.md:1".into(), info: info.into(), text: text.into() }
    }

    #[test]
    fn blocks_have_locations() {
        let text = "a\n```sh local\none\n```\n```yaml\nno: 1\n```\n  ```console other: needs a GPU\n  $ x\n  ```\n```sh\n```\n";
        let found = blocks_in("a.md", text);
        let places: Vec<(&str, &str)> =
            found.iter().map(|block| (block.location.as_str(), block.info.as_str())).collect();
        assert_eq!(places, [("a.md:2", "sh local"), ("a.md:8", "console other: needs a GPU"), ("a.md:11", "sh")]);
        assert_eq!(found[0].text, "one\n");
    }

    #[test]
    fn unknown_classes_are_rejected() {
        let class = |info: &str| block(info, "").class();
        assert_eq!(class("sh local"), Ok(Class::Local { exit: 0 }));
        assert_eq!(class("sh local exit=7"), Ok(Class::Local { exit: 7 }));
        assert_eq!(class("sh other: needs a GPU"), Ok(Class::Other("needs a GPU".into())));
        for info in ["sh", "sh loca", "sh local exit=x", "sh other:", "sh other: gpu", "console"] {
            let refused = class(info).unwrap_err();
            assert!(refused.starts_with("a.md:1: block class: got `"), "{info}: {refused}");
        }
    }

    #[test]
    fn commands_include_their_output() {
        let commands = block("console local", "$ one\nprinted\n  more\n$ two\n").commands();
        let expected = [("one", Some("printed\n  more")), ("two", None)];
        let expected = expected.map(|(line, output)| Command { line: line.into(), output: output.map(str::to_string) });
        assert_eq!(commands, expected);
        let commands = block("sh build", "# why\n\nA=1 cargo xtask test   # all\ncargo-deny\n").commands();
        assert_eq!(commands.len(), 2);
        assert_eq!(commands[0].cargo_arguments(), [["xtask", "test"]]);
        assert!(commands[1].cargo_arguments().is_empty() && !commands[1].is_skipped());
        let nested =
            Command { line: "export A=\"$(cargo xtask programs helm | sed x):$(cargo y)\"".into(), output: None };
        assert_eq!(nested.cargo_arguments(), [vec!["xtask", "programs", "helm"], vec!["y"]]);
    }
}
