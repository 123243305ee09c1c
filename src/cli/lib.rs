//! The command line: arguments, subcommands, screens.
//!
//! Results go to standard output; progress, warnings and errors to standard error.
#![forbid(unsafe_code)]

mod args;
mod checkpoint;
mod cluster;
mod completions;
mod connect;
mod convert;
mod doctor;
mod event_loop;
#[cfg(test)]
mod examples;
mod explain;
mod fabric;
mod failure;
mod import;
mod input;
mod lint;
mod live;
mod machine;
mod manifest;
mod output;
mod predict;
mod preflight;
mod progress;
#[cfg(test)]
mod reference;
mod report;
mod run;
mod screen;
mod simulate;
mod snapshot;
mod text;
mod topo;
mod tune;
mod verdict;
mod whatif;
mod xml;
mod yaml;

pub use args::Cli;

use args::{Command, Output, PlanArgs};
use failure::Failure;
use output::print;
use switchyard_worker_contract::exit::Exit;

/// Runs a command and returns its exit code. Prints an error if there is no result.
pub fn execute(cli: Cli) -> Exit {
    command(&cli).unwrap_or_else(|failure| failure.print())
}

fn command(cli: &Cli) -> Result<Exit, Failure> {
    if cli.output == Output::Dot && !matches!(cli.command, Command::Topo(_)) {
        return Err(Failure::usage("-o dot: only `switchyard topo` draws; expected table, yaml or json"));
    }
    match &cli.command {
        Command::Run(args) => run::run(cli, args),
        Command::Plan(args) if args.cluster || args.source.snapshot.is_some() => cluster::plan(cli, args),
        Command::Plan(PlanArgs { device: Some(device), file, bus_bandwidth, .. }) => {
            predict::predict(cli, file, device, *bus_bandwidth)
        }
        Command::Plan(args) => run::plan(cli, args),
        Command::Tune(args) => tune::tune(cli, args),
        Command::Whatif(args) => whatif::whatif(cli, args),
        Command::Simulate(args) => simulate::simulate(cli, args),
        Command::Snapshot(args) => cluster::snapshot(cli, args),
        Command::Report(args) if report::is_job(&args.subject) => live::report(cli, args),
        Command::Report(args) => report::report(cli, args),
        Command::Status(args) => live::status(cli, args),
        Command::Logs(args) => live::logs(cli, args),
        Command::SupportBundle(args) => live::bundle(cli, args),
        Command::Lint(args) => lint::lint(cli, args),
        Command::Convert(args) => convert::convert(cli, args),
        Command::Preflight(args) => preflight::preflight(cli, args),
        Command::Doctor(args) => doctor::doctor(cli, args),
        Command::Topo(args) => topo::topo(cli, args),
        Command::Checkpoint(command) => checkpoint::checkpoint(cli, command),
        Command::Controller(args) => switchyard_controller::daemon::start(args).map_err(Failure::from),
        Command::Crd => Ok(crd()),
        Command::Explain(args) => explain::explain(cli, args),
        Command::Completions(args) => Ok(completions::script(args.shell)),
        Command::Man(args) => completions::man(&args.folder),
        Command::Complete(args) => Ok(completions::complete(&args.words)),
        Command::Exec(args) => match switchyard_local::exec(&args.words) {
            Ok(never) => match never {},
            Err(why) => Err(Failure::unexpected(why)),
        },
        Command::Version => {
            print(&format!("switchyard {}", cli.version));
            Ok(Exit::Done)
        }
    }
}

/// Prints the CRDs, for `kubectl apply -f -`.
fn crd() -> Exit {
    for (_, crd) in switchyard_crds::generate::crds() {
        print(&format!("---\n{}", switchyard_crds::generate::yaml(&crd)));
    }
    Exit::Done
}
