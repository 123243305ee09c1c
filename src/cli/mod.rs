//! The command line: arguments, subcommands, screens.
//!
//! Results go to standard output; progress, warnings and errors to standard error.

mod args;
mod explain;
mod machine;
mod manifest;
mod run;
mod screen;
mod topo;
mod units;

pub use args::Cli;
pub use manifest::{ManifestError, read as read_manifest};

use args::Command;
use switchyard_worker_contract::exit::Exit;

/// Carries out one command line and answers its exit code.
pub fn execute(cli: Cli) -> Exit {
    match &cli.command {
        Command::Run(args) => run::run(&cli, args),
        Command::Plan(args) => run::plan(&cli, args),
        Command::Topo(args) => machine::show(&cli, args),
        Command::Crd => crd(),
        Command::Explain { code } => explain::explain(code),
        Command::Version => {
            println!("switchyard {}", env!("CARGO_PKG_VERSION"));
            Exit::Done
        }
    }
}

/// Prints the CRDs, for `kubectl apply -f -`.
fn crd() -> Exit {
    for (_, crd) in switchyard_crds::generate::crds() {
        println!("---\n{}", switchyard_crds::generate::yaml(&crd).trim_end());
    }
    Exit::Done
}

/// Prints an error to standard error and answers its exit code.
fn refuse(message: &str, exit: Exit) -> Exit {
    let message = if message.starts_with("error[") { message.to_string() } else { format!("error: {message}") };
    eprintln!("{message}");
    exit
}
