//! `switchyard completions` and `switchyard man`, generated from the argument definitions.

use crate::args::{Cli, CompletionShell};
use crate::failure::Failure;
use crate::output::print;
use clap::{Command, CommandFactory};
use clap_complete::{Shell, engine};
use std::ffi::OsString;
use std::path::Path;
use switchyard_worker_contract::exit::Exit;

/// The script that kubectl runs to complete `kubectl switchyard` (kubernetes/kubernetes#105867); it
/// receives the words of the command line.
const FOR_KUBECTL: &str =
    "#!/bin/sh\n# kubectl_complete-switchyard, anywhere on the PATH.\nexec kubectl-switchyard __complete \"$@\"\n";
/// The last line of the output, as defined by cobra: whether kubectl can also offer files
/// (ShellCompDirectiveDefault) or not (ShellCompDirectiveNoFileComp).
const FILES: &str = ":0";
const NO_FILES: &str = ":4";

/// Prints the completion script of a shell.
pub(super) fn script(shell: CompletionShell) -> Exit {
    let shell = match shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Zsh => Shell::Zsh,
        CompletionShell::Fish => Shell::Fish,
        CompletionShell::Kubectl => {
            print(FOR_KUBECTL);
            return Exit::Done;
        }
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "switchyard", &mut script);
    print(&String::from_utf8_lossy(&script));
    Exit::Done
}

/// Completes for kubectl: prints one candidate per line with its description after a tab, then the
/// directive.
pub(super) fn complete(words: &[String]) -> Exit {
    print(&candidates(words));
    Exit::Done
}

fn candidates(words: &[String]) -> String {
    let line: Vec<OsString> = std::iter::once("switchyard".into()).chain(words.iter().map(OsString::from)).collect();
    let last = line.len() - 1;
    // Leave file names to the shell, which knows how to quote them.
    let found = engine::complete(&mut Cli::command(), line, last.max(1), None).unwrap_or_default();
    let mut text = String::new();
    for candidate in found.iter().filter(|candidate| !candidate.is_hide_set()) {
        text.push_str(&candidate.get_value().to_string_lossy());
        if let Some(help) = candidate.get_help() {
            text.push_str(&format!("\t{}", help.to_string().lines().next().unwrap_or_default()));
        }
        text.push('\n');
    }
    text + if found.is_empty() { FILES } else { NO_FILES }
}

pub(super) fn man(folder: &Path) -> Result<Exit, Failure> {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let pages = std::fs::create_dir_all(folder).and_then(|()| pages(&command, "switchyard", folder));
    let count = pages.map_err(|error| {
        Failure::unexpected(format!("cannot write manual pages into {}: {error}", folder.display()))
    })?;
    print(&format!("{count} manual pages in {}", folder.display()));
    Ok(Exit::Done)
}

fn pages(command: &Command, name: &str, folder: &Path) -> std::io::Result<usize> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone()).title(name).render(&mut page)?;
    std::fs::write(folder.join(format!("{name}.1")), page)?;
    let mut count = 1;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        count += pages(sub, &format!("{name}-{}", sub.get_name()), folder)?;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubectl_gets_commands_flags_and_values() {
        let ask = |words: &[&str]| candidates(&words.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert!(ask(&["expl"]).starts_with("explain\t"), "{}", ask(&["expl"]));
        assert!(ask(&["expl"]).ends_with(":4"));
        assert!(ask(&["status", "--wa"]).contains("--watch\t"));
        assert_eq!(ask(&["-o", "js"]).split('\t').next(), Some("json"));
        assert!(!ask(&[""]).contains("__complete"));
    }

    #[test]
    fn every_command_has_a_manual_page_and_is_in_the_scripts() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(man(folder.path()), Ok(Exit::Done));
        let text = std::fs::read_to_string(folder.path().join("switchyard-checkpoint-verify.1")).unwrap();
        assert!(text.contains("digests"), "{text}");
        for name in ["switchyard", "switchyard-status", "switchyard-support-bundle", "switchyard-topo-import"] {
            assert!(folder.path().join(format!("{name}.1")).is_file(), "{name}");
        }
        assert!(!folder.path().join("switchyard-__complete.1").exists());
    }
}
