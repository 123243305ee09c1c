//! The screen of `switchyard topo`: one machine in the words of `nvidia-smi topo -m`.
//!
//! A pure function from the description to text. No row is ever wrapped: what does not fit is dropped from the right,
//! the columns that another table repeats first.

mod sets;
mod text;

use super::units::{binary, plural, speed, three_digits};
use crate::topology::cells;
use crate::topology::matrix::Cell;
use crate::topology::path::PathClass;
use std::collections::BTreeSet;
use switchyard_crds::gpu_topology::{Cache, CacheKind, Cpus, Facts, GPUTopology, GPUTopologyStatus, Gpu, Nic};
use text::{Screen, Table, cut, length, plain, short_list};

/// Rows are not made narrower than this, whatever the terminal is.
const NARROWEST: usize = 40;

/// The screen, `width` columns wide, every line ended by a newline.
pub fn render(topology: &GPUTopology, width: usize) -> String {
    let width = width.max(NARROWEST);
    let name = topology.metadata.name.as_deref().unwrap_or("-");
    let Some(status) = &topology.status else {
        return format!("{}\n", cut(&format!("{name}   not reported yet"), width));
    };
    let mut screen = Screen::new(width);
    header(&mut screen, name, status);
    if status.gpus.is_empty() {
        let reason = status.source(Facts::GPUs).and_then(|source| source.message.as_deref());
        screen.paragraph("no GPU", reason.unwrap_or("the description does not say why"));
    } else {
        device_matrix(&mut screen, status);
        sets::table(&mut screen, status);
    }
    numa_tables(&mut screen, status);
    cpu_lines(&mut screen, status);
    nic_table(&mut screen, status);
    missing_facts(&mut screen, status);
    screen.into_text()
}

fn header(screen: &mut Screen, name: &str, status: &GPUTopologyStatus) {
    let mut phrases = vec![name.to_owned()];
    phrases.extend(counted(status.gpus.iter().map(|gpu| gpu.model.as_deref().map_or("GPU".to_owned(), short_name))));
    let rated = status.nics.iter().filter(|nic| nic.rdma_device.is_some());
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
    while phrases.len() > 1 && length(&phrases.join("   ")) > screen.width {
        phrases.pop();
    }
    screen.line(&phrases.join("   "));
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

/// A GPU or a NIC in the matrix.
struct Device<'a> {
    label: String,
    /// Its name where there is room for it.
    name: String,
    shown: cells::Device<'a>,
}

fn devices(status: &GPUTopologyStatus) -> Vec<Device<'_>> {
    let gpus = status.gpus.iter().map(|gpu| (format!("GPU{}", gpu.index), format!("GPU{}", gpu.index)));
    let nics = cells::nics(status).enumerate().map(|(index, nic)| (format!("NIC{index}"), nic_name(nic).to_owned()));
    let named = gpus.chain(nics).zip(cells::devices(status));
    named.map(|((label, name), shown)| Device { label, name, shown }).collect()
}

fn device_matrix(screen: &mut Screen, status: &GPUTopologyStatus) {
    let devices = devices(status);
    let mut used = BTreeSet::new();
    let mut nvlink = false;
    let cells: Vec<Vec<String>> = devices
        .iter()
        .map(|a| {
            devices
                .iter()
                .map(|b| {
                    let cell = cells::cell(status, &a.shown, &b.shown);
                    match cell {
                        Cell::NvLink(_) => nvlink = true,
                        Cell::Pcie(PathClass::Same) => {}
                        Cell::Pcie(class) => used.extend([class]),
                    }
                    cell.word()
                })
                .collect()
        })
        .collect();
    let has_health = status.gpus.iter().any(|gpu| gpu.health.is_some());
    let variant = |names: bool, with_cpus: bool, gap: usize| {
        let label = |device: &Device<'_>| if names { device.name.clone() } else { device.label.clone() };
        let mut heading = vec![String::new()];
        heading.extend(devices.iter().map(&label));
        heading.push("NUMA".to_owned());
        heading.extend(with_cpus.then(|| "CPUS".to_owned()));
        heading.extend(has_health.then(|| "HEALTH".to_owned()));
        let mut rows = vec![heading];
        for (device, cells) in devices.iter().zip(&cells) {
            let mut row = vec![label(device)];
            row.extend(cells.iter().cloned());
            row.push(device.shown.numa.map_or("-".to_owned(), |node| node.to_string()));
            row.extend(with_cpus.then(|| cpus_of_node(status, device.shown.numa)));
            row.extend(has_health.then(|| health(device.shown.gpu).0.to_owned()));
            rows.push(row);
        }
        Table { rows, gap }
    };
    screen.table(vec![
        variant(true, true, 2),
        variant(false, true, 2),
        variant(false, true, 1),
        variant(true, false, 2),
        variant(false, false, 2),
        variant(false, false, 1),
    ]);
    for device in &devices {
        if let (word, Some(detail)) = health(device.shown.gpu) {
            screen.paragraph(&device.label, &format!("{word}: {detail}"));
        }
    }
    let mut legend: Vec<String> =
        used.into_iter().map(|class| format!("{} {}", class.word(), class.meaning())).collect();
    legend.extend(nvlink.then(|| "NV# number of NVLinks".to_owned()));
    screen.phrases(&legend);
}

/// A word, and what to do when it is not `ok`.
fn health(gpu: Option<&Gpu>) -> (&'static str, Option<String>) {
    match gpu.and_then(|gpu| gpu.health.as_ref()).map(|health| health.recovery_action.as_str()) {
        None => ("-", None),
        Some("None") => ("ok", None),
        Some("GPUReset") => ("warn", Some("the driver asks for a reset of this GPU".to_owned())),
        Some("NodeReboot") => ("warn", Some("the driver asks for a reboot of this machine".to_owned())),
        Some(action) => ("warn", Some(format!("the driver asks for recovery action {action}"))),
    }
}

fn numa_tables(screen: &mut Screen, status: &GPUTopologyStatus) {
    let nodes = &status.numa_nodes;
    if nodes.is_empty() {
        return;
    }
    screen.line("");
    let has_matrix = status.gpus.is_empty() && nodes.len() > 1;
    let mut table = Table::new(&["NUMA", "MEMORY", "CPUS"]);
    let mut with_distances = Table::new(&["NUMA", "MEMORY", "DISTANCES", "CPUS"]);
    for node in nodes {
        let memory = node.memory_bytes.map_or("-".to_owned(), binary);
        let distances: Vec<String> = node.distances.iter().map(u32::to_string).collect();
        let distances = if distances.is_empty() { "-".to_owned() } else { distances.join(" ") };
        let cpus = cpus_of_node(status, Some(node.id));
        table.rows.push(vec![node.id.to_string(), memory.clone(), cpus.clone()]);
        with_distances.rows.push(vec![node.id.to_string(), memory, distances, cpus]);
    }
    screen.table(if has_matrix { vec![table] } else { vec![with_distances, table] });
    if has_matrix {
        screen.line("");
        let mut matrix = Table::new(&["NUMA distance"]);
        matrix.rows[0].extend(nodes.iter().map(|node| node.id.to_string()));
        for node in nodes {
            let mut row = vec![format!("{:>13}", node.id)];
            row.extend((0..nodes.len()).map(|to| node.distances.get(to).map_or("-".to_owned(), u32::to_string)));
            matrix.rows.push(row);
        }
        screen.table(vec![matrix]);
        screen.line("10 local   21 means 2.1 times the cost of local memory, by the firmware");
    }
}

fn cpu_lines(screen: &mut Screen, status: &GPUTopologyStatus) {
    let Some(cpus) = &status.cpus else { return };
    screen.line("");
    let mut facts = vec![cpu_name(cpus)];
    facts.extend(cpus.cores.map(|cores| format!("{cores} core{}", plural(cores.into()))));
    facts.extend(cpus.threads.map(|threads| format!("{threads} thread{}", plural(threads.into()))));
    facts.extend(cpus.architecture.clone());
    screen.paragraph("CPUS", &facts.join(", "));
    let mut limits = Vec::new();
    if let (Some(usable), Some(online)) = (&cpus.usable, &cpus.online)
        && usable != online
    {
        limits.push(format!("{} of {}", short_list(usable), short_list(online)));
    }
    limits.extend(cpus.quota_millicores.map(|quota| format!("quota of {} CPUs", three_digits(quota as f64 / 1e3))));
    if !limits.is_empty() {
        screen.paragraph("USABLE", &limits.join(", "));
    }
    if !cpus.caches.is_empty() {
        screen.paragraph("CACHES", &cpus.caches.iter().map(cache_phrase).collect::<Vec<_>>().join(", "));
    }
}

fn cache_phrase(cache: &Cache) -> String {
    let kind = match cache.kind {
        CacheKind::Data => "d",
        CacheKind::Instruction => "i",
        CacheKind::Unified => "",
    };
    let size = cache.size_bytes.map_or("unknown".to_owned(), binary);
    format!("{}x L{}{kind} {size}", cache.shared_by.len(), cache.level)
}

fn nic_table(screen: &mut Screen, status: &GPUTopologyStatus) {
    if status.nics.is_empty() {
        return;
    }
    screen.line("");
    let default_route = status.host.as_ref().and_then(|host| host.default_route.as_deref());
    let labels: Vec<&Nic> = cells::nics(status).collect();
    let mut table = Table::new(&["NIC", "NAME", "SPEED", "STATE", "NUMA", "RDMA", "BUS ID"]);
    for nic in &status.nics {
        let label = labels.iter().position(|other| std::ptr::eq(*other, nic));
        let or_dash = |text: &Option<String>| text.as_deref().map_or("-".to_owned(), plain);
        let rdma = match (&nic.rdma_device, &nic.link_layer) {
            (Some(device), Some(layer)) => format!("{} {}", plain(device), plain(layer)),
            (Some(device), None) => plain(device),
            (None, _) => "-".to_owned(),
        };
        table.rows.push(vec![
            label.map_or("-".to_owned(), |index| format!("NIC{index}")),
            plain(&nic.name),
            nic.rate_megabits_per_second.map_or("-".to_owned(), speed),
            or_dash(&nic.state),
            nic.numa_node.map_or("-".to_owned(), |node| node.to_string()),
            rdma,
            or_dash(&nic.bus_id),
        ]);
    }
    screen.table(vec![table]);
    if let Some(interface) = default_route {
        screen.line(&format!("default route over {}", plain(interface)));
    }
}

/// What could not be read, but for the GPUs of a machine without any, which the first lines explain.
fn missing_facts(screen: &mut Screen, status: &GPUTopologyStatus) {
    let shown = |facts: Facts| facts == Facts::GPUs && status.gpus.is_empty();
    let sources = status.sources.iter().filter(|source| !shown(source.facts));
    let notes: Vec<_> = sources.filter_map(|source| Some((source.facts, source.message.as_deref()?))).collect();
    if !notes.is_empty() {
        screen.line("");
    }
    for (facts, message) in notes {
        screen.paragraph("not read", &format!("{facts:?}: {}", plain(message)));
    }
}

fn cpus_of_node(status: &GPUTopologyStatus, node: Option<u32>) -> String {
    let node = status.numa_nodes.iter().find(|known| Some(known.id) == node);
    match node.and_then(|node| node.cpus.as_deref()) {
        None => "-".to_owned(),
        Some("") => "none".to_owned(),
        Some(list) => short_list(list),
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
