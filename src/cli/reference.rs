//! Committed output of the program: `docs/cli.md`, generated from the arguments, and the picture of
//! README.md.
//!
//! If a test here fails after an intended change: run `INSTA_UPDATE=always cargo test -p
//! switchyard-cli reference`, and commit the file.
#![allow(clippy::unwrap_used)]

use crate::args::Cli;
use crate::{manifest, snapshot, topo};
use clap::{Arg, Command, CommandFactory};
use std::fmt::Write;
use std::path::Path;

/// Commands in reading order by group, each with an example.
const GROUPS: [(&str, &[(&str, &str)]); 5] = [
    (
        "Run and plan",
        &[
            ("run", "switchyard run examples/gpt-source.yaml"),
            ("plan", "switchyard plan examples/clusters/gpt-rack.yaml --snapshot examples/clusters/two-racks.json"),
            ("tune", "switchyard tune examples/gpt-source.yaml --out tuned.yaml"),
            ("explain", "switchyard explain gpt-124m --snapshot examples/clusters/two-racks.json"),
            ("whatif", "switchyard whatif --drain gpu-01 --snapshot examples/clusters/two-racks.json"),
            (
                "simulate",
                "switchyard simulate --trace examples/clusters/jobs.csv --snapshot examples/clusters/two-racks.json --more-racks 1",
            ),
        ],
    ),
    (
        "Follow a job",
        &[
            ("status", "switchyard status gpt-cluster --namespace team --watch"),
            ("logs", "switchyard logs gpt-cluster --namespace team --rank 2"),
            ("report", "switchyard report runs/gpt-source-6669"),
            ("checkpoint list", "switchyard checkpoint list checkpoints/gpt"),
            ("checkpoint verify", "switchyard checkpoint verify checkpoints/gpt --step 500"),
            ("checkpoint export", "switchyard checkpoint export checkpoints/gpt --to model.safetensors"),
        ],
    ),
    (
        "Check and diagnose",
        &[
            (
                "preflight",
                "switchyard preflight examples/clusters/gpt-rack.yaml --snapshot examples/clusters/two-racks.json",
            ),
            ("lint", "switchyard lint examples/other/pytorchjob-with-mistakes.yaml"),
            ("convert", "switchyard convert examples/other/pytorchjob.yaml"),
            ("doctor", "switchyard doctor examples/logs"),
            ("doctor gpu", "switchyard doctor gpu"),
            ("doctor cluster", "switchyard doctor cluster"),
            ("support-bundle", "switchyard support-bundle --namespace team"),
        ],
    ),
    (
        "Machines and clusters",
        &[
            ("topo", "switchyard topo --cluster --snapshot examples/clusters/two-racks.json"),
            ("topo import", "switchyard topo import tests/fixtures/topo/f04-h200.txt --gpu-model H200 --nic-gbps 400"),
            ("topo xml", "switchyard topo xml gpu-05 --snapshot examples/clusters/two-racks.json"),
            ("snapshot", "switchyard snapshot > cluster.yaml"),
            ("controller", "switchyard controller --leader-elect Disabled"),
            ("crd", "switchyard crd | kubectl apply --server-side -f -"),
        ],
    ),
    (
        "The program itself",
        &[
            ("completions", "switchyard completions bash"),
            ("man", "switchyard man man"),
            ("version", "switchyard version"),
        ],
    ),
];

const HEAD: &str = "# Commands

<!-- generated from the program's arguments by `src/cli/reference.rs` -->

The commands of `switchyard`. `switchyard COMMAND --help` prints the same in a terminal, and `switchyard man FOLDER` writes \
manual pages. Results go to standard output; progress, warnings and errors go to standard error. The node agent and the \
worker are separate programs: [operations.md](operations.md), [engine.md](engine.md).
";

fn root() -> Command {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    root
}

fn page() -> String {
    let root = root();
    let mut text = HEAD.to_owned();
    let mut commands = Vec::new();
    leaves(&root, "", &mut commands);
    let about = |name: &str| commands.iter().find(|(known, _)| known == name).map(|(_, command)| *command);
    for (group, examples) in GROUPS {
        let _ = write!(text, "\n**{group}**\n\n| command | what it does |\n|---|---|\n");
        for (name, _) in examples {
            let first = about(name).map(first).unwrap_or_default();
            let _ = writeln!(text, "| [`{name}`](#switchyard-{}) | {} |", name.replace(' ', "-"), cell(&first));
        }
    }
    text.push_str("\n## Options of every command\n\n");
    table(root.get_arguments().filter(|arg| arg.is_global_set()), &mut text);
    for (name, example) in GROUPS.iter().flat_map(|(_, examples)| *examples) {
        if let Some(command) = about(name) {
            section(name, command, example, &mut text);
        }
    }
    let codes = root.get_after_long_help().unwrap().to_string();
    let _ = write!(text, "\n## Exit codes\n\n```text\n{}\n```\n", codes.trim_start_matches("Exit codes:\n"));
    text
}

/// Commands without a required subcommand, by name, in the order of `--help`.
fn leaves<'a>(command: &'a Command, before: &str, found: &mut Vec<(String, &'a Command)>) {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        let name = format!("{before}{}", sub.get_name());
        if !sub.is_subcommand_required_set() {
            found.push((name.clone(), sub));
        }
        leaves(sub, &format!("{name} "), found);
    }
}

fn section(name: &str, command: &Command, example: &str, text: &mut String) {
    let about = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    let usage = command.clone().render_usage().to_string();
    let usage: Vec<&str> =
        usage.trim_start_matches("Usage:").lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let usage: Vec<String> = usage.iter().map(|line| format!("`{line}`")).collect();
    let _ = write!(text, "\n## switchyard {name}\n\n{}\n\nUsage: {}\n", sentence(&about), usage.join(", or "));
    let _ = write!(text, "\nExample: `{example}`\n");
    let own: Vec<&Arg> = command.get_arguments().filter(|arg| !arg.is_global_set() && !is_help(arg)).collect();
    if !own.is_empty() {
        text.push('\n');
        table(own.into_iter(), text);
    }
}

fn is_help(arg: &Arg) -> bool {
    matches!(arg.get_id().as_str(), "help" | "version")
}

fn table<'a>(arguments: impl Iterator<Item = &'a Arg>, text: &mut String) {
    text.push_str("| argument | meaning |\n|---|---|\n");
    for arg in arguments {
        let _ = writeln!(text, "| {} | {} |", cell(&format!("`{}`", form(arg))), cell(&meaning(arg)));
    }
}

/// `-n, --namespace <NAMESPACE>`.
fn form(arg: &Arg) -> String {
    let names: Vec<String> = arg.get_value_names().into_iter().flatten().map(|name| format!("<{name}>")).collect();
    let values = if arg.get_action().takes_values() { names.join(" ") } else { String::new() };
    let flags: Vec<String> = arg
        .get_short()
        .map(|short| format!("-{short}"))
        .into_iter()
        .chain(arg.get_long().map(|long| format!("--{long}")))
        .collect();
    format!("{} {values}", flags.join(", ")).trim().to_owned()
}

fn meaning(arg: &Arg) -> String {
    let mut text = arg.get_long_help().or(arg.get_help()).map(|help| sentence(&help.to_string())).unwrap_or_default();
    let takes = arg.get_action().takes_values();
    let possible: Vec<String> =
        arg.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    if takes && !possible.is_empty() {
        let _ = write!(text, " One of {}.", possible.join(", "));
    }
    let defaults: Vec<String> =
        arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    if takes && !defaults.is_empty() {
        let _ = write!(text, " Default: `{}`.", defaults.join(" "));
    }
    if let Some(variable) = arg.get_env() {
        let _ = write!(text, " Environment: `{}`.", variable.to_string_lossy());
    }
    text
}

/// The first paragraph of a command's description.
fn first(command: &Command) -> String {
    command.get_about().map(|about| sentence(&about.to_string())).unwrap_or_default()
}

/// The text on one line, with the full stop that clap removes.
fn sentence(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if text.is_empty() || text.ends_with('.') { text } else { format!("{text}.") }
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Compares a committed file, or writes it if snapshots are being updated.
fn assert_committed(path: &str, text: &str) {
    let full = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if std::env::var_os("INSTA_UPDATE").is_some_and(|how| how == "always") {
        std::fs::create_dir_all(full.parent().unwrap()).unwrap();
        std::fs::write(&full, text).unwrap();
    }
    let committed = std::fs::read_to_string(&full).unwrap_or_default();
    assert!(committed == text, "{path} differs: see src/cli/reference.rs");
}

#[test]
fn the_page_of_commands_is_that_of_the_program() {
    assert_committed("docs/cli.md", &page());
}

#[test]
fn every_command_has_a_group_and_an_example_that_it_takes() {
    let root = root();
    let mut commands = Vec::new();
    leaves(&root, "", &mut commands);
    let mut known: Vec<&str> = commands.iter().map(|(name, _)| name.as_str()).collect();
    let examples: Vec<&(&str, &str)> = GROUPS.iter().flat_map(|(_, examples)| *examples).collect();
    let mut grouped: Vec<&str> = examples.iter().map(|(name, _)| *name).collect();
    known.sort_unstable();
    grouped.sort_unstable();
    assert_eq!(grouped, known, "each command is in exactly one group");
    for (name, line) in examples {
        let line = line.split([' ']).take_while(|word| ![">", "|"].contains(word));
        assert!(line.clone().skip(1).collect::<Vec<_>>().join(" ").starts_with(name), "{name}");
        let words: Vec<&str> = line.collect();
        assert!(Cli::command().try_get_matches_from(&words).is_ok(), "{words:?}");
    }
}

/// `switchyard plan examples/clusters/gpt-rack.yaml --snapshot examples/clusters/two-racks.json
/// --svg`.
#[test]
fn the_picture_is_what_the_program_draws() {
    let at = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/clusters").join(name);
    let file = snapshot::read_file(&at("two-racks.json")).unwrap();
    let mut seen = snapshot::cluster(&file).unwrap();
    let job = snapshot::in_namespace(manifest::read(&at("gpt-rack.yaml")).unwrap(), &seen);
    let placed = snapshot::decide(&mut seen, &job).unwrap().placement.unwrap();
    assert_committed(
        "docs/pictures/two-racks.svg",
        &topo::cluster::drawing(&file, &seen, &snapshot::name_of(&job), &placed.status),
    );
}
