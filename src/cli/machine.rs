//! Machines on the command line: this one, or described by a file; `switchyard topo`.

use super::args::{Cli, ClusterArgs, Output, TopoArgs, TopoCommand};
use super::units::duration;
use super::{cluster, import, manifest, print, print_yaml, refuse, topo, xml};
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;
use std::io::IsTerminal;
use std::path::Path;
use switchyard_crds::gpu_topology::GPUTopology;
use switchyard_crds::labels::API_VERSION;
use switchyard_node_agent::{Roots, describe};
use switchyard_plan::cluster::is_old;
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

/// Shows a machine or a cluster, or imports a machine.
pub(super) fn topo(cli: &Cli, args: &TopoArgs) -> Exit {
    match &args.command {
        // clap could refuse this, but then also `topo -o json import FILE`.
        Some(command) if args.target.is_some() => {
            let name = command.name();
            refuse(&format!("got a FILE before `{name}`; expected it after: switchyard topo {name} FILE"), Exit::Usage)
        }
        Some(command) if cli.output == Output::Dot => {
            refuse(&format!("-o dot: `{}` draws nothing; expected yaml or json", command.name()), Exit::Usage)
        }
        Some(TopoCommand::Xml(args)) => xml::xml(cli, args),
        Some(TopoCommand::Import(args)) => import::import(cli, args),
        None if args.cluster => topo::cluster::show(cli, args, width()),
        None => show(cli, args),
    }
}

fn show(cli: &Cli, args: &TopoArgs) -> Exit {
    let topology = match find(args.target.as_deref(), &args.place) {
        Ok(topology) => topology,
        Err((error, exit)) => return refuse(&error, exit),
    };
    if args.svg {
        print(&topo::svg(&topology));
        return Exit::Done;
    }
    match cli.output {
        Output::Table => {
            let seen = args.target.as_ref().and_then(|target| seen(&topology, args, target));
            print(&topo::render(&topology, &topo::View { width: width(), full: args.full, seen }));
        }
        Output::Yaml => print_yaml(&topology),
        Output::Json => print(&json!(topology).to_string()),
        Output::Dot => print(&topo::dot(&topology)),
    }
    Exit::Done
}

/// Columns of standard output.
pub(super) fn width() -> usize {
    let terminal = std::io::stdout().is_terminal().then(terminal_size::terminal_size).flatten();
    terminal.map_or(PIPE_WIDTH, |(width, _)| usize::from(width.0))
}

/// When a report was made: how long ago for people, the time for logs; and whether its agent has gone silent.
fn seen(topology: &GPUTopology, args: &TopoArgs, target: &str) -> Option<String> {
    let observed = topology.status.as_ref()?.observed_time.as_ref()?.0;
    let now = Timestamp::now();
    let when = if std::io::stdout().is_terminal() {
        format!("{} ago", duration(now.duration_since(observed).as_secs_f64()))
    } else {
        observed.to_string()
    };
    // What was saved is old by itself.
    let is_stale = args.place.snapshot.is_none() && !is_file(target) && is_old(observed, now);
    Some(if is_stale { format!("{when} (stale)") } else { when })
}

/// The machine that is meant: this one, that of a file, or a node of a cluster.
pub(super) fn find(target: Option<&str>, place: &ClusterArgs) -> Result<GPUTopology, (String, Exit)> {
    let names_a_cluster = place.snapshot.is_some() || place.kubeconfig.is_some() || place.context.is_some();
    match target {
        None if names_a_cluster => {
            Err(("got a cluster but no node of it; expected NODE or --cluster".into(), Exit::Usage))
        }
        None => this_machine().map_err(|error| (error, Exit::Unexpected)),
        Some(target) if is_file(target) => read_file(Path::new(target)).map_err(|error| {
            let why = if Path::new(target).exists() { "there is one of that name" } else { "by its name" };
            (format!("{error}\n`{target}` was taken for a file, not for a node: {why}"), Exit::Usage)
        }),
        Some(node) => of_node(place, node),
    }
}

fn is_file(target: &str) -> bool {
    let has_ending = [".yaml", ".yml", ".json"].iter().any(|ending| target.ends_with(ending));
    target.contains('/') || has_ending || Path::new(target).exists()
}

/// The report of a node of a cluster.
fn of_node(place: &ClusterArgs, node: &str) -> Result<GPUTopology, (String, Exit)> {
    let also = |error: &str| format!("{error}\n`{node}` was taken for a node: there is no file of that name");
    let (items, cluster) = match &place.snapshot {
        Some(path) => {
            let file = cluster::read_file(path).map_err(|error| (error, Exit::Usage))?;
            (file.items, path.display().to_string())
        }
        None => {
            let (items, _) = cluster::list(place, Some(node)).map_err(|(error, exit)| (also(&error), exit))?;
            (items, "the cluster".to_string())
        }
    };
    let found = in_snapshot(&items, node).map_err(|error| (error, Exit::Usage))?;
    found.ok_or_else(|| (also(&format!("no GPUTopology {node} in {cluster}")), Exit::Usage))
}

fn in_snapshot(items: &[serde_json::Value], node: &str) -> Result<Option<GPUTopology>, String> {
    let is_it = |item: &&serde_json::Value| {
        item["kind"] == "GPUTopology" && item.pointer("/metadata/name").is_some_and(|name| name == node)
    };
    let report = items.iter().find(is_it).map(GPUTopology::deserialize);
    report.transpose().map_err(|error| format!("GPUTopology {node}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_a_file() {
        for file in ["./import", "gpu-07.yaml", "gpu-07.json", "Cargo.toml"] {
            assert!(is_file(file), "{file}");
        }
        for node in ["gpu-07", "ip-10-0-0-1.ec2.internal"] {
            assert!(!is_file(node), "{node}");
        }
    }
}
