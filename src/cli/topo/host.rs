//! Memory, processors, and facts that could not be read.

use super::{cpu_name, cpus_of_node};
use crate::text::{Screen, Table, plain, short_list};
use switchyard_core::units::{binary, plural, three_digits};
use switchyard_crds::gpu_topology::{Cache, CacheKind, Facts, GPUTopologyStatus};

/// NUMA nodes: memory, distances, CPUs.
pub(super) fn numa_tables(screen: &mut Screen, status: &GPUTopologyStatus) {
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

/// Processors and caches.
pub(super) fn cpu_lines(screen: &mut Screen, status: &GPUTopologyStatus) {
    let Some(cpus) = &status.cpus else { return };
    screen.line("");
    let mut facts = vec![cpu_name(cpus)];
    facts.extend(cpus.cores.map(|cores| format!("{cores} core{}", plural(cores.into()))));
    facts.extend(cpus.threads.map(|threads| format!("{threads} thread{}", plural(threads.into()))));
    facts.extend(cpus.architecture.as_deref().map(plain));
    screen.paragraph("CPUS", &facts.join(", "));
    let mut limits = Vec::new();
    if let (Some(usable), Some(online)) = (&cpus.usable, &cpus.online)
        && usable != online
    {
        limits.push(plain(&format!("{} of {}", short_list(usable), short_list(online))));
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

/// Facts that could not be read, except for the GPUs of a machine without any, which the first
/// lines explain.
pub(super) fn missing_facts(screen: &mut Screen, status: &GPUTopologyStatus) {
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

/// Report conditions that are not `True`.
pub(super) fn conditions(screen: &mut Screen, status: &GPUTopologyStatus) {
    for condition in status.conditions.iter().filter(|condition| condition.status != "True") {
        let doubt = if condition.status == "False" { "not" } else { "perhaps not" };
        screen.paragraph("report", &format!("{doubt} {}: {}", plain(&condition.type_), plain(&condition.message)));
    }
}
