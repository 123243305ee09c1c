//! `switchyard topo`: shows one machine with the bandwidth of its links and its faults, or a
//! cluster.
//!
//! Rendering is a pure function from the description to text. Rows are never wrapped: equal rows
//! and columns are folded, then columns that do not fit are dropped from the right, starting with
//! those that another table repeats.

pub(super) mod cluster;
mod devices;
mod draw;
mod health;
mod host;
mod nics;
mod sets;
mod smi;

use crate::args::{Cli, Output, TopoArgs, TopoCommand};
use crate::failure::Failure;
use crate::output::{emit_object, print, width};
use crate::text::{NARROWEST, Screen, length, plain, short_list, truncate};
use crate::{import, machine, xml};
use devices::NodeModel;
use draw::{dot, svg};
use jiff::Timestamp;
use std::io::IsTerminal;
use switchyard_core::units::{binary, duration, plural, speed};
use switchyard_crds::gpu_topology::{Cpus, Facts, GPUTopology, GPUTopologyStatus, Nic};
use switchyard_plan::cluster::is_stale;
use switchyard_worker_contract::exit::Exit;

/// Shows a machine or a cluster, or runs a subcommand.
pub(super) fn topo(cli: &Cli, args: &TopoArgs) -> Result<Exit, Failure> {
    match &args.command {
        // clap could reject this, but would also reject `topo -o json import FILE`.
        Some(command) if args.target.is_some() => {
            let name = command.name();
            let expected = format!("expected it after: switchyard topo {name} FILE");
            Err(Failure::usage(format!("got a FILE before `{name}`; {expected}")))
        }
        Some(command) if cli.output == Output::Dot => {
            Err(Failure::usage(format!("-o dot: `{}` draws nothing; expected yaml or json", command.name())))
        }
        Some(TopoCommand::Xml(args)) => xml::xml(cli, args),
        Some(TopoCommand::Import(args)) => import::import(cli, args),
        None if args.cluster => cluster::show(cli, args),
        None => show(cli, args),
    }
}

fn show(cli: &Cli, args: &TopoArgs) -> Result<Exit, Failure> {
    let topology = machine::find(args.target.as_deref(), &args.source)?;
    if args.svg {
        print(&svg(&topology));
        return Ok(Exit::Done);
    }
    match cli.output {
        Output::Table => {
            let seen = args.target.as_ref().and_then(|target| seen(&topology, args, target));
            print(&render(&topology, &View { width: width(), full: args.full, seen }));
        }
        Output::Yaml | Output::Json => emit_object(cli.output, &topology),
        Output::Dot => print(&dot(&topology)),
    }
    Ok(Exit::Done)
}

/// When a report was made (age for people, time for logs), and whether it is stale.
fn seen(topology: &GPUTopology, args: &TopoArgs, target: &str) -> Option<String> {
    let observed = topology.status.as_ref()?.observed_time.as_ref()?.0;
    let now = Timestamp::now();
    let when = if std::io::stdout().is_terminal() {
        format!("{} ago", duration(now.duration_since(observed).as_secs_f64()))
    } else {
        observed.to_string()
    };
    // A saved report is expected to be old.
    let is_outdated = args.source.snapshot.is_none() && !machine::is_file(target) && is_stale(observed, now);
    Some(if is_outdated { format!("{when} (stale)") } else { when })
}

/// View settings of a machine.
#[derive(Debug, Clone, Default)]
struct View {
    /// Columns.
    pub width: usize,
    /// Whether to show complete matrices.
    pub full: bool,
    /// Age or time of the description.
    pub seen: Option<String>,
}

/// The screen; every line ends with a newline.
fn render(topology: &GPUTopology, view: &View) -> String {
    let width = view.width.max(NARROWEST);
    let name = plain(topology.metadata.name.as_deref().unwrap_or("-"));
    let Some(status) = &topology.status else {
        return format!("{}\n", truncate(&format!("{name}   not reported yet"), width));
    };
    let mut screen = Screen::new(width);
    header(&mut screen, &name, status, view.seen.as_deref());
    host::conditions(&mut screen, status);
    let known = NodeModel::of(status);
    if status.gpus.is_empty() {
        let reason = status.source(Facts::GPUs).and_then(|source| source.message.as_deref());
        screen.paragraph("no GPU", &plain(reason.unwrap_or("the description does not say why")));
    } else {
        match &known {
            Ok(known) => devices::tables(&mut screen, known, view.full),
            Err(contradiction) => screen.paragraph("no rates", &plain(&contradiction.to_string())),
        }
        if view.full || known.is_err() {
            smi::matrix(&mut screen, status);
        }
        if let Ok(known) = &known {
            sets::table(&mut screen, known);
        }
    }
    host::numa_tables(&mut screen, status);
    host::cpu_lines(&mut screen, status);
    nics::table(&mut screen, status, known.as_ref().map_or(&[], |known| &known.named.nics));
    host::missing_facts(&mut screen, status);
    screen.into_text()
}

fn header(screen: &mut Screen, name: &str, status: &GPUTopologyStatus, seen: Option<&str>) {
    let mut phrases = vec![name.to_owned()];
    phrases.extend(counted(status.gpus.iter().map(|gpu| gpu.model.as_deref().map_or("GPU".to_owned(), short_name))));
    let rated = status.nics.iter().filter(|nic| nic.rdma_device.is_some() && nic.virtual_function_of.is_none());
    phrases.extend(counted(rated.map(|nic| match nic.rate_megabits_per_second {
        Some(rate) => format!("RDMA {}", speed(rate)),
        None => "RDMA".to_owned(),
    })));
    if let Some(cpus) = &status.cpus {
        phrases.push(cpu_name(cpus));
    }
    let nodes = status.numa_node_count.map(|count| format!("{count} NUMA node{}", plural(count.into())));
    let memory = status.memory_bytes.map(binary);
    phrases.push([memory, nodes].into_iter().flatten().collect::<Vec<_>>().join(", "));
    phrases.retain(|phrase| !phrase.is_empty());
    // Keep the name and the devices; first drop phrases that the tables below repeat.
    let seen = seen.map_or(String::new(), |seen| format!("   seen {seen}"));
    while phrases.len() > 1 && length(&phrases.join("   ")) + seen.len() > screen.width {
        phrases.pop();
    }
    screen.line(&(phrases.join("   ") + &seen));
}

/// `8x H100`, one phrase per distinct word, in order of appearance.
fn counted(words: impl Iterator<Item = String>) -> Vec<String> {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for word in words {
        match counts.iter_mut().find(|(known, _)| *known == word) {
            Some((_, count)) => *count += 1,
            None => counts.push((word, 1)),
        }
    }
    counts.into_iter().map(|(word, count)| format!("{count}x {word}")).collect()
}

fn cpus_of_node(status: &GPUTopologyStatus, node: Option<u32>) -> String {
    let node = status.numa_nodes.iter().find(|known| Some(known.id) == node);
    match node.and_then(|node| node.cpus.as_deref()) {
        None => "-".to_owned(),
        Some("") => "none".to_owned(),
        Some(list) => plain(&short_list(list)),
    }
}

fn nic_name(nic: &Nic) -> &str {
    nic.rdma_device.as_deref().unwrap_or(&nic.name)
}

/// `2x Xeon Platinum 8480+`.
fn cpu_name(cpus: &Cpus) -> String {
    let model = cpus.model.as_deref().map_or("CPU of unknown model".to_owned(), short_name);
    match cpus.sockets {
        Some(sockets) => format!("{sockets}x {model}"),
        None => model,
    }
}

/// A product name without the words that all products of the vendor share.
fn short_name(model: &str) -> String {
    let model = plain(model).replace("(R)", "").replace("(TM)", "").replace("(tm)", "");
    let model = model.split(" @ ").next().unwrap_or_default();
    let words: Vec<&str> = model
        .split_whitespace()
        .filter(|word| !["NVIDIA", "CPU", "Processor", "Intel", "AMD"].contains(word))
        .filter(|word| !word.ends_with("-Core"))
        .collect();
    if words.is_empty() { plain(model) } else { words.join(" ") }
}

#[cfg(test)]
mod tests;
