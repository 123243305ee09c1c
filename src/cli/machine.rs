//! Machines on the command line: this one, or described by a file; `switchyard topo`.

use super::args::{Cli, Output, TopoArgs, TopoCommand};
use super::{import, manifest, print, print_yaml, refuse, topo};
use jiff::Timestamp;
use serde_json::json;
use std::io::IsTerminal;
use std::path::Path;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::labels::API_VERSION;
use switchyard_node_agent::{Roots, describe};
use switchyard_worker_contract::exit::Exit;

/// Columns of output that goes to no terminal.
const PIPE_WIDTH: usize = 100;

/// This machine, described as a node agent would.
pub(super) fn this_machine() -> Result<GPUTopology, String> {
    describe(&Roots::local(node_name()), Timestamp::now())
        .map_err(|error| format!("cannot describe this machine: {error}"))
}

/// The host name in the form of a node's name, as kubelet takes it: lower case, and nothing that the API would refuse.
fn node_name() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let name: String = host
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '.' { c } else { '-' })
        .take(253)
        .collect();
    let name = name.trim_matches(['-', '.']);
    if name.is_empty() { "localhost".to_string() } else { name.to_string() }
}

/// The machine that a file describes.
pub(super) fn read_file(path: &Path) -> Result<GPUTopology, String> {
    let name = path.display().to_string();
    let text = manifest::read_text(path, &name, "GPUTopology").map_err(|error| error.0)?;
    let wrong = |error: serde_saphyr::Error| format!("{name} is not a GPUTopology\n{error}");
    let head: serde_json::Value = serde_saphyr::from_str(&text).map_err(wrong)?;
    for (field, expected) in [("apiVersion", API_VERSION), ("kind", "GPUTopology")] {
        let got = head.get(field).and_then(serde_json::Value::as_str);
        if got != Some(expected) {
            let got = got.map_or("nothing".to_string(), |got| format!("`{got}`"));
            return Err(format!("{name} is not a GPUTopology: {field}: got {got}; expected `{expected}`"));
        }
    }
    let topology: GPUTopology = serde_saphyr::from_str(&text).map_err(wrong)?;
    if topology.status.is_none() {
        return Err(format!("{}: status: got nothing; expected the description of a machine", path.display()));
    }
    Ok(topology)
}

/// Shows a machine, or imports one.
pub(super) fn topo(cli: &Cli, args: &TopoArgs) -> Exit {
    match &args.command {
        // clap could refuse this, but then also `topo -o json import FILE`.
        Some(TopoCommand::Import(_)) if args.file.is_some() => {
            refuse("got a FILE before `import`; expected it after: switchyard topo import FILE", Exit::Usage)
        }
        Some(TopoCommand::Import(args)) => import::import(cli, args),
        None => show(cli, args),
    }
}

fn show(cli: &Cli, args: &TopoArgs) -> Exit {
    let found = match &args.file {
        Some(path) => read_file(path).map_err(|error| (error, Exit::Usage)),
        None => this_machine().map_err(|error| (error, Exit::Unexpected)),
    };
    let topology = match found {
        Ok(topology) => topology,
        Err((error, exit)) => return refuse(&error, exit),
    };
    match cli.output {
        Output::Table => {
            let width = if std::io::stdout().is_terminal() {
                terminal_size::terminal_size().map_or(PIPE_WIDTH, |(width, _)| usize::from(width.0))
            } else {
                PIPE_WIDTH
            };
            print(&topo::render(&topology, &topo::View { width, ..topo::View::default() }));
        }
        Output::Yaml => print_yaml(&topology),
        Output::Json => print(&json!(topology).to_string()),
    }
    Exit::Done
}
