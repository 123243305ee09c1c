//! The screen of `switchyard topo`: one machine, what its links carry, and what is wrong with it.
//!
//! A pure function from the description to text. No row is ever wrapped: equal rows and columns are folded, then what does not fit is
//! dropped from the right, the columns that another table repeats first.

pub(super) mod cluster;
mod devices;
mod draw;
mod health;
mod host;
mod nics;
mod sets;
mod smi;
pub(super) mod text;

use super::units::{binary, plural, speed};
use devices::Known;
pub(super) use draw::{dot, svg};
use switchyard_crds::gpu_topology::{Cpus, Facts, GPUTopology, GPUTopologyStatus, Nic};
use text::{Screen, cut, length, plain, short_list};

/// Rows are not made narrower than this, whatever the terminal is.
const NARROWEST: usize = 40;

/// How a machine is shown.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    /// Columns.
    pub width: usize,
    /// Complete matrices.
    pub full: bool,
    /// When the description was made, in words.
    pub seen: Option<String>,
}

/// The screen, every line ended by a newline.
pub(super) fn render(topology: &GPUTopology, view: &View) -> String {
    let width = view.width.max(NARROWEST);
    let name = plain(topology.metadata.name.as_deref().unwrap_or("-"));
    let Some(status) = &topology.status else {
        return format!("{}\n", cut(&format!("{name}   not reported yet"), width));
    };
    let mut screen = Screen::new(width);
    header(&mut screen, &name, status, view.seen.as_deref());
    host::conditions(&mut screen, status);
    let known = Known::of(status);
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
    // The name and the devices stay; what the tables below repeat goes first.
    let seen = seen.map_or(String::new(), |seen| format!("   seen {seen}"));
    while phrases.len() > 1 && length(&phrases.join("   ")) + seen.len() > screen.width {
        phrases.pop();
    }
    screen.line(&(phrases.join("   ") + &seen));
}

/// `8x H100`, one phrase per different word, in order of appearance.
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

/// A product name without what every product of that vendor has in it.
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
