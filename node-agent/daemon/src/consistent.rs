//! Checks whether the facts agree with each other. Pure: reports both values of a contradiction and
//! corrects nothing.

use std::collections::{BTreeMap, BTreeSet};
use switchyard_crds::gpu_topology::GPUTopologyStatus;
use switchyard_node_agent::counters::GpuCounters;

/// Two facts that cannot both be true.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Contradiction {
    /// Path of the field in `status`.
    pub field: String,
    /// Its value.
    pub got: String,
    /// The value from another source.
    pub expected: String,
}

impl std::fmt::Display for Contradiction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: got {}; expected {}", self.field, self.got, self.expected)
    }
}

/// Facts about the machine's devices from other sources.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OtherSources<'a> {
    /// NVIDIA GPUs on the PCI bus; `None` if the bus cannot be read.
    pub pci_gpus: Option<u32>,
    /// GPU counters, with the NVLinks as counted at both ends.
    pub counters: &'a [GpuCounters],
    /// Resource and device of everything that the kubelet can allocate; `None` if it could not be
    /// queried.
    pub allocatable: Option<&'a BTreeSet<(String, String)>>,
}

/// All contradictions, in field order.
pub(crate) fn contradictions(facts: &GPUTopologyStatus, others: OtherSources<'_>) -> Vec<Contradiction> {
    let mut found = Vec::new();
    let mut add = |field: String, got: String, expected: String| found.push(Contradiction { field, got, expected });
    if let (Some(nvml), Some(pci)) = (facts.gpu_count, others.pci_gpus)
        && nvml != pci
    {
        add("gpuCount".into(), nvml.to_string(), format!("{pci}, the NVIDIA GPUs on the PCI bus"));
    }
    if let Some(count) = facts.gpu_count
        && facts.gpus.len() as u64 != u64::from(count)
    {
        add("gpus".into(), format!("{} that answer", facts.gpus.len()), format!("the {count} that the driver counts"));
    }
    duplicates(facts.gpus.iter().map(|gpu| Some(gpu.uuid.as_str())), "gpus", "uuid", &mut add);
    duplicates(facts.gpus.iter().map(|gpu| gpu.bus_id.as_deref()), "gpus", "busID", &mut add);
    numa_nodes(facts, &mut add);
    link_ends(facts, &mut add);
    asymmetric(others.counters, &mut add);
    if let Some(allocatable) = others.allocatable {
        kubelet(facts, allocatable, &mut add);
    }
    found
}

type Add<'a> = dyn FnMut(String, String, String) + 'a;

fn duplicates<'a>(values: impl Iterator<Item = Option<&'a str>>, list: &str, field: &str, add: &mut Add<'_>) {
    let mut first: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, value) in values.enumerate() {
        let Some(value) = value else { continue };
        if let Some(before) = first.get(value) {
            add(format!("{list}[{index}].{field}"), value.into(), format!("another one than {list}[{before}] has"));
        } else {
            first.insert(value, index);
        }
    }
}

fn numa_nodes(facts: &GPUTopologyStatus, add: &mut Add<'_>) {
    if facts.numa_nodes.is_empty() {
        return;
    }
    let known: BTreeSet<u32> = facts.numa_nodes.iter().map(|node| node.id).collect();
    let gpus = facts.gpus.iter().enumerate().map(|(index, gpu)| ("gpus", index, gpu.numa_node));
    let nics = facts.nics.iter().enumerate().map(|(index, nic)| ("nics", index, nic.numa_node));
    for (list, index, node) in gpus.chain(nics) {
        if let Some(node) = node.filter(|node| !known.contains(node)) {
            let known: Vec<String> = known.iter().map(u32::to_string).collect();
            add(
                format!("{list}[{index}].numaNode"),
                node.to_string(),
                format!("one of numaNodes ({})", known.join(", ")),
            );
        }
    }
}

fn link_ends(facts: &GPUTopologyStatus, add: &mut Add<'_>) {
    let known: BTreeSet<&str> = facts.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    for (index, link) in facts.links.iter().enumerate() {
        for (field, end) in [("a", &link.a), ("b", &link.b)] {
            if !known.contains(end.as_str()) {
                add(format!("links[{index}].{field}"), end.clone(), "the UUID of one of gpus".into());
            }
        }
        if link.a == link.b {
            add(format!("links[{index}].b"), link.b.clone(), "another GPU than a".into());
        }
    }
}

/// NVLinks between two GPUs, as counted by each of the two.
fn asymmetric(counters: &[GpuCounters], add: &mut Add<'_>) {
    for (index, one) in counters.iter().enumerate() {
        for other in &counters[index + 1..] {
            let there = one.nvlinks.get(&other.bus_id).copied().unwrap_or(0);
            let back = other.nvlinks.get(&one.bus_id).copied().unwrap_or(0);
            if there != back {
                let field = format!("links[{} to {}].count", one.bus_id, other.bus_id);
                add(field, format!("{there} active NVLinks there and {back} back"), "the same number both ways".into());
            }
        }
    }
}

/// Compares only GPUs that a device plugin names by UUID; MIG instances and claims have other
/// names.
fn kubelet(facts: &GPUTopologyStatus, allocatable: &BTreeSet<(String, String)>, add: &mut Add<'_>) {
    // A plugin that shares GPUs allocates `UUID::0`, `UUID::1`, …
    let plain = |id: &'_ str| id.split("::").next().unwrap_or_default().to_owned();
    let allocated: BTreeSet<String> =
        allocatable.iter().map(|(_, id)| plain(id)).filter(|id| id.starts_with("GPU-")).collect();
    if allocated.is_empty() || facts.gpu_count.is_none() {
        return;
    }
    let known: BTreeSet<&str> = facts.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    for id in allocated.iter().filter(|id| !known.contains(id.as_str())) {
        add("gpus".into(), format!("no {id}"), "it, as the kubelet gives it to containers".into());
    }
    for (index, gpu) in facts.gpus.iter().enumerate() {
        let is_split = gpu.mig.as_ref().is_some_and(|mig| mig.mode == switchyard_crds::gpu_topology::MigMode::Enabled);
        if !is_split && !allocated.contains(&gpu.uuid) {
            let expected = "one of those that the kubelet gives to containers";
            add(format!("gpus[{index}].uuid"), gpu.uuid.clone(), expected.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use switchyard_crds::gpu_topology::{Gpu, Link, Nic, NumaNode};

    fn gpu(index: u32) -> Gpu {
        let bus_id = Some(format!("0000:{index:02x}:00.0"));
        Gpu { index, uuid: format!("GPU-{index}"), bus_id, numa_node: Some(index / 2), ..Gpu::default() }
    }

    fn machine() -> GPUTopologyStatus {
        GPUTopologyStatus {
            gpu_count: Some(4),
            gpus: (0..4).map(gpu).collect(),
            numa_nodes: [0, 1].map(|id| NumaNode { id, ..NumaNode::default() }).into(),
            nics: vec![Nic { name: "eth0".into(), ..Nic::default() }],
            ..GPUTopologyStatus::default()
        }
    }

    fn messages(facts: &GPUTopologyStatus, others: OtherSources<'_>) -> Vec<String> {
        contradictions(facts, others).iter().map(ToString::to_string).collect()
    }

    const NO_SOURCES: OtherSources<'static> = OtherSources { pci_gpus: None, counters: &[], allocatable: None };

    fn allocatable(ids: &[&str]) -> BTreeSet<(String, String)> {
        ids.iter().map(|id| ("nvidia.com/gpu".into(), id.to_string())).collect()
    }

    #[test]
    fn agreeing_sources_have_no_contradictions() {
        let all = allocatable(&["GPU-0", "GPU-1::0", "GPU-1::1", "GPU-2", "GPU-3"]);
        let others = OtherSources { pci_gpus: Some(4), allocatable: Some(&all), ..NO_SOURCES };
        assert_eq!(messages(&machine(), others), Vec::<String>::new());
        assert_eq!(
            messages(&GPUTopologyStatus::default(), others),
            Vec::<String>::new(),
            "unknown contradicts nothing"
        );
        assert_eq!(messages(&machine(), NO_SOURCES), Vec::<String>::new());
    }

    #[test]
    fn counts_differ() {
        let mut facts = machine();
        facts.gpus.pop();
        assert_eq!(
            messages(&facts, OtherSources { pci_gpus: Some(8), ..NO_SOURCES }),
            [
                "gpuCount: got 4; expected 8, the NVIDIA GPUs on the PCI bus",
                "gpus: got 3 that answer; expected the 4 that the driver counts"
            ]
        );
    }

    #[test]
    fn impossible_names_and_nodes() {
        let mut facts = machine();
        facts.gpus[3].uuid = "GPU-1".into();
        facts.gpus[2].bus_id = facts.gpus[0].bus_id.clone();
        facts.gpus[1].numa_node = Some(7);
        facts.nics[0].numa_node = Some(2);
        assert_eq!(
            messages(&facts, NO_SOURCES),
            [
                "gpus[3].uuid: got GPU-1; expected another one than gpus[1] has",
                "gpus[2].busID: got 0000:00:00.0; expected another one than gpus[0] has",
                "gpus[1].numaNode: got 7; expected one of numaNodes (0, 1)",
                "nics[0].numaNode: got 2; expected one of numaNodes (0, 1)",
            ]
        );
    }

    #[test]
    fn impossible_links() {
        let link = |a: &str, b: &str| -> Link {
            serde_json::from_value(serde_json::json!({"a": a, "b": b, "kind": "NVLink", "count": 1})).unwrap()
        };
        let mut facts = machine();
        facts.links = vec![link("GPU-0", "GPU-1"), link("GPU-0", "GPU-9"), link("GPU-2", "GPU-2")];
        let counters = |bus_id: &str, other: &str, links| GpuCounters {
            bus_id: bus_id.into(),
            nvlinks: BTreeMap::from([(other.to_owned(), links)]),
            ..GpuCounters::default()
        };
        let counters = [counters("a", "b", 4), counters("b", "a", 3), counters("c", "switch", 18)];
        assert_eq!(
            messages(&facts, OtherSources { counters: &counters, ..NO_SOURCES }),
            [
                "links[1].b: got GPU-9; expected the UUID of one of gpus",
                "links[2].b: got GPU-2; expected another GPU than a",
                "links[a to b].count: got 4 active NVLinks there and 3 back; expected the same number both ways",
            ]
        );
    }

    #[test]
    fn the_kubelet_names_other_gpus() {
        let some = allocatable(&["GPU-0", "GPU-1", "GPU-2", "GPU-7"]);
        let of = |facts: &GPUTopologyStatus| messages(facts, OtherSources { allocatable: Some(&some), ..NO_SOURCES });
        let [lost, unknown] = of(&machine()).try_into().unwrap();
        assert_eq!(lost, "gpus: got no GPU-7; expected it, as the kubelet gives it to containers");
        assert_eq!(unknown, "gpus[3].uuid: got GPU-3; expected one of those that the kubelet gives to containers");
        let mut split = machine();
        split.gpus[3].mig = serde_json::from_value(serde_json::json!({"mode": "Enabled"})).unwrap();
        assert_eq!(of(&split).len(), 1, "the instances of GPU 3 have other names");
        let claims = allocatable(&["0", "1"]);
        assert!(messages(&machine(), OtherSources { allocatable: Some(&claims), ..NO_SOURCES }).is_empty());
    }
}
