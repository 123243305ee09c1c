//! The command line: arguments, subcommands, screens.
//!
//! Results go to standard output; progress, warnings and errors to standard error.
#![forbid(unsafe_code)]

mod args;
mod checkpoint;
mod cluster;
mod completions;
mod controller;
mod convert;
mod doctor;
#[cfg(test)]
mod examples;
mod explain;
mod fabric;
mod import;
mod lint;
mod live;
mod machine;
mod manifest;
mod preflight;
#[cfg(test)]
mod reference;
mod report;
mod run;
mod screen;
mod snapshot;
mod topo;
mod verdict;
mod whatif;
mod xml;
mod yaml;

pub use args::Cli;
pub use manifest::{ManifestError, read as read_manifest};

use args::Command;
use switchyard_core::units;
use switchyard_worker_contract::exit::Exit;

/// Carries out one command line and answers its exit code.
pub fn execute(cli: Cli) -> Exit {
    if cli.output == args::Output::Dot && !matches!(cli.command, Command::Topo(_)) {
        return refuse("-o dot: only `switchyard topo` draws; expected table, yaml or json", Exit::Usage);
    }
    match &cli.command {
        Command::Run(args) => run::run(&cli, args),
        Command::Plan(args) if args.cluster || args.place.snapshot.is_some() => cluster::plan(&cli, args),
        Command::Plan(args) => run::plan(&cli, args),
        Command::Whatif(args) => whatif::whatif(&cli, args),
        Command::Snapshot(args) => cluster::snapshot(&cli, args),
        Command::Report(args) => report::of_either(&cli, args),
        Command::Status(args) => live::status(&cli, args),
        Command::Logs(args) => live::logs(&cli, args),
        Command::SupportBundle(args) => live::bundle(&cli, args),
        Command::Lint(args) => lint::lint(&cli, args),
        Command::Convert(args) => convert::convert(&cli, args),
        Command::Preflight(args) => preflight::preflight(&cli, args),
        Command::Doctor(args) => doctor::doctor(&cli, args),
        Command::Topo(args) => machine::topo(&cli, args),
        Command::Checkpoint(command) => checkpoint::checkpoint(&cli, command),
        Command::Controller(args) => controller::controller(args),
        Command::Crd => crd(),
        Command::Explain(args) => explain::explain(&cli, args),
        Command::Completions(args) => completions::script(args.shell),
        Command::Man(args) => completions::man(&args.folder),
        Command::Complete(args) => completions::complete(&args.words),
        Command::Version => {
            print(&format!("switchyard {}", cli.version));
            Exit::Done
        }
    }
}

/// Prints a result. A reader that has gone (`| head`) has seen enough; a disk that is full is told.
fn print(text: &str) {
    use std::io::Write;
    let written = writeln!(anstream::stdout(), "{}", text.trim_end());
    if let Err(error) = written.as_ref()
        && error.kind() != std::io::ErrorKind::BrokenPipe
    {
        anstream::eprintln!("error: the result cannot be printed: {error}");
    }
}

/// Prints a result as YAML.
fn print_yaml(result: &impl serde::Serialize) {
    print(&serde_saphyr::to_string(result).unwrap_or_default());
}

/// Prints the CRDs, for `kubectl apply -f -`.
fn crd() -> Exit {
    for (_, crd) in switchyard_crds::generate::crds() {
        print(&format!("---\n{}", switchyard_crds::generate::yaml(&crd)));
    }
    Exit::Done
}

/// Prints an error to standard error and answers its exit code. Styles stay where `--color`, the environment and the stream want them.
fn refuse(message: &str, exit: Exit) -> Exit {
    let has_code = anstream::adapter::strip_str(message).to_string().starts_with("error[");
    anstream::eprintln!("{}{message}", if has_code { "" } else { "error: " });
    exit
}
